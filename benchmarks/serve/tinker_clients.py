"""Concurrent clients of one `windfall tinker`, each with a model and a loop of its own: 1, 4 and 8, beside one client.

    python benchmarks/serve/tinker_clients.py                                    CPU, the tiny model; three minutes
    python benchmarks/serve/tinker_clients.py --device cuda --model 0.6b         an H200, random weights

A step of a client: sample --groups prompts with 8 responses each, forward_backward with all of them, optim_step, save
for the next samples. Everything goes over HTTP (windfall.client). The trainer and the worker share the device.

    sampled, trained    tokens per second of all clients, from the end of every client's first step until the first
                        client has made its last
    in sum              steps per second of all clients, relative to one client
    each                the slowdown of a client, as the mean of all
"""

from __future__ import annotations

import argparse
import asyncio
import json
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

LOSS, PROMPT, GROUP = Loss(name="importance_sampling"), 64, 8


@dataclass
class Work:
    """What a client did, with the time at which it was done."""

    steps: list[float] = field(default_factory=list)
    sampled: list[tuple[float, int]] = field(default_factory=list)
    trained: list[tuple[float, int]] = field(default_factory=list)


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
        work.sampled.append((time.monotonic(), sum(len(r.tokens) for r in found)))
        return found

    groups = await asyncio.gather(*(sample(n, prompt) for n, prompt in enumerate(prompts)))
    samples = [s for g in groups for k, r in enumerate(g) for s in samples_of(r, (k % 2 - 0.5) / 1e4, args.tokens)]
    await policy.forward_backward(samples, LOSS, id=f"{number}/gradient")
    work.trained.append((time.monotonic(), sum(len(s.ids) for s in samples)))
    await policy.optim_step(adam=Adam(lr=1e-5), id=f"{number}/step")
    await policy.publish(id=f"{number}/publish")
    work.steps.append(time.monotonic())


async def clients(count: int, url: str, key: str, args: argparse.Namespace) -> list[Work]:
    """Let so many clients make their steps at the same time."""

    async def one(seed: int) -> Work:
        work = Work()
        async with Client(url, key) as client:
            policy = await client.create(seed=seed)
            for number in range(args.steps):
                await step(policy, number, seed, work, args)
        return work

    return await asyncio.gather(*(one(seed) for seed in range(count)))


def measure(found: Sequence[Work]) -> tuple[float, float, float]:
    """Sampled and trained tokens per second, and steps per second, of all clients while all were at work."""
    begin, end = max(work.steps[0] for work in found), min(work.steps[-1] for work in found)
    took = end - begin

    def rate(entries: Sequence[tuple[float, int]]) -> float:
        return sum(count for at, count in entries if begin < at <= end) / took

    sampled, trained = sum(rate(work.sampled) for work in found), sum(rate(work.trained) for work in found)
    return sampled, trained, sum(sum(1 for at in work.steps if begin < at <= end) for work in found) / took


def main() -> None:
    p = argparse.ArgumentParser(description="Concurrent clients of one server.")
    p.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    p.add_argument("--model", default="tiny", help=f"a name, a folder, or a shape: {', '.join(SHAPES)}")
    p.add_argument("--clients", default="1,4,8")
    p.add_argument("--steps", type=int, default=6)
    p.add_argument("--groups", type=int, default=4, help=f"prompts of a step, each with {GROUP} responses")
    p.add_argument("--tokens", type=int, default=48, help="upper limit per response")
    p.add_argument("--timeout-s", type=float, default=300.0, help="for the server to start")
    args = p.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        process, url, key = start(Path(folder), args)
        try:
            print(f"{args.model} on {args.device}, {args.steps} steps of {args.groups} x {GROUP} responses of at most")
            print(f"{args.tokens} tokens\n{'clients':>8}{'sampled/s':>12}{'trained/s':>12}{'in sum':>9}{'each':>8}")
            alone = 0.0
            for count in map(int, args.clients.split(",")):
                found = asyncio.run(clients(count, url, key, args))
                sampled, trained, steps = measure(found)
                alone = alone or steps
                each = count * alone / steps
                print(f"{count:>8}{sampled:>12,.0f}{trained:>12,.0f}{steps / alone:>8.2f}x{each:>7.2f}x", flush=True)
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.kill(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
