"""A worker's process: from its command line to an agent."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

import msgspec

from windfall import unhandled
from windfall.devices import describe
from windfall.errors import WindfallError
from windfall.launch import invitation, tls
from windfall.link import auth
from windfall.link import messages as m
from windfall.types import Lease
from windfall.weights.pull import Puller
from windfall.worker import engine_factory, preemption
from windfall.worker.agent import Agent
from windfall.worker.startup import StartupThread, check_device, detect_device


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of the port
        return False


def main(
    url: str, token: str, *, name: str, kind: Any, device: str, region: str, price_usd_per_h: float, threads: int,
    share: float, clouds: str, ca: Path | None, patience_s: float,
) -> None:  # fmt: skip
    """Join and work; ends the process with the agent's status. `token`: the run's, or the file that has it."""
    if not _is_address(url):
        raise WindfallError(f"{url!r} is not a controller's address", where="--join", fix="Give http://HOST:PORT.")
    pinned = os.environ.get("WINDFALL_TLS_PIN")
    context = tls.dialling(url, ca=ca, pinned=Path(pinned) if pinned else None)
    token = invitation.token(token, patience_s)
    start = StartupThread(device, threads)  # takes seconds: what can be refused was refused before
    glanced = detect_device(device)
    lease = Lease(kind=kind, device=glanced[1] if glanced else describe(start.chosen_device()), region=region,
                  price_usd_per_h=price_usd_per_h)  # fmt: skip

    def make(spec: m.EngineSpec) -> tuple[Any, int]:
        found = start.chosen_device()
        if glanced is not None:
            check_device(glanced, found)
        engine, slots, took = engine_factory.build_engine_timed(spec, found, share=share)
        start.took = msgspec.structs.replace(start.took, build_s=took.build_s, warm_s=took.warm_s)
        return engine, slots

    async def run() -> int:
        agent = Agent(
            url, token, name=name or f"{socket.gethostname()}-{os.getpid()}", lease=lease, build=make,
            puller=Puller(key=auth.weights_key(token), ssl=context), boot=lambda: start.took, ssl=context,
            patience_s=patience_s,
        )  # fmt: skip
        loop = asyncio.get_running_loop()
        preemption.on_sigterm(loop, agent.warned)
        asked = preemption.PreemptionNotice(source="ctrl-c", left_s=None, detail="somebody asked it to leave")

        def leave() -> None:
            loop.remove_signal_handler(signal.SIGINT)  # a second Ctrl-C ends it at once
            agent.warned(asked)

        loop.add_signal_handler(signal.SIGINT, leave)
        return await agent.run("auto" if clouds == "auto" else () if clouds == "none" else clouds.split(","))

    async def live() -> NoReturn:
        """Ends the process from inside the loop: `asyncio.run` would wait without limit for a thread that pulls, and
        the engine's thread may be in the middle of a step that nobody needs."""
        code = await unhandled.guard(run())
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    try:
        asyncio.run(live())
    except BaseException:  # it goes on up, once nobody imports any more
        start.join()
        raise
