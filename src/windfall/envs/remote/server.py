"""`windfall env-server`: runs the calls of runs on other machines in its own pool of processes, until it is stopped.

    controller ── link ──▶ EnvService ── call ──▶ EnvPool ──▶ child processes
                     ◀── CallBegan, then one answer ──┘

- The environment is built before the port is opened, so a client that can connect can also call it. Its processes end
  with this one, also if it is killed.
- A controller must prove that it knows the token before it learns anything (link/handshake.py).
- The calls of all controllers share the limits of the pool. The time limit of a call counts from when it begins to run
  in a process; it is at most the server's own.
- Sessions belong to the link: when it ends, its calls are canceled and its idle sessions are closed.
- A controller that breaks the protocol loses its link.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from windfall.envs.calls import answer_message, session_key
from windfall.envs.failures import EnvFailed
from windfall.envs.hosting import evaluation_data
from windfall.envs.process_pool.pool import EnvPool
from windfall.envs.remote.settings import exchange, settings_of
from windfall.envs.sessions import Key
from windfall.errors import WindfallError
from windfall.link import env_messages as e
from windfall.link import handshake, listener, network, tls
from windfall.link import messages as m
from windfall.link.base import Link, LinkClosed, clip
from windfall.link.socket import Port, Route
from windfall.processes.process import open_log
from windfall.recipe.env_sections import HostedEnv
from windfall.recipe.fleet import Fleet
from windfall.recipe.sections import Recipe
from windfall.types import Feedback

NAME = "environment server"
REFUSAL_S = 1.0
"""At most one refusal is shown in this many seconds, so that a peer that dials in a loop does not fill the disk."""
HEARTBEAT_S = 10.0
"""Seconds between two pings of a controller. One that does not answer a ping within half of that is lost."""
MAX_CALLS = 1 << 16
"""Upper limit for the calls of one controller that wait or run here."""


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
        raise WindfallError(what, where="env.name", fix="Use gym, dataset or custom.")
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


class EnvService:
    def __init__(
        self,
        pool: EnvPool,
        settings: dict[str, Any],
        token: str,
        *,
        timeout_s: float,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`pool` must be ready. `settings`: what its environment was built from (settings.py). `timeout_s`: upper limit
        for the time of one call. `say` shows a line to the user."""
        self.pool = pool
        self.timeout_s = timeout_s
        self._settings = settings
        self._token = token
        self._say = say
        self._refused_s = -REFUSAL_S

    async def attend(self, link: Link) -> None:
        try:
            _, proof = await handshake.challenge(link, handshake.ENV_CLIENT, NAME, lambda _: self._token)
        except handshake.PeerRefused as error:
            if time.monotonic() - self._refused_s > REFUSAL_S:
                self._refused_s = time.monotonic()
                self._say(f"refused {link.peer}: {clip(error)}")
            with contextlib.suppress(LinkClosed, TimeoutError):
                async with asyncio.timeout(1.0):
                    await link.send(m.Refused(why=clip(error), again=error.again))
            return
        link.authenticated()
        pool = self.pool
        await link.send(
            e.EnvWelcome(
                proof=proof,
                name=pool.name,
                settings=self._settings,
                stateful=pool.stateful,
                replayable=pool.sessions.replayable,
                needs_tokens=pool.needs_tokens,
                slots=pool.max_calls,
                sessions=min(pool.sessions.limit, 1 << 31),
            )
        )
        self._say(f"{link.peer} is connected")
        client = _Client(self, link)
        try:
            await exchange(link, client.outbox, client.handle, client.unsendable)
        except LinkClosed as error:
            self._say(f"connection ended: {clip(error)}")
            raise
        finally:
            client.end()


class _Client:
    def __init__(self, service: EnvService, link: Link) -> None:
        self._pool = service.pool
        self._timeout_s = service.timeout_s
        self._peer = link.peer
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._ended = False
        self._idle: Counter[Key] = Counter()
        self.outbox: asyncio.Queue[Any] = asyncio.Queue()

    def end(self) -> None:
        self._ended = True
        for call in self._calls.values():
            call.cancel()
        for key in self._idle.elements():
            self._pool.end(key)

    def unsendable(self, message: Any, why: str) -> None:
        what = f"the answer of the environment server cannot be sent: {why}"
        self.outbox.put_nowait(answer_message(message.number, EnvFailed(what, "an answer that cannot be sent")))

    def handle(self, message: object) -> None:
        match message:
            case e.TaskCall():
                self._begin(message)
            case e.FeedbackCall():
                if not message.turns:
                    raise LinkClosed(f"{self._peer}: feedback on no turns")
                self._not_idle(session_key(message))
                self._begin(message)
            case e.CancelCall():
                if message.number in self._calls:
                    self._calls[message.number].cancel()
            case e.EndSession():
                key = (message.id, *message.turns)
                self._not_idle(key)
                self._pool.end(key)
            case _:
                raise LinkClosed(f"{self._peer}: unexpected {type(message).__name__}")

    def _begin(self, message: e.TaskCall | e.FeedbackCall) -> None:
        number, limit_s = message.number, message.limit_s
        if number in self._calls or len(self._calls) >= MAX_CALLS or not limit_s > 0:
            raise LinkClosed(f"{self._peer}: call {number} is a second one, one too many, or without a time limit")
        limited = msgspec.structs.replace(message, limit_s=min(limit_s, self._timeout_s))
        call = self._calls[number] = self._pool.call(
            limited, lambda: self.outbox.put_nowait(e.CallBegan(number=number))
        )
        call.add_done_callback(lambda call: self._answer(message, call))

    def _answer(self, message: e.TaskCall | e.FeedbackCall, call: asyncio.Future[Any]) -> None:
        del self._calls[message.number]
        error = asyncio.CancelledError() if call.cancelled() else call.exception()
        if error is None:
            value = call.result()
            if self._pool.stateful and isinstance(value, Feedback) and value.observation is not None:
                assert isinstance(message, e.FeedbackCall)
                key = (*session_key(message), (message.turns[-1][0], value.observation))
                self._idle[key] += 1
                if self._ended:
                    self._pool.end(key)
        elif isinstance(error, EnvFailed):
            value = error
        elif isinstance(error, WindfallError):
            value = EnvFailed(str(error), "the environment cannot be built again")
        else:  # canceled, or a bug: the controller must get an answer in any case
            what = "canceled" if call.cancelled() else f"the environment server failed: {error!r}"
            value = EnvFailed(what, what)
        self.outbox.put_nowait(answer_message(message.number, value))

    def _not_idle(self, key: Key) -> None:
        self._idle[key] -= 1
        if self._idle[key] <= 0:
            del self._idle[key]
