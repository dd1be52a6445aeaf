"""The server process: from its command line to a listening server, and its end.

SIGTERM and Ctrl-C drain: no request is accepted any more, the run gets its responses back, requests in flight end, and
the process exits. A second Ctrl-C ends it at once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from windfall import devices
from windfall.defaults import KV_SHARE
from windfall.errors import WindfallError
from windfall.link import auth, invitation, tls
from windfall.models import load
from windfall.models.chat import Chat
from windfall.serve import build
from windfall.serve.api import ServeApi, ServeLimits
from windfall.serve.call_sampler import ServedModel
from windfall.serve.host import Host
from windfall.serve.lender import Lender
from windfall.serve.slo import Objectives
from windfall.trainer.derived import text_for
from windfall.weights.pulling.pull import Puller
from windfall.worker.process import is_address

LEAVE_S = 5.0
"""Time limit for returning the run's responses at the end (seconds)."""
LOOPBACK = ("127.0.0.1", "::1", "localhost")
REPORT_S = 2.0
"""Time limit for telling clients that the engine has failed (seconds)."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    model: str
    host: str = "127.0.0.1"
    port: int = 8000
    objectives: Objectives = field(default_factory=Objectives)
    name: str = ""
    """Name of the model in the API. Empty: as `model`."""
    api_key: str = ""
    max_requests: int = 256
    max_running: int = 64
    kv_tokens: int = 0
    memory: float = KV_SHARE
    device: str = "auto"
    dtype: str = "auto"
    threads: int = 0
    drain_s: float = 30.0
    lend: str = ""
    """Address of the controller of a run. Empty: do not lend."""
    token: str = ""
    ca: Path | None = None


def main(options: ServeOptions) -> None:
    """Serve until a signal. Exits the process."""
    context = None
    if options.lend:
        if not is_address(options.lend):
            what = f"{options.lend!r} is not the address of a controller"
            raise WindfallError(what, where="--lend", fix="Give http://HOST:PORT, as the run printed it at its start.")
        if not options.token:
            raise WindfallError("lending needs the run's token", where="--lend", fix="Give --token FILE.")
        context = tls.client_context(options.lend, ca=options.ca, pinned=os.environ.get("WINDFALL_TLS_PIN", ""))
    check_address(options.host, options.port)
    load.resolve(options.model)  # a wrong name is reported before torch is imported
    _tell(f"loading {options.model} ...")
    device, dtype = devices.resolve(options.device, options.dtype, options.threads)
    model = load.load(options.model, dtype=dtype, device=device)
    tokenizer = load.load_tokenizer(options.model)
    stop = text_for(tokenizer, model, {}).stop
    longest = getattr(model.config, "max_position_embeddings", None) or 4096
    spec = build.serving_spec(
        model, dtype, context=longest, max_running=options.max_running, kv_tokens=options.kv_tokens, device=device
    )
    host = build.build_host(spec, model, device, options.objectives, share=options.memory, tell=_tell)
    served = ServedModel(
        model=options.name or options.model,
        context=min(longest, host.engine.limit),
        vocabulary=model.get_input_embeddings().num_embeddings,
    )
    chat = Chat(tokenizer, stop) if getattr(tokenizer, "chat_template", None) else None
    limits = ServeLimits(api_key=options.api_key, max_requests=options.max_requests)
    api = ServeApi(host, tokenizer, chat, stop, served=served, limits=limits)

    async def run() -> int:
        lender: Lender | None = None
        if options.lend:
            lender = Lender(
                host,
                options.lend,
                lambda: invitation.token(options.token),
                device=device,
                name=f"{socket.gethostname()}-{os.getpid()}",
                lease_device=devices.describe(device),
                ssl=context,
                puller=lambda token: Puller(key=auth.weights_key(token), ssl=context),
            )
        return await serve(host, api, options, lender)

    async def run_and_exit() -> NoReturn:
        code = await run()  # an error in a callback, of the lender or of one connection, is logged: serving goes on
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # threads may be in the middle of a step or a pull whose result is no longer needed

    asyncio.run(run_and_exit())


def _tell(line: str) -> None:
    """Say what the start of the server is doing. Standard output has the address of the server as its first line."""
    print(line, file=sys.stderr, flush=True)


def check_address(host: str, port: int) -> None:
    """Raise WindfallError if this process cannot listen there: better before the model is loaded than minutes later."""
    try:
        for family, kind, _, _, address in socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM):
            with socket.socket(family, kind) as s:
                s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                s.bind(address)
    except OSError as e:
        fix = "Choose another --port, or as --host a name or an address of this machine."
        raise WindfallError(f"cannot listen: {e.strerror}", where=f"{host}:{port}", fix=fix) from e


async def serve(host: Host, api: ServeApi, options: ServeOptions, lender: Lender | None) -> int:
    """Listen until a signal or until the engine fails. Returns the exit status."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    host.start(lambda: loop.call_soon_threadsafe(ended.set) and None)
    port = await api.listen(options.host, options.port, "Choose another --port, or end the process that uses it.")

    def leave(number: int) -> None:
        loop.remove_signal_handler(number)
        ended.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, leave, number)
    slo = options.objectives
    print(
        f"serving {api.served.model} at http://{options.host}:{port}/v1 "
        f"(TTFT {slo.ttft_s * 1000:g} ms, TPOT {slo.tpot_s * 1000:g} ms)",
        flush=True,
    )
    if not api.has_key and options.host not in LOOPBACK:
        print(f"warning: every client that reaches {options.host} may use this server; set --api-key", file=sys.stderr)
    lending: asyncio.Task[Any] | None = asyncio.create_task(lender.run()) if lender is not None else None
    await ended.wait()
    if host.failed is not None:
        print(f"the engine failed: {type(host.failed).__name__}: {host.failed}", file=sys.stderr, flush=True)
        await api.drain(REPORT_S, "the engine has failed")
        return 1
    if lender is not None:
        lender.leave("the server is shutting down")
    drained = await api.drain(options.drain_s)
    if lending is not None:
        await asyncio.wait([lending], timeout=LEAVE_S)
        lending.cancel()
        await asyncio.gather(lending, return_exceptions=True)
    await api.stop_listening()
    print("drained" if drained else f"ended with requests in flight after {options.drain_s:g} s", flush=True)
    return 0
