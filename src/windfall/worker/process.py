"""The worker process: from its command line to a running client."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

import msgspec

from windfall import errors
from windfall.devices import describe, resolve, visible_gpus
from windfall.engine import choice, factory
from windfall.engine.choice import EngineName
from windfall.engine.vllm import factory as vllm_factory
from windfall.engine.vllm import installed
from windfall.errors import WindfallError
from windfall.link import auth, invitation, tls
from windfall.link import messages as m
from windfall.processes import process
from windfall.types import Lease
from windfall.weights.pulling.pull import Puller
from windfall.worker import preemption
from windfall.worker.controller_client import ControllerClient


def is_address(url: str) -> bool:
    """Whether this is the URL of a host.

    >>> [is_address(url) for url in ("http://10.0.0.5:8765", "10.0.0.5:8765", "http://", "http://a:port")]
    [True, False, False, False]
    """
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is not a number
        return False


def check_ranks(device: str, engine: EngineName, tensor_parallel: int) -> None:
    """Raise WindfallError unless the worker can have this many ranks. `device`: as the user gave it."""
    where = "--tensor-parallel"
    if tensor_parallel == 1 or device == "cpu":
        return
    if engine == "windfall":
        what = f"windfall's engine runs on one device, but --tensor-parallel is {tensor_parallel}"
        raise WindfallError(what, where=where, fix="Use --engine vllm, or one worker for each GPU.")
    if device.startswith("cuda:"):
        what = f"--device {device} is one GPU, but --tensor-parallel is {tensor_parallel}"
        raise WindfallError(what, where=where, fix="Use --device cuda, and select GPUs with CUDA_VISIBLE_DEVICES.")
    seen = len(visible_gpus(os.environ))
    if 0 < seen < tensor_parallel:  # 0: unknown, or a CPU
        what = f"this process sees {seen} GPUs, but --tensor-parallel is {tensor_parallel}"
        raise WindfallError(what, where=where, fix=f"Use --tensor-parallel {seen}, or set CUDA_VISIBLE_DEVICES.")


def devices_held(device: str, tensor_parallel: int) -> str:
    """All devices of a worker, as a lease names them: the price is that of all together.

    >>> devices_held("NVIDIA H200", 4), devices_held("NVIDIA H200", 1), devices_held("cpu", 2)
    ('4x NVIDIA H200', 'NVIDIA H200', 'cpu')
    """
    return f"{tensor_parallel}x {device}" if tensor_parallel > 1 and device != "cpu" else device


def main(
    url: str,
    token: str,
    *,
    name: str,
    kind: Any,
    device: str,
    region: str,
    price_usd_per_h: float,
    threads: int,
    share: float,
    clouds: str,
    ca: Path | None,
    patience_s: float,
    engine: EngineName = "auto",
    tensor_parallel: int = 1,
    weights_port: int = 0,
    weights_address: str = "",
) -> None:
    """Join a run and work for it; exits the process. `token`: the run's token, or the file that
    holds it. `share`: share of the free memory for the KV cache. `engine`: which engine; "auto" leaves it to the run.
    `tensor_parallel`: number of GPUs that the engine spans. `weights_port`, `weights_address`: where other workers read
    weights from this one."""
    if not is_address(url):
        what = f"{url!r} is not the address of a controller"
        raise WindfallError(what, where="--join", fix="Give http://HOST:PORT.")
    name = name or f"{socket.gethostname()}-{os.getpid()}"
    context = tls.client_context(url, ca=ca, pinned=os.environ.get("WINDFALL_TLS_PIN", ""))
    token = invitation.token(token, patience_s)
    check_ranks(device, engine, tensor_parallel)
    found, _ = resolve(device, "auto", threads)
    imported = m.LoadTimes(import_s=process.age_s())
    # Of the engines, only vLLM spans several devices. It must initialize CUDA itself, in other processes.
    if engine == "vllm" or tensor_parallel > 1:
        installed.check(found)
    held = devices_held(describe(found), tensor_parallel)
    lease = Lease(kind=kind, device=held, region=region, price_usd_per_h=price_usd_per_h)
    took = [imported]

    def build_engine(spec: m.EngineSpec) -> tuple[Any, int]:
        """Runs in the engine's thread, while the weights are pulled."""
        chosen = choice.choose(spec, found, asked=engine, tensor_parallel=tensor_parallel)
        print(chosen, file=sys.stderr, flush=True)
        if chosen.name == "vllm":
            built, slots, times = vllm_factory.build(spec, found, share=share, tensor_parallel=tensor_parallel)
        else:
            built, slots, times = factory.build_engine_timed(spec, found, share=share)
        took.append(msgspec.structs.replace(imported, build_s=times.build_s, warm_s=times.warm_s))
        return built, slots

    async def run() -> int:
        puller = Puller(key=auth.weights_key(token), ssl=context)
        client = ControllerClient(
            url,
            token,
            name=name,
            lease=lease,
            build=build_engine,
            puller=puller,
            files=puller.files,
            weights_port=weights_port,
            weights_address=weights_address,
            boot=lambda: took[-1],
            ssl=context,
            patience_s=patience_s,
            say=lambda line: print(f"{name}: {line}", file=sys.stderr, flush=True),
        )
        _leave_on_signals(client)
        return await client.run("auto" if clouds == "auto" else () if clouds == "none" else clouds.split(","))

    asyncio.run(_exit_with(run()))


def _leave_on_signals(client: ControllerClient) -> None:
    loop = asyncio.get_running_loop()
    preemption.on_sigterm(loop, client.warned)
    interrupt = preemption.PreemptionNotice(source="ctrl-c", left_s=None, detail="interrupted by the user")

    def leave() -> None:
        loop.remove_signal_handler(signal.SIGINT)  # a second Ctrl-C ends the process at once
        client.warned(interrupt)

    loop.add_signal_handler(signal.SIGINT, leave)


async def _exit_with(run: Coroutine[Any, Any, int]) -> NoReturn:
    """Exit the process from inside the loop: `asyncio.run` would wait without limit for a thread that pulls weights,
    and the engine's thread may be in the middle of a step whose result is no longer needed."""
    code = await errors.guard(run)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
