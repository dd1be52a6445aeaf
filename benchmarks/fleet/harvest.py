"""What harvesting is worth: the same run in several variants, with real processes and workers that follow a trace.

    python benchmarks/fleet/harvest.py                             all variants, one to two minutes each
    python benchmarks/fleet/harvest.py --variants colocated,windfall --steps 12 --seed 3
    python benchmarks/fleet/harvest.py --trace FILE --speedup 60   a spot trace (docs/fleet-traces.md), 60 times as fast

Controller, links, ledger, journal, policies, weight pulls and kills are windfall's own, in separate processes. Two
cores cannot show a parallel speed-up, so engines and the trainer sleep by a service-time model instead of computing
(windfall.sim): a decode step takes a fixed time plus a time per response; prefill and training take a time per token.
The trainer's machine stands for 8 GPUs and a worker for 2, at RLBoost's prices ($83.79 and $5.32 per hour). Workers
come and go by a trace; a worker that is down costs nothing. "leaves by itself" is windfall without kills: the same
machines leave at the same moments, but with a notice, so they drain first. The difference to it is the cost of killing.

Columns: tokens per second and per dollar, each with its ratio to the first row; trainer idle: share of its time without
work; workers idle, lost: shares of the time paid for (lost: booting, pulling, repeated prefill and lost work); again:
tokens generated again, as a share of all tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from windfall import run_folder as folders
from windfall.events import log
from windfall.link import auth
from windfall.models.load import TINY
from windfall.processes import process
from windfall.providers import trace
from windfall.providers.trace_provider import TraceProvider
from windfall.recipe.file import load_recipe
from windfall.sim.core.draws import LogNormalLengths
from windfall.step_time import StepTime
from windfall.types import Lease

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `benchmarks` is found

TRAINER_USD_PER_H, WORKER_USD_PER_H = 83.79, 5.32
# Seconds, scaled down, in the proportions of RLBoost's artifact for an 8B model: alone, the trainer's machine generates
# about as long as it trains, and a worker has a fifth to a quarter of that machine's throughput.
LOCAL = StepTime(fixed_s=0.006, each_s=0.00012, prefill_s=0.000004, train_s=0.000185)
WORKER = StepTime(fixed_s=0.008, each_s=0.0006, prefill_s=0.00002)
SLOW = float(os.environ.get("HARVEST_SLOW", "1"))
"""Factor by which all times and the trace are stretched, so that the real cost of processes matters less."""
LOCAL, WORKER = LOCAL.slower(SLOW), WORKER.slower(SLOW)
LENGTHS = LogNormalLengths(median=75, sigma=0.7, alike=0.5)
VOCABULARY = 1000
UP_S, DOWN_S, NODES = 40.0, 15.0, 5

RECIPE = """
[run]
name = "harvest"
steps = {steps}
threads = 1
[rollout]
groups = 48
group_size = 8
max_tokens = 350
{rollout}
[train]
micro_tokens = 1600
[eval]
tasks = 0
[checkpoint]
every = 1000
[fleet]
heartbeat_s = 0.3
suspect_s = 1.0
gone_s = 2.5
workers = 0
trainer_price_usd_per_h = 83.79
{fleet}
{techniques}
"""

VARIANTS: dict[str, dict[str, Any]] = {
    "colocated": {"changes": []},
    "disaggregated": {"fleet": "local = false"},
    "windfall": {},
    "no local time": {"techniques": "[techniques]\ntrainer_generates = false"},
    "no migration": {"techniques": "[techniques]\nmigration = false"},
    "no balancing": {"techniques": "[techniques]\nbalancing = false"},
    "no pipelining": {"techniques": "[techniques]\npipelining = false"},
    "leaves by itself": {"notice_s": 5.0},
}


# the processes


async def run_trainer(folder: Path) -> int:
    from functools import partial

    import torch

    from benchmarks.support.sleeping_engine import SleepingEngine
    from benchmarks.support.sleeping_trainer import SleepingTrainer
    from windfall.link import messages as m
    from windfall.link.socket import Dialer
    from windfall.trainer import derived
    from windfall.trainer import process as training
    from windfall.trainer.own_engine.trainer_engine import TrainerEngine, TrainerWeights
    from windfall.trainer.service import TrainerService
    from windfall.training import CheckpointState
    from windfall.weights import buffers
    from windfall.weights.publishing.publish import Publisher
    from windfall.weights.serve import serve
    from windfall.worker.controller_client import ControllerClient

    recipe = load_recipe(folder / "recipe.toml")
    shutil.copytree(TINY, folder / "tokenizer", dirs_exist_ok=True)
    token, secret = auth.read_token(folder / "token"), auth.make_token(folder / "trainer.secret")
    publisher = Publisher(folder)
    server = await serve(publisher.files, host="127.0.0.1", port=0, key=auth.weights_key(token))
    weights = torch.zeros(1 << 20)

    published: list[m.PublishedFiles] = []

    def publish(version: int, order: m.Publish) -> Any:
        weights.add_(1.0)
        made = publisher.publish(version, {"w": weights}, pack=order.pack)
        holds = publisher.files.describe()
        holder = m.HolderFiles(location=f"http://_:{server.port}", holds=holds, machine=buffers.machine())
        files = tuple(each.file for each in holds)
        published[:] = [m.PublishedFiles(version=version, digest=made.digest, files=files, holders=(holder,))]
        return made

    o = recipe.rollout
    engine = m.EngineSpec(
        model_config=json.dumps({"model_type": "sleeping", "vocab_size": VOCABULARY}), dtype="float32", kv_tokens=0,
        page_size=16, max_running=0, max_rows=2048, deterministic=False, longest=64 + o.max_tokens,
        wanted=o.groups * o.group_size,
    )  # fmt: skip
    hello = partial(
        m.TrainerHello, micro_tokens=recipe.train.micro_tokens, model=derived.fingerprint(engine), engine=engine,
        facts={"pid": os.getpid(), "parameters": 1 << 20, "device": "none", "dtype": "float32"},
    )  # fmt: skip
    address = await training._address(folder)
    host = TrainerService(
        trainer=SleepingTrainer(LOCAL), state=CheckpointState(step=0, next_task=0), secret=secret, hello=hello,
        publish=publish, weights=lambda: published[-1] if published else None, save=lambda state: "nowhere",
        dialer=Dialer(address, "/trainer", m.ToTrainer, ssl=None),
        address=lambda: address,
    )  # fmt: skip
    tasks = [asyncio.create_task(host.run())]
    if recipe.fleet.local:
        await asyncio.sleep(0.5)
        sleeping = SleepingEngine(LOCAL, LENGTHS, vocabulary=VOCABULARY)
        shared = TrainerEngine(sleeping, host.engine.turn, published=lambda: host.manifest)
        host.engine.engine = shared
        agent = ControllerClient(
            address, secret, name="local", lease=Lease(kind="reserved", price_usd_per_h=TRAINER_USD_PER_H),
            build=lambda spec: (shared, 1024), puller=TrainerWeights(lambda: host.manifest), patience_s=math.inf,
        )  # fmt: skip
        tasks.append(asyncio.create_task(agent.run()))
    await asyncio.wait(tasks, return_when=asyncio.ALL_COMPLETED)
    return 0


async def run_worker(url: str, name: str, factor: float) -> int:
    from benchmarks.support.sleeping_engine import SleepingEngine
    from windfall.weights.pulling.pull import Puller
    from windfall.worker import preemption
    from windfall.worker.controller_client import ControllerClient

    service = WORKER.slower(factor)
    token = os.environ["WINDFALL_TOKEN"]
    agent = ControllerClient(
        url, token, name=name, lease=Lease(kind="spot", price_usd_per_h=WORKER_USD_PER_H),
        build=lambda spec: (SleepingEngine(service, LENGTHS, vocabulary=VOCABULARY), 256),
        puller=Puller(key=auth.weights_key(token)),
    )  # fmt: skip
    preemption.on_sigterm(asyncio.get_running_loop(), agent.warned)
    return await agent.run()


# one variant


async def run_variant(
    folder: Path, *, changes: list[Any], steps: int, speedup: float, rollout: str = "", fleet: str = "",
    techniques: str = "", notice_s: float = 0.0,
    controller_argv: Sequence[str] = ("-m", "windfall.run.cli", "_controller"),
) -> None:  # fmt: skip
    """`controller_argv`: arguments of Python that start a controller, without its folder."""
    folder.mkdir(parents=True)
    recipe = RECIPE.format(steps=steps, rollout=rollout, fleet=fleet, techniques=techniques)
    (folder / "recipe.toml").write_text(recipe + "\n")
    auth.make_token(folder / "token")
    auth.make_token(folder / "trainer.secret")
    env = {**os.environ, "WINDFALL_TOKEN": auth.read_token(folder / "token"), "OMP_NUM_THREADS": "1"}
    this_script = [sys.executable, __file__]

    async def spawn(name: str, lease: Lease) -> Any:
        url = (folders.read_json(folder / "address.json") or {})["url"]
        return process.start(name=name, argv=[*this_script, "--worker", url, name], env=env, log=folder / f"{name}.log")

    controller = process.start(
        name="controller", argv=[sys.executable, *controller_argv, str(folder)], env=env,
        log=folder / "controller.log",
    )  # fmt: skip
    trainer = process.start(
        name="trainer", argv=[*this_script, "--trainer", str(folder)], env=env, log=folder / "trainer.log"
    )
    provider = None
    try:
        async with asyncio.timeout(60):
            while not (folder / "tokenizer" / "tokenizer.json").is_file() or not (folder / "address.json").is_file():
                await asyncio.sleep(0.05)
        if changes:
            provider = asyncio.create_task(TraceProvider(spawn, changes, speedup=speedup, notice_s=notice_s).run())
        async with asyncio.timeout(900):
            code = await controller.wait()
        if code != 0:
            raise SystemExit(
                f"the controller exited with code {code}: {(folder / 'controller.log').read_text()[-2000:]}"
            )
    finally:
        if provider is not None:
            provider.cancel()
            await asyncio.gather(provider, return_exceptions=True)
        for handle in (trainer, controller):
            await handle.terminate(0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--trainer", type=Path)
    parser.add_argument("--worker", nargs=2)
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--nodes", type=int, default=NODES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--up", type=float, default=UP_S, help="Mean uptime of a machine in the generated trace, in seconds."
    )
    parser.add_argument("--down", type=float, default=DOWN_S, help="Mean downtime of a machine, in seconds.")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--start", type=float, default=0.0, help="Start time in the trace file, in seconds.")
    parser.add_argument("--speedup", type=float, default=1.0)
    parser.add_argument("--keep", type=Path, help="Directory that keeps the run folders.")
    parser.add_argument("--slow", type=float, default=SLOW, help="Factor that stretches all times, for a busy machine.")
    options = parser.parse_args()

    from windfall.sim.report import figures  # imported here so that workers do not boot longer

    if options.slow != SLOW:  # child processes inherit it
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "HARVEST_SLOW": str(options.slow)})
    if options.trainer:
        sys.exit(asyncio.run(run_trainer(options.trainer)))
    if options.worker:
        url, name = options.worker
        sys.exit(asyncio.run(run_worker(url, name, 1.0)))
    if options.trace:
        changes = trace.slots(trace.window(trace.read(options.trace), options.start, math.inf), options.nodes)
        print(f"{options.trace.name} from {options.start:g} s, {options.speedup:g} times as fast, ", end="")
        print(f"at most {options.nodes} machines; {options.steps} steps of 384")
    else:
        changes = trace.synthetic(
            nodes=options.nodes, mean_up_s=options.up, mean_down_s=options.down, seconds=3600.0, seed=options.seed
        )
        print(f"{options.nodes} machines, up {options.up:g} s, down {options.down:g} s on average; ", end="")
        print(f"{options.steps} steps of 384")
    print(f"all times {SLOW:g} times as long; " if SLOW != 1 else "", end="")
    print(f"sleeping engines: local {LOCAL}; worker {WORKER}; lengths {LENGTHS}")
    print(f"{'':24}{'':8}{'':7}{'':10}{'':7}{'':8}{'trainer':>9}{'workers':>9}")
    heads = ("tok/s", 8), ("x", 7), ("tok/$", 10), ("x", 7), ("step s", 8), ("idle", 9), ("there", 9), ("idle", 8)
    heads += ("lost", 8), ("killed", 8), ("moved", 7), ("again", 7)
    print(f"{'variant':24}" + "".join(f"{name:>{width}}" for name, width in heads))
    base: figures.Figures | None = None
    with tempfile.TemporaryDirectory() as temporary:
        root = options.keep or Path(temporary)
        for name in options.variants.split(","):
            options_of_variant = {"changes": changes, **VARIANTS[name]}
            folder = root / name.replace(" ", "-").replace(",", "")
            asyncio.run(run_variant(folder, steps=options.steps, speedup=options.speedup / SLOW, **options_of_variant))
            f = figures.from_events(log.read(folder / "events.jsonl"), skip=min(2, options.steps - 1))
            base = base or f
            print(
                f"{name:24}{f.tok_per_s:8,.0f}{f.tok_per_s / base.tok_per_s:7.2f}{f.tok_per_usd:10,.0f}"
                f"{f.tok_per_usd / base.tok_per_usd:7.2f}{f.step_mean_s:8.2f}{f.trainer_idle:9.0%}"
                f"{f.workers_there:9.2f}{f.workers_idle:8.0%}{f.workers_lost:8.0%}{f.killed:8.0f}{f.moved:7.0f}"
                f"{f.again:7.1%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
