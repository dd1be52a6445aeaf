"""Lends the host to a run: a worker with a `borrowed` lease, whose engine is the rollout tenant of the host.

    Lender.run ──▶ token ──▶ ControllerClient ──▶ (run) ... drained, or the tenant failed ──▶ wait ──▶ begin again
                               └──▶ refused: as above, but after a longer time if this run never fitted

A server outlives the runs that it lends to. After a crash, the next run at the same address may train another model or
have another token: the client is refused, and the next one begins with neither model nor engine. The token is read when
a client starts; a token file that does not exist yet is awaited, while serving goes on. The client reconnects without
end while there is no controller. It keeps the engine and its weights meanwhile, but no response: these are continued
elsewhere, and their pages are free.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import ssl as tls
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from windfall.errors import WindfallError
from windfall.link import messages as m
from windfall.serve.build import build_rollout
from windfall.serve.host import Host
from windfall.serve.rollout_tenant import RolloutTenant
from windfall.types import Lease
from windfall.weights.pulling.pull import WeightPuller
from windfall.worker.controller_client import ControllerClient
from windfall.worker.preemption import PreemptionNotice

RETRY_S = 10.0
"""Seconds between the end of one client and the start of the next."""
REFUSED = 3
"""Exit status of a client that the run has refused for good."""
REFUSED_S = 60.0
"""Seconds until the next attempt if the run cannot use this server at all, or does not accept its token."""
PATIENCE_S = math.inf
"""The service outlives any outage of the run."""


@dataclass(eq=False)
class Lender:
    host: Host
    url: str
    token: Callable[[], str]
    """Returns the run's token, or raises WindfallError while there is none. Called in a thread."""
    name: str
    device: str
    puller: Callable[[str], WeightPuller]
    """Makes a weights.pulling.pull.Puller for every client, given the token."""
    lease_device: str = ""
    """Name of the device in the lease; empty: as `device`."""
    ssl: tls.SSLContext | None = None
    retry_s: float = RETRY_S
    refused_s: float = REFUSED_S
    say: Callable[[str], None] = lambda line: print(f"lend: {line}", file=sys.stderr, flush=True)

    def __post_init__(self) -> None:
        self._lease = Lease(kind="borrowed", device=self.lease_device or self.device)
        self._client: ControllerClient | None = None
        self._tenant: RolloutTenant | None = None
        self._leaving = asyncio.Event()
        self.tenants = 0
        """Number of rollout tenants that were made."""

    async def run(self) -> None:
        """Lend until `leave`."""
        waiting = ""
        while not self._leaving.is_set():
            self._tenant = None
            try:
                token = await asyncio.to_thread(self.token)
            except (WindfallError, OSError) as e:
                if str(e) != waiting:  # print repeats once
                    waiting = str(e)
                    self.say(f"waiting for the run's token: {e}")
                await self._pause(self.retry_s)
                continue
            client = self._client = ControllerClient(
                self.url,
                token,
                name=self.name,
                lease=self._lease,
                puller=self.puller(token),
                build=self._build,
                ssl=self.ssl,
                patience_s=PATIENCE_S,
                host=self._make_tenant,
                lends=True,
                say=self.say,
            )
            try:
                code = await client.run()
            except Exception as e:  # fault boundary: serving goes on whatever happens to the lender
                self.say(f"{type(e).__name__}: {e}")
                code = 1
                if self._tenant is not None:  # its memory must be free before the next one is made
                    self._tenant.close(0.0)
            finally:
                self._client = None
            if code == REFUSED and not (self._tenant is not None and self._tenant.built):
                what = "the run does not take this worker; serving goes on without lending"
                self.say(f"{what}; the next attempt is in {self.refused_s:g} s")
                await self._pause(self.refused_s)
            else:
                await self._pause(self.retry_s)

    async def _pause(self, seconds: float) -> None:
        """Wait for the next attempt, or for `leave`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._leaving.wait()

    def leave(self, why: str) -> None:
        """Tell the run that this worker leaves soon, so that it takes its responses back. `run` ends then."""
        self._leaving.set()
        if self._client is not None:
            self._client.warned(PreemptionNotice(source="sigterm", left_s=None, detail=why))

    def _make_tenant(self, make: Callable[[], tuple[Any, int]]) -> RolloutTenant:
        self.tenants += 1
        self._tenant = RolloutTenant(self.host, make=make)
        return self._tenant

    def _build(self, spec: m.EngineSpec) -> tuple[Any, int]:
        if self._tenant is not None:
            self._tenant.response_tokens = spec.longest
        return build_rollout(self.host, spec, self.device)
