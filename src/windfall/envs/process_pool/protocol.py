"""What a child process and its parent exchange: one JSON line per message, and a few bytes of shared memory.

    parent ──▶ child     BuildEnv;  TaskCall, FeedbackCall, CancelCall, EndSession (link/env_messages.py);  EndEnv
    child ──▶ parent     EnvBuilt or EnvRefused;  CallWaits, CallLate, CallVerdict;  TaskMade, CallGraded, CallFailed

The shared memory says which call is running, and since when. The parent can read it no matter how busy the child is,
even while C code holds the interpreter's lock.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from windfall.link import env_messages as e
from windfall.link.message_base import Message

RECORD = struct.Struct("<Qd")
"""The number of the running call (0: none), and when it began to run (CLOCK_MONOTONIC, seconds)."""
LINK_LOST = 114
"""Exit status of a child whose link to its parent was closed or replaced by the environment."""


class BuildEnv(Message, frozen=True, tag=60):
    section: dict[str, Any]
    seed: int
    strict: bool  # the environment is windfall's own: limit its memory


class EndEnv(Message, frozen=True, tag=61):
    """The run is over: close the sessions, and exit."""


class EnvBuilt(Message, frozen=True, tag=62):
    name: str
    stateful: bool
    needs_tokens: bool
    replayable: bool


class EnvRefused(Message, frozen=True, tag=63):
    what: str
    where: str
    fix: str


class CallWaits(Message, frozen=True, tag=64):
    """The call waits in an `async def`, so that other calls can begin."""

    number: int


class CallLate(Message, frozen=True, tag=65):
    number: int
    stack: str


class CallVerdict(Message, frozen=True, tag=66):
    """The result of the call if the kernel ends the child because of its CPU time."""

    number: int
    reward: float
    scores: tuple[tuple[str, float], ...]


ToChild = BuildEnv | EndEnv | e.TaskCall | e.FeedbackCall | e.CancelCall | e.EndSession
FromChild = EnvBuilt | EnvRefused | CallWaits | CallLate | CallVerdict | e.TaskMade | e.CallGraded | e.CallFailed
decode_call = msgspec.json.Decoder(ToChild).decode
decode_answer = msgspec.json.Decoder(FromChild).decode


def encode(message: Message) -> bytes:
    return msgspec.json.encode(message) + b"\n"
