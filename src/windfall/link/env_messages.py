"""The messages between a controller and an environment server (envs/remote/). Any change must change PROTOCOL.

    controller ──▶ server     EnvHello;  TaskCall, FeedbackCall, CancelCall, EndSession
    server ──▶ controller     Challenge, EnvWelcome or Refused;  CallBegan, TaskMade, CallGraded, CallFailed

Every call has a number and ends with exactly one answer: TaskMade, CallGraded or CallFailed. Calls overlap in any
order.
"""

from __future__ import annotations

from typing import Any

from windfall.link.message_base import Challenge, Message, Refused

MAX_ENV_FRAME_BYTES = 64 << 20  # a call carries all turns of its episode, with their observations

Turns = tuple[tuple[str, str | None, tuple[int, ...], str], ...]  # text, observation, ids if they are needed, role


class EnvHello(Message, frozen=True, tag=40):
    """Controller to server: the answer to Challenge."""

    protocol: int
    nonce: bytes  # random bytes that the server's proof must cover
    proof: bytes  # HMAC that shows that the controller knows the token of the server


class EnvWelcome(Message, frozen=True, tag=41):
    """Server to controller: what it hosts, and how much of it."""

    proof: bytes  # HMAC that shows that the server knows the token
    name: str  # name of the environment, for messages to people
    settings: dict[str, Any]  # what the environment was built from; the controller compares it with its own
    stateful: bool
    replayable: bool
    needs_tokens: bool
    slots: int  # calls that this controller may have in progress
    sessions: int  # sessions that may be open


class TaskCall(Message, frozen=True, tag=42):
    number: int
    index: int
    limit_s: float  # from when the call begins to run


class FeedbackCall(Message, frozen=True, tag=43):
    number: int
    index: int
    id: str  # id of the task
    prompt_crc: int  # CRC-32 of the prompt: the server must have the same task
    turns: Turns
    limit_s: float


class CancelCall(Message, frozen=True, tag=44):
    """The answer is not needed, but must still be sent."""

    number: int


class EndSession(Message, frozen=True, tag=45):
    """No further turn follows these: close their session."""

    id: str
    turns: tuple[tuple[str, str | None], ...]


class CallBegan(Message, frozen=True, tag=46):
    """The call waits no longer for a free slot, session or process. It may be sent several times."""

    number: int


class TaskMade(Message, frozen=True, tag=47):
    number: int
    id: str
    prompt: str | list[dict[str, Any]]
    role: str = ""  # Task.role


class CallGraded(Message, frozen=True, tag=48):
    number: int
    reward: float | None
    observation: str | None
    scores: tuple[tuple[str, float], ...]
    role: str = ""  # Feedback.role
    rewards: tuple[tuple[str, float], ...] = ()  # Feedback.rewards


class CallFailed(Message, frozen=True, tag=49):
    number: int
    error: str
    cause: str
    traceback: str
    final: bool


FromEnvServer = Challenge | EnvWelcome | Refused | CallBegan | TaskMade | CallGraded | CallFailed
ToEnvServer = EnvHello | TaskCall | FeedbackCall | CancelCall | EndSession
