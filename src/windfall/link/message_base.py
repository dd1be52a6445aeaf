"""What every link's messages share. They are in a file of their own because the processes of environments, which start
often, import no others: messages.py needs numpy, which takes longer to import than the rest of such a process."""

from __future__ import annotations

import msgspec


class Value(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A value within messages."""


class Message(Value, frozen=True):
    """The common base. Decoding refuses a message with a missing field or a field of the wrong type."""


class Challenge(Message, frozen=True, tag=1):
    """Controller to worker or trainer, first message on a link: prove that you know the secret (link/handshake.py)."""

    protocol: int  # PROTOCOL of the controller
    run: str  # name of the run
    nonce: bytes  # random bytes that the peer's proof must cover


class Refused(Message, frozen=True, tag=4):
    """Controller to worker or trainer, before it closes the link: this peer may not join."""

    why: str
    again: bool = False  # True if a later attempt may succeed
