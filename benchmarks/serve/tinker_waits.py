"""What clients of `windfall tinker` wait for besides the devices: trainer and engine sleep instead of computing.

    python benchmarks/serve/tinker_waits.py                     CPU; five minutes

Server, HTTP, slots, files of adapters, publishing, pulls and schedules are those of a run. The rows are those of
tinker_clients.py. A gradient sleeps for as long as one H200 took for a model of the shape 0.6B, an update, a save, a
load and a step of the engine for about as long; all of them --slower times longer, so that this machine's cores are not
the limit. Multiply tokens per second by that.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `benchmarks` and `tests` are found

from benchmarks.serve import tinker_clients
from tests.support.runs import tinker_server  # pyright: ignore[reportMissingImports]
from windfall.engine.base import Engine
from windfall.step_time import StepTime
from windfall.trainer.slots.slot import Slot
from windfall.training import Report
from windfall.types import Capabilities, Chunk, Request

TRAIN_S, UPDATE_S, SAVE_S, LOAD_S, SWAP_S = 9.3e-6, 0.01, 0.05, 0.07, 0.02
"""Seconds of the trainer for a token, an update, a save and a load; of the engine for a swap."""
STEP = StepTime(fixed_s=0.002, each_s=8e-6, prefill_s=5e-6)
BURST, MODELS, SAMPLERS = 8, 8, 16
RECIPE = """
[run]
name = "tinker"
threads = 1
[model]
path = "tiny"
[rollout]
max_tokens = TOKENS
[tinker]
port = 0
accounts = "{accounts}"
[policies.base]
frozen = true
SLOTS
"""
SLOT = """
[policies.{name}]
slot = "{kind}"
lora = {{{{ rank = 16 }}}}
"""


class BurstEngine(Engine):
    """Sleeps for a burst of steps, as the engine of a GPU makes them, for several policies of one base."""

    capabilities = Capabilities(name="sleeping", adapters=SAMPLERS + 1)
    limit, kv_tokens = 4096, 1 << 20

    def __init__(self, slower: float) -> None:
        self.versions: dict[str, int] = {}
        self._rows: dict[str, tuple[Request, int]] = {}
        self._slower, self._prefill = slower, 0

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, request: Request) -> None:
        self._rows[request.id] = request, 0
        self._prefill += len(request.prompt)

    def cancel(self, id: str) -> None:
        self._rows.pop(id, None)

    def step(self) -> list[Chunk]:
        time.sleep(self._slower * (BURST * STEP.step_s(len(self._rows)) + STEP.prefill_s * self._prefill))
        self._prefill, out = 0, list[Chunk]()
        for id, (request, before) in list(self._rows.items()):
            count = min(BURST, request.max_tokens - before)
            self._rows[id] = request, before + count
            ended = before + count == request.max_tokens
            if ended:
                del self._rows[id]
            out.append(Chunk(
                id=id, position=request.position + before, tokens=(5,) * count, logprobs=(-1.0,) * count,
                version=self.versions[request.policy], finish="length" if ended else None,
            ))  # fmt: skip
        return out

    def swap(self, version: int, weights: Mapping[str, Any] | None = None, *, policy: str = "") -> None:
        time.sleep(self._slower * SWAP_S)
        self.versions[policy] = version


def slowed(work: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    @functools.wraps(work)
    def slow(*args: Any, **options: Any) -> Any:
        time.sleep(seconds)
        return work(*args, **options)

    return slow


def let_the_trainer_sleep(slower: float) -> None:
    def gradient(slot: Slot, samples: Any, loss: Any) -> list[np.ndarray]:
        time.sleep(slower * TRAIN_S * sum(len(sample.ids) for sample in samples))
        return [np.zeros(len(sample.targets)) for sample in samples]

    report = Report(tokens=1, responses=1, grad_norm=1.0, lr=1e-5)
    Slot.forward_backward = gradient  # pyright: ignore[reportAttributeAccessIssue]
    Slot.optim_step = slowed(lambda slot, adam: report, slower * UPDATE_S)
    Slot.copied, Slot._load = slowed(Slot.copied, slower * SAVE_S), slowed(Slot._load, slower * LOAD_S)


def main() -> None:
    p = argparse.ArgumentParser(description="Concurrent clients of one server whose devices sleep.")
    p.add_argument("--clients", default="1,4,8")
    p.add_argument("--seconds", type=float, default=60.0, help="time that counts, for each number of clients")
    p.add_argument("--slower", type=float, default=5.0)
    p.add_argument("--groups", type=int, default=8)
    p.add_argument("--tokens", type=int, default=256)
    p.add_argument("--timeout-s", type=float, default=300.0)
    args = p.parse_args()
    let_the_trainer_sleep(args.slower)
    print(f"{args.slower:g} times slower than one H200\n{tinker_clients.HEADER}", flush=True)
    slots = "".join(SLOT.format(name=f"t{n}", kind="train") for n in range(MODELS))
    slots += "".join(SLOT.format(name=f"s{n}", kind="sample") for n in range(SAMPLERS))
    recipe = RECIPE.replace("SLOTS", slots).replace("TOKENS", str(tinker_clients.PROMPT + args.tokens))
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        engine = BurstEngine(args.slower)
        with tinker_server.Server.serving(Path(folder), recipe, build=lambda spec, device: (engine, 1024)) as server:
            alone = 0.0
            for count in map(int, args.clients.split(",")):
                alone = pool.submit(tinker_clients.row, count, alone, server.url, server.key, args).result()


if __name__ == "__main__":
    main()
