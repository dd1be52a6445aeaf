"""Builds the scenario of a simulation from a recipe with its [sim] section. Rejects wrong values before the start."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from windfall.controller.assembly import Rules
from windfall.errors import WindfallError, nearest
from windfall.events.log import read
from windfall.providers import trace
from windfall.providers.trace_formats import Change
from windfall.recipe.sections import Recipe
from windfall.sim.calibrate import event_log
from windfall.sim.core.draws import LogNormalLengths, MeasuredLengths, SessionShape
from windfall.sim.core.token_schedule import LengthDistribution, PolicyTokens
from windfall.sim.machines.decode import simulated
from windfall.sim.section import Sim, SimKind, SimPolicy
from windfall.step_time import StepTime
from windfall.types import policy_of

STEPS_PER_MEDIAN = 32
"""Number of simulated tokens in a response of median length, unless the recipe sets `sim.granule`."""
TRACE_S = 30 * 86400.0
"""Longest trace, in seconds."""
GENERATED_STAYS = 10_000
"""Number of machine stays in a generated trace if the simulation has no time limit."""
ONE_TURN = SessionShape()
OWN_RULES = Rules()
MICRO_TOKENS = 16384
"""Micro-batch size in tokens if the recipe lets the trainer choose."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineKind:
    """One type of worker machine."""

    device: str
    service: StepTime
    slots: int
    kv_tokens: int
    usd_per_h: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedPolicy(PolicyTokens):
    base: str
    trainer: StepTime


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    recipe: Recipe
    """The recipe that the controller gets. Its token limits are in simulated tokens."""
    real: Recipe
    """The recipe as written, in real tokens."""
    granule: int
    """Real tokens that one simulated token stands for."""
    quantum_s: float
    """Workers report tokens at multiples of this time, about as long as a granule takes. 0: when a response ends."""
    policies: Mapping[str, SimulatedPolicy]
    """By name, the first one first."""
    base_services: Mapping[str, StepTime]
    """By base: step times of workers that have it, if they differ from those of `worker`."""
    worker: MachineKind
    """The kind of machine of workers that stay for the whole run."""
    kinds: tuple[MachineKind, ...]
    """Kinds of the machines in the trace, assigned in turn."""
    changes: tuple[Change, ...]
    trace_s: float
    """Length of the generated trace in seconds; the simulation must not run longer. inf for a trace from a file:
    machines that are up at its end stay up."""
    sessions: SessionShape = ONE_TURN
    rules: Rules = OWN_RULES
    """What the controller decides by."""


def build(recipe: Recipe) -> Scenario:
    s, t = recipe.sim, recipe.trace
    _check_policies(recipe)
    views = {name: of_policy(s, name) for name in recipe.names()}
    granule = s.granule or max(1, round(min(view.median_tokens for view in views.values()) / STEPS_PER_MEDIAN))
    bases = {name: base for base, names in recipe.bases().items() for name in names}
    for name in recipe.fleet.sources:
        fix = "Remove the section here, and say with fleet.workers or [trace] which workers there are."
        raise WindfallError("workers that a run starts elsewhere are not simulated", where=f"fleet.{name}", fix=fix)
    if not recipe.fleet.local and not (t.nodes or recipe.fleet.workers):
        what = "nothing could be generated: fleet.local is off, and there are no workers"
        raise WindfallError(what, where="fleet", fix="Set trace.nodes or fleet.workers.")
    worker = MachineKind(
        device="simulated", service=service(s.worker or s.trainer, "sim.worker"), slots=s.worker_slots,
        kv_tokens=s.worker_kv_tokens, usd_per_h=t.price_usd_per_h,
    )  # fmt: skip
    kinds = tuple(chain.from_iterable(repeat(_kind(k, t.price_usd_per_h), k.share) for k in s.kinds)) or (worker,)
    return Scenario(
        recipe=scaled(recipe, granule), real=recipe, granule=granule,
        quantum_s=min(_quantum_s(recipe, k) for k in kinds) * granule if granule > 1 else 0.0,
        policies={name: _policy(recipe, name, view, bases[name]) for name, view in views.items()},
        base_services={
            bases[name]: service(view.worker, f"sim.policies.{name}.worker")
            for name, view in views.items() if view.worker != s.worker
        },
        worker=worker, kinds=kinds, changes=tuple(changes(recipe)), sessions=sessions(s, recipe.names()),
        trace_s=math.inf if t.file or not t.nodes or s.seconds else _trace_length_s(recipe) / t.speedup,
    )  # fmt: skip


def of_policy(s: Sim, policy: str) -> Sim:
    """The section as this policy sees it: with the keys of its own section."""
    own = s.policies.get(policy, SimPolicy())
    services = {"trainer": {**s.trainer, **own.trainer}, "worker": {**s.worker, **own.worker}}
    return s.model_copy(update=own.model_dump(exclude_none=True) | services)


def _policy(recipe: Recipe, name: str, own: Sim, base: str) -> SimulatedPolicy:
    """`own`: the section [sim] as the policy sees it."""
    where = f"sim.policies.{name}.trainer" if recipe.sim.trainer != own.trainer else "sim.trainer"
    return SimulatedPolicy(
        base=base, trainer=service(own.trainer, where), lengths=_lengths(own), prompt_tokens=own.prompt_tokens,
        max_tokens=recipe.of(name).rollout.max_tokens,
    )  # fmt: skip


def _check_policies(recipe: Recipe) -> None:
    recipe.refuse_slots()
    s, names = recipe.sim, recipe.names()
    roles = [policy_of(role) for role, _ in s.script]
    for where, given, known in (("sim.policies", s.policies, recipe.policies), ("sim.script", roles, names)):
        for name in given:
            if name not in known:
                raise WindfallError(f"unknown policy {name!r}", where=where, fix=nearest(name, known))
    silent = [name for name in names if roles and name not in roles and recipe.is_trained(name)]
    if silent:
        fix = "Add a role of this policy, or set `frozen` for it."
        raise WindfallError(f"{silent[0]!r} is trained, but says nothing", where="sim.script", fix=fix)
    if (s.turns > 1 or s.script) and any(recipe.of(name).rollout.turn_tokens for name in names):
        fix = "Set it to 0, and let sim.median_tokens be the length of a turn."
        raise WindfallError("turns that reach a limit are not simulated", where="rollout.turn_tokens", fix=fix)
    if s.turns > 1 and (s.script or recipe.policies):
        raise WindfallError("sim.turns is for one role", where="sim", fix="Give all turns in sim.script.")
    if s.kinds and any(own.worker for own in s.policies.values()):
        fix = "Remove sim.kinds or `worker` of the policies."
        raise WindfallError("machines of a kind have the same speed for all policies", where="sim.policies", fix=fix)
    for base, policies in recipe.bases().items():
        if any(of_policy(s, name).worker != of_policy(s, base).worker for name in policies):
            fix = f"Give {' and '.join(policies)} the same `worker`: one engine has all of them."
            raise WindfallError("policies on one base differ in their workers", where=f"sim.policies.{base}", fix=fix)


def sessions(s: Sim, policies: Sequence[str] = ("",)) -> SessionShape:
    return SessionShape(
        script=tuple(s.script) or tuple((name, 1.0) for name in policies if name),
        turns=s.turns, env_s=s.env_s, env_sigma=s.env_sigma, observation_tokens=s.observation_tokens,
        observation_sigma=s.observation_sigma,
    )  # fmt: skip


def _kind(kind: SimKind, usd_per_h: float) -> MachineKind:
    return MachineKind(
        device=kind.name,
        service=service(kind.worker, f"sim.kinds, {kind.name}"),
        slots=kind.slots,
        kv_tokens=kind.kv_tokens,
        usd_per_h=kind.price_usd_per_h or usd_per_h,
    )


def with_keys(recipe: Recipe, sections: Mapping[str, Mapping[str, Any]]) -> Recipe:
    """The recipe with these keys, by section. The values are not validated."""
    new = {name: getattr(recipe, name).model_copy(update=dict(keys)) for name, keys in sections.items()}
    return recipe.model_copy(update=new)


def scaled(recipe: Recipe, granule: int) -> Recipe:
    """Convert the recipe's token limits from real to simulated tokens."""

    def limits(view: Recipe) -> dict[str, dict[str, int]]:
        micro_tokens = max(1, round((view.train.micro_tokens or MICRO_TOKENS) / granule))
        max_tokens = simulated(view.rollout.max_tokens, granule)
        turn_tokens = view.rollout.turn_tokens and simulated(view.rollout.turn_tokens, granule)
        return {
            "rollout": {"max_tokens": max_tokens, "turn_tokens": turn_tokens},
            "train": {"micro_tokens": micro_tokens},
        }

    policies = {}
    for name, own in recipe.policies.items():
        keys = {section: {**getattr(own, section), **more} for section, more in limits(recipe.of(name)).items()}
        policies[name] = own.model_copy(update=keys)
    return with_keys(recipe, limits(recipe)).model_copy(update={"policies": policies})


def service(keys: dict[str, float], where: str) -> StepTime:
    """Build and check the service times of one machine.

    >>> service({"fixed_s": 0.01, "each_s": 0.0001}, "sim.worker").step_s(100)
    0.02
    """
    for name, value in keys.items():
        if name not in StepTime.KEYS:
            raise WindfallError(f"unknown key {name!r}", where=where, fix=nearest(name, StepTime.KEYS))
        if not (math.isfinite(value) and value >= 0):
            raise WindfallError(f"{name} is {value}", where=where, fix="Use 0 or more seconds.")
    missing = [n for n in ("fixed_s", "each_s") if not keys.get(n)]
    if missing:
        fix = "`windfall sim calibrate` prints them from a measurement; docs/sim.md explains them."
        raise WindfallError(f"{' and '.join(missing)} must be above 0", where=where, fix=fix)
    if where.endswith("trainer") and not keys.get("train_s"):
        raise WindfallError("train_s must be above 0", where=where, fix="Give the seconds per trained token.")
    return StepTime(**keys)


def changes(recipe: Recipe) -> list[Change]:
    """The changes of the recipe's trace, in seconds of the simulation."""
    t = recipe.trace

    def generate() -> list[Change]:
        # The run's seed is part of the trace's seed, so each seed of a simulation gets its own trace.
        seed = t.seed + 7919 * recipe.run.seed
        return list(_generated(t.nodes, t.mean_up_s, t.mean_down_s, _trace_length_s(recipe), seed))

    events = trace.resolve(nodes=t.nodes, file=t.file, start_s=t.start_s, generate=generate)
    if t.speedup == 1:
        return events
    return [Change(at_s=c.at_s / t.speedup, node=c.node, up=c.up) for c in events]


@functools.lru_cache(maxsize=16)
def _generated(nodes: int, mean_up_s: float, mean_down_s: float, seconds: float, seed: int) -> tuple[Change, ...]:
    """A generated trace. It is kept, because runs that are compared have the same one."""
    return tuple(trace.synthetic(nodes=nodes, mean_up_s=mean_up_s, mean_down_s=mean_down_s, seconds=seconds, seed=seed))


def _trace_length_s(recipe: Recipe) -> float:
    """Length of a generated trace in seconds: the time limit of the simulation, or enough for GENERATED_STAYS."""
    t = recipe.trace
    enough_s = GENERATED_STAYS * (t.mean_up_s + t.mean_down_s) / max(1, t.nodes)
    return recipe.sim.seconds * t.speedup or min(TRACE_S, enough_s)


def _quantum_s(recipe: Recipe, kind: MachineKind) -> float:
    """Seconds of a typical engine step of a worker that has its share of a step's responses."""
    o = recipe.rollout
    share = o.groups * o.group_size / (1 + recipe.fleet.workers + recipe.trace.nodes)
    return kind.service.step_s(max(1.0, min(kind.slots, share)))


def _lengths(s: Sim) -> LengthDistribution:
    if s.lengths_file is None:
        return LogNormalLengths(median=s.median_tokens, sigma=s.sigma, alike=s.alike)
    return MeasuredLengths(lengths=read_lengths(s.lengths_file), alike=s.alike)


def read_lengths(path: Path) -> tuple[int, ...]:
    """Read response lengths from a text file with one length per line, or from the event log of a run."""
    fix = "Give a file with one whole number above 0 per line, or events.jsonl of a run."
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        if lines and lines[0].startswith("{"):
            log = read(path)
            granule = next((e["granule"] for e in log if "granule" in e), 1)
            lengths = sorted(n * granule for e in event_log.steps_of(log) for row in e["lengths"] for n in row)
        else:
            lengths = sorted(int(line) for line in lines)
    except OSError as e:
        raise WindfallError(f"cannot read the lengths: {e.strerror}", where=str(path), fix="Check the path.") from e
    except (ValueError, KeyError, TypeError) as e:
        raise WindfallError(f"not a list of lengths: {e}", where=str(path), fix=fix) from e
    if not lengths or lengths[0] < 1:
        raise WindfallError("not a list of lengths: it is empty, or one is below 1", where=str(path), fix=fix)
    return tuple(lengths)
