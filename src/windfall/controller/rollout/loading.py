"""Asks workers to load the versions that work is assigned with, and retries with back-off when they fail.

A worker gets one Load for each of its policies. It carries them out one after the other.

A worker that fails LOAD_TRIES times in a row is drained. A worker that neither fails nor makes progress is found by
`Members.tick` (workers/members.py). Failures while the weights are not served (the trainer is being restarted) do
not count.

A worker that builds its engine may refuse the model: its self-test measured a difference, or its memory is too small.
The run ends when work is queued, no worker has ever been ready, REFUSED_S seconds have passed since the first refusal,
and no worker is still starting. If workers that refuse are restarted again and again, one is always starting: after
REFUSALS refusals the run no longer waits for workers that joined more recently than the slowest refusal took.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping

import msgspec

from windfall import backoff
from windfall.controller.cost.accounts import Accounts
from windfall.controller.ledger.episode import Malformed
from windfall.controller.ledger.ledger import Ledger
from windfall.controller.rollout.weight_routes import WeightRoutes
from windfall.controller.workers.borrowing import Borrowing
from windfall.controller.workers.members import Member, Members, WorkerState
from windfall.controller.workers.versions import PolicyVersions, policy_fields
from windfall.errors import WindfallError
from windfall.events.log import EventLog
from windfall.link import messages as m

LOAD_TRIES = 12
MAX_CHARS = 300
"""Characters of a peer's message that are logged."""
REFUSED_S = 120.0
REFUSALS = 8
MAX_REASON = 2000
"""Characters of a refusal that are kept: it says what was measured and what to do."""


class Loading:
    def __init__(
        self,
        versions: Mapping[str, PolicyVersions],
        members: Members,
        weights: WeightRoutes,
        accounts: Accounts,
        events: EventLog,
        send: Callable[[str, object], None],
        drain: Callable[[str, str], None],
        *,
        finish: bool = False,
    ) -> None:
        """`versions`: by policy. `finish`: a worker with responses finishes them before it loads a new version."""
        self._finish = finish
        self._versions = versions
        self._members = members
        self._weights = weights
        self._accounts = accounts
        self._events = events
        self._send, self._drain = send, drain
        self.served: Callable[[str], bool] = lambda policy: True
        """Whether the weights of a policy are being served at the moment."""

    def request_all(self, ledger: Ledger, borrowing: Borrowing) -> None:
        """Have workers load the newest versions. New workers load them at once. With staleness 0, others load a version
        when there is work for it; above 0, at once if running responses are interrupted, otherwise when idle. Lenders
        load it if the run may use them. The trainer's engine always has the newest weights. The policy with most queued
        responses comes first."""
        now = asyncio.get_running_loop().time()
        outdated = [
            (versions, self._members.outdated(
                versions, needed=bool(versions.staleness or ledger.queues[versions.name]),
                offered=self._weights.directories[versions.name].offered(),
            ))
            for versions in sorted(self._versions.values(), key=lambda each: -len(ledger.queues[each.name]))
            if versions.offer is not None
        ]  # fmt: skip
        lends = any(member.lends for _, members in outdated for member in members)
        usable = {w.id for w in borrowing.usable(self._members.here(), now)} if lends else set()
        for versions, members in outdated:
            asked = []
            for member in members:
                if member.lends and member.state is not WorkerState.PULLING and member.id not in usable:
                    continue
                busy = ledger.running(member.id) > 0
                if self._finish and busy and member.state is WorkerState.READY and not member.local:
                    continue
                if self._goes_on(member, versions.name, busy):  # it generates while it pulls
                    if not any(member.loads(held) for name, held in member.held.items() if name != versions.name):
                        member.progress_s = now  # otherwise this load waits for that one
                elif member.state is not WorkerState.PULLING:  # else it abandons the pull of an older version
                    self._members.pull(member.id, now)
                    self._accounts.pulling(now, member.id)
                asked.append(member)
            self._weights.stopped(asked, versions.name)
            for member in asked:
                self.request(member, versions.name)

    def _goes_on(self, member: Member, policy: str, busy: bool) -> bool:
        """Whether the worker stays ready while it loads this policy: it has work, or may get some of another policy."""
        for name, held in member.held.items():
            window = self._versions[name].window
            if busy and window.allows(held.version, held.digest):
                return True
            if name != policy and member.state is WorkerState.READY and window.is_newest(held.version, held.digest):
                return True
        return False

    def request(self, member: Member, policy: str = "") -> None:
        """Ask a worker to load the offered version."""
        if (offer := self._versions[policy].offer) is not None:
            member.held[policy].requested = (offer.version, offer.digest)
            files = self._weights.load(member, offer.digest, policy)
            load = m.Load(version=offer.version, digest=offer.digest, files=files, policy=policy)
            self._send(member.id, load)

    def retry(self, id: str, policy: str = "") -> None:
        member = self._members.all.get(id)
        if member is not None and policy in member.held and member.loads(member.held[policy]):
            self.request(member, policy)

    def done(self, member: Member, message: m.Loaded, now_s: float) -> bool:
        """The worker has loaded a version. True if it is in the window, so that work can be assigned."""
        if message.slots < 1 or message.version < 0 or message.longest < 0:
            capacity = f"{message.slots} slots and room for {message.longest} tokens"
            raise Malformed(f"loaded version {message.version} with {capacity}")
        policy = message.policy
        if policy not in member.held:
            raise Malformed(f"loaded policy {policy!r}, which it was not asked for")
        self._weights.loaded(member, message)
        member.longest = min(member.longest, message.longest or math.inf)
        member.kv_tokens = 0 if member.lends else max(0, message.kv_tokens)
        if not self._versions[policy].window.allows(message.version, message.digest):
            held, member.slots = member.held[policy], message.slots
            held.version, held.digest = message.version, message.digest
            self.retry(member.id, policy)
            return False
        was_pulling = member.state is WorkerState.PULLING  # a paused worker stays paused
        self._members.loaded(member.id, message.version, message.digest, message.slots, message.s, policy)
        if was_pulling:
            self._accounts.ready(now_s, member.id)
        self._events.instant(
            "worker_ready",
            worker=member.id,
            version=message.version,
            s=message.s,
            bytes=message.pulled_bytes,
            slots=message.slots,
            longest=message.longest,
            engine=member.engine.label,
            exact=member.engine.exact,
            **{name: s for name, s in msgspec.structs.asdict(message.parts).items() if s},
            **policy_fields(policy),
        )
        return True

    def failed(self, member: Member, message: m.LoadFailed) -> None:
        policy, why = message.policy, message.why[:MAX_CHARS]
        if (held := member.held.get(policy)) is None:
            return  # its engine holds one policy at a time, and has another one
        self._weights.failed(member, message)
        held.failed += self.served(policy)
        self._events.instant("load_failed", worker=member.id, version=message.version, why=why, **policy_fields(policy))
        if held.failed >= LOAD_TRIES:
            self._drain(member.id, f"failed to load the weights {held.failed} times: {why}")
        else:
            delay_s = backoff.delay_s(held.failed, first_s=0.25, limit_s=10.0)
            asyncio.get_running_loop().call_later(delay_s, self.retry, member.id, policy)


class Refusals:
    def __init__(self) -> None:
        self.count = 0
        self._since_s = self._slowest_s = 0.0
        """When the first worker refused, and the longest time from joining to refusing."""
        self._last = ""
        """The worker that refused last, and its reason."""
        self._ready = False

    def ready(self) -> None:
        """A worker can run the model."""
        self._ready = True

    def refused(self, member: Member, why: str, now_s: float) -> None:
        if not self.count:
            self._since_s = now_s
        self.count += 1
        self._slowest_s = max(self._slowest_s, now_s - member.joined_s)
        self._last = f"Worker {member.id} says: {why[:MAX_REASON]}"

    def check(self, here: Iterable[Member], now_s: float) -> WindfallError | None:
        """The error that ends a run whose work is queued, if no worker can be expected to do that work."""
        if self._ready or not self.count or now_s - self._since_s < REFUSED_S:
            return None
        if any(self.count < REFUSALS or now_s - worker.joined_s > self._slowest_s for worker in here):
            return None
        refused = f"no worker can run the model: {self.count} refused it, and none has ever been ready"
        fix = "Correct that, or add a worker that can run the model. Then continue with `windfall resume`."
        return WindfallError(f"{refused} (waited {REFUSED_S:g} s). {self._last}", where="fleet", fix=fix)
