"""Samples in messages to the trainer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from windfall.training import Sample

FRAME_BYTES = 16 << 20
"""Approximate size of one message with samples."""


def parts(samples: Sequence[Sample]) -> Iterator[tuple[Sample, ...]]:
    """Split samples into messages, always in the same way, so that the order of summation does not change."""
    part: list[Sample] = []
    size = 0
    for sample in samples:
        # On the wire an integer takes up to 5 bytes, a log-prob 8 and a lag 2; a sample has a few more fields.
        wire = 5 * (len(sample.ids) + len(sample.targets)) + 16 * len(sample.targets) + 160
        wire += 0 if sample.lag is None else sample.lag.nbytes
        wire += sum(4 * len(name) + 10 for name, _ in sample.engines)
        if part and size + wire > FRAME_BYTES:
            yield tuple(part)
            part, size = [], 0
        part.append(sample)
        size += wire
    yield tuple(part)
