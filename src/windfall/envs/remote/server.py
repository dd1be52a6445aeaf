"""An environment server: runs the calls of other machines in its own pool of processes.

    controller ── link ──▶ EnvService ── call ──▶ EnvPool ──▶ child processes
                     ◀── CallBegan, then one answer ──┘

- A controller must prove that it knows the token before it learns anything (link/handshake.py).
- The calls of all controllers share the limits of the pool. The time limit of a call counts from when it begins to run
  in a process; it is at most the server's own.
- Sessions belong to the link: when it ends, its calls are canceled and its idle sessions are closed.
- A controller that breaks the protocol loses its link.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from windfall.envs.failures import EnvFailed
from windfall.envs.process_pool.pool import EnvPool
from windfall.envs.remote.exchange import exchange
from windfall.envs.sessions.open_sessions import Key
from windfall.errors import WindfallError
from windfall.link import env_messages as e
from windfall.link import handshake
from windfall.link import messages as m
from windfall.link.base import Link, LinkClosed, clip
from windfall.types import Feedback, Task

NAME = "environment server"
REFUSAL_S = 1.0
"""At most one refusal is shown in this many seconds, so that a peer that dials in a loop does not fill the disk."""


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
        self._settings = settings
        self._token = token
        self._timeout_s = timeout_s
        self._say = say
        self._refused_s = -REFUSAL_S

    async def attend(self, link: Link) -> None:
        """Serve the link of one controller until it ends."""
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
        if lift_limits := getattr(link, "authenticated", None):
            lift_limits()
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
            await client.serve()
        except LinkClosed as error:
            self._say(f"connection ended: {clip(error)}")
            raise
        finally:
            client.end()

    def call(
        self, what: str, args: tuple[Any, ...], limit_s: float, begin: Callable[[], object]
    ) -> asyncio.Future[Any]:
        return self.pool.call(what, args, min(limit_s, self._timeout_s), begin)


class _Client:
    """One controller, while its link lasts."""

    def __init__(self, service: EnvService, link: Link) -> None:
        self._service = service
        self._link = link
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._ended = False
        self._idle: Counter[Key] = Counter()
        """Its sessions that wait for their next turn."""
        self._outbox: asyncio.Queue[Any] = asyncio.Queue()

    async def serve(self) -> None:
        await exchange(self._link, self._outbox, self._handle, self._unsendable)

    def end(self) -> None:
        self._ended = True
        for call in self._calls.values():
            call.cancel()
        for key in self._idle.elements():
            self._service.pool.end(key)

    def _unsendable(self, message: Any, why: str) -> None:
        what = f"the answer of the environment server cannot be sent: {why}"
        self._outbox.put_nowait(_failed(message.number, EnvFailed(what, "an answer that cannot be sent")))

    def _handle(self, message: object) -> None:
        match message:
            case e.TaskCall():
                self._begin(message.number, "task", (message.index,), message.limit_s)
            case e.FeedbackCall():
                if not message.turns:
                    raise LinkClosed(f"{self._link.peer}: feedback on no turns")
                turns = [(*turn[:2], turn[2]) if turn[2] else turn[:2] for turn in message.turns]
                self._not_idle((message.id, *(turn[:2] for turn in message.turns[:-1])))
                args = (message.index, message.id, message.prompt_crc, turns)
                self._begin(message.number, "feedback", args, message.limit_s)
            case e.CancelCall():
                if message.number in self._calls:
                    self._calls[message.number].cancel()
            case e.EndSession():
                key = (message.id, *message.turns)
                self._not_idle(key)
                self._service.pool.end(key)
            case _:
                raise LinkClosed(f"{self._link.peer}: unexpected {type(message).__name__}")

    def _begin(self, number: int, what: str, args: tuple[Any, ...], limit_s: float) -> None:
        if number in self._calls or len(self._calls) >= self._service.pool.max_calls or not limit_s > 0:
            raise LinkClosed(f"{self._link.peer}: call {number} is a second one, one too many, or without a time limit")
        begin = lambda: self._outbox.put_nowait(e.CallBegan(number=number))  # noqa: E731
        call = self._calls[number] = self._service.call(what, args, limit_s, begin)
        call.add_done_callback(lambda call: self._answer(number, args, call))

    def _answer(self, number: int, args: tuple[Any, ...], call: asyncio.Future[Any]) -> None:
        del self._calls[number]
        error = asyncio.CancelledError() if call.cancelled() else call.exception()
        if error is None:
            value = call.result()
            answer = _value(number, value)
            if self._service.pool.stateful and isinstance(value, Feedback) and value.observation is not None:
                before, last = args[3][:-1], args[3][-1][0]
                key = (args[1], *(turn[:2] for turn in before), (last, value.observation))
                self._idle[key] += 1
                if self._ended:
                    self._service.pool.end(key)
        elif isinstance(error, EnvFailed):
            answer = _failed(number, error)
        elif isinstance(error, WindfallError):
            answer = _failed(number, EnvFailed(str(error), "the environment cannot be built again"))
        else:  # canceled, or a bug: the controller must get an answer in any case
            what = "canceled" if call.cancelled() else f"the environment server failed: {error!r}"
            answer = _failed(number, EnvFailed(what, what))
        self._outbox.put_nowait(answer)

    def _not_idle(self, key: Key) -> None:
        self._idle[key] -= 1
        if self._idle[key] <= 0:
            del self._idle[key]


def _value(number: int, value: Task | Feedback) -> Any:
    if isinstance(value, Task):
        prompt = value.prompt if isinstance(value.prompt, str) else [dict(message) for message in value.prompt]
        return e.TaskMade(number=number, id=value.id, prompt=prompt)
    scores = tuple((name, float(score)) for name, score in value.scores)
    return e.CallGraded(number=number, reward=value.reward, observation=value.observation, scores=scores)


def _failed(number: int, error: EnvFailed) -> e.CallFailed:
    texts = (text.encode(errors="replace").decode() for text in (error.error, error.cause, error.traceback))
    what, cause, traceback = texts
    return e.CallFailed(number=number, error=what, cause=cause, traceback=traceback, final=error.final)
