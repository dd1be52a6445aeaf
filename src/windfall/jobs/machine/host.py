"""The devices of one machine, which jobs use by turns: the server of the turns, and the process that workers are
forked from. The service has one, and so has every machine that joins it (join.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import tempfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from windfall.controller.cost import prices
from windfall.devices import Place, cuda_device_name
from windfall.errors import WindfallError
from windfall.jobs.bill import Times
from windfall.jobs.machine.mps import Mps
from windfall.jobs.settings import FleetSettings, places
from windfall.processes.fork_client import ForkClient
from windfall.processes.process import Handle
from windfall.turns.client import KEY, SOCKET
from windfall.turns.server import MAX_PATH_BYTES, TurnServer
from windfall.turns.server_thread import TurnServerThread
from windfall.types import Lease

FLEET_TOKEN = "WINDFALL_FLEET_TOKEN"
"""Environment variable of a user's commands."""
MOST_ENDED = 20_000
"""Turns that have ended and were not asked for yet: minutes of a busy machine."""


class DeviceHost:
    def __init__(
        self,
        settings: FleetSettings,
        log: Path,
        *,
        preload: str,
        on_event: Callable[[str, Mapping[str, Any]], None] = lambda event, fields: None,
    ) -> None:
        """`log`: of the process that workers are forked from. `preload`: what that process does first, as
        module:function:argument. `on_event`: see TurnServer; it is called in the event loop that enters this."""
        self.places, self.trainers = places(settings)
        self.price_usd_per_h = settings.price_usd_per_h or _table_price(self.places[0])
        self.life = secrets.token_hex(8)
        """Names this process in reports of device time."""
        self.forks = ForkClient(entry="windfall.run.cli:main", modules=[preload], log=log)
        self._socket = log.with_name("turns.socket")
        self._stack = contextlib.AsyncExitStack()
        self._keys: dict[str, str] = {}
        self._ended: deque[dict[str, Any]] = deque(maxlen=MOST_ENDED)
        """Turns that have ended, until someone asks for them."""
        self._on_event = on_event
        self._turns = TurnServer(
            [place.name for place in self.places], on_event=self._hand_over, log=self._ended.append,
            co_running=settings.co_running, slice_s=settings.slice_s, limit_s=settings.turn_limit_s,
            state_bytes=None if settings.trainer_state_gb == "auto" else int(settings.trainer_state_gb * 1e9),
        )  # fmt: skip
        self._thread = TurnServerThread(self._turns)
        self._loop: asyncio.AbstractEventLoop | None = None
        co_runs = settings.co_running and self.places[0].device == "cuda"
        self._mps = Mps(log.with_name("mps.log"), os.environ) if co_runs else None

    async def __aenter__(self) -> Self:
        async with contextlib.AsyncExitStack() as stack:
            if len(os.fsencode(self._socket)) > MAX_PATH_BYTES:
                self._socket = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="windfall-"))) / "turns"
            if self._mps is not None:
                await stack.enter_async_context(self._mps)
            self._loop = asyncio.get_running_loop()
            self._thread.start(self._socket)
            stack.callback(self._thread.close)
            stack.push_async_callback(self.forks.close)
            warming = asyncio.create_task(self._warm())
            stack.callback(warming.cancel)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _warm(self) -> None:
        """Import torch before the first job needs it."""
        with contextlib.suppress(WindfallError, OSError):  # the first job reports it
            await self.forks.ready()

    def admit(self, job: str, *, share: float, priority: int, deadline_s: float) -> dict[str, str]:
        """Let a job take turns. Returns the environment variables of its processes."""
        if job not in self._keys:
            self._keys[job] = secrets.token_urlsafe(24)
            deadline = deadline_s or None
            terms = {"share": share, "priority": priority, "deadline": deadline}
            self._thread.call(self._turns.register, self._keys[job], job, **terms)
        shared = {} if self._mps is None else self._mps.environment
        return {**shared, SOCKET: str(self._socket), KEY: self._keys[job]}

    def forget(self, job: str) -> None:
        if self._keys.pop(job, None):
            self._thread.call(self._turns.forget, job)

    def expect(self, job: str, left_s: float | None) -> None:
        """Record how many more seconds the job will need; None: not known."""
        if job in self._keys and left_s is not None:
            self._thread.call(self._turns.update, job, left_s=left_s)

    def times(self) -> Times:
        """What the devices were used for since this process began."""
        return self._thread.call(self._turns.charged)

    def turns(self) -> dict[str, Any]:
        """Who has which device, and who waits for it."""
        return self._thread.call(self._turns.snapshot)

    def ended_turns(self) -> list[dict[str, Any]]:
        """The turns that have ended since the last call; the newest MOST_ENDED."""
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def _hand_over(self, event: str, fields: Mapping[str, Any]) -> None:
        """Runs in the thread of the turns, which must not wait for what others do with an event."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # that loop has ended
                self._loop.call_soon_threadsafe(self._on_event, event, fields)

    def forks_of(self, job: str) -> JobForks:
        return JobForks(self.forks, job)


class JobForks:
    """Forks the processes of one job: several jobs have processes of the same names."""

    def __init__(self, client: ForkClient, job: str) -> None:
        self._client, self._job = client, job

    async def start(self, *, name: str, argv: Sequence[str], env: Mapping[str, str], log: Path) -> Handle:
        handle = await self._client.start(name=f"{self._job}/{name}", argv=argv, env=env, log=log)
        handle.name = name
        return handle


def _table_price(place: Place) -> float:
    if place.device != "cuda":
        return 0.0
    return prices.of(Lease(kind="reserved", device=cuda_device_name() or "")).usd_per_h


def environment(
    own: Mapping[str, str], *, token: str, directory: str = "", pin: Path | str | None = None
) -> dict[str, str]:
    """Environment variables of the processes of a job. `own`: what `DeviceHost.admit` returned. `directory`: where its
    modules may be. `pin`: certificate of its controller, or its file."""
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH", ""), directory)))
    more = {"PYTHONPATH": path, "WINDFALL_TLS_PIN": str(pin or "")}
    inherited = {key: value for key, value in os.environ.items() if key != FLEET_TOKEN}  # it allows more than a job may
    return {**inherited, **own, "WINDFALL_TOKEN": token, **{key: value for key, value in more.items() if value}}
