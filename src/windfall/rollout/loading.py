"""Asks workers to load the version that work is given out with, and again, ever more slowly, when they fail.

A worker that fails LOAD_TRIES times in a row is sent away. One that neither fails nor gets on is found by
`Members.tick`. Failures while nobody serves the weights (the trainer is being started again) do not count.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

import msgspec

from windfall import backoff
from windfall.cost.accounts import Accounts
from windfall.events.log import EventLog
from windfall.ledger.ends import Malformed
from windfall.link import messages as m
from windfall.rollout.assignment import Offer
from windfall.scheduling.members import Member, Members, WorkerState

LOAD_TRIES = 12
WORDS = 300
"""Characters of a peer's message that are written down."""


class Loading:
    def __init__(
        self, members: Members, accounts: Accounts, events: EventLog, tell: Callable[[str, object], None],
        drain: Callable[[str, str], None],
    ) -> None:  # fmt: skip
        self._members, self._accounts, self._events = members, accounts, events
        self._tell, self._drain = tell, drain
        self.offer: Offer | None = None
        self.served: Callable[[], bool] = lambda: True
        """Whether anybody serves the weights just now."""

    def ask(self, member: Member) -> None:
        offer = self.offer
        if offer is not None:
            member.asked = (offer.version, offer.digest)
            self._tell(member.id, m.Load(version=offer.version, digest=offer.digest, url=offer.url))

    def again(self, id: str) -> None:
        member = self._members.all.get(id)
        if member is not None and member.state is WorkerState.PULLING:
            self.ask(member)

    def done(self, member: Member, message: m.Loaded, now_s: float) -> bool:
        """It has loaded a version. True: the one that is offered, so it can be given work."""
        if message.slots < 1 or message.version < 0 or message.longest < 0:
            said = f"{message.slots} slots and room for {message.longest} tokens"
            raise Malformed(f"loaded version {message.version} with {said}")
        member.longest = min(member.longest, message.longest or math.inf)
        offer = self.offer
        if offer is None or (message.version, message.digest) != (offer.version, offer.digest):
            member.version, member.digest, member.slots = message.version, message.digest, message.slots
            self.again(member.id)
            return False
        self._members.loaded(member.id, message.version, message.digest, message.slots, message.s)
        self._accounts.ready(now_s, member.id)
        self._events.instant(
            "worker_ready", worker=member.id, version=message.version, s=message.s, bytes=message.pulled_bytes,
            slots=message.slots, longest=message.longest,
            **{name: s for name, s in msgspec.structs.asdict(message.parts).items() if s},
        )  # fmt: skip
        return True

    def failed(self, member: Member, message: m.LoadFailed) -> None:
        member.failed += self.served()
        self._events.instant("load_failed", worker=member.id, version=message.version, why=message.why[:WORDS])
        if member.failed >= LOAD_TRIES:
            self._drain(member.id, f"could not load its weights {member.failed} times: {message.why[:WORDS]}")
        else:
            delay_s = backoff.delay_s(member.failed, first_s=0.25, limit_s=10.0)
            asyncio.get_running_loop().call_later(delay_s, self.again, member.id)
