"""The messages between an engine group and its child processes: msgpack, each after its length in four bytes.

    group ──▶ child    Build, Add, CancelResponse, Grant, PauseSteps, LoadVersion, Sleep
    child ──▶ group    Built, Stepped, OrderDone, VersionRefused, ChildError

PauseSteps, LoadVersion and Sleep have an order number; the child answers each with OrderDone, or LoadVersion with
VersionRefused. The id of a request is its handle, a number that is never used again. These messages stay on one machine
and between processes of one program, so they have no version.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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


class Add(Message, frozen=True, tag=2):
    request: Request


class CancelResponse(Message, frozen=True, tag=3):
    handle: int


class Grant(Message, frozen=True, tag=4):
    """The child may make this many more engine steps. It makes them while it has work."""

    steps: int


class PauseSteps(Message, frozen=True, tag=5):
    """Make no more steps: what was granted is void. OrderDone follows the last Stepped."""

    order: int


class LoadVersion(Message, frozen=True, tag=6):
    """Copy these weights into the engine, which has none while it sleeps, and use them from now on as this version."""

    order: int
    version: int
    shared: SharedVersion | None  # None: the engine has exactly these weights already


class Sleep(Message, frozen=True, tag=7):
    """Free the memory of the KV cache and of the weights. Responses stay, and are prefilled again. Weights with an
    adapter are kept if they are small compared with the free memory, because most of them are the base, which stays."""

    order: int


class Built(Message, frozen=True, tag=12):
    slots: int  # responses that are decoded at once
    limit: int  # tokens of the longest response, prompt included, that fits
    vocabulary: int
    engine: Capabilities = Capabilities()


class Stepped(Message, frozen=True, tag=13):
    """The child has made one of the granted steps."""

    chunks: list[Chunk]
    counters: Counters


class OrderDone(Message, frozen=True, tag=14):
    order: int
    kept_weights: bool = False  # whether the engine has its weights still, after Sleep


class VersionRefused(Message, frozen=True, tag=15):
    """The weights do not fit the model. The engine has not changed."""

    order: int
    why: str


class ChildError(Message, frozen=True, tag=16):
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


ToChild = Build | Add | CancelResponse | Grant | PauseSteps | LoadVersion | Sleep
FromChild = Built | Stepped | OrderDone | VersionRefused | ChildError


def encode(message: object) -> bytes:
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


class Receiver:
    """Cuts a stream of bytes into messages."""

    def __init__(self, kind: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._data = bytearray()

    def messages(self, data: bytes) -> Iterator[object]:
        """The messages that are complete with these bytes."""
        self._data += data
        while len(self._data) >= LENGTH_BYTES:
            end = LENGTH_BYTES + int.from_bytes(self._data[:LENGTH_BYTES], "big")
            if len(self._data) < end:
                return
            message = self._decoder.decode(self._data[LENGTH_BYTES:end])
            del self._data[:end]
            yield message
