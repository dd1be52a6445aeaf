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
from collections.abc import Callable
from typing import Any, Self

from windfall.envs.base import HostLoad
from windfall.envs.failures import EnvFailed
from windfall.envs.process_pool.calls import QueueingHost
from windfall.envs.process_pool.pool import MAX_MOVES, QUIET_S
from windfall.envs.remote.connection import EnvServer, Expected, RemoteCall
from windfall.envs.remote.settings import settings_of
from windfall.envs.sessions.open_sessions import Key
from windfall.errors import WindfallError
from windfall.link import auth
from windfall.types import Feedback, Task

START_S = 60.0
"""Seconds in which a first server must be reachable when a run starts."""
LOST_S = 300.0
"""Seconds without any server after which calls fail."""
CHECK_S = 0.25
"""Seconds between checks of the servers."""


class EnvServers(QueueingHost[RemoteCall]):
    """An EnvHost. Used as `async with`; `ready` waits until a server is connected."""

    def __init__(
        self,
        section: Any,
        seed: int,
        *,
        evaluation: dict[str, Any] | None = None,
        log: Callable[..., None] = lambda name, **fields: None,
        start_s: float = START_S,
    ) -> None:
        """`section` is an env section of windfall.recipe with `servers`. For `evaluation` and `log` see EnvPool."""
        super().__init__(getattr(section, "factory", section.name), RemoteCall)
        self._log = log
        self._start_s = start_s
        expected = Expected(
            token=auth.read_token(section.servers_token), settings=settings_of(section, seed, evaluation)
        )
        self.servers = [EnvServer(address, expected, self) for address in section.servers]
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
        self._cancel_all()
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

    def end(self, key: Key) -> None:
        if self.stateful and (server := self._take(key)) is not None:
            server.end_session(key[0], key[1:])
            self._dispatch_soon()

    def _enqueue(self, call: RemoteCall, *, first: bool = False) -> None:
        """Put a call in the queue of the server that has its session, or of all servers."""
        steps = self._steps(call)
        server = self._take(call.session) if steps and len(call.args[3]) > 1 else None
        queue = server.queue if server is not None else self._opening if steps else self._pending
        (queue.appendleft if first else queue.append)(call)
        self._dispatch_soon()

    def _take(self, key: Key) -> EnvServer | None:
        return next((found for s in self.servers if (found := s.sessions.take(key)) is not None), None)

    def _cancel(self, call: RemoteCall) -> None:
        for server in self.servers:
            server.cancel(call)

    def _sent_calls(self) -> list[RemoteCall]:
        return [call for s in self.servers for call in (*s.sent.values(), *s.queue)]

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
                    server.end_session(call.session[0], call.session[1:])
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

    def changed(self, server: EnvServer) -> None:
        if server.terms is not None:
            self.name = server.terms.name
            self.needs_tokens = server.terms.needs_tokens
            self.stateful = server.terms.stateful
            self._connected.set()
            if server.address not in self._known:
                self._known.add(server.address)
                self._log("env_server_joined", address=server.address, slots=server.terms.slots)
        if all(s.tried for s in self.servers):
            self._attempted.set()
        self._dispatch_soon()

    def answered(self, server: EnvServer, call: RemoteCall, value: Task | Feedback | EnvFailed) -> None:
        if isinstance(value, EnvFailed):
            call.fail(value)
            return
        if self.stateful and (key := call.session_after(value)) is not None:
            if call.future.cancelled():
                server.end_session(key[0], key[1:])
            else:
                server.sessions.keep(key, server)
        call.succeed(value)

    def lost(self, server: EnvServer, calls: list[RemoteCall], why: str) -> None:
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
