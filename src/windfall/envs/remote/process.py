"""`windfall env-server`: hosts the environment of a recipe for runs on other machines, until it is stopped.

The environment is built before the port is opened, so whoever can connect can also call it. The processes of the
environment end with this one, also if it is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

from windfall.envs.hosting import evaluation_data
from windfall.envs.process_pool.pool import EnvPool
from windfall.envs.remote.server import EnvService
from windfall.envs.remote.settings import settings_of
from windfall.errors import WindfallError
from windfall.link import env_messages as e
from windfall.link import listener, network, tls
from windfall.link.socket import Port, Route
from windfall.processes.process import open_log
from windfall.recipe.env_sections import HostedEnv
from windfall.recipe.fleet import Fleet
from windfall.recipe.sections import Recipe

HEARTBEAT_S = 10.0
"""Seconds between two pings of a controller. One that does not answer a ping within half of that is lost."""


def main(
    recipe: Recipe,
    token: str,
    *,
    host: str,
    port: int,
    concurrency: int,
    log: Path,
    cert: Path | None,
    key: Path | None,
) -> None:
    if not isinstance(recipe.task_env, HostedEnv):
        what = f"{recipe.task_env.name!r} runs in the controller or on its machine, not on a server"
        raise WindfallError(what, where="env.name", fix="Use gym, jsonl, dataset, frozen_lake or custom.")
    if bool(cert) != bool(key):
        raise WindfallError("one of --tls-cert and --tls-key is missing", where="windfall env-server", fix="Give both.")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_run(recipe, token, host, port, concurrency, log, Fleet(tls_cert=cert, tls_key=key)))


async def _run(recipe: Recipe, token: str, host: str, port: int, concurrency: int, log: Path, fleet: Fleet) -> None:
    section, evaluation = recipe.task_env, evaluation_data(recipe)
    settings, context = settings_of(section, recipe.run.seed, evaluation), tls.server_context(fleet)
    listener.raise_file_limit()
    os.close(open_log(log))  # it must be writable
    stop = asyncio.Event()
    pool = EnvPool(
        section,
        recipe.run.seed,
        evaluation=evaluation,
        processes=recipe.rollout.reward_processes,
        max_calls=concurrency,
        output=log,
        log=lambda name, env, log: _say(f"environment {env} prints; its output is in {log}"),
    )
    async with pool:
        await pool.ready()
        for number in (signal.SIGINT, signal.SIGTERM):  # not earlier: a build that takes long can be interrupted
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        service = EnvService(pool, settings, token, timeout_s=recipe.rollout.reward_timeout_s, say=_say)
        route = Route(
            receives=e.ToEnvServer,
            max_frame_bytes=e.MAX_ENV_FRAME_BYTES,
            handler=service.attend,
            heartbeat_s=HEARTBEAT_S,
        )
        fix = "Set --host and --port, or stop the process that uses the port."
        opened = Port(host, port, {"/env": route}, context, fix=fix)
        await opened.open()
        sessions = f" and {pool.sessions.limit} sessions" if pool.stateful else ""
        url = f"{'https' if context else 'http'}://{network.in_url(host)}:{opened.port}"
        _say(f"environment {pool.name} is served at {url}, with at most {concurrency} calls{sessions} at once")
        try:
            await stop.wait()
        finally:
            await opened.close("the environment server ends")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
