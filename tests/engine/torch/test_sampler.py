"""Sampling is a function of (seed, position, logits): its statistics, truncation, and independence of other rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from windfall.engine.torch import sampler
from windfall.engine.torch.sampler import sample, uniform
from windfall.types import Sampling

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])


def draw(count: int, how: Sampling, logits: torch.Tensor = LOGITS, position: int = 0) -> np.ndarray:
    rows = logits.expand(count, -1)
    return sample(rows, list(range(count)), [position] * count, [how] * count)[0].numpy()


def frequencies_match(counts: np.ndarray, p: np.ndarray) -> bool:
    kept = p > 0
    assert counts[~kept].sum() == 0
    expected = p[kept] / p[kept].sum() * counts.sum()
    critical = {1: 10.8, 2: 13.8, 5: 20.5}[kept.sum() - 1]  # of chi-square at 0.1 %, by degrees of freedom
    return float(((counts[kept] - expected) ** 2 / expected).sum()) < critical


def test_frequencies_match_the_softmax_over_seeds_and_over_positions() -> None:
    p = torch.softmax(LOGITS.double(), 0).numpy()
    assert frequencies_match(np.bincount(draw(20_000, Sampling()), minlength=6), p)
    n = 20_000
    tokens, _ = sample(LOGITS.expand(n, -1), [7] * n, list(range(n)), [Sampling()] * n)
    assert frequencies_match(np.bincount(tokens.numpy(), minlength=6), p)


def test_temperature_top_k_and_top_p_truncate_the_distribution() -> None:
    p = torch.softmax(LOGITS.double() / 0.5, 0).numpy()
    assert frequencies_match(np.bincount(draw(20_000, Sampling(temperature=0.5)), minlength=6), p)
    p = torch.softmax(LOGITS.double(), 0).numpy()
    assert frequencies_match(
        np.bincount(draw(20_000, Sampling(top_k=2)), minlength=6), np.where(np.arange(6) < 2, p, 0)
    )
    # cumulative: 0.56, 0.77, 0.90, ...: 0.8 needs the third token too
    assert frequencies_match(
        np.bincount(draw(20_000, Sampling(top_p=0.8)), minlength=6), np.where(np.arange(6) < 3, p, 0)
    )
    assert set(draw(500, Sampling(top_p=1e-6))) == {0}
    both = draw(20_000, Sampling(top_k=3, top_p=0.6))  # within the three: 0.62 alone is enough
    assert set(both) == {0}


@pytest.mark.parametrize("vocabulary", [50, 700])
@pytest.mark.parametrize("chunk", [1, 250, 1 << 18])
def test_rows_are_sampled_independently(chunk: int, vocabulary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "CHUNK", chunk)
    hows = [Sampling(temperature=t, top_p=p, top_k=k) for t in (0.0, 0.6, 1.0) for p in (0.5, 1.0) for k in (0, 3)]
    torch.manual_seed(0)
    logits = torch.randn(len(hows), vocabulary)
    seeds, positions = list(range(len(hows))), list(range(100, 100 + len(hows)))
    tokens, logp = sample(logits, seeds, positions, hows)
    for i, how in enumerate(hows):
        alone, alone_logp = sample(logits[i : i + 1], [seeds[i]], [positions[i]], [how])
        assert tokens[i] == alone[0]
        assert logp[i] == alone_logp[0]
        if how.temperature == 0:
            assert tokens[i] == logits[i].argmax()


def test_a_large_vocabulary_is_searched_span_by_span_as_if_at_once() -> None:
    torch.manual_seed(0)
    p = (3 * torch.randn(400, 5000)).softmax(-1)
    p[p < 1e-6] = 0.0
    u = torch.rand(400, dtype=torch.float64)
    u[:3] = torch.tensor([0.0, 1 - 2**-52, 0.5])
    found = sampler.first_above(p, u)
    upto = p.cumsum(-1, dtype=torch.float64)
    wanted = u * upto[:, -1]
    assert (p.gather(-1, found[:, None]) > 0).all()
    before = (upto - p).gather(-1, found[:, None])[:, 0]
    assert (before <= wanted + 1e-6).all()
    assert (wanted - 1e-6 <= upto.gather(-1, found[:, None])[:, 0]).all()


def test_logprob_is_that_of_the_whole_distribution_at_the_temperature() -> None:
    how = Sampling(temperature=0.5, top_k=2)
    tokens, logp = sample(LOGITS[None], [3], [0], [how])
    assert torch.allclose(logp, torch.log_softmax(LOGITS / 0.5, 0)[tokens])


def test_uniform_numbers_are_uniform_and_uncorrelated() -> None:
    n = 50_000
    u = uniform([1] * n, list(range(n)))
    assert u.min() >= 0
    assert u.max() < 1
    v = uniform(list(range(n)), [0] * n)
    for numbers in (u, v):  # Kolmogorov-Smirnov at 0.1 %
        assert np.abs(np.sort(numbers) - (np.arange(n) + 0.5) / n).max() < 1.95 / np.sqrt(n)
    for a, b in ((u[:-1], u[1:]), (v[:-1], v[1:]), (u, v)):
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.02
    assert len(np.unique(uniform([0, 0, 1, 1, -1, 2**64 - 2], [0, 1, 0, 1, 0, 0]))) == 6


def test_nothing_that_was_cut_is_ever_drawn_even_at_the_edges() -> None:
    """All probability on one token, and exact zeros elsewhere."""
    for hot, vocabulary in ((0, 6), (5, 6), (0, 700), (255, 700), (256, 700), (699, 700)):
        logits = torch.full((vocabulary,), -1e4)
        logits[hot] = 0.0
        assert set(draw(2000, Sampling(), logits)) == {hot}


@pytest.mark.parametrize("vocabulary", [7, 700])
def test_logits_without_any_number_give_a_token_of_the_vocabulary(vocabulary: int) -> None:
    logits = torch.stack([torch.zeros(vocabulary), torch.full((vocabulary,), torch.nan)])
    tokens, logprobs = sample(logits, [1, 2], [0, 0], [Sampling(), Sampling()])
    assert 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary
    assert logprobs[0].isfinite()
