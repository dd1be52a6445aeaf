"""Admission to the controller: accepts authenticated workers and the trainer, and refuses other peers with a reason.

The trainer has a secret of its own that no worker knows, because whoever is accepted as the trainer determines the
run's weights. Refusals are logged with clipped text and a rate limit of MAX_LOGGED_PER_S, and the same refusal of the
same peer once in REPEAT_S, so a peer that dials in a loop fills neither the disk nor the screen.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Any

import msgspec

from windfall.link import handshake
from windfall.link import messages as m
from windfall.link.base import BadFrame, Link, LinkClosed, clip
from windfall.types import is_local

MAX_LOGGED_PER_S = 5  # refusals logged per second; further refusals are not logged
MAX_REMEMBERED = 500  # refusals whose repeats are counted: more than are logged in REPEAT_S
REPEAT_S = 60.0  # seconds until a refusal is logged again that has the same peer and the same reason


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """What the Welcome of every worker with the same base contains."""

    model: str
    engine: m.EngineSpec
    heartbeat_s: float
    stalled_s: float = 60.0
    upload_bytes_per_s: float = 0.0
    policies: tuple[str, ...] = ("",)


class Gate:
    def __init__(
        self,
        run: str,
        token: str,
        *,
        log: Callable[..., None],
        max_workers: int,
        trainer_secret: str = "",
        borrows: bool = True,
        policies: Collection[str] = ("",),
    ) -> None:
        """Without a `trainer_secret`, no trainer is accepted. `borrows`: workers that lend are accepted. `policies`:
        those that trainers may train."""
        self.run = run
        self._token = token
        self._log = log
        self.max_workers = max_workers
        self._trainer_secret, self._borrows = trainer_secret, borrows
        self._policies = policies
        self.terms: dict[str, Terms] = {}  # by base; empty until trainers have joined: workers must dial again later
        # The base of a worker that joins, of those given. The same answer for the same worker until it has joined.
        self.choose: Callable[[m.Hello, Collection[str]], str] = lambda hello, bases: next(iter(bases))
        self.workers = 0  # workers connected now
        # The last logged refusals by peer and reason: when (monotonic, s), and how many were left out since.
        self._logged: dict[tuple[str, str], tuple[float, int]] = {}

    async def worker(self, link: Link, serve: Callable[[Link, m.Hello, str], Awaitable[None]]) -> None:
        """`serve` gets the worker's base, too."""
        hello, proof = await self._authenticate(link, handshake.WORKER, self._worker_secret)
        if hello is None:
            return
        # A lender has the model of its service. Another worker builds the engine that the Welcome describes.
        fitting = [base for base, terms in self.terms.items() if not hello.lends or hello.model in ("", terms.model)]
        if not self.terms:
            await self._refuse(link, "the run is still starting", again=True, log=False)
        elif not fitting:
            models = ", ".join(dict.fromkeys(terms.model for terms in self.terms.values()))
            await self._refuse(link, f"the run trains model {models}, this worker has {hello.model}")
        elif not 0 < len(hello.name) <= 64 or not hello.name.isprintable() or "#" in hello.name:
            await self._refuse(link, "a worker's name must be 1 to 64 printable characters without '#'")
        elif max(map(len, _texts(hello))) > 128:
            await self._refuse(
                link, "its model, device, region, location, machine, policy or digest has over 128 characters"
            )
        elif not 0 <= hello.lease.price_usd_per_h < math.inf:
            await self._refuse(link, f"invalid price: {hello.lease.price_usd_per_h} $ per hour")
        elif hello.lends and not self._borrows:
            await self._refuse(link, "the run borrows from no lender (fleet.borrowed_max is 0)")
        elif self.workers >= self.max_workers:
            why = f"the run has its maximum of {self.max_workers} workers (fleet.max_workers)"
            await self._refuse(link, why, again=True, log=False)
        else:
            self.workers += 1
            base = self.choose(hello, fitting)
            terms = self.terms[base]
            try:
                await link.send(m.Welcome(proof=proof, worker=hello.name, **msgspec.structs.asdict(terms)))
                if self.terms.get(base) == terms:
                    await serve(link, hello, base)
                else:  # the worker dials again, and builds the engine that the run wants now
                    await link.close("the run wants another engine now")
            finally:
                self.workers -= 1

    async def trainer(self, link: Link, serve: Callable[[Link, m.TrainerHello], Awaitable[None]]) -> None:
        if not self._trainer_secret:
            await self._refuse(link, "no trainer is expected here")
            return
        hello, proof = await self._authenticate(link, handshake.TRAINER, lambda hello: self._trainer_secret)
        if hello is not None and hello.policy not in self._policies:
            names = ", ".join(map(repr, self._policies))
            await self._refuse(link, f"the run has no policy {clip(hello.policy)!r}, but {names}")
        elif hello is not None:
            await link.send(m.TrainerWelcome(proof=proof))
            await serve(link, hello)

    def _worker_secret(self, hello: m.Hello) -> str:
        """The secret that a worker must know. Only the trainer's processes may use the names `local` and `local-N`:
        these workers are paused and resumed with training, and billed as the trainer."""
        return self._trainer_secret if is_local(hello.name) else self._token

    async def _authenticate(self, link: Link, role: handshake.Role, secret: Callable[[Any], str]) -> tuple[Any, bytes]:
        """The peer's hello and the proof for its welcome. The hello is None if the peer was refused or is gone."""
        try:
            hello, proof = await handshake.challenge(link, role, self.run, secret)
        except handshake.PeerRefused as e:
            await self._refuse(link, str(e), again=e.again)
        except BadFrame as e:
            self._log_refusal(link, str(e))
        except LinkClosed:
            pass
        else:
            link.authenticated()
            return hello, proof
        return None, b""

    async def _refuse(self, link: Link, why: str, *, again: bool = False, log: bool = True) -> None:
        why = clip(why)
        if log:
            self._log_refusal(link, why)
        await handshake.refuse(link, why, again=again)
        await link.close(why)

    def _log_refusal(self, link: Link, why: str) -> None:
        now, what = time.monotonic(), (link.peer, clip(why))
        logged_s, repeats = self._logged.get(what, (-math.inf, 0))
        if now - logged_s < REPEAT_S:
            self._logged[what] = logged_s, repeats + 1
            return
        if sum(now - at < 1.0 for at, _ in self._logged.values()) < MAX_LOGGED_PER_S:
            self._logged.pop(what, None)
            self._logged[what] = now, 0  # the newest one is last
            if len(self._logged) > MAX_REMEMBERED:
                self._logged.pop(next(iter(self._logged)))
            self._log("refused", peer=link.peer, why=what[1], **({"repeats": repeats} if repeats else {}))


def _texts(hello: m.Hello) -> tuple[str, ...]:
    """What a worker says of itself, apart from its name."""
    held = (text for policy, (_, digest) in hello.held.items() for text in (policy, digest))
    return (hello.model, hello.lease.device, hello.lease.region, hello.location, hello.machine, *held)
