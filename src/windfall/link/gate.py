"""The door of the controller: who is let in as a worker or as the trainer, and who is refused, with the reason.

The trainer has a secret of its own, which no worker knows: whoever is let in as the trainer says what the weights are.
A refusal is logged, at most a few per second, and cut short: somebody who knocks without end must not fill the disk.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from windfall.link import auth
from windfall.link import messages as m
from windfall.link.base import BadFrame, Link, LinkClosed, clip
from windfall.types import LOCAL

SHAKE_S = 10.0
LOGGED_PER_S = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """What a worker is told."""

    model: str
    engine: m.EngineSpec
    heartbeat_s: float
    stalled_s: float = 60.0


@runtime_checkable
class Guarded(Protocol):
    """A link over a port, which keeps strangers short until it is told. One in memory has none."""

    def proved(self) -> object: ...


class Gate:
    def __init__(
        self, run: str, token: str, *, log: Callable[..., None], most_workers: int, trainer_secret: str = ""
    ) -> None:
        """Without a `trainer_secret`, nobody is let in as the trainer."""
        self.run, self._token, self._log, self.most_workers = run, token, log, most_workers
        self._trainer_secret = trainer_secret
        self.terms: Terms | None = None
        """None: there is no trainer yet, and so no model; workers are asked to come again."""
        self.workers = 0
        self._knocks: list[float] = []

    async def worker(self, link: Link, attend: Callable[[Link, m.Hello], Awaitable[None]]) -> None:
        hello, challenge = await self._meet(link, m.Hello, "hello", self._secret)
        if hello is None:
            return
        terms = self.terms
        if terms is None:
            await self._refuse(link, "the run is still starting", again=True)
        elif hello.model and hello.model != terms.model:
            await self._refuse(link, f"the run trains model {terms.model}, this worker has {hello.model}")
        elif not 0 < len(hello.name) <= 64 or not hello.name.isprintable() or "#" in hello.name:
            await self._refuse(link, "a worker's name is 1 to 64 printable characters without '#'")
        elif max(map(len, (hello.lease.device, hello.lease.region, hello.digest))) > 128:
            await self._refuse(link, "a device, a region or a digest of more than 128 characters")
        elif not 0 <= hello.lease.price_usd_per_h < math.inf:
            await self._refuse(link, f"a price of {hello.lease.price_usd_per_h} $ per hour")
        elif self.workers >= self.most_workers:
            await self._refuse(link, f"the run has its {self.most_workers} workers (fleet.max_workers)", again=True)
        else:
            proof = auth.proof(self._secret(hello), "welcome", self.run, challenge, hello.nonce)
            self.workers += 1
            try:
                await link.send(
                    m.Welcome(
                        proof=proof,
                        worker=hello.name,
                        model=terms.model,
                        engine=terms.engine,
                        heartbeat_s=terms.heartbeat_s,
                        stalled_s=terms.stalled_s,
                    )
                )
                await attend(link, hello)
            finally:
                self.workers -= 1

    async def trainer(self, link: Link, attend: Callable[[Link, m.TrainerHello], Awaitable[None]]) -> None:
        if not self._trainer_secret:
            await self._refuse(link, "no trainer is expected here")
            return
        hello, challenge = await self._meet(link, m.TrainerHello, "trainer", lambda hello: self._trainer_secret)
        if hello is not None:
            proof = auth.proof(self._trainer_secret, "trainer welcome", self.run, challenge, hello.nonce)
            await link.send(m.TrainerWelcome(proof=proof))
            await attend(link, hello)

    def _secret(self, hello: m.Hello) -> str:
        """What a worker must know. Only the trainer's process may call itself `local`: that name is paused and resumed
        with training, and billed as the trainer."""
        return self._trainer_secret if hello.name == LOCAL else self._token

    async def _meet(self, link: Link, kind: type[Any], said: str, secret: Callable[[Any], str]) -> tuple[Any, bytes]:
        """Challenge it; its Hello if it knows the secret, else None."""
        challenge = auth.nonce()
        try:
            async with asyncio.timeout(SHAKE_S):
                await link.send(m.Challenge(protocol=m.PROTOCOL, run=self.run, nonce=challenge))
                hello: Any = await link.receive()
        except TimeoutError:
            await self._refuse(link, f"said nothing for {SHAKE_S:g} s")
            return None, challenge
        except BadFrame as e:
            self._knock(link, str(e))
            return None, challenge
        except LinkClosed:
            return None, challenge
        if not isinstance(hello, kind):
            await self._refuse(link, f"a {kind.__name__} was expected, not a {type(hello).__name__}")
        elif hello.protocol != m.PROTOCOL:
            fix = "install the same version of windfall on both"
            await self._refuse(link, f"protocol {hello.protocol}, this run speaks {m.PROTOCOL}: {fix}")
        elif (
            not (needed := secret(hello))  # an empty one proves nothing
            or len(hello.nonce) != auth.NONCE_BYTES
            or not auth.same(hello.proof, auth.proof(needed, said, self.run, challenge, hello.nonce))
        ):
            await self._refuse(link, "wrong token, or a Hello made for another challenge")
        else:
            if isinstance(link, Guarded):
                link.proved()
            return hello, challenge
        return None, challenge

    async def _refuse(self, link: Link, why: str, *, again: bool = False) -> None:
        why = clip(why)
        if not again:
            self._knock(link, why)
        try:
            async with asyncio.timeout(1.0):
                await link.send(m.Refused(why=why, again=again))
        except (LinkClosed, TimeoutError):
            pass
        await link.close(why)

    def _knock(self, link: Link, why: str) -> None:
        now = time.monotonic()
        self._knocks = [t for t in self._knocks if now - t < 1.0]
        if len(self._knocks) < LOGGED_PER_S:
            self._knocks.append(now)
            self._log("refused", peer=link.peer, why=clip(why))
