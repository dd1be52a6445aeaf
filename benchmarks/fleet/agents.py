"""Multi-turn sessions on several workers: what turn affinity saves.

    python benchmarks/fleet/agents.py                             the tiny model on this CPU, real engines, 2 workers
    python benchmarks/fleet/agents.py --simulated                 64 simulated workers (an 8B model on H200-class GPUs)
    python benchmarks/fleet/agents.py --device cuda --model 0.6b  on a GPU, with random weights: only times count
    python benchmarks/fleet/agents.py --vllm                      also a row for vLLM with its own prefix cache

A session has a prompt, then turns of sampled tokens, each answered by an observation after some time. About 80 % of all
tokens are prompts and observations, as in agentic RL. Every variant has the same sessions, seeds and times:

    affinity              turns go where their tokens are, in the prefix cache of a worker (windfall's default)
    by speed              turns go to the worker with the shortest step, whatever it has in its cache
    round robin           workers take turns: all get equally many responses

`computed`: tokens in prefill and decode. `saved`: share of all prefill that was found in the cache. The time of a turn
is from the observation to its last token; that of the environment is not part of it. Real engines run in threads of one
process behind windfall's own dispatch, so their times include each other's on a machine with few cores. Engines of vLLM
in one process make their steps one at a time: compare times with --workers 1, and tokens with more.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from windfall.controller.ledger.episode import Episode
from windfall.controller.rollout.dispatch import Dispatch
from windfall.controller.scheduling.turns import Turns
from windfall.controller.workers.members import WorkerState
from windfall.controller.workers.versions import Offer
from windfall.engine.base import Counters, Engine
from windfall.events import log as events
from windfall.recipe.file import parse_recipe
from windfall.recipe.sections import Techniques
from windfall.types import Chunk, Request, Sampling

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `benchmarks` is found

VOCABULARY = 90
"""Prompts and observations have token ids below this: every model has them. What is sampled may be any id of the
model."""
VARIANTS: dict[str, dict[str, Any]] = {
    "affinity": {},
    "by speed": {"affinity": False},
    "round robin": {"affinity": False, "balancing": False},
}
"""[techniques]"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    sessions: int = 48
    prompt: int = 192
    turns: int = 8
    sampled: int = 32
    """Tokens of a turn."""
    observed: int = 112
    """Tokens of an observation."""
    env_s: float = 0.3
    """Median seconds of the environment between two turns; log-normal with a sigma of 0.8."""
    group: int = 4
    """Sessions with the same prompt."""

    @property
    def longest(self) -> int:
        return self.prompt + self.turns * (self.sampled + self.observed)

    @property
    def prefill_share(self) -> float:
        given = self.prompt + (self.turns - 1) * self.observed
        return given / (given + self.turns * self.sampled)


@dataclass(slots=True)
class Row:
    variant: str
    seconds: float = 0.0
    sampled: int = 0
    computed: int = 0
    saved: float = 0.0
    at_holder: float = 0.0
    turn_s: list[float] = field(default_factory=list)
    preemptions: int = 0

    def quantile(self, share: float) -> float:
        ordered = sorted(self.turn_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0

    def line(self) -> str:
        return (
            f"| {self.variant} | {self.computed:,} | {self.saved:.0%} | {self.at_holder:.0%} "
            f"| {self.quantile(0.5):.3f} | {self.quantile(0.99):.3f} | {self.sampled / self.seconds:,.0f} "
            f"| {self.seconds:.1f} | {self.preemptions} |"
        )


HEAD = (
    "| variant | tokens computed | prefill saved | turns at their worker | turn, P50 (s) | P99 (s) | sampled tok/s | s "
    "| preemptions |\n|---|---|---|---|---|---|---|---|---|"
)


class TimedTurns(Turns):
    """Records how long the later turns take, from the observation to the last token."""

    def __init__(self) -> None:
        super().__init__()
        self.turn_s: list[float] = []
        self._since: dict[str, float] = {}

    def returned(self, id: str) -> None:
        super().returned(id)
        self._since[id] = asyncio.get_running_loop().time()

    def ended(self, id: str, worker: str, *, context: int, sampled: int) -> None:
        super().ended(id, worker, context=context, sampled=sampled)
        if id in self._since:
            self.turn_s.append(asyncio.get_running_loop().time() - self._since.pop(id))


# real engines


def make_engines(args: argparse.Namespace, work: Workload) -> tuple[list[Any], int]:
    """Engines, and the number of responses that each decodes at once."""
    slots = -(-work.sessions // args.workers)
    kv_tokens = int(args.cache * slots * work.longest) + work.longest
    if args.device == "cpu" and args.model == "tiny":
        from windfall.engine.torch.engine import TorchEngine
        from windfall.models import load

        model = load.load("tiny", dtype="float32", device="cpu")
        return [
            TorchEngine(model, kv_tokens=kv_tokens, max_running=slots, max_rows=512) for _ in range(args.workers)
        ], slots
    from windfall.engine.factory import build_engine

    spec = engine_spec(args, work, slots, kv_tokens)
    engines = [
        build_engine(spec, args.device, model=random_model(spec, args.device), share=0.8 / args.workers)[0]
        for _ in range(args.workers)
    ]
    return one_at_a_time(engines) if args.device == "cuda" else engines, slots


def engine_spec(args: argparse.Namespace, work: Workload, slots: int, kv_tokens: int) -> Any:
    from windfall.link.messages import EngineSpec

    if args.model == "0.6b":
        from benchmarks.support.gpu_job import SHAPES  # those of benchmarks/engine/gpu.py

        fields = SHAPES["0.6b"]
    else:
        from windfall.models import load

        fields = json.loads((Path(load.fetch(args.model)) / "config.json").read_text())
    # vLLM refuses sequences beyond the model's context. Only times count here.
    fields = {**fields, "max_position_embeddings": max(work.longest, fields.get("max_position_embeddings", 0))}
    return EngineSpec(
        model_config=json.dumps(fields), dtype="float32" if args.device == "cpu" else "bfloat16", kv_tokens=kv_tokens,
        page_size=16, max_running=slots, max_rows=2048, deterministic=False, longest=work.longest,
        wanted=work.sessions,
    )  # fmt: skip


def random_model(spec: Any, device: str) -> Any:
    import torch

    from windfall.engine.factory import build_model

    model = build_model(spec, device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02) if parameter.dim() > 1 else parameter.fill_(1)
    return model


def make_vllm(args: argparse.Namespace, work: Workload) -> tuple[list[Any], int]:
    from windfall.engine.vllm import factory as vllm_factory

    slots = -(-work.sessions // args.workers)
    kv_tokens = int(args.cache * slots * work.longest) + work.longest
    spec = engine_spec(args, work, slots, kv_tokens)
    engines = [vllm_factory.build(spec, args.device, share=0.8 / args.workers)[0] for _ in range(args.workers)]
    return one_at_a_time(engines), slots


def one_at_a_time(engines: Sequence[Any]) -> list[Any]:
    lock = threading.Lock()
    return [OneAtATime(engine, lock) for engine in engines]


class OneAtATime(Engine):
    """An engine beside others in this process, whose steps take turns. vLLM keeps the state of a forward pass in
    variables of the process: two engines that step at the same time hang or compute nonsense. On a GPU, no other thread
    may use the device while a graph is captured."""

    def __init__(self, engine: Any, lock: threading.Lock) -> None:
        self._engine, self._lock = engine, lock
        self.capabilities, self.limit = engine.capabilities, engine.limit

    @property
    def counters(self) -> Counters:
        return self._engine.counters

    def __len__(self) -> int:
        return len(self._engine)

    def step(self) -> list[Chunk]:
        with self._lock:
            return self._engine.step()

    def add(self, request: Request) -> None:
        with self._lock:
            self._engine.add(request)

    def cancel(self, id: str) -> None:
        with self._lock:
            self._engine.cancel(id)

    def swap(self, version: int, weights: Any = None, *, policy: str = "") -> None:
        with self._lock:
            self._engine.swap(version, weights, policy=policy)


class Sessions:
    """The environment: answers every turn after a drawn time."""

    def __init__(self, dispatch: Dispatch, work: Workload) -> None:
        self._dispatch, self._work = dispatch, work
        self._left: dict[str, int] = {}
        self._episodes: dict[str, Episode] = {}
        self.done, self.over, self.refused = 0, asyncio.Event(), ""

    def open(self) -> None:
        w = self._work
        for n in range(w.sessions):
            group, sibling = divmod(n, w.group)
            rng = random.Random(group)
            prompt = tuple(rng.randrange(3, VOCABULARY) for _ in range(w.prompt))
            id = f"{group}/{sibling}"
            episode = Episode(id=id, prompt=prompt, seed=n, max_tokens=w.sampled, sampling=Sampling(), stop=frozenset())
            self._episodes[id], self._left[id] = episode, w.turns - 1
            self._dispatch.open(episode, self)

    def rejected(self, id: str, why: str) -> None:
        self.refused = f"{id}: {why}"
        self.over.set()

    def turn_ended(self, id: str) -> None:
        seconds = random.Random(f"{id}/{self._left[id]}").lognormvariate(0, 0.8) * self._work.env_s
        asyncio.get_running_loop().call_later(seconds, self._answer, id)

    def _answer(self, id: str) -> None:
        episode, rng = self._episodes[id], random.Random(f"{id}/observation/{self._left[id]}")
        if not self._left[id]:
            self._dispatch.close(id)
            self.done += 1
            if self.done == len(self._episodes):
                self.over.set()
            return
        self._left[id] -= 1
        episode.max_tokens += self._work.observed + self._work.sampled
        assert episode.observe(rng.randrange(3, VOCABULARY) for _ in range(self._work.observed))
        self._dispatch.next_turn(id)


async def measure(
    variant: str, engines: Sequence[Any], slots: int, work: Workload, techniques: dict[str, Any], vocabulary: int
) -> Row:
    from windfall.run.commands.in_process import in_process_worker

    with tempfile.TemporaryDirectory() as folder:
        log = events.EventLog(Path(folder) / "events.jsonl")
        with patch("windfall.controller.scheduling.placement.Turns", TimedTurns):
            dispatch = Dispatch(events=log, vocabulary=vocabulary, techniques=Techniques(**techniques))
        dispatch.set_offer(Offer(version=0, digest=""))
        async with AsyncExitStack() as stack:
            for n, engine in enumerate(engines):
                await stack.enter_async_context(
                    in_process_worker(dispatch, engine, slots, name=f"w{n}", heartbeat_s=0.2)
                )
            watching = asyncio.create_task(dispatch.watch())
            while [w.state for w in dispatch.members.here()] != [WorkerState.READY] * len(engines):
                await asyncio.sleep(0.01)
            sessions, began = Sessions(dispatch, work), time.perf_counter()
            sessions.open()
            await until_over(sessions, dispatch, log, len(engines))
            row = Row(variant=variant, seconds=time.perf_counter() - began)
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        counters = [e.counters for e in engines]
        log.close()
    row.sampled = work.sessions * work.turns * work.sampled
    reused, prefilled = (sum(getattr(c, k) for c in counters) for k in ("reused_tokens", "prefilled"))
    if not prefilled:  # vLLM does not count it
        prefilled = sum_prefill(work) - reused
    row.computed, row.saved = prefilled + row.sampled, reused / (reused + prefilled)
    turns: Any = dispatch.turns
    row.at_holder, row.turn_s = turns.counts.to_holder / max(1, turns.counts.routed), turns.turn_s
    row.preemptions = sum(c.evictions for c in counters)
    return row


async def until_over(sessions: Sessions, dispatch: Dispatch, log: events.EventLog, workers: int) -> None:
    """Wait for the last session. Raises RuntimeError if a worker is lost: the others would wait for it forever."""
    while not sessions.over.is_set():
        with suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await sessions.over.wait()
        if len(list(dispatch.members.here())) < workers:
            lost = [e.get("why") for e in events.read(log.path) if e["name"] == "worker_lost"]
            raise RuntimeError(f"a worker was lost: {lost}")
    if sessions.refused:
        raise RuntimeError(f"a turn was refused: {sessions.refused}")


def vocabulary_of(args: argparse.Namespace, work: Workload) -> int:
    return json.loads(engine_spec(args, work, 1, 1).model_config)["vocab_size"]


def free_memory(device: str) -> None:
    """Return the memory of engines that are gone: the next ones plan with what is free."""
    gc.collect()
    if device.startswith("cuda"):
        import torch

        torch.cuda.empty_cache()


def sum_prefill(work: Workload) -> int:
    """Tokens to prefill without any cache."""
    each = work.sampled + work.observed
    return work.sessions * sum(work.prompt + n * each for n in range(work.turns))


def real(args: argparse.Namespace) -> list[Row]:
    work = Workload(sessions=args.sessions, turns=args.turns, env_s=args.env_s)
    print(f"{args.workers} workers ({args.device}, {args.model}), {work}, prefill share {work.prefill_share:.0%}")
    rows, vocabulary = [], vocabulary_of(args, work)
    # The first responses on a GPU wait for kernels to be compiled, which are then kept for all.
    warm_up = Workload(sessions=args.sessions, turns=2, env_s=0.01)
    engines, slots = make_engines(args, work)
    asyncio.run(measure("warm-up", engines, slots, warm_up, {}, vocabulary))
    del engines
    free_memory(args.device)
    for name, techniques in VARIANTS.items():
        engines, slots = make_engines(args, work)
        rows.append(asyncio.run(measure(name, engines, slots, work, techniques, vocabulary)))
        print(rows[-1].line(), flush=True)
        del engines
        free_memory(args.device)
    if args.vllm:
        engines, slots = make_vllm(args, work)
        techniques = VARIANTS["round robin"]
        rows.append(asyncio.run(measure("vLLM, round robin", engines, slots, work, techniques, vocabulary)))
        for engine in engines:
            engine.close()
    return rows


# simulated


def recipe(workers: int, techniques: dict[str, Any], *, steps: int, groups: int, cache: int) -> Any:
    """An 8B model (16 GB, 131 kB of KV cache per token) at 70 % of the bandwidth and 40 % of the FLOP/s of an H200."""
    worker = {"fixed_s": 0.005, "each_s": 3e-5, "context_s": 4e-8, "prefill_s": 4e-5}
    return parse_recipe(
        {
            "run": {"steps": steps, "name": "agents"},
            "rollout": {"groups": groups, "group_size": 16, "max_tokens": 40_000},
            "eval": {"tasks": 0},
            "train": {"micro_tokens": 200_000},
            "checkpoint": {"every": 1000},
            "fleet": {"local": False, "workers": workers, "trainer_price_usd_per_h": 1.0},
            "techniques": techniques,
            "sim": {
                "worker": worker, "trainer": worker | {"train_s": 1e-7}, "worker_slots": 64, "worker_kv_tokens": cache,
                "turns": 12.0, "env_s": 3.0, "env_sigma": 0.8, "observation_tokens": 750.0, "observation_sigma": 0.5,
                "median_tokens": 220.0, "sigma": 0.5, "prompt_tokens": 1500, "granule": 16, "boot_s": 1.0,
                "skip_steps": 0,
            },
        },
        where="agents",
    )  # fmt: skip


def simulated(workers: int = 64, *, steps: int = 1, groups: int = 64, cache: int = 150_000) -> list[Row]:
    from windfall.sim.calibrate.event_log import steps_of
    from windfall.sim.core import run, scenario

    print(
        f"{workers} simulated workers, {groups * 16} sessions per step, a KV cache of {cache:,} tokens, {steps} steps"
    )
    rows = []
    for name, techniques in VARIANTS.items():
        built = scenario.build(recipe(workers, techniques, steps=steps, groups=groups, cache=cache))
        with (
            tempfile.TemporaryDirectory() as folder,
            patch("windfall.controller.scheduling.placement.Turns", TimedTurns),
        ):
            log = Path(folder) / "events.jsonl"
            done = run.simulate(built, log)
            logged = steps_of(events.read(log))
        reused, prefilled = (sum(e[k] for e in logged) for k in ("prefill_saved", "prefilled"))
        turns: Any = done.dispatch.turns
        routed, to_holder = (sum(e["sessions"][k] for e in logged) for k in ("routed", "to_holder"))
        rows.append(
            Row(variant=name, seconds=sum(e["s"] for e in logged), sampled=done.token_schedule.real_tokens,
                computed=prefilled + done.token_schedule.real_tokens, saved=reused / (reused + prefilled),
                at_holder=to_holder / max(1, routed), turn_s=turns.turn_s)
        )  # fmt: skip
        print(f"{name}: done", flush=True)
    return rows


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--simulated", action="store_true", help="simulate instead of running engines")
    p.add_argument("--device", default="cpu")
    p.add_argument("--model", default="tiny", help="a model's name or folder, or 0.6b: a shape without weights")
    p.add_argument("--workers", type=int, default=0, help="number of workers; 2, or 64 if simulated")
    p.add_argument("--sessions", type=int, default=48)
    p.add_argument("--turns", type=int, default=8)
    p.add_argument("--env-s", type=float, default=0.3, help="median seconds of the environment between two turns")
    p.add_argument(
        "--cache", type=float, default=0.5, help="size of the KV cache, as a share of what all sessions need"
    )
    p.add_argument("--vllm", action="store_true", help="also measure vLLM behind the engine seam, with round robin")
    p.add_argument("--out", type=Path, help="also write the figures to this file, as JSON")
    args = p.parse_args()
    args.workers = args.workers or (64 if args.simulated else 2)
    rows = simulated(args.workers) if args.simulated else real(args)
    print(HEAD, *(row.line() for row in rows), sep="\n")
    if args.out:
        args.out.write_text(json.dumps([asdict(row) for row in rows]))


if __name__ == "__main__":
    main()
