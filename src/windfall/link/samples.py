"""Samples as messages to the trainer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from windfall.link import messages as m
from windfall.training import Sample

FRAME_BYTES = 16 << 20
"""Approximate size of one message with samples."""


def parts(samples: Sequence[Sample]) -> Iterator[tuple[m.SampleMessage, ...]]:
    """Split samples into messages, always in the same way, so that the order of summation does not change."""
    part: list[m.SampleMessage] = []
    size = 0
    for sample in samples:
        # On the wire an integer takes up to 5 bytes, a log-prob 8 and a lag 2; a sample has a few more fields.
        wire = 5 * (len(sample.ids) + len(sample.targets)) + 16 * len(sample.targets) + 64
        wire += 0 if sample.lag is None else sample.lag.nbytes
        wire += sum(4 * len(name) + 10 for name, _ in sample.engines)
        if part and size + wire > FRAME_BYTES:
            yield tuple(part)
            part, size = [], 0
        part.append(pack(sample))
        size += wire
    yield tuple(part)


def pack(sample: Sample) -> m.SampleMessage:
    s = sample
    return m.SampleMessage(
        ids=s.ids,
        targets=s.targets,
        behavior=np.asarray(s.behavior, np.float64).tobytes(),
        advantage=s.advantage,
        limit=s.limit,
        old=None if s.old is None else np.asarray(s.old, np.float64).tobytes(),
        lag=None if s.lag is None else np.asarray(s.lag, np.uint16).tobytes(),
        engines=tuple(name for name, _ in s.engines),
        engine_tokens=tuple(count for _, count in s.engines),
        whole=s.whole,
    )


def unpack(sample: m.SampleMessage) -> Sample:
    """
    >>> s = Sample(ids=(1, 2), targets=(1,), behavior=np.array([-0.1]), advantage=0.5, limit=9)
    >>> unpack(pack(s)).behavior.tolist()
    [-0.1]
    """
    s = sample
    return Sample(
        ids=s.ids,
        targets=s.targets,
        behavior=np.frombuffer(s.behavior),
        advantage=s.advantage,
        limit=s.limit,
        old=None if s.old is None else np.frombuffer(s.old),
        lag=None if s.lag is None else np.frombuffer(s.lag, np.uint16),
        engines=tuple(zip(s.engines, s.engine_tokens, strict=True)),
        whole=s.whole,
    )
