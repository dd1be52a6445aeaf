"""The workload of benchmarks/engine/long_groups.py: lengths, prompts and streams, the same for every engine."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

PROMPT, LONGEST, SIBLINGS = 512, 8192, 8
COMMON_TEXT = 1000
"""Tokens of a group's common text."""


@dataclass(frozen=True)
class LongWork:
    """`groups` groups of 8 siblings. `stream`: what they say, COMMON:OWN, or "" for what the model says."""

    groups: int
    longest: int
    prompt: int
    stream: str
    vocabulary: int

    @property
    def lengths(self) -> list[int]:
        rng, scale = random.Random("lengths"), self.longest / LONGEST
        drawn = (int(scale * rng.lognormvariate(7.45, 0.8)) for _ in range(self.groups * SIBLINGS))
        return [max(1, min(self.longest, length)) for length in drawn]

    @property
    def prompts(self) -> list[list[int]]:
        rng = random.Random("prompts")
        return [[rng.randrange(3, 500) for _ in range(self.prompt)] for _ in range(self.groups)]

    def said(self) -> torch.Tensor:
        """(responses, longest) tokens: what each response says."""
        common, own = map(int, self.stream.split(":"))
        rng, lengths = random.Random("streams"), self.lengths
        out = torch.zeros(len(lengths), max(lengths) + 1, dtype=torch.int32)
        for group in range(self.groups):
            text = [rng.randrange(3, self.vocabulary) for _ in range(COMMON_TEXT)]
            for n in range(group * SIBLINGS, (group + 1) * SIBLINGS):
                tokens: list[int] = []
                while len(tokens) < out.shape[1]:
                    at = rng.randrange(COMMON_TEXT)
                    tokens += text[at : at + 1 + int(rng.expovariate(1 / common))]
                    tokens += [rng.randrange(3, self.vocabulary) for _ in range(1 + int(rng.expovariate(1 / own)))]
                out[n] = torch.tensor(tokens[: out.shape[1]], dtype=torch.int32)
        return out


def tail_s(ended: list[float]) -> float:
    """From the end of the 90th percentile of the responses to the last one."""
    return ended[-1] - ended[int(0.9 * len(ended)) - 1]
