"""What harvesting is worth: the same run in several ways, with real processes, on workers that come and go by a trace.

    python benchmarks/harvest.py                              all variants, about a minute each
    python benchmarks/harvest.py --variants colocated,windfall --steps 12 --seed 3

Controller, links, ledger, journal, policies, weight pulls and kills are the product's own, in processes of their own.
Two cores cannot show a parallel speed-up, so engines and the trainer sleep by a stated service-time model instead of
computing (windfall.sim): a decode step takes a fixed time and a time per response, a prefill and training a time per
token. The trainer's machine stands for 8 GPUs, a worker for 2, at RLBoost's prices ($83.79 and $5.32 per hour). Workers
come and go by a drawn trace (exponential times, stated below); a worker that is down costs nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from windfall import config, events
from windfall.fleet import process, trace
from windfall.fleet.replay import TraceProvider
from windfall.launch import folder as folders
from windfall.link import auth
from windfall.models import TINY
from windfall.sim.service import Lengths, Service
from windfall.types import Lease

TRAINER_USD_PER_H, WORKER_USD_PER_H = 83.79, 5.32
# Seconds. Eight GPUs read the weights as fast as two do (tensor parallel), and do four times the work per response.
LOCAL = Service(fixed_s=0.012, each_s=0.00012, prefill_s=0.000004, train_s=0.00021)
WORKER = Service(fixed_s=0.012, each_s=0.00048, prefill_s=0.000016)
LENGTHS = Lengths(median=150, sigma=0.7)
VOCABULARY = 1000
UP_S, DOWN_S, NODES = 25.0, 10.0, 5

RECIPE = """
[run]
name = "harvest"
steps = {steps}
threads = 1
[rollout]
groups = 24
group_size = 8
max_tokens = 700
[train]
micro_tokens = 6000
[eval]
tasks = 0
[checkpoint]
every = 1000
[fleet]
heartbeat_s = 0.3
suspect_s = 1.0
gone_s = 2.5
workers = 0
{fleet}
{techniques}
"""

VARIANTS: dict[str, dict[str, Any]] = {
    "colocated": {"nodes": 0},
    "disaggregated": {"fleet": "local = false"},
    "windfall": {},
    "windfall, Algorithm 1": {"fleet": 'offload = "feedback"\nfirst_seed_s = 3.0'},
    "no seeding": {"techniques": "[techniques]\nseeding = false"},
    "no migration": {"techniques": "[techniques]\nmigration = false"},
    "no balancing": {"techniques": "[techniques]\nbalancing = false"},
    "no pipelining": {"techniques": "[techniques]\npipelining = false"},
}


# the trainer's process


async def be_trainer(folder: Path) -> int:
    import threading
    from functools import partial

    import torch

    from windfall.launch import training
    from windfall.link import messages as m
    from windfall.link.socket import Dialler
    from windfall.sim.engine import SleepingEngine
    from windfall.sim.trainer import SleepingTrainer
    from windfall.train.checkpoint import State
    from windfall.train.host import TrainerHost
    from windfall.weights.publish import Publisher
    from windfall.weights.serve import serve
    from windfall.worker.agent import Agent
    from windfall.worker.shared import HasThem, Shared

    recipe = config.load(folder / "recipe.toml")
    shutil.copytree(TINY, folder / "tokenizer", dirs_exist_ok=True)
    token, secret = auth.read_token(folder / "token"), auth.make_token(folder / "trainer.secret")
    publisher = Publisher(folder)
    server = await serve(publisher, host="127.0.0.1", port=0, key=auth.weights_key(token))
    weights = torch.zeros(1 << 20)

    def publish(version: int) -> Any:
        weights.add_(1.0)
        return publisher.publish(version, {"w": weights})

    o = recipe.rollout
    engine = m.Engine(
        model_config=json.dumps({"model_type": "sleeping", "vocab_size": VOCABULARY}), dtype="float32", kv_tokens=0,
        page_size=16, max_running=0, max_rows=2048, deterministic=False, longest=64 + o.max_tokens,
        wanted=o.groups * o.group_size,
    )  # fmt: skip
    hello = partial(
        m.TrainerHello, micro_tokens=recipe.train.micro_tokens, model=training.fingerprint(engine), engine=engine,
        url=f"http://_:{server.port}",
        facts={"pid": os.getpid(), "parameters": 1 << 20, "device": "none", "dtype": "float32"},
    )  # fmt: skip
    address = await training._address(folder)
    lock = threading.Lock()
    host = TrainerHost(
        trainer=SleepingTrainer(LOCAL), state=State(step=0, next_task=0), secret=secret, hello=hello, publish=publish,
        save=lambda state: "nowhere", dialler=Dialler(address, "/trainer", m.ToTrainer, ssl=None),
        address=lambda: address, lock=lock,
    )  # fmt: skip
    tasks = [asyncio.create_task(host.run())]
    if recipe.fleet.local:
        await asyncio.sleep(0.5)
        agent = Agent(
            address, secret, name="local", lease=Lease(kind="reserved", price_usd_per_h=TRAINER_USD_PER_H),
            build=lambda spec: (Shared(SleepingEngine(LOCAL, LENGTHS, vocabulary=VOCABULARY), lock), 1024),
            puller=HasThem(lambda: host.manifest), patience_s=math.inf,
        )  # fmt: skip
        tasks.append(asyncio.create_task(agent.run()))
    await asyncio.wait(tasks, return_when=asyncio.ALL_COMPLETED)
    return 0


async def be_worker(url: str, name: str, factor: float) -> int:
    from windfall.sim.engine import SleepingEngine
    from windfall.weights.pull import Puller
    from windfall.worker.agent import Agent

    service = Service(
        fixed_s=WORKER.fixed_s * factor, each_s=WORKER.each_s * factor, prefill_s=WORKER.prefill_s * factor
    )
    token = os.environ["WINDFALL_TOKEN"]
    return await Agent(
        url, token, name=name, lease=Lease(kind="spot", price_usd_per_h=WORKER_USD_PER_H),
        build=lambda spec: (SleepingEngine(service, LENGTHS, vocabulary=VOCABULARY), 256),
        puller=Puller(key=auth.weights_key(token)),
    ).run()  # fmt: skip


# one variant


async def run(folder: Path, *, nodes: int, steps: int, seed: int, fleet: str = "", techniques: str = "") -> None:
    folder.mkdir(parents=True)
    recipe = RECIPE.format(steps=steps, fleet=fleet, techniques=techniques)
    (folder / "recipe.toml").write_text(recipe + "\n")
    auth.make_token(folder / "token")
    auth.make_token(folder / "trainer.secret")
    env = {**os.environ, "WINDFALL_TOKEN": auth.read_token(folder / "token"), "OMP_NUM_THREADS": "1"}
    me = [sys.executable, __file__]

    async def spawn(name: str, lease: Lease) -> Any:
        url = (folders.read_json(folder / "address.json") or {})["url"]
        return await process.start(name=name, argv=[*me, "--worker", url, name], env=env, log=folder / f"{name}.log")

    controller = await process.start(
        name="controller", argv=[sys.executable, "-m", "windfall.cli", "_controller", str(folder)], env=env,
        log=folder / "controller.log",
    )  # fmt: skip
    trainer = await process.start(
        name="trainer", argv=[*me, "--trainer", str(folder)], env=env, log=folder / "trainer.log"
    )
    provider = None
    try:
        async with asyncio.timeout(60):
            while not (folder / "tokenizer" / "tokenizer.json").is_file() or not (folder / "address.json").is_file():
                await asyncio.sleep(0.05)
        if nodes:
            changes = trace.synthetic(nodes=nodes, mean_up_s=UP_S, mean_down_s=DOWN_S, seconds=3600.0, seed=seed)
            provider = asyncio.create_task(TraceProvider(spawn, changes).run())
        async with asyncio.timeout(900):
            code = await controller.wait()
        if code != 0:
            raise SystemExit(f"the controller ended with {code}: {(folder / 'controller.log').read_text()[-2000:]}")
    finally:
        if provider is not None:
            provider.cancel()
            await asyncio.gather(provider, return_exceptions=True)
        for handle in (trainer, controller):
            await handle.terminate(0.0)


def figures(folder: Path, skip: int) -> dict[str, float]:
    """Of the steps after the first `skip`, which measure and warm up."""
    log = events.read(folder / "events.jsonl")
    steps = [e for e in log if e["kind"] == "scalar" and e["name"] == "step"][skip:]
    start, end = steps[0]["t"] - steps[0]["s"], steps[-1]["t"]
    seconds, tokens = end - start, sum(e["made"] for e in steps)
    joined = {e["worker"]: e["t"] for e in log if e["name"] == "worker_joined" and e["worker"] != "local"}
    gone = {e["worker"]: e["t"] for e in log if e["name"] in ("worker_lost", "worker_left")}
    alive = sum(max(0.0, min(gone.get(w, end), end) - max(t, start)) for w, t in joined.items())
    usd = seconds / 3600 * TRAINER_USD_PER_H + alive / 3600 * WORKER_USD_PER_H
    spans = [e for e in log if e["kind"] == "span" and e["name"] == "train" and e["t"] > start]
    return {
        "tok_per_s": tokens / seconds, "tok_per_usd": tokens / usd, "workers": alive / seconds,
        "step_s": statistics.mean(e["s"] for e in steps),
        "lost": sum(1 for e in log if e["name"] == "worker_lost" and start < e["t"] < end),
        "moved": sum(e["moved"] for e in steps), "made_twice": sum(e.get("discarded", 0) for e in steps),
        "train_s": statistics.mean(e["s"] + e.get("early_s", 0.0) for e in spans),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--trainer", type=Path)
    parser.add_argument("--worker", nargs=2)
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--nodes", type=int, default=NODES)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.trainer:
        sys.exit(asyncio.run(be_trainer(options.trainer)))
    if options.worker:
        url, name = options.worker
        sys.exit(asyncio.run(be_worker(url, name, 1.0)))
    print(f"{options.nodes} machines, up {UP_S:g} s, down {DOWN_S:g} s on average; {options.steps} steps of 192")
    print(f"sleeping engines: local {LOCAL}; worker {WORKER}; lengths {LENGTHS}")
    base: dict[str, float] | None = None
    print(f"{'variant':24}{'tok/s':>8}{'x':>7}{'tok/$':>10}{'x':>7}{'step s':>8}{'workers':>8}{'lost':>6}{'moved':>7}")
    with tempfile.TemporaryDirectory() as place:
        for name in options.variants.split(","):
            how = {"nodes": options.nodes, **VARIANTS[name]}
            folder = Path(place) / name.replace(" ", "-").replace(",", "")
            asyncio.run(run(folder, steps=options.steps, seed=options.seed, **how))
            f = figures(folder, skip=2)
            base = base or f
            print(
                f"{name:24}{f['tok_per_s']:8,.0f}{f['tok_per_s'] / base['tok_per_s']:7.2f}{f['tok_per_usd']:10,.0f}"
                f"{f['tok_per_usd'] / base['tok_per_usd']:7.2f}{f['step_s']:8.2f}{f['workers']:8.2f}{f['lost']:6.0f}"
                f"{f['moved']:7.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
