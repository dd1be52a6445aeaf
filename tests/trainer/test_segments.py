"""A response with several segments counts once, whatever the algorithm: its tokens have the weights that they would
have in one segment, and its normalizer is the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from windfall import algorithms
from windfall.algorithms.base import SampledTokens
from windfall.controller.credit import credit, outcomes
from windfall.link import messages as m
from windfall.training import Sample
from windfall.types import Group, Response, Task

TASK = Task(id="t", prompt="p")


def response(id: str, reward: float, sampled: int, prompt: int = 3, observed: int = 2) -> Response:
    count = sampled + observed
    return Response(
        id=id, prompt=tuple(range(prompt)), tokens=tuple(range(10, 10 + count)), logprobs=(-0.5,) * count,
        sampled=(True,) * sampled + (False,) * observed, versions=(4,) * sampled + (-1,) * observed, finish="stop",
        reward=reward, agent=True,
    )  # fmt: skip


def groups() -> tuple[Group, Group]:
    """The same responses: the first in three segments, and in one."""
    parts = [response("0/0", 1.0, 4), response("0/0+1", 1.0, 1), response("0/0+4", 1.0, 7)]
    other = response("0/1", 0.0, 5)
    segmented = replace(parts[0], more=tuple(parts[1:]))
    whole = response("0/0", 1.0, 12, observed=6)
    return (Group(index=0, task=TASK, responses=(r, other)) for r in (segmented, whole))  # type: ignore[return-value]


def weights(name: str, samples: list[Sample]) -> tuple[float, float, int]:
    """Sum of the token weights with ratio 1, of the normalizers, and the number of tokens."""
    algorithm, total, divisor, tokens = algorithms.make(name), 0.0, 0.0, 0
    for s in samples:
        logp = np.full(len(s.targets), -0.5)
        total += algorithm.weights(SampledTokens(logp=logp, proximal=logp, advantage=s.advantage, whole=s.whole)).sum()
        divisor += algorithm.normalizer(s.length, s.limit) * s.share
        tokens += len(s.targets)
    return total, divisor, tokens


@pytest.mark.parametrize("name", list(algorithms.ALGORITHMS))
def test_response_counts_once(name: str) -> None:
    segmented, whole = groups()
    algorithm = algorithms.make(name)
    assert outcomes(segmented, 64) == outcomes(whole, 64)
    many, one = (credit([g], algorithm, 64, version=5)[0] for g in (segmented, whole))
    assert [len(s.targets) for s in many] == [4, 1, 7, 5]
    assert [s.whole for s in many] == [12, 12, 12, 0]
    assert len({s.advantage for s in many[:3]}) == 1
    assert weights(name, many) == pytest.approx(weights(name, one))
    assert sum(s.share for s in many) == pytest.approx(2), "two responses"
    assert all((s.lag == 1).all() for s in many if s.lag is not None)


def test_segments_on_the_wire_and_in_totals() -> None:
    segmented, _ = groups()
    sample = credit([segmented], algorithms.make("grpo"), 64)[0][1]
    received = m.decoder(m.ForwardBackward)(m.encode(m.ForwardBackward(id="1", samples=(sample,))))
    assert received.samples[0].whole == 12
    assert received.samples[0].behavior.tolist() == sample.behavior.tolist()
    r = segmented.responses[0]
    assert (r.sampled_count, r.oldest_version, r.length) == (12, 4, 9 + 12 + 6)
    assert [part.id for part in r.segments] == ["0/0", "0/0+1", "0/0+4"]
