"""Runs an environment on servers, which may be other machines: spreads calls, follows sessions, survives lost servers.

    task, feedback ──▶ pending ──▶ the server with the lowest load ──▶ value or failure
                          ▲                    │
                          └── a server is lost ┘   its calls are sent to another one

- A turn of a session goes to the server that has it. If that server is lost, the turn goes to any other one, which
  replays the session from its turns or says why it cannot (sessions/stateful.py).
- A server has at most as many calls and sessions as it said. Others wait here, which counts against no time limit. The
  time limit of a call is kept by the server; this side only notices servers that do not answer (connection.py).
- A call that was in progress on more than MAX_MOVES lost servers fails: it may be what ends them. A server that is
  dropped because of its first wrong answer to the call does not count.
- A server whose calls fail much more often than those of another one gets few new ones (connection.py).
- While no server is reachable, calls wait for LOST_S. Then they fail, and their rewards are missing.
"""

from __future__ import annotations

import asyncio
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Self

from windfall.envs.base import HostLoad
from windfall.envs.failures import EnvFailed
from windfall.envs.process_pool.calls import feedback_of
from windfall.envs.process_pool.pool import MAX_MOVES, QUIET_S
from windfall.envs.remote.connection import EnvServer, Expected, RemoteCall
from windfall.envs.remote.settings import settings_of
from windfall.envs.sessions.base import answered
from windfall.envs.sessions.open_sessions import Key
from windfall.errors import WindfallError
from windfall.link import auth
from windfall.types import Feedback, Task, Turn, prompt_key

START_S = 60.0
"""Seconds in which a first server must be reachable when a run starts."""
LOST_S = 300.0
"""Seconds without any server after which calls fail."""
CHECK_S = 0.25
"""Seconds between checks of the servers."""


class EnvServers:
    """An EnvHost. Used as `async with`; `ready` waits until a server is connected."""

    def __init__(
        self, section: Any, seed: int, *, evaluation: dict[str, Any] | None = None,
        log: Callable[..., None] = lambda name, **fields: None, start_s: float = START_S,
    ) -> None:  # fmt: skip
        """`section` is an env section of windfall.recipe with `servers`. For `evaluation` and `log` see hosting.py."""
        self.name = getattr(section, "factory", section.name)
        self.needs_tokens = self._stateful = False
        self._log, self._start_s = log, start_s
        expected = Expected(
            token=auth.read_token(section.servers_token), settings=settings_of(section, seed, evaluation)
        )
        self.servers = [
            EnvServer(
                address, expected, on_change=self._changed, on_answer=self._answered, on_lost=self._lost
            ) for address in section.servers
        ]  # fmt: skip
        self._pending: deque[RemoteCall] = deque()
        self._opening: deque[RemoteCall] = deque()
        """Calls that open a session, or replay one."""
        self._next_number = 1
        self._connected = asyncio.Event()
        self._attempted = asyncio.Event()
        """Set when the first attempt for each server has ended."""
        self._known: set[str] = set()
        """Addresses that were connected before."""
        self._last_s = 0.0
        """When a server was last connected (monotonic clock, seconds)."""
        self._dispatching = False
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._last_s = time.monotonic()
        self._tasks = [asyncio.create_task(work) for work in (self._watch(), *(s.run() for s in self.servers))]
        for task in self._tasks:
            task.add_done_callback(self._task_ended)
        return self

    async def __aexit__(self, *_: object) -> None:
        calls = self._open_calls()
        self._pending.clear()
        self._opening.clear()
        for call in calls:
            call.future.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def load(self) -> HostLoad:
        queued = len(self._pending) + len(self._opening) + sum(len(s.queue) for s in self.servers)
        slots = sum(s.terms.slots for s in self.servers if s.terms)
        return HostLoad(limit=slots, queued=queued, servers=tuple(s.describe() for s in self.servers))

    async def ready(self) -> None:
        """Wait until all servers were tried, and one is connected. Raises WindfallError."""
        settled, first_s = asyncio.ensure_future(self._settled()), min(QUIET_S, self._start_s)
        try:
            await asyncio.wait([settled], timeout=first_s)
            if not settled.done() and first_s < self._start_s:
                names = ", ".join(s.address for s in self.servers if s.terms is None)
                line = f"waiting up to {self._start_s:g} s for environment servers: {names}"
                print(line, file=sys.stderr, flush=True)
                await asyncio.wait([settled], timeout=self._start_s - first_s)
            if not settled.done():
                what = f"waited {self._start_s:g} s for an environment server: {self._problems()}"
                fix = "Start one there with `windfall env-server RECIPE.toml`, and check addresses and firewalls."
                raise WindfallError(what, where="env.servers", fix=fix)
        finally:
            settled.cancel()
        if refused := next((s.refused for s in self.servers if s.refused), None):
            raise refused
        for server in self.servers:
            if server.terms is None:
                line = f"environment server {server.address} is not reachable and is tried again: {server.why}"
                print(line, file=sys.stderr, flush=True)

    async def _settled(self) -> None:
        await self._attempted.wait()
        if all(s.refused is None for s in self.servers):
            await self._connected.wait()

    def _problems(self) -> str:
        return "; ".join(f"{s.address}: {s.why}" for s in self.servers if s.terms is None)

    # Calls.

    def task(self, index: int, timeout_s: float) -> asyncio.Future[Task]:
        return self._call("task", (index,), timeout_s, f"{self.name}.task({index})")

    async def feedback(self, index: int, task: Task, turns: Sequence[Turn], timeout_s: float) -> Feedback:
        plain = tuple((t.text, t.observation, t.tokens if self.needs_tokens else ()) for t in turns)
        args = (index, task.id, zlib.crc32(prompt_key(task.prompt)), plain)
        call = self._call("feedback", args, timeout_s, f"{self.name}.feedback of task '{task.id}'")
        return await feedback_of(call, lambda f: self.end_session(index, task, answered(turns, f)))

    def end_session(self, index: int, task: Task, turns: Sequence[Turn]) -> None:
        key = (task.id, *((t.text, t.observation) for t in turns))
        if self._stateful and (server := self._take(key)) is not None:
            server.end_session(task.id, key[1:])
            self._dispatch_soon()

    def _call(self, what: str, args: tuple[Any, ...], limit_s: float, name: str) -> asyncio.Future[Any]:
        future = asyncio.get_running_loop().create_future()
        call = RemoteCall(number=self._next_number, what=what, args=args, limit_s=limit_s, name=name, future=future)
        self._next_number += 1
        future.add_done_callback(lambda future: self._on_cancel(call) if future.cancelled() else None)
        self._enqueue(call)
        return future

    def _enqueue(self, call: RemoteCall, *, first: bool = False) -> None:
        """Put a call in the queue of the server that has its session, or of all servers."""
        steps = self._stateful and call.what == "feedback"
        key = (call.args[1], *(turn[:2] for turn in call.args[3][:-1])) if steps else ()
        server = self._take(key) if len(key) > 1 else None
        queue = server.queue if server is not None else self._opening if steps else self._pending
        (queue.appendleft if first else queue.append)(call)
        self._dispatch_soon()

    def _take(self, key: Key) -> EnvServer | None:
        return next((found for s in self.servers if (found := s.sessions.take(key)) is not None), None)

    def _on_cancel(self, call: RemoteCall) -> None:
        for server in self.servers:
            server.cancel(call)

    def _open_calls(self) -> list[RemoteCall]:
        held = (call for s in self.servers for call in (*s.sent.values(), *s.queue))
        return [*self._pending, *self._opening, *held]

    # Sending.

    def _dispatch_soon(self) -> None:
        if not self._dispatching:
            self._dispatching = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._dispatching = False
        for server in self.servers:
            while server.has_slot and server.queue:
                if not (call := server.queue.popleft()).future.done():
                    server.send(call)
                else:  # it was canceled, and nothing else knows of its session
                    server.end_session(call.args[1], tuple(turn[:2] for turn in call.args[3][:-1]))
        for queue in (self._opening, self._pending):
            while queue:
                if queue[0].future.done():  # it was canceled
                    queue.popleft()
                elif (server := self._choose(queue[0], opens=queue is self._opening)) is not None:
                    server.send(queue.popleft())
                else:
                    break

    def _choose(self, call: RemoteCall, *, opens: bool) -> EnvServer | None:
        """The server with the lowest load that can take the call. Those that were lost with it are the last choice."""
        connected = [s for s in self.servers if s.terms is not None]
        others = [s for s in connected if s not in call.failed_at] or connected
        least = min((s.failing for s in others), default=0.0)
        free = [s for s in others if s.accepts_new(least) and (not opens or s.sessions.has_room(s.busy))]
        return min(free, key=lambda s: s.load, default=None)

    # What servers report.

    def _changed(self, server: EnvServer) -> None:
        if server.terms is not None:
            self.name, self.needs_tokens = server.terms.name, server.terms.needs_tokens
            self._stateful = server.terms.stateful
            self._connected.set()
            if server.address not in self._known:
                self._known.add(server.address)
                self._log("env_server_joined", address=server.address, slots=server.terms.slots)
        if all(s.tried for s in self.servers):
            self._attempted.set()
        self._dispatch_soon()

    def _answered(self, server: EnvServer, call: RemoteCall, value: Task | Feedback | EnvFailed) -> None:
        if isinstance(value, EnvFailed):
            call.fail(value)
            return
        if self._stateful and isinstance(value, Feedback) and value.observation is not None:
            before, last = call.args[3][:-1], call.args[3][-1][0]
            key = (call.args[1], *(turn[:2] for turn in before), (last, value.observation))
            if call.future.cancelled():
                server.end_session(call.args[1], key[1:])
            else:
                server.sessions.keep(key, server)
        call.succeed(value)

    def _lost(self, server: EnvServer, calls: list[RemoteCall], why: str) -> None:
        self._known.discard(server.address)
        self._log("env_server_lost", address=server.address, why=why, calls=len(calls))
        for call in reversed(calls):
            if call.moves > MAX_MOVES:
                what = f"{call.moves} environment servers were lost during {call.name}; the last one: {why}"
                call.fail(EnvFailed(what, "lost environment servers", final=True))
            elif not call.future.done():
                self._enqueue(call, first=True)

    # Timers.

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            now_s = time.monotonic()
            for server in self.servers:
                server.check_progress(now_s)
                self._close_sessions(server)
            if any(s.terms is not None for s in self.servers):
                self._last_s = now_s
            elif now_s - self._last_s > LOST_S:
                self._fail_queued()

    def _close_sessions(self, server: EnvServer) -> None:
        """Close sessions whose next turn does not come, and one that can be replayed if a call waits for its room."""
        sessions = server.sessions
        while found := sessions.expire() or (sessions.make_room(server.busy) if self._opening else None):
            server.end_session(found[0][0], found[0][1:])
            self._dispatch_soon()

    def _fail_queued(self) -> None:
        what = f"no environment server has been reachable for {LOST_S:g} s: {self._problems()}"
        for queue in (self._opening, self._pending):
            while queue:
                queue.popleft().fail(EnvFailed(what, "no environment server is reachable"))

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """A bug in windfall: all calls must fail. They must not wait forever."""
        if not task.cancelled() and (error := task.exception()) is not None:
            for call in self._open_calls():
                call.fail(RuntimeError(f"the environment servers cannot be used any more: {error!r}"))
            raise error
