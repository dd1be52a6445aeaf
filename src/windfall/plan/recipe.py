"""From a plan to a recipe that runs, and to a simulation of it with the product's own controller.

The written recipe carries the plan's speeds in [sim], so `windfall plan --check RUN` can compare them with what the run
measured. Machines other than the trainer's first one are started by their owner; `commands` prints how.

In the simulation every replica is one worker. Workers of reserved machines stay; those of spot machines come and go by
the market's rates, as `windfall sim` does it.
"""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from windfall import config
from windfall.config import Recipe
from windfall.errors import WindfallError
from windfall.events.log import read
from windfall.fleet.trace_formats import Change
from windfall.plan.cluster import Machine
from windfall.plan.request import Request
from windfall.plan.scoring import Placed, Plan
from windfall.sim.calibrate import event_log
from windfall.sim.core import run, scenario
from windfall.sim.core.scenario import with_keys
from windfall.sim.report.figures import figures

PORT = 29400
SIM_STEPS, SIM_SKIP = 6, 2
"""Steps that the figures cover, and steps before them. As many steps as the staleness follow, in which nothing is
generated for later steps."""
SIM_TOKENS = 16
"""Simulated tokens of a response of median length."""
TRACE_S = 14 * 86400.0


def trainer_keys(plan: Plan) -> dict[str, float]:
    """The trainer's machine for [sim]: the keys of sim/core/service.py. Its own engine is that of one replica."""
    engine, work = plan.replicas[0][1].service, plan.work
    train_s = max(1e-12, plan.train_s - plan.training.update_s) / work.tokens
    return {**_engine_keys(engine), "train_s": train_s, "update_s": plan.training.update_s}


def _engine_keys(service: Any) -> dict[str, float]:
    names = ("fixed_s", "each_s", "context_s", "prefill_s", "over_batch", "over_s")
    return {name: value for name in names if (value := getattr(service, name))}


def sim_keys(plan: Plan, request: Request) -> dict[str, Any]:
    """Section [sim]."""
    work, links = plan.work, request.cluster.links
    first = plan.replicas[0][1]
    sources = max(1, sum(1 for p in plan.placed if p.training))
    return {
        "trainer": trainer_keys(plan), "worker": _engine_keys(first.service), "worker_slots": first.slots,
        "trainer_slots": first.slots, "worker_kv_tokens": first.kv_tokens, "weights_bytes": float(work.weights_bytes),
        "egress_bytes_per_s": sources * links.across_types, "ingress_bytes_per_s": links.across_types,
        "prompt_tokens": work.prompt_tokens, "median_tokens": work.median_tokens, "sigma": work.sigma,
        "reward_s": work.reward_s,
    }  # fmt: skip


def write(plan: Plan, request: Request, base: Recipe | None) -> Recipe:
    """The recipe that runs this plan; raises WindfallError if an address is missing."""
    work, training = plan.work, [p for p in plan.placed if p.training]
    first = training[0]
    others = any(p.replicas for p in plan.placed if p is not first)
    base = base or Recipe()
    train: dict[str, Any] = {"ranks": first.training, "machines": len(training)}
    fleet: dict[str, Any] = {
        "local": False, "workers": len(first.replicas), "workers_max": 0, "kind": "reserved",
        "trainer_price_usd_per_h": round(sum(p.training * p.machine.kind.usd_per_h for p in training), 4),
    }  # fmt: skip
    if first.replicas:
        fleet["price_usd_per_h"] = round(first.replicas[0] * first.machine.kind.usd_per_h, 4)
    if len(training) > 1 or others:
        address = first.machine.address or base.fleet.host
        if address in ("127.0.0.1", "localhost"):
            fix = "Set address of that machine in the cluster file, or fleet.host in the recipe."
            what = "the plan uses several machines, and the address of the trainer's first one is not known"
            raise WindfallError(what, where=f"machine {first.machine.name}", fix=fix)
        fleet["host"] = address
        if len(training) > 1:
            train["rendezvous"] = base.train.rendezvous or f"{address}:{PORT}"
    data = base.model_dump(exclude_none=True)
    largest = max(engine.slots for _, engine, _, _ in plan.replicas)
    for section, keys in {
        "rollout": {"staleness": work.staleness}, "train": train, "fleet": fleet,
        "trace": {"nodes": 0}, "engine": {"max_running": largest}, "sim": sim_keys(plan, request),
    }.items():  # fmt: skip
        data[section].update(keys)
    return config.parse(data, where="the planned recipe")


def commands(plan: Plan) -> Iterator[str]:
    """What to start on which machine, besides the run itself."""
    first = next(p for p in plan.placed if p.training)
    for p in plan.placed:
        if p is not first and p.training:
            yield f"{p.machine.name}: windfall ranks --join URL --token FILE --ranks {p.training}"
        if p is not first and p.replicas:
            yield f"{p.machine.name}: {_worker_command(p, p.machine)}"


def _worker_command(p: Placed, machine: Machine) -> str:
    gpus = ",".join(str(p.training + n) for n in range(len(p.replicas)))
    price = f"{machine.kind.usd_per_h:g}"
    return f"windfall worker --join URL --token FILE --gpus {gpus} --lease {machine.lease} --price {price}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulated:
    tok_per_s: float
    """Trained response tokens per second."""
    trainer_idle: float
    workers_idle: float
    step_s: tuple[float, ...]


def simulate(plan: Plan, request: Request, base: Recipe | None = None, *, measured: int = SIM_STEPS) -> Simulated:
    """Figures of the plan over `measured` steps, run by the product's controller in virtual time."""
    steps = SIM_SKIP + plan.work.staleness + measured
    work = plan.work
    recipe = with_keys(base or Recipe(), {
        "run": {"steps": steps, "name": "plan"}, "eval": {"tasks": 0}, "checkpoint": {"every": 100_000},
        "algorithm": {"kl": 0.0}, "trace": {"nodes": sum(n for _, _, n, _ in plan.replicas), "file": None},
        "rollout": {
            "groups": work.groups, "group_size": work.group_size, "max_tokens": work.max_tokens,
            "staleness": work.staleness,
        },
        "train": {"minibatches": 1, "micro_tokens": max(plan.training.pack_tokens, 1)},
        "fleet": {
            "local": False, "workers": 0, "workers_max": 0, "gone_s": 60.0, "suspect_s": 30.0, "heartbeat_s": 10.0,
            "trainer_price_usd_per_h": sum(p.training * p.machine.kind.usd_per_h for p in plan.placed),
        },
        "sim": {
            **sim_keys(plan, request), "boot_s": 0.0, "skip_steps": SIM_SKIP,
            "granule": max(1, round(work.median_tokens / SIM_TOKENS)), "lengths_file": None, "prices_file": None,
            "kinds": [
                config.SimKind(
                    name=kind.name, share=count, worker=_engine_keys(engine.service), slots=engine.slots,
                    kv_tokens=engine.kv_tokens, price_usd_per_h=engine.tp * kind.usd_per_h,
                )
                for kind, engine, count, _ in plan.replicas
            ],
        },
    })  # fmt: skip
    world = scenario.build(recipe)
    world = replace(world, changes=tuple(_changes(plan, request)), trace_s=math.inf)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "events.jsonl"
        done = run.simulate(world, log)
        whole = figures(log, world, done.stays)
        counted = event_log.steps_of(read(log))[SIM_SKIP : SIM_SKIP + measured]
    seconds = sum(e["s"] for e in counted)
    return Simulated(
        tok_per_s=sum(e["trained"] for e in counted) * world.granule / seconds, trainer_idle=whole.trainer_idle,
        workers_idle=whole.workers_idle, step_s=tuple(e["s"] for e in counted),
    )  # fmt: skip


def _changes(plan: Plan, request: Request) -> list[Change]:
    """All workers are up at the start, in the order of their kinds; spot workers then come and go."""
    start, later = list[Change](), list[Change]()
    market, draw = request.spot, random.Random(0)
    for kind, _, count, _ in plan.replicas:
        for _ in range(count):
            node = f"w{len(start)}"
            start.append(Change(at_s=0.0, node=node, up=True))
            if kind.lease != "spot" or not market.losses_per_h:
                continue
            up_s = 3600 / market.losses_per_h
            down_s = up_s * (1 / max(market.availability, 1e-3) - 1)
            at_s, up = draw.expovariate(1 / up_s), True
            while at_s < TRACE_S and len(later) < 200_000:
                up = not up
                later.append(Change(at_s=at_s, node=node, up=up))
                at_s += max(1.0, draw.expovariate(1 / up_s) if up else draw.expovariate(1 / max(down_s, 1.0)))
    return start + sorted(later, key=lambda c: c.at_s)
