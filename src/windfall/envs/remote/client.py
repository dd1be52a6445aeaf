"""Runs an environment on servers, which may be other machines: spreads calls, keeps links, survives lost servers.

    dial ──▶ handshake ──▶ serve: calls out, answers in ──▶ lost ──▶ wait (back-off) ──▶ dial ...

- A call goes to the server with the lowest load that has a free slot. A server whose calls fail much more often than
  those of another one gets few new ones: it would fail calls faster than others answer them, and so get most of them.
- The time limit of a call is kept by the server. This side notices servers that do not answer: one that has begun calls
  must answer one of them within twice the limit of a call, and some grace. A call that has not begun waits there for a
  session that another controller has, but not forever (WAIT_S). A link that is not answering pings is lost
  (link/socket.py).
- Everything that a server sends is checked. A server that answers what was not asked, or sends something that is not a
  valid answer, loses its link.
- A call that was in progress on more than MAX_MOVES lost servers fails: it may be what ends them. A server that is
  dropped because of its first wrong answer to the call does not count.
- While no server is reachable, calls wait for LOST_S. Then they fail, and their rewards are missing.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from typing import Any, Self

from windfall import backoff
from windfall.envs.base import HostLoad, ServerLoad
from windfall.envs.calls import CallHost, CallPlace, EnvCall, parse_answer
from windfall.envs.failures import EnvFailed
from windfall.envs.remote.settings import difference, exchange, settings_of
from windfall.errors import WindfallError
from windfall.link import auth, handshake
from windfall.link import env_messages as e
from windfall.link.base import LinkClosed, clip
from windfall.link.socket import Dialer, SocketLink

START_S = 60.0
"""Seconds in which a first server must be reachable when a run starts."""
LOST_S = 300.0
"""Seconds without any server after which calls fail."""
CHECK_S = 0.25
RETRY_S, MAX_RETRY_S = 0.5, 30.0
"""Seconds between two attempts to connect, at first and at most."""
STABLE_S = 60.0
"""After a link that lasted this long, the next attempt is made after RETRY_S again (seconds)."""
GRACE_S = 30.0
"""Seconds beyond twice its time limit in which a server must have answered one of the calls that it has begun."""
WAIT_S = 600.0
"""Seconds in which a server must begin a call."""
NEW_WEIGHT = 0.1
SICK_SHARE = 0.5
"""A server is sick if more than this share of its recent answers are failures, and twice that of another server."""
PROBE_S = 5.0
"""Seconds between two new calls to a sick server."""


class WrongAnswer(LinkClosed):
    """A server sent something that does not answer a call. This is not the fault of its calls."""


class EnvServer(CallPlace):
    def __init__(self, address: str, owner: EnvServers) -> None:
        super().__init__()
        self.address = address
        self._owner = owner
        url = address if "://" in address else f"http://{address}"
        self._dialer = Dialer(url, "/env", e.FromEnvServer, ssl=None, max_frame_bytes=e.MAX_ENV_FRAME_BYTES)
        self.terms: e.EnvWelcome | None = None
        """What the server said about itself; None while there is no link."""
        self.tried = False
        self.refused: WindfallError | None = None
        """Why this server cannot be used as long as neither side is changed."""
        self.why = "no attempt has ended yet"
        self._link: SocketLink | None = None
        self._outbox: asyncio.Queue[Any] = asyncio.Queue()
        self._answered_s = 0.0
        self._fault = ""
        self._closing: asyncio.Task[None] | None = None
        self.answers = self.errors = self.losses = 0
        self._mean_s = self.failing = 0.0
        """Running means: seconds for an answer, and the share of failures."""

    def send(self, message: Any) -> None:
        self._outbox.put_nowait(message)

    def load(self, idle: int) -> float:
        """Calls and open sessions for every call that may be in progress. `idle`: its sessions that make no step."""
        assert self.terms is not None
        return (len(self.sent) + idle) / self.terms.slots

    def accepts_new(self, least_failing: float) -> bool:
        """Whether a call without a session here may be sent. `least_failing`: the share of failures of the best
        server."""
        sick = self.failing > max(SICK_SHARE, 2 * least_failing)
        if self.terms is None or len(self.sent) >= self.terms.slots:
            return False
        return not sick or (not self.sent and time.monotonic() - self._answered_s >= PROBE_S)

    def describe(self) -> ServerLoad:
        return ServerLoad(
            address=self.address,
            connected=self.terms is not None,
            calls=len(self.sent),
            answers=self.answers,
            errors=self.errors,
            lost=self.losses,
            answer_s=self._mean_s,
        )

    async def run(self) -> None:
        failures = 0
        try:
            while True:
                began_s = time.monotonic()
                try:
                    await self._connect()
                except (LinkClosed, WindfallError) as error:
                    self._end(error)
                failures = 0 if time.monotonic() - began_s > STABLE_S else failures
                await asyncio.sleep(backoff.delay_s(failures, first_s=RETRY_S, limit_s=MAX_RETRY_S))
                failures += 1
        finally:
            await self._dialer.close()

    async def _connect(self) -> None:
        link = await self._dialer.dial()
        try:
            terms = await handshake.join(link, handshake.ENV_CLIENT, self._owner.token, e.EnvHello)
            self._owner.check(terms, self._where)
            self.terms = terms
            self._link = link
            self._outbox = asyncio.Queue()
            self.refused = None
            self.why = self._fault = ""
            self.tried = True
            self._answered_s = time.monotonic()
            self._owner.changed(self)
            await exchange(link, self._outbox, self._handle, self._unsendable)
        finally:
            await link.close()

    @property
    def _where(self) -> str:
        return f"environment server {self.address}"

    def _end(self, error: LinkClosed | WindfallError) -> None:
        had_link, self.terms, self._link = self.terms is not None, None, None
        said = error.what if isinstance(error, WindfallError) else str(error)
        self.why = self._fault or clip(said.removeprefix(f"{self._dialer.url}: "))
        self.refused = self._refusal(error)
        self.tried = True
        if had_link:
            self.losses += 1
            self._owner.lost(self, isinstance(error, WrongAnswer))
        self._owner.changed(self)

    def _refusal(self, error: LinkClosed | WindfallError) -> WindfallError | None:
        if isinstance(error, WindfallError):
            return error
        if isinstance(error, handshake.ControllerUnverified) or (
            isinstance(error, handshake.JoinRefused) and not error.again
        ):
            fix = "Give the server the file of env.servers_token as --token, and install the same windfall on both."
            return WindfallError(str(error), where=self._where, fix=fix)
        return None

    def check_progress(self, now_s: float) -> None:
        if self._link is None or not self.sent or self._fault:
            return
        begun = [call for call in self.sent.values() if call.began_s is not None]
        if begun:
            limit_s = 2 * max(call.message.limit_s for call in begun) + GRACE_S
            if now_s - max(self._answered_s, min(call.began_s or 0.0 for call in begun)) > limit_s:
                self.drop(f"no answer to {len(begun)} calls for {limit_s:g} s")
        waited_s = max((now_s - call.sent_s for call in self.sent.values() if call.began_s is None), default=0.0)
        if waited_s > WAIT_S:
            self.drop(f"a call has not begun for {WAIT_S:g} s")

    def drop(self, why: str) -> None:
        self._fault = why
        if self._link is not None:
            self._closing = asyncio.create_task(self._link.close(why[:100]))

    def _unsendable(self, message: Any, why: str) -> None:
        call = self.sent.get(getattr(message, "number", -1))
        if call is not None:
            what = f"{call.name} cannot be sent to an environment server: {why}"
            self._owner.answered(self, call, EnvFailed(what, "a call that cannot be sent", final=True))

    def _handle(self, message: Any) -> None:
        """Raises WrongAnswer if this is not an answer to a call."""
        call = self.sent.get(getattr(message, "number", -1))
        if call is None:
            raise WrongAnswer(f"it sent a {type(message).__name__} that answers no call")
        if isinstance(message, e.CallBegan):
            call.began_s = call.began_s or time.monotonic()
            return
        try:
            value = parse_answer(call, message)
        except ValueError as error:
            raise WrongAnswer(f"it sent {error}") from error
        now_s = time.monotonic()
        took_s, self._answered_s = now_s - call.sent_s, now_s
        self._mean_s = (1 - NEW_WEIGHT) * self._mean_s + NEW_WEIGHT * took_s if self.answers else took_s
        self.answers += 1
        if not call.future.cancelled():  # otherwise it "failed" because it was canceled
            failed = isinstance(value, EnvFailed)
            self.errors += failed
            self.failing += NEW_WEIGHT * (failed - self.failing)
        self._owner.answered(self, call, value)


class EnvServers(CallHost[EnvServer]):
    def __init__(
        self,
        section: Any,
        seed: int,
        *,
        evaluation: dict[str, Any] | None = None,
        log: Callable[..., None] = lambda name, **fields: None,
        start_s: float = START_S,
    ) -> None:
        """`section` is an env section of windfall.recipe with `servers`. For `evaluation` see EnvPool. `log` gets the
        name and the fields of an event."""
        super().__init__(getattr(section, "factory", section.name), 0)
        self._log = log
        self._start_s = start_s
        self.token = auth.read_token(section.servers_token)
        self._settings = settings_of(section, seed, evaluation)
        self._traits: tuple[bool, bool, bool] | None = None
        """Stateful, replayable, needs tokens: as the first server said."""
        self.places = [EnvServer(address, self) for address in section.servers]
        self._connected = asyncio.Event()
        self._attempted = asyncio.Event()
        self._known: set[str] = set()
        self._last_s = 0.0
        """When a server was last connected (monotonic clock, seconds)."""
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._last_s = time.monotonic()
        self._tasks = [asyncio.create_task(work) for work in (self._watch(), *(s.run() for s in self.places))]
        for task in self._tasks:
            task.add_done_callback(self._task_ended)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._cancel_all()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def load(self) -> HostLoad:
        slots = sum(s.terms.slots for s in self.places if s.terms)
        return HostLoad(limit=slots, queued=len(self._queued()), servers=tuple(s.describe() for s in self.places))

    async def ready(self) -> None:
        """Wait until all servers were tried, and one is connected. Raises WindfallError."""
        try:
            async with asyncio.timeout(self._start_s):
                await self._attempted.wait()
                if all(s.refused is None for s in self.places):
                    if not self._connected.is_set():
                        _say(f"waiting up to {self._start_s:g} s for environment servers: {self._problems()}")
                    await self._connected.wait()
        except TimeoutError:
            what = f"waited {self._start_s:g} s for an environment server: {self._problems()}"
            fix = "Start one there with `windfall env-server RECIPE.toml`, and check addresses and firewalls."
            raise WindfallError(what, where="env.servers", fix=fix) from None
        if refused := next((s.refused for s in self.places if s.refused), None):
            raise refused
        for server in self.places:
            if server.terms is None:
                _say(f"environment server {server.address} is not reachable and is tried again: {server.why}")

    def _problems(self) -> str:
        return "; ".join(f"{s.address}: {s.why}" for s in self.places if s.terms is None)

    def _choose(self, call: EnvCall) -> EnvServer | None:
        """The server with the lowest load that can take the call. Those that were lost with it are the last choice."""
        connected = [s for s in self.places if s.terms is not None]
        others = [s for s in connected if s not in call.failed_at] or connected
        least = min((s.failing for s in others), default=0.0)
        idle = {s: self.sessions.count(s) for s in others}
        free = [s for s in others if s.accepts_new(least) and s.terms and idle[s] + s.stepping < s.terms.sessions]
        return min(free, key=lambda s: s.load(idle[s]), default=None)

    # What servers report.

    def check(self, terms: e.EnvWelcome, where: str) -> None:
        """Raise unless this server hosts the environment of the run."""
        if differs := difference(terms.settings, self._settings):
            fix = "Start the server with the recipe of the run."
            raise WindfallError(f"it hosts another environment: {differs}", where=where, fix=fix)
        traits = (terms.stateful, terms.replayable, terms.needs_tokens)
        if self._traits not in (None, traits):
            fix = "Install the same version of the environment on all servers."
            raise WindfallError("it describes the environment differently than another", where=where, fix=fix)
        self._traits = traits
        if terms.slots < 1 or terms.sessions < 1:
            raise LinkClosed(f"it offers {terms.slots} slots and {terms.sessions} sessions")

    def changed(self, server: EnvServer) -> None:
        """An attempt to connect has ended, with a link or without one."""
        if server.terms is not None:
            self.name = server.terms.name
            self.stateful, self.sessions.replayable, self.needs_tokens = self._traits or (False, True, False)
            self._connected.set()
            if server.address not in self._known:
                self._known.add(server.address)
                self._log("env_server_joined", address=server.address, slots=server.terms.slots)
        self.sessions.limit = sum(s.terms.sessions for s in self.places if s.terms)
        if all(s.tried for s in self.places):
            self._attempted.set()
        self._dispatch_soon()

    answered = CallHost._answered

    def lost(self, server: EnvServer, wrong_answer: bool) -> None:
        """The link is lost, and with it the calls that were in progress there."""
        self._known.discard(server.address)
        self._log("env_server_lost", address=server.address, why=server.why, calls=len(server.sent))
        suspects = [call for call in server.sent.values() if not wrong_answer or server in call.failed_at]
        self._suspect(suspects, "environment servers were lost", f"one: {server.why}")
        for call in server.sent.values():
            call.failed_at.add(server)
        self._lose(server)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            now_s = time.monotonic()
            for server in self.places:
                server.check_progress(now_s)
            self._close_old_sessions()
            if any(s.terms is not None for s in self.places):
                self._last_s = now_s
            elif now_s - self._last_s > LOST_S:
                what = f"no environment server has been reachable for {LOST_S:g} s: {self._problems()}"
                for call in self._clear_queues():
                    call.fail(EnvFailed(what, "no environment server is reachable"))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
