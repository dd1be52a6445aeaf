"""What replayed groups and skipped prompts bring: responses generated until a small policy has learned its tasks.

    python benchmarks/train/data_selection.py [--seeds 2] [--target 0.8]        about 90 s on one idle core

The decisions, the credit and the importance weights are windfall's own. The policy is not a language model, but a
table: a task is a chain of 1 to 12 facts, and a response has one token for each, right or wrong. The reward is 1 if all
are right. Facts are shared between tasks, so the policy generalizes. Short chains are solved early, long ones late. The
256 tasks come back in every epoch. In the second table, only a third of them can be learned from: a third has facts
that the policy knows from the start, and a third is never rewarded, as if its answers were wrong. Held-out tasks are
other chains of facts to learn, and their reward is computed exactly.

    informative   share of the generated groups, after the first epoch, whose rewards differ
    steps         until the held-out reward reached the target
    responses     generated until then; a replayed one is not generated again

Means over the seeds. A run that does not reach the target counts with all its steps (MAX_STEPS).
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass, field

import numpy as np

from windfall import algorithms
from windfall.algorithms.base import SampledTokens
from windfall.algorithms.importance import importance_weights
from windfall.controller.credit import credit, informative
from windfall.controller.step_batch import StepBatch
from windfall.controller.tasks.selection import PromptSelection, Replay, outcome
from windfall.training import Sample
from windfall.types import Group, Response, Task

FACTS, KNOWN, CHOICES, TASKS, LONGEST = 48, 16, 4, 256, 12
"""Facts to learn, facts that the policy knows, choices of each, tasks, and facts of the longest chain."""
GROUPS, SIZE, MAX_DRAWS, LR, MAX_STEPS = 16, 8, 3, 8.0, 600
VARIANTS = [
    ("grpo", 0.0, False), ("grpo", 0.0, True), ("grpo", 0.5, False), ("grpo", 0.5, True),
    ("dapo", 0.0, False), ("dapo", 0.0, True), ("dapo", 0.25, False), ("dapo", 0.5, False), ("dapo", 0.5, True),
]  # fmt: skip
"""Algorithm, share of replayed groups, prompts are skipped."""


def prompt(chain: np.ndarray) -> str:
    return " ".join(map(str, chain))


@dataclass
class Learner:
    """The policy: for each fact, the logits of its choices. Choice 0 is right."""

    rng: np.random.Generator
    logits: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.logits = self.rng.normal(0.0, 0.5, (FACTS + KNOWN, CHOICES))
        self.logits[:, 0] += 1.5
        self.logits[FACTS:, 0] += 8.0

    @property
    def probabilities(self) -> np.ndarray:
        powers = np.exp(self.logits - self.logits.max(1, keepdims=True))
        return powers / powers.sum(1, keepdims=True)

    def group(self, index: int, chain: np.ndarray, version: int, *, solvable: bool) -> Group:
        rows = self.probabilities[chain]
        draws = (self.rng.random((SIZE, len(chain), 1)) > rows.cumsum(1)).sum(2).clip(max=CHOICES - 1)
        logprobs = np.log(rows[np.arange(len(chain)), draws])
        responses = tuple(
            Response(
                id=f"{index}/{n}", prompt=(), tokens=tuple((chain * CHOICES + draws[n]).tolist()),
                logprobs=tuple(logprobs[n].tolist()), sampled=(True,) * len(chain), versions=(version,) * len(chain),
                finish="stop", reward=float(solvable and not draws[n].any()),
            )
            for n in range(SIZE)
        )  # fmt: skip
        return Group(index=index, task=Task(id=str(index), prompt=prompt(chain)), responses=responses)

    def train(self, samples: list[Sample], algorithm: algorithms.Algorithm) -> None:
        probabilities, gradient, divisor = self.probabilities, np.zeros_like(self.logits), 0.0
        for s in samples:
            divisor += algorithm.normalizer(len(s.targets), s.limit)
            if not s.advantage:
                continue
            facts, choices = np.divmod(np.array(s.ids), CHOICES)
            now = np.log(probabilities[facts, choices])
            weights = algorithm.weights(SampledTokens(logp=now, proximal=now, advantage=s.advantage))
            weights = weights * importance_weights(now, s.behavior, mode="truncate", cap=2.0)[0]
            np.add.at(gradient, (facts, choices), weights)
            np.add.at(gradient, facts, -weights[:, None] * probabilities[facts])
        self.logits += LR * gradient / max(divisor, 1.0)


def run(name: str, replay: float, selects: bool, *, few: bool, seed: int, target: float) -> tuple[float, int, int]:
    """Train until the target is reached. `few`: only a third of the tasks can be learned from. Returns the share of
    informative groups, the steps, and the responses that were generated."""
    rng = np.random.default_rng(seed)
    chains = [rng.integers(0, FACTS, rng.integers(1, LONGEST + 1)) for _ in range(2 * TASKS)]
    held_out, order = chains[TASKS:], rng.permutation(TASKS)
    for n in range(0, TASKS, 3) if few else ():
        chains[n] = FACTS + chains[n] % KNOWN
    learner, algorithm, replayed = Learner(rng), algorithms.make(name), round(GROUPS * replay)
    selection, replays = PromptSelection(seed), Replay(groups=replayed, age=8)
    next_task = generated = repeated = useful = 0
    for version in range(MAX_STEPS):
        batch = StepBatch()
        for group in replays.take(version):
            batch.replay(group, 1 << 30)
        draws, fresh = 0, GROUPS - replayed
        while len(batch.fresh) < fresh and draws < MAX_DRAWS * fresh:
            index, next_task = next_task, next_task + 1
            number = order[index % TASKS]
            if selects and not selection.wants(index, prompt(chains[number])):
                selection.skip(prompt(chains[number]))
                continue
            draws += 1
            group = learner.group(index, chains[number], version, solvable=not few or number % 3 != 1)
            if index >= TASKS:
                repeated += 1
                useful += outcome(group) == "informative"
            if informative(group, algorithm, LONGEST):
                batch.add(group, SIZE, 1 << 30)
            else:
                batch.note(group, SIZE)
        learner.train([s for part in credit(batch.kept, algorithm, LONGEST, version) for s in part], algorithm)
        replays.groups.extend(g for g in batch.fresh if batch.outcomes[g.index][1] == "informative")
        selection.end_step(batch.outcomes)
        selection.skipped.clear()
        generated += draws * SIZE
        right = learner.probabilities[:, 0]
        if float(np.mean([right[chain].prod() for chain in held_out])) >= target:
            break
    return useful / max(1, repeated), version + 1, generated


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--target", type=float, default=0.8, help="Held-out reward to reach.")
    options = parser.parse_args()
    for few in (False, True):
        print("a third of the tasks can be learned from" if few else "all tasks can be learned from")
        print(f"{'algorithm':10}{'replay':>8}{'select':>8}{'informative':>13}{'steps':>8}{'responses':>11}")
        for name, replay, selects in VARIANTS:
            found = [
                run(name, replay, selects, few=few, seed=seed, target=options.target) for seed in range(options.seeds)
            ]
            share, steps, responses = map(statistics.mean, zip(*found, strict=True))
            select = "greso" if selects else "off"
            print(f"{name:10}{replay:8.2f}{select:>8}{share:13.2f}{steps:8.0f}{responses:11,.0f}", flush=True)


if __name__ == "__main__":
    main()
