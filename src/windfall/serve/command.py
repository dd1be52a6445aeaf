"""`windfall serve`: its options. The server itself is in serve/process.py."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from windfall.defaults import KV_SHARE, MAX_SLOWDOWN, TPOT_S, TTFT_S
from windfall.run.commands.options import token_option

LENDING = "Options for lending"


def serve(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model: tiny, smollm2-135m, a directory or a hub id.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on. 0: any free port.")] = 8000,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    ttft_ms: Annotated[float, typer.Option(min=1.0, help="Objective: milliseconds to the first token.")] = 1000
    * TTFT_S,
    tpot_ms: Annotated[float, typer.Option(min=1.0, help="Objective: milliseconds per token after the first.")] = 1000
    * TPOT_S,
    max_slowdown: Annotated[
        float,
        typer.Option(
            min=0.0,
            rich_help_panel=LENDING,
            help="Upper limit for the time per token that lending adds, as a share of the time without lending.",
        ),
    ] = MAX_SLOWDOWN,
    name: Annotated[str, typer.Option(help="Name of the model in the API. Default: MODEL.")] = "",
    api_key: Annotated[
        str, typer.Option(envvar="WINDFALL_API_KEY", help="Key that clients must send. Default: none is needed.")
    ] = "",
    max_requests: Annotated[
        int, typer.Option(min=1, help="Upper limit for choices in flight (n per prompt); more get 429.")
    ] = 256,
    max_running: Annotated[int, typer.Option(min=1, help="Upper limit for requests that are decoded at once.")] = 64,
    kv_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens of the model that fit into the KV cache. 0: by the free memory.")
    ] = 0,
    memory: Annotated[
        float, typer.Option(min=0.01, max=0.95, help="Share of the free memory for the KV cache.")
    ] = KV_SHARE,
    device: Annotated[str, typer.Option(help="Device: auto, cpu, cuda, or one GPU such as cuda:1.")] = "auto",
    threads: Annotated[int, typer.Option(min=0, help="CPU threads. 0: all cores.")] = 0,
    drain: Annotated[float, typer.Option(min=0.0, help="Seconds that requests have to end after SIGTERM.")] = 30.0,
    lend: Annotated[
        str, typer.Option(metavar="URL", rich_help_panel=LENDING, help="Controller of the run to lend this device to.")
    ] = "",
    token: Annotated[str, token_option("; it may be created after the server starts", panel=LENDING)] = "",
    tls_ca: Annotated[
        Path | None, typer.Option(rich_help_panel=LENDING, help="Additional certificate (PEM) to trust.")
    ] = None,
) -> None:
    """Serve a model with an OpenAI-compatible API. With --lend, what serving does not need works for a run."""
    from windfall.serve import process
    from windfall.serve.slo import Objectives

    process.main(
        process.ServeOptions(
            model=model, host=host, port=port, name=name, api_key=api_key, max_requests=max_requests,
            objectives=Objectives(ttft_s=ttft_ms / 1000, tpot_s=tpot_ms / 1000, max_slowdown=max_slowdown),
            max_running=max_running,
            kv_tokens=kv_tokens, memory=memory, device=device, threads=threads, drain_s=drain, lend=lend, token=token,
            ca=tls_ca,
        )
    )  # fmt: skip
