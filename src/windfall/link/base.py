"""The Link seam: one connection between two parties. `tests/link/test_link_contract.py` says what every kind does."""

from __future__ import annotations

from typing import Protocol

CLIPPED = 200


class LinkClosed(Exception):
    """The other side is not there any more, or never was. Says why, as far as is known."""


class BadFrame(LinkClosed):
    """The other side sent something that is no message. The link is closed."""


class TooLarge(LinkClosed):
    """A message that the other side would refuse for its size. It was not sent."""


def clip(text: object) -> str:
    """What somebody else has said, fit to be logged or sent on: however long it was, and whatever is in it.

    >>> clip("a" * 300) == "a" * 199 + "…", clip(ValueError("two\\nlines"))
    (True, 'two?lines')
    """
    said = str(text)
    said = said if len(said) <= CLIPPED else said[: CLIPPED - 1] + "…"
    return "".join(c if c.isprintable() else "?" for c in said)


class Link(Protocol):
    peer: str
    """Who is at the other end, for messages."""

    async def send(self, message: object) -> None:
        """Waits while the other side does not read. LinkClosed once it is gone."""
        ...

    async def receive(self) -> object:
        """The next message, in the order in which they were sent. LinkClosed once there will be none."""
        ...

    async def close(self, why: str = "") -> None: ...
