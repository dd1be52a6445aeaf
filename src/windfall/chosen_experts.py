"""The experts that compute each token of a response, in a model with experts: an engine records them, a trainer replays
them (docs/models.md). Pure.

For one token they are one number for each layer with experts and each expert that its router chose, as bytes: uint8, or
uint16 for 256 experts and more. The largest number stands for "unknown": there the trainer's own router chooses.

Rule: what is recorded first stays. When a response moves, another engine computes the keys and values of its tokens
again, and may choose other experts; the tokens that are there were sampled with the first ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field

UNKNOWN = b"\xff"
"""Every byte of an expert that is not known."""


def item_bytes(experts: int) -> int:
    """Bytes of an expert's number, if a layer has this many.

    >>> item_bytes(128), item_bytes(256)
    (1, 2)
    """
    return 1 if experts < 256 else 2


@dataclass(slots=True)
class ChosenExperts:
    """The experts of consecutive tokens. Token 0 is the first one of the response; those of its prompt come before it,
    at negative positions.

    >>> known = ChosenExperts(start=-2)
    >>> known.add(-2, b"abcd", width=2); known.add(-1, b"xxef", width=2); known.end
    1
    >>> known.of(-2, 3)
    b'abcdef\\xff\\xff\\xff\\xff'
    """

    start: int = 0
    width: int = 0
    """Bytes of a token; 0: nothing is known yet."""
    data: bytearray = field(default_factory=bytearray)

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.start + (len(self.data) // self.width if self.width else 0)

    def add(self, start: int, data: bytes | bytearray | memoryview, width: int) -> None:
        """Add the experts of tokens from `start` on. Tokens that are known stay as they are; those of a gap become
        unknown."""
        if self.width not in (0, width) or len(data) % width or start < self.start:
            raise ValueError(f"experts of {len(data)} bytes, {width} for each token, from {start} on")
        self.width = width
        skip = self.end - start
        if skip < 0:
            self.data += UNKNOWN * (-skip * width)
        self.data += data[max(0, skip) * width :]

    def cut(self, end: int) -> None:
        """Remove those of the tokens from `end` on."""
        del self.data[max(0, end - self.start) * self.width :]

    def of(self, start: int, end: int) -> bytes:
        """The experts of these tokens. Empty if nothing at all is known."""
        if not self.width:
            return b""
        at = (start - self.start) * self.width
        return bytes(self.data[at : at + (end - start) * self.width]).ljust((end - start) * self.width, UNKNOWN)
