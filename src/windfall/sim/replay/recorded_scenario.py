"""From a recorded run to a simulation of it: services fitted to some of its steps, lengths and rewards as they were.

Fitted are the times of engine steps, training, pulls, rewards and checkpoints. Taken as they were: which responses
there are and how long, which groups were replaced, and when each worker came, was ready, was warned and was gone.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from windfall.envs.base import HELD_OUT
from windfall.errors import WindfallError
from windfall.rollout.groups import seed_of
from windfall.sim.calibrate import event_log
from windfall.sim.core.scenario import MachineKind, Scenario, scaled
from windfall.sim.core.service import Listed, Service
from windfall.sim.core.token_schedule import FIRST_TAG, TAGS
from windfall.sim.machines import market
from windfall.sim.machines.env import SimEnv
from windfall.sim.replay.log import Record
from windfall.types import LOCAL, Feedback, Task, Turn

Fit = Literal["first-half", "all"]
FITS: tuple[Fit, ...] = ("first-half", "all")
SKIP = 2
"""With every step fitted to, the first ones are still left out of the figures: rates are being measured in them."""
FEWEST = 3
"""Steps that a prediction is fitted to, at least: with fewer, nothing is known of how much single steps differ."""
EXACT_TOKENS = 256
"""Responses up to about so long are simulated token by token; longer ones in as many granules."""


class Recorded:
    """Lengths as they were. Of a response that the log does not know: drawn from those it does."""

    def __init__(self, record: Record) -> None:
        seed = record.recipe.run.seed
        self._of = {
            seed_of(seed, task, sibling): length
            for task, row in record.lengths.items()
            for sibling, length in enumerate(row)
        }
        self._seed, self._evals = seed, list(record.evals)
        known = sorted(self._of.values())
        self._else = Listed(lengths=known)
        self.median = known[len(known) // 2]
        self._held_out: dict[int, int] = {}
        self.evaluated()

    def of(self, seed: int, group: int = 0) -> int:
        found = self._of.get(seed) or self._held_out.get(seed)
        return max(1, found) if found else self._else.of(seed, group)

    def evaluated(self) -> None:
        """From here on it is the next evaluation's."""
        rows = self._evals.pop(0) if self._evals else ()
        self._held_out = {seed_of(self._seed, HELD_OUT + n, 0): length for n, length in enumerate(rows)}


class RecordedEnv(SimEnv):
    """Rewards that keep the groups that were kept, and replace those that were replaced."""

    def __init__(self, record: Record, reward_s: float) -> None:
        super().__init__(seed=record.recipe.run.seed, reward_mean=0.0, reward_s=reward_s)
        self._replaced, self._run_seed = record.replaced, record.recipe.run.seed

    async def feedback(self, task: Task, turns: Sequence[Turn]) -> Feedback:
        await super().feedback(task, turns)
        index = int(str(task.prompt))
        first = FIRST_TAG + seed_of(self._run_seed, index, 0) % TAGS
        return Feedback(reward=float(index not in self._replaced and turns[-1].text == str(first)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitted:
    services: Mapping[str, Service]
    pulls: event_log.Pulls
    reward_s: float
    steps: int
    """Fitted to so many, the first ones."""
    skip: int
    """The figures are of the steps after these."""
    notes: tuple[str, ...]


def fitted(record: Record, fit: Fit) -> Fitted:
    count = len(record.steps)
    if fit == "first-half" and count // 2 < FEWEST:
        raise WindfallError(
            f"it completed {count} steps, and a prediction needs {2 * FEWEST}: {FEWEST} to fit to, the rest to predict",
            where="the log", fix="Let the run complete more steps, or see how formulas fit to all of them: --fit all.",
        )  # fmt: skip
    upto, skip = (count // 2, count // 2) if fit == "first-half" else (count, min(SKIP, count - 1))
    steps, until_s = record.steps[:upto], record.steps[upto - 1]["t"]
    trained = event_log.training(record.events, [e["step"] for e in steps])
    if trained is None:
        raise WindfallError("nothing was trained on", where="the log", fix="Fit to more steps: --fit all.")
    found, notes = event_log.services(steps, trained), []
    kinds = {life.kind for life in record.lives}
    if not found:
        raise WindfallError("no step times", where="the log", fix="Was the run longer than a few steps?")
    for kind in sorted(kinds - set(found)):
        found[kind] = _likely(kind, found)
        notes.append(f"{kind}: nothing measured in the steps fitted to; taken to be as others are")
    if LOCAL not in found:  # its engine is never asked: only what training takes counts
        found[LOCAL] = replace(next(iter(found.values())), train_s=trained.train_s, update_s=trained.update_s)
    return Fitted(
        services=found, pulls=event_log.pulls(record.events, until_s), steps=upto, skip=skip, notes=tuple(notes),
        reward_s=statistics.mean(e["reward_s"] for e in steps),
    )  # fmt: skip


def _likely(kind: str, found: Mapping[str, Service]) -> Service:
    """Of the same terms and device at another price, if there is one, else of any worker, the slowest step first."""
    same = [s for k, s in found.items() if k.partition(" at $")[0] == kind.partition(" at $")[0]]
    others = [s for k, s in found.items() if k != LOCAL]
    return max(same or others or list(found.values()), key=lambda s: s.fixed_s)


def world(record: Record, fitted: Fitted, lengths: Recorded) -> Scenario:
    """As the run was, with machines as formulas. Its workers are for a ReplayedFleet to bring."""
    recipe, s = record.recipe, record.recipe.sim
    until_s = record.steps[fitted.steps - 1]["t"]
    granule = s.granule or max(1, round(lengths.median / EXACT_TOKENS))
    prompts = statistics.mean(e["prompt_tokens"] for e in record.steps)
    sim = s.model_copy(
        update={
            "prompt_tokens": max(1, round(prompts)), "granule": granule, "skip_steps": fitted.skip, "seconds": 0.0,
            "save_s": event_log.mean(record.events, "span", "checkpoint", "s", until_s), "reward_s": fitted.reward_s,
            "trainer_mean_up_s": 0.0, "controller_mean_up_s": 0.0,
        }
    )  # fmt: skip
    real = recipe.model_copy(
        update={
            "sim": sim,
            "run": recipe.run.model_copy(update={"steps": len(record.steps)}),
            "train": recipe.train.model_copy(update={"micro_tokens": record.micro_tokens}),
        }
    )
    trainer = fitted.services[LOCAL]
    step = next((v for k, v in fitted.services.items() if k != LOCAL), trainer)
    prices = market.constant(recipe.trace.price_usd_per_h)
    worker = MachineKind(device="replayed", service=step, slots=s.worker_slots, kv_tokens=0, prices=prices)
    share = recipe.rollout.groups * recipe.rollout.group_size / (1 + len({life.name for life in record.lives}))
    return Scenario(
        recipe=scaled(real, granule), real=real, granule=granule,
        quantum_s=step.step_s(max(1.0, share)) * granule if granule > 1 else 0.0, trainer=trainer, worker=worker,
        kinds=(worker,), lengths=lengths, changes=(), drawn_s=float("inf"),
    )  # fmt: skip
