"""RowSampler gives the tokens of `windfall.engine.torch.sampler`, in any order of rows and whatever the batch was."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from windfall.engine.torch import sampler
from windfall.engine.vllm.sampling import RowSampler
from windfall.types import Sampling

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PLAIN = [Sampling(), Sampling(temperature=0.0), Sampling(temperature=0.7)]
CUT = [Sampling(top_k=3), Sampling(top_p=0.4), Sampling(temperature=1.5, top_k=20, top_p=0.9)]


@pytest.mark.parametrize("samplings", [PLAIN, PLAIN + CUT], ids=["plain", "cut"])
def test_tokens_are_those_of_the_sampler(samplings: list[Sampling]) -> None:
    rows, generator = RowSampler(DEVICE), torch.Generator().manual_seed(1)
    for count in (2, 37, 5):  # the batch grows and shrinks
        seeds = [2**64 - 1 - n * 7919 for n in range(count)]
        wanted = [samplings[n % len(samplings)] for n in range(count)]
        rows.set_rows(seeds, wanted)
        for step in range(3):  # the positions are given, not counted
            logits = 3 * torch.randn(count, 5000, generator=generator)
            positions = np.arange(count) * 3 + 10 - 5 * step
            positions = np.maximum(0, positions)
            tokens, logprobs = rows.sample(logits.to(DEVICE), positions)
            expected, expected_logprobs = sampler.sample(logits, seeds, positions.tolist(), wanted)
            assert tokens.tolist() == expected.tolist()
            assert torch.allclose(logprobs.cpu(), expected_logprobs, atol=1e-4)
