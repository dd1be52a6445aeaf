"""Builds the scenario that replays a recorded run. Step times are fitted to some of its steps; lengths and rewards
are as recorded.

Fitted: the times of engine steps, training, pulls, rewards and checkpoints. Taken from the record: the responses and
their lengths, the groups that were replaced, and when each worker joined, became ready, was warned and was lost.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from windfall.controller.rollout.stream import seed_of
from windfall.envs.base import HELD_OUT
from windfall.errors import WindfallError
from windfall.sim.calibrate import event_log
from windfall.sim.core.draws import MeasuredLengths
from windfall.sim.core.scenario import MachineKind, Scenario, scaled, with_keys
from windfall.sim.core.token_schedule import id_token_of
from windfall.sim.machines import market
from windfall.sim.machines.env import SimEnv
from windfall.sim.replay.log import Record
from windfall.step_time import StepTime
from windfall.types import LOCAL, Feedback, Task, Turn

Fit = Literal["first-half", "all"]
FITS: tuple[Fit, ...] = ("first-half", "all")
SKIP = 2
"""Number of first steps that are left out of the figures if all steps are fitted: rates are still being measured."""
MIN_FITTED_STEPS = 3
"""Minimum number of steps that a prediction is fitted to. Fewer do not show how much single steps vary."""
EXACT_TOKENS = 256
"""If the median response has about this many tokens or fewer, responses are simulated token by token; otherwise the
median response is simulated in about this many granules."""


class RecordedLengths:
    """Recorded response lengths. Lengths of responses that are not in the log are drawn from those that are."""

    def __init__(self, record: Record) -> None:
        seed = record.recipe.run.seed
        self._by_seed = {
            seed_of(seed, task, sibling): length
            for task, row in record.lengths.items()
            for sibling, length in enumerate(row)
            if length  # 0: it was dropped because it was too old
        }
        self._seed = seed
        self._evals = list(record.evals)
        all_lengths = sorted(self._by_seed.values())
        self._others = MeasuredLengths(lengths=all_lengths)
        self.median = all_lengths[len(all_lengths) // 2]
        self._held_out: dict[int, int] = {}
        self.next_eval()

    def draw(self, seed: int, group: int = 0) -> int:
        length = self._by_seed.get(seed) or self._held_out.get(seed)
        return max(1, length) if length else self._others.draw(seed, group)

    def next_eval(self) -> None:
        """Held-out tasks now get the lengths of the next evaluation."""
        rows = self._evals.pop(0) if self._evals else ()
        self._held_out = {seed_of(self._seed, HELD_OUT + n, 0): length for n, length in enumerate(rows)}


class RecordedEnv(SimEnv):
    """Gives rewards by which the same groups are kept or replaced as in the recorded run."""

    def __init__(self, record: Record, reward_s: float) -> None:
        super().__init__(seed=record.recipe.run.seed, reward_mean=0.0, reward_s=reward_s)
        self._replaced = record.replaced
        self._run_seed = record.recipe.run.seed

    async def feedback(self, task: Task, turns: Sequence[Turn]) -> Feedback:
        await super().feedback(task, turns)
        index = int(str(task.prompt))
        first = id_token_of(seed_of(self._run_seed, index, 0))
        return Feedback(reward=float(index not in self._replaced and turns[-1].text == str(first)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitted:
    services: Mapping[str, StepTime]
    pulls: event_log.Pulls
    reward_s: float
    steps: int
    """Number of first steps that the times are fitted to."""
    skip: int
    """Number of first steps that are left out of the figures."""
    notes: tuple[str, ...]


def fitted(record: Record, fit: Fit) -> Fitted:
    count = len(record.steps)
    if fit == "first-half" and count // 2 < MIN_FITTED_STEPS:
        raise WindfallError(
            f"the run completed {count} steps, and a prediction needs {2 * MIN_FITTED_STEPS}: "
            f"{MIN_FITTED_STEPS} to fit, the others to predict",
            where="the log",
            fix="Let the run complete more steps, or fit to all of them with --fit all.",
        )
    upto, skip = (count // 2, count // 2) if fit == "first-half" else (count, min(SKIP, count - 1))
    steps, until_s = record.steps[:upto], record.steps[upto - 1]["t"]
    trained = event_log.training(record.events, [e["step"] for e in steps])
    if trained is None:
        raise WindfallError("no step trained on anything", where="the log", fix="Fit to more steps with --fit all.")
    measured, notes = event_log.services(steps, trained), []
    kinds = {worker.kind for worker in record.workers}
    if not measured:
        raise WindfallError("the log has no step times", where="the log", fix="Let the run complete more steps.")
    for kind in sorted(kinds - set(measured)):
        measured[kind] = _similar(kind, measured)
        notes.append(f"{kind}: nothing measured in the fitted steps; assumed to be like other workers")
    if LOCAL not in measured:  # its engine is never used; only its training times count
        measured[LOCAL] = replace(next(iter(measured.values())), **trained._asdict())
    return Fitted(
        services=measured,
        pulls=event_log.pulls(record.events, until_s),
        steps=upto,
        skip=skip,
        notes=tuple(notes),
        reward_s=statistics.mean(e["reward_s"] for e in steps),
    )


def _similar(kind: str, measured: Mapping[str, StepTime]) -> StepTime:
    """The times of the same lease kind and device at another price, if measured; otherwise of the slowest worker."""
    same = [s for k, s in measured.items() if k.partition(" at $")[0] == kind.partition(" at $")[0]]
    others = [s for k, s in measured.items() if k != LOCAL]
    return max(same or others or list(measured.values()), key=lambda s: s.fixed_s)


def build_scenario(record: Record, fitted: Fitted, lengths: RecordedLengths) -> Scenario:
    """The scenario of the recorded run with fitted machines. A ReplayedFleet provides its workers."""
    recipe, s = record.recipe, record.recipe.sim
    until_s = record.steps[fitted.steps - 1]["t"]
    granule = s.granule or max(1, round(lengths.median / EXACT_TOKENS))
    prompts = statistics.mean(e["prompt_tokens"] for e in record.steps)
    saves = [e for e in record.events if (e["kind"], e["name"]) == ("span", "checkpoint") and e["t"] <= until_s]
    sim = {
        "prompt_tokens": max(1, round(prompts)),
        "granule": granule,
        "skip_steps": fitted.skip,
        "seconds": 0.0,
        "save_s": statistics.mean(e["s"] for e in saves) if saves else 0.0,
        "reward_s": fitted.reward_s,
        "trainer_mean_up_s": 0.0,
        "controller_mean_up_s": 0.0,
    }
    run, train = {"steps": len(record.steps)}, {"micro_tokens": record.micro_tokens}
    real = with_keys(recipe, {"sim": sim, "run": run, "train": train})
    trainer = fitted.services[LOCAL]
    step = next((v for k, v in fitted.services.items() if k != LOCAL), trainer)
    prices = market.constant(recipe.trace.price_usd_per_h)
    worker = MachineKind(device="replayed", service=step, slots=s.worker_slots, kv_tokens=0, prices=prices)
    share = recipe.rollout.groups * recipe.rollout.group_size / (1 + len({worker.name for worker in record.workers}))
    return Scenario(
        recipe=scaled(real, granule),
        real=real,
        granule=granule,
        quantum_s=step.step_s(max(1.0, share)) * granule if granule > 1 else 0.0,
        trainer=trainer,
        worker=worker,
        kinds=(worker,),
        lengths=lengths,
        changes=(),
        trace_s=float("inf"),
    )
