"""The Link interface: one connection between two processes. `tests/link/test_link_contract.py` is its contract."""

from __future__ import annotations

from typing import Protocol

MAX_QUOTED_CHARS = 200


class LinkClosed(Exception):
    """The connection ended or could not be established. The text gives the reason as far as it is known."""


class BadFrame(LinkClosed):
    """The peer sent a frame that is not a valid message. The link is closed."""


class FrameTooLarge(LinkClosed):
    """The message exceeds the peer's frame limit. It was not sent."""


def clip(text: object) -> str:
    """Make text from a peer safe to log or forward: limit its length and replace unprintable characters.

    >>> clip("a" * 300) == "a" * 199 + "…", clip(ValueError("two\\nlines"))
    (True, 'two?lines')
    """
    quoted = str(text)
    quoted = quoted if len(quoted) <= MAX_QUOTED_CHARS else quoted[: MAX_QUOTED_CHARS - 1] + "…"
    return "".join(c if c.isprintable() else "?" for c in quoted)


class Link(Protocol):
    peer: str  # address of the other end, for logs and errors

    async def send(self, message: object) -> None:
        """Send a message. Waits while the peer does not read. Raises LinkClosed once the peer is gone."""
        ...

    async def receive(self) -> object:
        """Return the next message, in the order of sending. Raises LinkClosed once no more messages can arrive."""
        ...

    def authenticated(self) -> None:
        """Lift the limits of a peer that has proved that it knows the secret."""
        ...

    async def close(self, why: str = "") -> None: ...
