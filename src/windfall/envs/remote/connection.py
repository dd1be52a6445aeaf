"""One environment server as its controller sees it: dial, calls in progress, answers, and the loss of the link.

    dial ──▶ handshake ──▶ serve: calls out, answers in ──▶ lost ──▶ wait (back-off) ──▶ dial ...

- Everything that a server sends is checked. A server that answers what was not asked, or sends something that is not a
  valid answer, loses its link.
- A server that has begun calls must answer one of them within the time limit of a call, and some grace. A call that has
  not begun waits there for a slot or a session that another controller has, but not forever (WAIT_S).
- A link that is not answering pings is lost (link/socket.py).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Protocol

from windfall import backoff
from windfall.envs.base import ServerLoad
from windfall.envs.failures import EnvFailed, feedback_fault, task_fault
from windfall.envs.process_pool.calls import EnvCall
from windfall.envs.remote.exchange import exchange
from windfall.envs.remote.settings import difference
from windfall.envs.sessions.open_sessions import OpenSessions
from windfall.errors import WindfallError
from windfall.link import env_messages as e
from windfall.link import handshake
from windfall.link.base import LinkClosed, clip
from windfall.link.socket import Dialer, SocketLink
from windfall.types import Feedback, Task

RETRY_S, MAX_RETRY_S = 0.5, 30.0
"""Seconds between two attempts to connect, at first and at most."""
STABLE_S = 60.0
"""After a link that lasted this long, the next attempt is made after RETRY_S again (seconds)."""
GRACE_S = 30.0
"""Seconds beyond twice its time limit in which a server must have answered one of the calls that it has begun."""
WAIT_S = 600.0
"""Seconds in which a server must begin a call."""
NEW_WEIGHT = 0.1
"""Weight of a new measurement in a running mean."""
SICK_SHARE = 0.5
"""A server is sick if more than this share of its recent answers are failures, and twice that of another server."""
PROBE_S = 5.0
"""Seconds between two new calls to a sick server."""


class WrongAnswer(LinkClosed):
    """A server sent something that does not answer a call. This is not the fault of its calls."""


@dataclass(kw_only=True, eq=False)
class RemoteCall(EnvCall):
    failed_at: set[EnvServer] = field(default_factory=set)
    """The servers that were lost while they had the call. Others are preferred."""
    sent_s: float = 0.0
    began_s: float | None = None
    """When its server began it for the first time (monotonic clock, seconds)."""


@dataclass(kw_only=True)
class Expected:
    """What every server must host."""

    token: str
    settings: dict[str, Any]
    traits: tuple[bool, bool, bool] | None = None
    """Stateful, replayable, needs tokens: as the first server said."""


class ServerOwner(Protocol):
    """Who spreads calls over servers."""

    def changed(self, server: EnvServer) -> None:
        """An attempt to connect has ended, or a call may be sent."""
        ...

    def answered(self, server: EnvServer, call: RemoteCall, value: Task | Feedback | EnvFailed) -> None: ...

    def lost(self, server: EnvServer, calls: list[RemoteCall], why: str) -> None:
        """The link is lost, and with it the calls that were in progress or queued there."""
        ...


class EnvServer:
    def __init__(self, address: str, expected: Expected, owner: ServerOwner) -> None:
        self.address = address
        self._expected = expected
        self._owner = owner
        url = address if "://" in address else f"http://{address}"
        self._dialer = Dialer(url, "/env", e.FromEnvServer, ssl=None, max_frame_bytes=e.MAX_ENV_FRAME_BYTES)
        self.terms: e.EnvWelcome | None = None
        """What the server said about itself; None while there is no link."""
        self.tried = False
        """An attempt to connect has ended."""
        self.refused: WindfallError | None = None
        """Why this server cannot be used as long as neither side is changed."""
        self.why = "no attempt has ended yet"
        """Why there is no link."""
        self.sent: dict[int, RemoteCall] = {}
        self.queue: deque[RemoteCall] = deque()
        """Turns of sessions that are here. They wait for a free slot."""
        self.sessions: OpenSessions[EnvServer] = OpenSessions(0)
        self._link: SocketLink | None = None
        self._outbox: asyncio.Queue[Any] = asyncio.Queue()
        self._answered_s = 0.0
        self._fault = ""
        self._closing: asyncio.Task[None] | None = None
        self.answers = self.errors = self.losses = 0
        self._mean_s = self.failing = 0.0
        """Running means: seconds for an answer, and the share of failures."""

    # The state, for whoever spreads calls.

    @property
    def load(self) -> float:
        """Calls and open sessions for every call that may be in progress."""
        assert self.terms is not None
        return (len(self.sent) + len(self.queue) + len(self.sessions)) / self.terms.slots

    @property
    def has_slot(self) -> bool:
        return self.terms is not None and len(self.sent) < self.terms.slots

    def accepts_new(self, least_failing: float) -> bool:
        """Whether a call without a session here may be sent. A sick server would fail calls faster than others answer
        them, and so get most of them. `least_failing`: the share of failures of the best server."""
        sick = self.failing > max(SICK_SHARE, 2 * least_failing)
        return self.has_slot and not (sick and (self.sent or time.monotonic() - self._answered_s < PROBE_S))

    @property
    def busy(self) -> int:
        """Sessions that make a step now, or have one queued."""
        return sum(call.what == "feedback" for call in self.sent.values()) + len(self.queue)

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

    # Messages out.

    def send(self, call: RemoteCall) -> None:
        self.sent[call.number], call.sent_s, call.began_s = call, time.monotonic(), None
        if call.what == "task":
            message: Any = e.TaskCall(number=call.number, index=call.args[0], limit_s=call.limit_s)
        else:
            index, id, crc, given = call.args
            turns = tuple((text, seen, tuple(*tokens)) for text, seen, *tokens in given)
            message = e.FeedbackCall(
                number=call.number, index=index, id=id, prompt_crc=crc, turns=turns, limit_s=call.limit_s
            )
        self._outbox.put_nowait(message)

    def cancel(self, call: RemoteCall) -> None:
        if call.number in self.sent:
            self._outbox.put_nowait(e.CancelCall(number=call.number))

    def end_session(self, id: str, turns: tuple[Any, ...]) -> None:
        self._outbox.put_nowait(e.EndSession(id=id, turns=turns))

    def _unsendable(self, message: Any, why: str) -> None:
        call = self.sent.pop(getattr(message, "number", -1), None)
        if call is not None:
            what = f"{call.name} cannot be sent to an environment server: {why}"
            self._owner.answered(self, call, EnvFailed(what, "a call that cannot be sent", final=True))

    # The link.

    async def run(self) -> None:
        """Keep a link to the server. Never ends."""
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
            terms = await handshake.join(link, handshake.ENV_CLIENT, self._expected.token, e.EnvHello)
            self._check(terms)
            self._begin(link, terms)
            await exchange(link, self._outbox, self._handle, self._unsendable)
        finally:
            await link.close()

    def _check(self, terms: e.EnvWelcome) -> None:
        if differs := difference(terms.settings, self._expected.settings):
            fix = "Start the server with the recipe of the run."
            raise WindfallError(f"it hosts another environment: {differs}", where=self._where, fix=fix)
        traits = (terms.stateful, terms.replayable, terms.needs_tokens)
        if self._expected.traits not in (None, traits):
            fix = "Install the same version of the environment on all servers."
            raise WindfallError("it describes the environment differently than another", where=self._where, fix=fix)
        self._expected.traits = traits
        if terms.slots < 1 or terms.sessions < 1:
            raise LinkClosed(f"it offers {terms.slots} slots and {terms.sessions} sessions")

    @property
    def _where(self) -> str:
        return f"environment server {self.address}"

    def _begin(self, link: SocketLink, terms: e.EnvWelcome) -> None:
        self.terms = terms
        self._link = link
        self.refused = None
        self.why = ""
        self.tried = True
        self._fault = ""
        self._outbox = asyncio.Queue()
        self._answered_s = time.monotonic()
        self.sessions = OpenSessions(terms.sessions)
        self.sessions.replayable = terms.replayable
        self._owner.changed(self)

    def _end(self, error: LinkClosed | WindfallError) -> None:
        """There is no link any more, or there was none."""
        had_link, self.terms, self._link = self.terms is not None, None, None
        said = error.what if isinstance(error, WindfallError) else str(error)
        self.why = self._fault or clip(said.removeprefix(f"{self._dialer.url}: "))
        self.refused = self._refusal(error)
        self.tried = True
        calls = [*self.sent.values(), *self.queue]
        for call in self.sent.values():
            call.moves += self in call.failed_at or not isinstance(error, WrongAnswer)
            call.failed_at.add(self)
        self.sent = {}
        self.queue = deque()
        self.sessions = OpenSessions(0)
        if had_link:
            self.losses += 1
            self._owner.lost(self, calls, self.why)
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
        """Close the link if the server does not answer."""
        if self._link is None or not self.sent or self._fault:
            return
        begun = [call for call in self.sent.values() if call.began_s is not None]
        if begun:
            limit_s = 2 * max(call.limit_s for call in begun) + GRACE_S
            if now_s - max(self._answered_s, min(call.began_s or 0.0 for call in begun)) > limit_s:
                self._drop(f"no answer to {len(begun)} calls for {limit_s:g} s")
        waited_s = max((now_s - call.sent_s for call in self.sent.values() if call.began_s is None), default=0.0)
        if waited_s > WAIT_S:
            self._drop(f"a call has not begun for {WAIT_S:g} s")

    def _drop(self, why: str) -> None:
        self._fault = why
        if self._link is not None:
            self._closing = asyncio.create_task(self._link.close(why[:100]))

    # Messages in.

    def _handle(self, message: Any) -> None:
        """Raises WrongAnswer if this is not an answer to a call."""
        number = getattr(message, "number", None)
        call = self.sent.get(number) if isinstance(number, int) else None
        if call is None:
            raise WrongAnswer(f"it sent a {type(message).__name__} that answers no call")
        if isinstance(message, e.CallBegan):
            call.began_s = call.began_s or time.monotonic()
            return
        value = self._value(call, message)
        del self.sent[call.number]
        now_s = time.monotonic()
        took_s, self._answered_s = now_s - call.sent_s, now_s
        self._mean_s = (1 - NEW_WEIGHT) * self._mean_s + NEW_WEIGHT * took_s if self.answers else took_s
        self.answers += 1
        if not call.future.cancelled():  # otherwise it "failed" because it was canceled
            failed = isinstance(value, EnvFailed)
            self.errors += failed
            self.failing += NEW_WEIGHT * (failed - self.failing)
        self._owner.answered(self, call, value)
        self._owner.changed(self)

    def _value(self, call: RemoteCall, message: Any) -> Task | Feedback | EnvFailed:
        if isinstance(message, e.CallFailed):
            return EnvFailed(message.error, message.cause, message.traceback, final=message.final)
        if isinstance(message, e.TaskMade) and call.what == "task":
            value: Task | Feedback = Task(id=message.id, prompt=message.prompt)
        elif isinstance(message, e.CallGraded) and call.what == "feedback":
            value = Feedback(reward=message.reward, observation=message.observation, scores=message.scores)
        else:
            raise WrongAnswer(f"it answered a {call.what} with a {type(message).__name__}")
        if fault := task_fault(value) if isinstance(value, Task) else feedback_fault(value):
            raise WrongAnswer(f"it sent a wrong answer: {fault}")
        return value
