"""From a recipe to the workload for the planner; from a plan to a recipe that runs, and to a simulation of it with the
product's own controller.

The written recipe carries the plan's speeds in [sim], so `windfall plan --check RUN` can compare them with what the run
measured. Machines other than the trainer's first one are started by their owner; `commands` prints how.

Machines of a provider need its section in the recipe, which the plan completes: number of workers, engine, tensor
parallelism, GPUs, terms and price.

In the simulation every replica is one worker, and a lender is a worker that is slower by what it does not lend. Workers
of reserved machines stay. Those of spot machines come and go by the rates of the trace, as `windfall sim` does it;
without a trace they are slower by what boots cost on average.
"""

from __future__ import annotations

import json
import math
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from windfall.engine.vllm import installed
from windfall.errors import WindfallError, install_command
from windfall.events.log import read
from windfall.models import load
from windfall.plan.model.cluster import PROVIDERS, Kind
from windfall.plan.model.workload import VALUE_BYTES, AddedWorkload, Workload, add_up, delta_share, hub_id
from windfall.plan.model.workload import model as find_model
from windfall.plan.search.plan import PlacedMachine, PlanRequest, RunPlan, pull_alone
from windfall.providers.trace_formats import Change
from windfall.recipe.file import parse_recipe
from windfall.recipe.lora import DEFAULT_RANK
from windfall.recipe.sections import Recipe
from windfall.recipe.worker_source import WorkerSource
from windfall.run import worker_sources
from windfall.sim.calibrate import event_log
from windfall.sim.core import run, scenario
from windfall.sim.core.scenario import of_policy, sessions, with_keys
from windfall.sim.report.figures import figures
from windfall.sim.section import SimKind, SimPolicy
from windfall.step_time import StepTime
from windfall.trainer.ranks.rank_budget import ModelShape
from windfall.trainer.ranks.state_layout import moment_bytes
from windfall.types import policy_of

PORT = 29400
SOME_ADDRESS = "192.0.2.1"
"""Stands for the address of a machine that is not known yet (RFC 5737)."""
SIM_STEPS, SIM_SKIP = 5, 2
"""Steps that the figures cover, and steps before them. As many steps as the staleness follow, in which nothing is
generated for later steps."""
SIM_TOKENS = 8
"""Simulated tokens of a response of median length."""
TRACE_S = 14 * 86400.0
AWAY_S = 1e-3
"""Seconds after the start at which spot workers leave that are away on average."""


def _engine_keys(service: StepTime) -> dict[str, float]:
    """An engine for [sim]: the times of a step without those of training."""
    names = ("fixed_s", "each_s", "context_s", "prefill_s", "over_batch", "over_s")
    return {name: value for name in names if (value := asdict(service)[name])}


def sim_keys(plan: RunPlan, request: PlanRequest) -> dict[str, Any]:
    """Section [sim]. The trainer's machine has its own engine if that generates."""
    work, engines = plan.work, plan.engines
    first, trainer = engines[0], plan.own or engines[0]
    train_s = max(1e-12, plan.train_s - plan.training.update_s) / work.trainer_tokens
    # Engines that read a new version from each other have it as late as planned; one alone has all that its link has.
    alone = work.pull_bytes / pull_alone(request, plan.placed)
    together = work.pull_bytes / plan.pull_s if plan.replicas else alone
    return {
        "trainer": {**_engine_keys(trainer.service), "train_s": train_s, "update_s": plan.training.update_s},
        "worker": _engine_keys(first.service),
        "worker_slots": first.slots,
        "trainer_slots": trainer.slots,
        "worker_kv_tokens": first.kv_tokens,
        "weights_bytes": float(work.pull_bytes),
        **(_policy_keys(work) if isinstance(work, AddedWorkload) else {}),
        "boot_s": request.spot.boot_s,
        "egress_bytes_per_s": together,
        "ingress_bytes_per_s": max(together, alone),
        "prompt_tokens": work.prompt_tokens,
        "median_tokens": work.median_tokens,
        "sigma": work.sigma,
        "reward_s": work.reward_s,
    }


def _policy_keys(work: AddedWorkload) -> dict[str, Any]:
    """Keys of [sim] that are there for several policies."""
    own = {
        p.policy: SimPolicy(median_tokens=p.median_tokens, sigma=p.sigma, prompt_tokens=p.prompt_tokens)
        for part in work.parts
        for p in (part.parts if isinstance(part, AddedWorkload) else (part,))
    }
    sizes = {"weights_bytes": float(work.weights_bytes), "adapter_bytes": work.update_bytes / len(own)}
    return {"policies": own, **(sizes if work.one_base and work.adapter_parameters else {})}


LR, ADAPTER_LR = 1e-6, 1e-5
"""Learning rates of a recipe that is made from a model's name: for all weights, and for adapters."""
NOTES = {
    "[env]": "# A stand-in, so that the recipe runs: put your own task here (docs/environments.md).",
    "lr = ": f"# A careful start: {LR:g} for all weights, {ADAPTER_LR:g} for adapters.",
}
"""Comments above these lines of such a recipe."""


def of_model(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of a plan that was asked for with a model's name only: usual sizes, and the user's keys."""
    known = name in load.NAMED or "/" in name or Path(name).is_dir()
    sizes = {f.name: f.default for f in fields(Workload)}
    adapters = any(text.startswith("train.lora") for text in overrides)
    data = {
        "run": {"steps": sizes["steps"]},
        "model": {"path": name if known else hub_id(find_model(name)[0])},
        "rollout": {key: sizes[key] for key in ("groups", "group_size", "max_tokens", "staleness")},
        "train": {"lr": ADAPTER_LR if adapters else LR},
        "sim": {key: sizes[key] for key in ("prompt_tokens", "median_tokens", "sigma")},
    }
    return parse_recipe(data, f"the recipe of {name}", overrides)


def with_notes(text: str) -> str:
    """The recipe of a model's name, with comments on what its user should decide.

    >>> print(with_notes("[env]\\nname = 'arithmetic'"))
    # A stand-in, so that the recipe runs: put your own task here (docs/environments.md).
    [env]
    name = 'arithmetic'
    """
    out: list[str] = []
    for line in text.split("\n"):
        out += [note for start, note in NOTES.items() if line.startswith(start)]
        out.append(line)
    return "\n".join(out)


def recipe_workload(base: Recipe) -> Workload:
    """Lengths are those of [sim]; without that section, a third of `rollout.max_tokens`. Adapters, and weights in
    float32, are pulled whole: nearly every element changes (docs/weights.md)."""
    o, s, lora = base.rollout, base.sim, base.train.lora
    shape = model_shape(base.model.path)
    given = s.model_fields_set
    return Workload(
        shape=shape, groups=o.groups, group_size=o.group_size, max_tokens=o.max_tokens,
        prompt_tokens=s.prompt_tokens, median_tokens=s.median_tokens if "median_tokens" in given else o.max_tokens / 3,
        sigma=s.sigma, staleness=o.staleness, reward_s=s.reward_s, steps=base.run.steps, kl=base.algorithm.kl > 0,
        offload=base.train.offload, moment_bytes=moment_bytes(base.train.optimizer, adapters=lora is not None),
        minibatches=base.train.minibatches,
        context_parallel=base.train.context_parallel, micro_tokens=base.train.micro_tokens,
        delta=1.0 if lora is not None or base.model.dtype == "float32" else delta_share(base.train.lr),
        adapter_parameters=0 if lora is None else _adapter_parameters(shape, lora.rank or DEFAULT_RANK),
        kv_value_bytes=1 if base.engine.kv_dtype == "fp8" else VALUE_BYTES,
    )  # fmt: skip


def run_workload(base: Recipe) -> Workload:
    """The work of all policies. Who speaks how often is in [sim]."""
    base.refuse_slots()
    script = sessions(base.sim, base.names()).script
    if not script:
        return recipe_workload(base)
    said, so_far = dict.fromkeys(base.names(), 0.0), 1.0
    for n, (role, probability) in enumerate(script):
        so_far *= probability if n else 1.0
        said[policy_of(role)] += so_far

    def part(policy: str) -> Workload:
        view = base.of(policy).model_copy(update={"sim": of_policy(base.sim, policy)})
        own = {"policy": policy, "share": said[policy], "trained": base.is_trained(policy)}
        return replace(recipe_workload(view), groups=base.rollout.groups, **own)

    return add_up([add_up([*map(part, names)], one_base=True) for names in base.bases().values()], one_base=False)


def _adapter_parameters(shape: ModelShape, rank: int) -> int:
    """Adapters on all linear layers. Experts have none."""
    wide = (shape.heads + 2 * shape.kv_heads) * shape.head + shape.hidden
    mlp = 0 if shape.experts else 3 * (shape.hidden + shape.intermediate)
    return shape.layers * rank * (4 * shape.hidden + wide + mlp)


def model_shape(path: str) -> ModelShape:
    """The sizes of a model, from its config.json or from the table of known models."""
    if path != "tiny" and not Path(path).expanduser().is_dir():
        return find_model(path)[1]
    load.check_kind(path)
    file = Path(load.resolve(path)) / "config.json"
    try:
        c: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return ModelShape.of(c)
    except (OSError, ValueError, KeyError, TypeError) as e:
        fix = "Only decoders with the sizes of Llama or Qwen can be planned."
        raise WindfallError(f"the sizes of this model cannot be read: {e!r}", where=str(file), fix=fix) from e


def write(plan: RunPlan, request: PlanRequest, base: Recipe, simulated: Simulated | None = None) -> Recipe:
    """The recipe that runs this plan; raises WindfallError if an address, a provider's section or vLLM is missing."""
    training = [p for p in plan.placed if p.training]
    first = training[0]
    train: dict[str, Any] = {"ranks": sum(p.training for p in training) // len(base.bases()), "rendezvous": ""}
    fleet = _fleet(plan, base)
    if len(training) > 1 or any(p.replicas for p in plan.placed if p is not first):
        here = base.fleet.host in ("127.0.0.1", "localhost")
        address = first.machine.address or ("0.0.0.0" if here else base.fleet.host)
        fleet["host"] = address
        if len(training) > 1:
            if address == "0.0.0.0" and not base.train.rendezvous:
                fix = "Give --set fleet.host=10.0.0.5, or set address of that machine in the cluster file."
                what = "the trainer spans several machines, and the address of its first one is not known"
                raise WindfallError(what, where=f"machine {first.machine.name}", fix=fix)
            train["rendezvous"] = base.train.rendezvous or f"{address}:{PORT}"
    engine: dict[str, Any] = {}
    if first.replicas:
        engine["name"] = first.machine.engine if first.machine.engine == "vllm" else base.engine.name
    if first.machine.gpu.worker is None:
        engine["max_running"] = max(e.slots // e.tp if e is plan.own else e.slots for e in plan.engines)
    data = base.model_dump(exclude_none=True)
    for section, keys in {
        "run": {"device": "cpu"} if first.machine.gpu.name == "cpu" else {},
        "rollout": {"staleness": plan.work.staleness},
        "train": train,
        "fleet": fleet,
        "trace": {"nodes": 0},
        "engine": engine,
        "sim": sim_keys(plan, request),
        "plan": plan_keys(plan, simulated),
    }.items():
        data[section].update(keys)
    if first.machine.engine == "vllm" and first.replicas and installed.find() is None:
        fix = f'Install it: {install_command("vllm")}; or set engine = "windfall" for that machine in the cluster file.'
        raise WindfallError("the plan's workers on the trainer's machine need vLLM", where="engine.name", fix=fix)
    return parse_recipe(data, where="the planned recipe")


def _fleet(plan: RunPlan, base: Recipe) -> dict[str, Any]:
    """Section [fleet], with the sections of providers."""
    training = [p for p in plan.placed if p.training]
    first = training[0]
    here = [tp for tp in first.replicas if tp == 1]
    borrowed = sum(len(p.replicas) for p in plan.placed if p.machine.lease == "borrowed")
    fleet: dict[str, Any] = {
        "local": plan.own is not None,
        "workers": len(here),
        "workers_max": 0,
        "kind": "reserved",
        "borrowed_max": borrowed,
        "trainer_price_usd_per_h": round(sum(p.training * p.machine.kind.usd_per_h for p in training), 4),
    }
    if here:
        fleet["price_usd_per_h"] = round(first.machine.kind.usd_per_h, 4)
    for name in PROVIDERS:
        section = base.fleet.sources.get(name)
        found = {(p.machine.kind, tp) for p in plan.placed if p.machine.provider == name for tp in p.replicas}
        if not found:
            if section is not None:
                fleet[name] = None  # the plan uses none of its machines
            continue
        count = sum(len(p.replicas) for p in plan.placed if p.machine.provider == name)
        if error := provider_refusal(name, base):
            raise error
        assert section is not None  # provider_refusal has checked it
        if len(found) > 1:
            what = f"the plan has {len(found)} kinds of workers from {name}; a recipe can have one"
            fix = "Give all machines of this provider the same GPU, terms and engine."
            raise WindfallError(what, where=f"fleet.{name}", fix=fix)
        fleet[name] = {**section.model_dump(exclude_none=True), **_source_keys(name, section, *found.pop(), count)}
    return fleet


def _source_keys(name: str, section: WorkerSource, kind: Kind, tp: int, count: int) -> dict[str, Any]:
    """The keys of a provider's section that follow from the plan."""
    cpu = kind.gpu.name == "cpu"
    keys: dict[str, Any] = {
        "workers": count,
        "workers_max": 0,
        "kind": kind.lease,
        "engine": kind.engine,
        "tensor_parallel": tp,
        "device": "cpu" if cpu else "auto",
        "price_usd_per_h": round(tp * kind.usd_per_h, 4),
    }
    match name:
        case "ray":
            keys["gpus"] = 0 if cpu else float(tp)
        case "kubernetes":
            keys["gpus"] = 0 if cpu else tp
        case "skypilot":
            keys["accelerators"] = [] if cpu else f"{kind.gpu.name}:{tp}"
        case "slurm":
            typed = str(section.model_dump()["gpus"]).rpartition(":")[0]
            keys["gpus"] = "0" if cpu else f"{typed}:{tp}" if typed else str(tp)
    return keys


def provider_refusal(name: str, base: Recipe) -> WindfallError | None:
    """Why no worker can come from this provider: its section or its program is missing. None: they can."""
    if name not in base.fleet.sources:
        fix = f"Add [fleet.{name}] to the recipe; docs/recipes.md has its keys."
        return WindfallError(
            f"the recipe does not say how to start workers with {name}", where=f"fleet.{name}", fix=fix
        )
    only = {other: None for other in base.fleet.sources if other != name}
    try:
        worker_sources.check(with_keys(base, {"fleet": {**only, "host": "0.0.0.0", "max_usd_per_h": 0.0}}))
    except WindfallError as error:
        return error
    return None


def refusal(plan: RunPlan, request: PlanRequest, base: Recipe) -> WindfallError | None:
    """Why this plan cannot run from here: a provider or an engine is missing. Missing addresses are asked for only when
    a recipe is written. None: it can."""
    first = next(p for p in plan.placed if p.training)
    named = replace(first.machine, address=first.machine.address or SOME_ADDRESS)
    placed = tuple(replace(p, machine=named) if p is first else p for p in plan.placed)
    try:
        write(replace(plan, placed=placed), request, base)
    except WindfallError as error:
        return error
    return None


def plan_keys(plan: RunPlan, simulated: Simulated | None) -> dict[str, Any]:
    """Section [plan]."""
    tok_per_s = simulated.tok_per_s if simulated else plan.tok_per_s
    return {
        "name": plan.name,
        "step_s": plan.work.tokens / tok_per_s,
        "tok_per_s": tok_per_s,
        "usd_per_h": plan.usd_per_h,
        "workers": [
            {
                "device": kind.gpu.name,
                "lease": kind.lease,
                "price_usd_per_h": round(engine.tp * kind.usd_per_h, 4),
                "count": count,
                "gpus": engine.tp,
                "batch": float(batch),
                "worker": _engine_keys(engine.service),
            }
            for kind, engine, count, batch in plan.replicas
        ],
    }


def commands(plan: RunPlan, model: str = "MODEL") -> Iterator[str]:
    """What to start on which machine, besides the run itself and the workers of providers."""
    training = [p for p in plan.placed if p.training]
    first = training[0]
    for p in plan.placed:
        if p.training and len(training) > 1:
            nodes = f"--nnodes {len(training)} --node-rank {training.index(p)} --nproc-per-node {p.training}"
            join = "windfall trainer --join URL --token FILE"
            yield f"{p.machine.name}: torchrun {nodes} --master-addr HOST --no-python {join}"
        if p.machine.lease == "borrowed" and p.replicas:
            yield f"{p.machine.name}: windfall serve {model} --lend URL --token FILE"
        elif not p.machine.provider:
            yield from (f"{p.machine.name}: {line}" for line in _worker_commands(p, here=p is first))


def _worker_commands(p: PlacedMachine, *, here: bool) -> Iterator[str]:
    """One command for all engines on one GPU, which the run starts by itself on its own machine; one for each engine
    on several GPUs."""
    machine, at = p.machine, p.training
    terms = f"--join URL --token FILE --engine {machine.engine} --lease {machine.lease}"
    single = [at + n for n in range(p.replicas.count(1))]
    price = f"--price {machine.kind.usd_per_h:g}"
    if single and not here and machine.gpu.name == "cpu":
        yield from (f"windfall worker {terms} {price} --device cpu --threads 1" for _ in single)
    elif single and not here:
        yield f"windfall worker {terms} {price} --gpus {','.join(map(str, single))}"
    at += len(single)
    for tp in p.replicas:
        if tp > 1:
            gpus = ",".join(str(at + n) for n in range(tp))
            price = f"--price {tp * machine.kind.usd_per_h:g}"
            yield f"CUDA_VISIBLE_DEVICES={gpus} windfall worker {terms} {price} --tensor-parallel {tp}"
            at += tp


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulated:
    tok_per_s: float
    """Trained response tokens per second."""
    trainer_idle: float
    workers_idle: float


def simulate(plan: RunPlan, request: PlanRequest, base: Recipe) -> Simulated:
    """Figures of the plan, run by the product's controller in virtual time."""
    world = scenario.build(_simulated_recipe(plan, request, base))
    world = replace(world, changes=tuple(_changes(plan, request)), trace_s=math.inf)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "events.jsonl"
        done = run.simulate(world, log)
        whole = figures(log, world, done.stays)
        events, tok_per_s = read(log), 0.0
        for policy in base.names():
            counted = event_log.steps_of(events, policy)[SIM_SKIP : SIM_SKIP + SIM_STEPS]
            if counted:  # otherwise it is not trained
                tok_per_s += sum(e["trained"] for e in counted) * world.granule / sum(e["s"] for e in counted)
    return Simulated(tok_per_s=tok_per_s, trainer_idle=whole.trainer_idle, workers_idle=whole.workers_idle)


def _simulated_recipe(plan: RunPlan, request: PlanRequest, base: Recipe) -> Recipe:
    work = plan.work
    steps = SIM_SKIP + work.staleness + SIM_STEPS
    return with_keys(
        base,
        {
            "run": {"steps": steps, "name": "plan"},
            "eval": {"tasks": 0},
            "checkpoint": {"every": 100_000},
            "algorithm": {"kl": 0.0},
            "trace": {"nodes": sum(n for _, _, n, _ in plan.replicas), "file": None},
            "rollout": {
                "groups": work.groups,
                "group_size": work.group_size,
                "max_tokens": work.max_tokens,
                "turn_tokens": 0,  # a session is planned as one turn
                "staleness": work.staleness,
            },
            "train": {"minibatches": 1, "micro_tokens": max(plan.training.pack_tokens, 1)},
            "fleet": {
                "local": plan.own is not None,
                "workers": 0,
                "workers_max": 0,
                "gone_s": 60.0,
                "suspect_s": 30.0,
                "heartbeat_s": 10.0,
                "trainer_price_usd_per_h": sum(p.training * p.machine.kind.usd_per_h for p in plan.placed),
                **dict.fromkeys(base.fleet.sources),
            },
            "sim": {
                **sim_keys(plan, request),
                "skip_steps": SIM_SKIP,
                "granule": max(1, round(work.median_tokens / SIM_TOKENS)),
                "lengths_file": None,
                "kinds": [
                    SimKind(
                        name=kind.name,
                        share=count,
                        worker=_engine_keys(engine.service.slower(_slower(request, kind))),
                        slots=engine.slots,
                        kv_tokens=engine.kv_tokens,
                        price_usd_per_h=engine.tp * kind.usd_per_h,
                    )
                    for kind, engine, count, _ in plan.replicas
                ],
            },
        },
    )


def _slower(request: PlanRequest, kind: Kind) -> float:
    """How much slower workers are simulated: lenders lend a share of their speed, and of spot machines without a trace
    the mean loss is taken, because few steps would see one or none."""
    steady = kind.lease == "borrowed" or (kind.lease == "spot" and request.spot.assumed)
    return 1 / max(1e-3, request.useful_share(kind)) if steady else 1.0


def _changes(plan: RunPlan, request: PlanRequest) -> list[Change]:
    """Workers in the order of their kinds. All have booted when the run begins: a run whose trainer generates as well
    does not wait for them, and could be over before they join. Of the spot workers, only the share that is available on
    average stays after the start, because the few simulated steps are too short for that to come about by itself; then
    they come and go. A worker gets its kind when it first comes up, so all of them come up once."""
    market, draw = request.spot, random.Random(0)
    workers = [kind for kind, _, count, _ in plan.replicas for _ in range(count)]
    start = [Change(at_s=-market.boot_s, node=f"w{n}", up=True) for n in range(len(workers))]
    later = list[Change]()
    spot = [n for n, kind in enumerate(workers) if kind.lease == "spot"]
    if market.assumed or (not market.losses_per_h and market.availability == 1.0):
        return start
    up_s = 3600 / max(market.losses_per_h, 1e-6)
    down_s = max(1.0, up_s * (1 / max(market.availability, 1e-3) - 1))
    for i, n in enumerate(spot):
        # Of the first i workers, i x availability are up, rounded: kinds with few workers are not all up or all away.
        up = math.floor((i + 1) * market.availability + 0.5) > math.floor(i * market.availability + 0.5)
        if not up:
            later.append(Change(at_s=AWAY_S - market.boot_s, node=f"w{n}", up=False))
        at_s = AWAY_S + max(1.0, draw.expovariate(1 / (up_s if up else down_s)))
        while at_s < TRACE_S and len(later) < 200_000:
            up = not up
            later.append(Change(at_s=at_s, node=f"w{n}", up=up))
            at_s += max(1.0, draw.expovariate(1 / (up_s if up else down_s)))
    return start + sorted(later, key=lambda c: c.at_s)
