"""Concurrent clients of one `windfall tinker`, each with a model and a loop of its own: 1, 4 and 8, beside one client.

    python benchmarks/serve/tinker_clients.py                                    CPU, the tiny model; three minutes
    python benchmarks/serve/tinker_clients.py --device cuda --model 0.6b         an H200, random weights

A step of a client: sample --groups prompts with 8 responses each, forward_backward with all of them, optim_step, save
for the next samples. Everything goes over HTTP (windfall.client). The trainer and the worker share the device. Clients
wait for each other after their first step; then they work for --seconds, and what was answered in this time counts.

    sampled, trained    tokens per second of all clients
    in sum              trained tokens per second of all clients, relative to one client
    each                how many times longer a client takes for its tokens than alone, as the mean of all
    steps               of the client with the fewest and the one with the most
    sample, train, save   seconds of a client's step, as the mean: what it waits for
    trainer, worker       share of the time in which it had work

No row begins after --limit-s. A row that fails is printed with its error.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `benchmarks` is found

from benchmarks.support.gpu_job import SHAPES
from benchmarks.train.two_policies import write_model
from windfall.algorithms.given import Loss
from windfall.client import Client, RemotePolicy
from windfall.training import Adam, samples_of

PARTS = ("sample", "train", "save")
HEADER = " clients   sampled/s   trained/s   in sum    each    steps  sample   train    save  trainer  worker"
LOSS, PROMPT, GROUP = Loss(name="importance_sampling"), 64, 8


@dataclass
class Work:
    """What a client did since all clients began together."""

    steps: int = 0
    sampled: int = 0
    """Tokens."""
    trained: int = 0
    waited: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    """Seconds."""


def start(place: Path, args: argparse.Namespace) -> tuple[subprocess.Popen[bytes], str, str]:
    """A server, its address and its key."""
    model = args.model
    if model in SHAPES and model != "tiny":
        write_model(place / "model", model)
        model = str(place / "model")
    keys = [f"run.folder={place}", "run.name=server", f"run.device={args.device}"]
    keys += ["run.threads=1"] if args.device == "cpu" else ["fleet.worker_memory=0.3"]
    command = [sys.executable, "-m", "windfall.run.cli", "tinker", "--model", model, "--port", "0", "--name", "base"]
    command += ["--models", "8", "--samplers", "16", "--rank", "16", "--context", str(PROMPT + args.tokens)]
    command += [part for key in keys for part in ("--set", key)]
    process = subprocess.Popen(command, stdout=(place / "log").open("wb"), stderr=subprocess.STDOUT)
    folder, deadline = place / "server", time.monotonic() + args.timeout_s
    while not (folder / "tinker.json").is_file():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the server did not start within {args.timeout_s:g} s:\n{(place / 'log').read_text()}")
        time.sleep(0.2)
    port = json.loads((folder / "tinker.json").read_text())["port"]
    return process, f"http://127.0.0.1:{port}", (folder / "tinker.key").read_text().strip()


async def step(policy: RemotePolicy, number: int, seed: int, work: Work, args: argparse.Namespace) -> None:
    rng = random.Random(f"{seed}/{number}")
    prompts = [[rng.randrange(4, 90) for _ in range(PROMPT)] for _ in range(args.groups)]

    async def sample(n: int, prompt: Sequence[int]) -> list:
        found = await policy.sample(prompt, GROUP, id=f"{number}/{n}", max_tokens=args.tokens)
        work.sampled += sum(len(r.tokens) for r in found)
        return found

    at = time.monotonic()
    groups = await asyncio.gather(*(sample(n, prompt) for n, prompt in enumerate(prompts)))
    samples = [s for g in groups for k, r in enumerate(g) for s in samples_of(r, (k % 2 - 0.5) / 1e4, args.tokens)]
    work.waited["sample"] += time.monotonic() - at
    at = time.monotonic()
    await policy.forward_backward(samples, LOSS, id=f"{number}/gradient")
    work.trained += sum(len(s.ids) for s in samples)
    await policy.optim_step(adam=Adam(lr=1e-5), id=f"{number}/step")
    work.waited["train"] += time.monotonic() - at
    at = time.monotonic()
    await policy.publish(id=f"{number}/publish")
    work.waited["save"] += time.monotonic() - at
    work.steps += 1


async def clients(count: int, url: str, key: str, args: argparse.Namespace) -> tuple[list[Work], list[float]]:
    """Let so many clients make steps at the same time. Returns what they did, and the shares of the time in which
    trainer and worker had work."""
    together, used = asyncio.Barrier(count), list[tuple[float, dict[str, float]]]()

    async def one(seed: int) -> Work:
        async with Client(url, key) as client:
            policy = await client.create(seed=seed)
            await step(policy, 0, seed, Work(), args)
            await together.wait()
            if not seed:
                used.append((time.monotonic(), await client.usage()))
            work = Work()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(args.seconds):
                    for number in itertools.count(1):
                        await step(policy, number, seed, work, args)
            if not seed:
                used.append((time.monotonic(), await client.usage()))
        return work

    async with asyncio.timeout(args.timeout_s + args.seconds):
        found = await asyncio.gather(*(one(seed) for seed in range(count)))
    (began_s, before), (ended_s, after) = used
    parts = ("trainer_s", "worker_s")
    return found, [(after[part] - before[part]) / (ended_s - began_s) for part in parts]


def row(count: int, alone: float, url: str, key: str, args: argparse.Namespace) -> float:
    """Measure and print one number of clients. Returns the tokens per second of a single client."""
    found, busy = asyncio.run(clients(count, url, key, args))
    sampled, trained = (sum(getattr(w, of) for w in found) / args.seconds for of in ("sampled", "trained"))
    alone = alone or trained / count
    gain, steps = trained / alone if alone else 0.0, [work.steps for work in found]
    each = count / gain if gain else 0.0
    print(
        f"{count:>8}{sampled:>12,.0f}{trained:>12,.0f}{gain:>8.2f}x{each:>7.2f}x{min(steps):>5} {max(steps):>3}", end=""
    )
    means = (sum(w.waited[part] for w in found) / max(1, sum(steps)) for part in PARTS)
    print("".join(f"{s:>7.2f}s" for s in means) + "".join(f"{share:>8.0%}" for share in busy), flush=True)
    return alone


def main() -> None:
    p = argparse.ArgumentParser(description="Concurrent clients of one server.")
    p.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    p.add_argument("--model", default="tiny", help=f"a name, a folder, or a shape: {', '.join(SHAPES)}")
    p.add_argument("--clients", default="1,4,8")
    p.add_argument("--seconds", type=float, default=30.0, help="time that counts, for each number of clients")
    p.add_argument("--groups", type=int, default=4, help=f"prompts of a step, each with {GROUP} responses")
    p.add_argument("--tokens", type=int, default=48, help="upper limit per response")
    p.add_argument("--timeout-s", type=float, default=300.0, help="for the server to start")
    p.add_argument("--limit-s", type=float, default=math.inf, help="no row begins later than this")
    args = p.parse_args()
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        process, url, key = start(Path(folder), args)
        try:
            print(f"{args.model} on {args.device}, steps of {args.groups} x {GROUP} responses of at most {args.tokens}")
            print(f"tokens; the server is ready after {time.monotonic() - began_s:.0f} s\n{HEADER}", flush=True)
            alone = 0.0
            for count in map(int, args.clients.split(",")):
                if time.monotonic() - began_s > args.limit_s:
                    print(f"{count:>8} not measured: {args.limit_s:g} s are over")
                    continue
                try:
                    alone = row(count, alone, url, key, args)
                except Exception as e:  # the other rows are wanted all the same
                    print(f"{count:>8} failed: {type(e).__name__}: {e}", flush=True)
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.kill(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
