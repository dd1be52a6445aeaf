"""From a recipe and its [sim] section to what a simulation is made of. Refuses what is wrong before any time passes."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from itertools import chain, repeat
from pathlib import Path

from windfall import config
from windfall.config import Recipe
from windfall.errors import WindfallError, nearest
from windfall.events.log import read
from windfall.fleet import trace
from windfall.fleet.trace_formats import Change
from windfall.sim.calibrate import event_log
from windfall.sim.core.service import Lengths, Listed, Service
from windfall.sim.core.token_schedule import Drawn
from windfall.sim.machines import market
from windfall.sim.machines.decode import simulated
from windfall.sim.machines.market import MarketRates, Prices

STEPS_PER_MEDIAN = 32
"""Simulated tokens of a typical response, unless the recipe says otherwise."""
TRACE_S = 30 * 86400.0
DRAWN = 10_000
"""Stays in a trace that is drawn, for a simulation without a limit in time."""
MICRO_TOKENS = 16384
"""Where the recipe lets the trainer choose."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineKind:
    """What a worker's machine is like."""

    device: str
    service: Service
    slots: int
    kv_tokens: int
    prices: Prices


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    recipe: Recipe
    """As the controller gets it: its token limits are in simulated tokens."""
    real: Recipe
    """As it was written."""
    granule: int
    quantum_s: float
    """Workers tell what they made at multiples of this: about as long as a granule takes. 0: exact."""
    trainer: Service
    worker: MachineKind
    """Of workers that stay."""
    kinds: tuple[MachineKind, ...]
    """Machines of the trace are of these, in turn."""
    lengths: Drawn
    changes: tuple[Change, ...]
    drawn_s: float
    """So long a trace was drawn; a simulation must not go on after it. Of a file: what is up at its end stays up."""


def build(recipe: Recipe) -> Scenario:
    s, t = recipe.sim, recipe.trace
    granule = s.granule or max(1, round(s.median_tokens / STEPS_PER_MEDIAN))
    if s.prices_file is not None and not t.nodes:
        raise WindfallError("prices of machines that never come", where="sim.prices_file", fix="Set trace.nodes.")
    if not recipe.fleet.local and not (t.nodes or recipe.fleet.workers):
        raise WindfallError(
            "nobody would ever generate: fleet.local is off, and there are no workers", where="fleet",
            fix="Set trace.nodes or fleet.workers.",
        )  # fmt: skip
    prices = market.prices(s.prices_file) if s.prices_file else market.constant(t.price_usd_per_h)
    worker = MachineKind(
        device="simulated", service=service(s.worker or s.trainer, "sim.worker"), slots=s.worker_slots,
        kv_tokens=s.worker_kv_tokens, prices=prices,
    )  # fmt: skip
    kinds = tuple(chain.from_iterable(repeat(_kind(k, prices), k.share) for k in s.kinds)) or (worker,)
    return Scenario(
        recipe=scaled(recipe, granule), real=recipe, granule=granule,
        quantum_s=min(_quantum_s(recipe, k) for k in kinds) * granule if granule > 1 else 0.0,
        trainer=service(s.trainer, "sim.trainer"), worker=worker, kinds=kinds,
        lengths=_lengths(s), changes=tuple(changes(recipe)),
        drawn_s=math.inf if t.file or not t.nodes or s.seconds else _length_s(recipe) / t.speedup,
    )  # fmt: skip


def _kind(said: config.SimKind, prices: Prices) -> MachineKind:
    return MachineKind(
        device=said.name, service=service(said.worker, f"sim.kinds, {said.name}"), slots=said.slots,
        kv_tokens=said.kv_tokens,
        prices=market.constant(said.price_usd_per_h) if said.price_usd_per_h else prices,
    )  # fmt: skip


def scaled(recipe: Recipe, granule: int) -> Recipe:
    """What counts in tokens, in simulated ones."""
    rollout, train = recipe.rollout, recipe.train
    micro = train.micro_tokens or MICRO_TOKENS
    return recipe.model_copy(
        update={
            "rollout": rollout.model_copy(update={"max_tokens": simulated(rollout.max_tokens, granule)}),
            "train": train.model_copy(update={"micro_tokens": max(1, round(micro / granule))}),
        }
    )


def service(said: dict[str, float], where: str) -> Service:
    """
    >>> service({"fixed_s": 0.01, "each_s": 0.0001}, "sim.worker").step_s(100)
    0.02
    """
    known = [f.name for f in fields(Service)]
    for name, value in said.items():
        if name not in known:
            raise WindfallError(f"unknown key {name!r}", where=where, fix=nearest(name, known))
        if not (math.isfinite(value) and value >= 0):
            raise WindfallError(f"{name} is {value}", where=where, fix="Use seconds, 0 or more.")
    missing = [n for n in ("fixed_s", "each_s") if not said.get(n)]
    if missing:
        fix = "`windfall sim calibrate` prints them from a measurement; docs/sim.md says what they mean."
        raise WindfallError(f"{' and '.join(missing)} must be above 0", where=where, fix=fix)
    if where == "sim.trainer" and not said.get("train_s"):
        raise WindfallError("train_s must be above 0", where=where, fix="Give the seconds of one trained token.")
    return Service(**said)


def changes(recipe: Recipe) -> list[Change]:
    """What the recipe's trace does, in seconds of the simulation."""
    t, s = recipe.trace, recipe.sim

    def generate() -> list[Change]:
        rates = MarketRates(
            nodes=t.nodes, mean_up_s=t.mean_up_s, mean_down_s=t.mean_down_s, arrivals_per_h=s.arrivals_per_h,
            bursts_per_h=s.bursts_per_h, burst_share=s.burst_share, day_s=s.day_s,
        )  # fmt: skip
        if s.market == "poisson" and not s.arrivals_per_h:
            fix = "Say how many machines are given an hour."
            raise WindfallError("no machine would ever come", where="sim.arrivals_per_h", fix=fix)
        # With the run's seed in it: several seeds of a simulation are several traces.
        return market.generate(s.market, rates, seconds=_length_s(recipe), seed=t.seed + 7919 * recipe.run.seed)

    found = trace.resolve(nodes=t.nodes, file=t.file, start_s=t.start_s, generate=generate)
    return [Change(at_s=c.at_s / t.speedup, node=c.node, up=c.up) for c in found]


def _length_s(recipe: Recipe) -> float:
    """Of a trace that is drawn: what the simulation is limited to, or what so many changes are enough for."""
    t = recipe.trace
    enough_s = DRAWN * (t.mean_up_s + t.mean_down_s) / max(1, t.nodes)
    return recipe.sim.seconds * t.speedup or min(TRACE_S, enough_s)


def _quantum_s(recipe: Recipe, kind: MachineKind) -> float:
    """A typical engine step of a worker that has its part of a step's responses."""
    o = recipe.rollout
    share = o.groups * o.group_size / (1 + recipe.fleet.workers + recipe.trace.nodes)
    return kind.service.step_s(max(1.0, min(kind.slots, share)))


def _lengths(s: config.Sim) -> Drawn:
    if s.lengths_file is None:
        return Lengths(median=s.median_tokens, sigma=s.sigma, alike=s.alike)
    return Listed(lengths=read_lengths(s.lengths_file), alike=s.alike)


def read_lengths(path: Path) -> tuple[int, ...]:
    """A file with a response's length per line, or the event log of a run."""
    fix = "One whole number above 0 per line, or events.jsonl of a run."
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        if lines and lines[0].startswith("{"):
            log = read(path)
            granule = next((e["granule"] for e in log if "granule" in e), 1)
            found = sorted(n * granule for e in event_log.steps_of(log) for row in e["lengths"] for n in row)
        else:
            found = sorted(int(line) for line in lines)
    except OSError as e:
        raise WindfallError(f"cannot read the lengths: {e.strerror}", where=str(path), fix="Check the path.") from e
    except (ValueError, KeyError, TypeError) as e:
        raise WindfallError(f"no list of lengths: {e}", where=str(path), fix=fix) from e
    if not found or found[0] < 1:
        raise WindfallError("no list of lengths: it is empty, or one is below 1", where=str(path), fix=fix)
    return tuple(found)
