"""The messages between an engine group and its child processes: msgpack, each after its length in four bytes.

    group ──▶ child    Build, LoadVersion, StepEngine, PauseEngine: one at a time
    child ──▶ group    the answer to each: Built, OrderDone or VersionRefused, Stepped, OrderDone; or ChildError

The id of a request is its handle, a number that is never used again. These messages stay on one machine and between
processes of one program, so they have no version.
"""

from __future__ import annotations

import msgspec

from windfall.engine.base import Counters
from windfall.errors import WindfallError
from windfall.link.messages import EngineSpec, Message
from windfall.types import Capabilities, Chunk, Request
from windfall.weights.shared import SharedVersion

LENGTH_BYTES = 4


class Build(Message, frozen=True, tag=1):
    """Build the engine. It takes memory, but has no weights yet."""

    spec: EngineSpec
    device: str
    share: float  # share of the free memory for the KV cache
    threads: int  # CPU threads; 0: as they are


class LoadVersion(Message, frozen=True, tag=2):
    """Copy these weights into the engine, and use them from now on as this version."""

    version: int
    shared: SharedVersion


class StepEngine(Message, frozen=True, tag=3):
    """Begin and cancel these responses, then make one step."""

    add: list[Request]
    cancel: list[int]  # handles


class PauseEngine(Message, frozen=True, tag=4):
    """Answer when the device computes nothing any more. `free`: also free the memory of the KV cache and the weights;
    responses stay, and are prefilled again."""

    free: bool


class Built(Message, frozen=True, tag=11):
    slots: int  # responses that are decoded at once
    limit: int  # tokens of the longest response, prompt included, that fits
    vocabulary: int
    engine: Capabilities = Capabilities()


class Stepped(Message, frozen=True, tag=12):
    chunks: list[Chunk]
    counters: Counters


class OrderDone(Message, frozen=True, tag=13):
    pass


class VersionRefused(Message, frozen=True, tag=14):
    """The weights do not fit the model. The engine has not changed."""

    why: str


class ChildError(Message, frozen=True, tag=15):
    """The engine cannot be built, or raised an error. The child exits after this message."""

    what: str
    where: str = ""
    fix: str = ""
    for_user: bool = False  # True if it is a WindfallError: a person must fix the cause

    def error(self) -> Exception:
        if self.for_user:
            return WindfallError(self.what, where=self.where, fix=self.fix)
        return ChildFailed(self.what)


class ChildFailed(Exception):
    """A child process of the group failed, with an error that is not the user's."""


ToChild = Build | LoadVersion | StepEngine | PauseEngine
FromChild = Built | Stepped | OrderDone | VersionRefused | ChildError


def encode(message: object) -> bytes:
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data
