"""`windfall env-server`: the environment of a recipe on a machine of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from windfall.run.commands.options import Overrides, RecipeFile, token_option


def env_server(
    recipe: RecipeFile,
    token: Annotated[
        str, token_option("; the same file is env.servers_token of the run", what="the token of the server")
    ],
    host: Annotated[str, typer.Option(help="Address on which the server listens. 0.0.0.0: all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the server. 0: any free one.")] = 9000,
    concurrency: Annotated[
        int, typer.Option(min=1, max=65536, help="Upper limit for calls in progress. Others wait for a free slot.")
    ] = 64,
    log: Annotated[
        Path, typer.Option(help="File for what the environment prints. The newest 8 to 16 MiB are kept.")
    ] = Path("env.log"),
    set: Overrides = None,
    tls_cert: Annotated[
        Path | None, typer.Option(help="Certificate chain (PEM) of the server; runs then connect over https.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Private key (PEM) of the certificate.")] = None,
) -> None:
    """Host the environment of a recipe for runs on other machines, which name this server in env.servers.

    Processes, memory, sessions and time per call are limited by this server's own recipe: rollout.reward_processes,
    env.memory_mb, env.max_sessions and rollout.reward_timeout_s.
    """
    from windfall.envs.remote import server
    from windfall.link import invitation
    from windfall.recipe.file import load_recipe

    server.main(
        load_recipe(recipe, set), invitation.token(token), host=host, port=port, concurrency=concurrency,
        log=log, cert=tls_cert, key=tls_key,
    )  # fmt: skip
