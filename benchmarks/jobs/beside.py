"""Two processes on one GPU at the same moment: the speed of each, beside the other, as a share of its speed alone.

    python benchmarks/jobs/beside.py                                  0.6B; needs a GPU; about four minutes
    python benchmarks/jobs/beside.py --models 1.7b --rows 64 --seconds 2
    python benchmarks/jobs/beside.py --rows                           only what sleeping costs; half a minute

One process trains all weights of a model with random weights (windfall's trainer, packs of 16k tokens), the other
generates with windfall's engine, `rows` responses at once; then two processes that both generate. A sum above 1 is a
gain over taking turns. Once by the time slices of the driver, once under NVIDIA's Multi-Process Service (MPS), and
there also with the trainer on a part of the multiprocessors (a stream of a green context). The last lines: how long
the state of the trainer takes to leave the GPU for pinned memory or a file and to come back (trainer/sleep.py), and how
much slower training is if the memory of activations is returned to the GPU after every update.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `benchmarks` is found

from benchmarks.support.gpu_job import Job, alike

READY_S = 240.0
LENGTH, PACK = 1024, 16_384
NOT_OF_QWEN3 = {"architectures", "model_type", "torch_dtype", "max_position_embeddings"}
"""Keys of a shape that the benchmark of training sets itself."""


class Child:
    """A process that trains or generates when it is asked to."""

    def __init__(self, kind: str, model: str, rows: int, sm_share: float, environ: dict[str, str]) -> None:
        self.kind = kind
        spec = json.dumps({"kind": kind, "model": model, "rows": rows, "sm_share": sm_share})
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--child", spec], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ
        )

    def ask(self, **order: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(b'{"answer"'):
                return json.loads(line)["answer"]
        raise SystemExit(f"a process that {self.kind}s ended with status {self._process.wait()}")

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


def speeds(children: list[Child], seconds: float) -> list[float]:
    """Tokens per second of processes that work at the same time."""
    for child in children:
        child.ask(work=seconds)
    return [child.answer()["rate"] for child in children]


def compare(kinds: tuple[str, str], model: str, rows: int, share: float, seconds: float, env: dict[str, str]) -> str:
    with ExitStack() as stack:
        both = [stack.enter_context(Child(kind, model, rows, share, env)) for kind in kinds]
        for child in both:
            child.answer()  # it is ready
        alone = [speeds([child], seconds)[0] for child in both]
        ratios = [speed / base for speed, base in zip(speeds(both, seconds), alone, strict=True)]
    return f"{ratios[0]:>9.2f}{ratios[1]:>9.2f}{sum(ratios):>9.2f}   alone {alone[0]:,.0f} and {alone[1]:,.0f} tokens/s"


def work(spec: dict[str, Any]) -> None:
    """The program of a child: answers one line for each order."""
    step, state = training(spec) if spec["kind"] == "train" else generating(spec)
    deadline_s = time.perf_counter() + 3.0
    while time.perf_counter() < deadline_s:  # captures graphs and compiles kernels
        step()
    print(json.dumps({"answer": "ready"}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if "work" in order:
            began, done = time.perf_counter(), 0
            while time.perf_counter() - began < order["work"]:
                done += step()
            answer = {"rate": done / (time.perf_counter() - began)}
        else:
            answer = sleep(state, step)
        print(json.dumps({"answer": answer}), flush=True)


def sleep(state: Any, step: Callable[[], int]) -> dict[str, float]:
    import torch

    from windfall.turns import residence

    answer: dict[str, float] = {"gb": state.nbytes / 1e9}
    for where in ("memory", "disk"):
        if where == "disk":
            residence.MEMORY_SHARE, state = 0.0, type(state)(state._tensors, Path.cwd())
        for time_ in ("first", "next"):
            for name, act in (("sleep", state.sleep), ("wake", state.wake)):
                began = time.perf_counter()
                act()
                answer[f"{where}_{time_}_{name}_s"] = time.perf_counter() - began
    for name, after in (("kept", lambda: None), ("returned", torch.cuda.empty_cache)):
        for _ in range(3):
            step()
            after()
        began = time.perf_counter()
        for _ in range(10):
            step()
            after()
        answer[f"{name}_s"] = (time.perf_counter() - began) / 10
    return answer


def training(spec: dict[str, Any]) -> tuple[Callable[[], int], Any]:
    from benchmarks.train.gpu import trainer_of
    from benchmarks.train.random_model import random_samples
    from windfall.trainer.sleep import SleepingState

    config = Job(model=spec["model"]).config
    trainer = trainer_of({k: v for k, v in config.items() if k not in NOT_OF_QWEN3}, PACK)
    samples = random_samples([LENGTH] * (PACK // LENGTH), config["vocab_size"])
    import torch

    limit = part_of_gpu(spec["sm_share"])

    def step() -> int:
        with limit():
            trainer.forward_backward(samples)
            trainer.optim_step()
        torch.cuda.synchronize()
        return PACK

    return step, SleepingState(trainer.optimizer.tensors)


def part_of_gpu(share: float) -> Callable[[], AbstractContextManager[None]]:
    if share >= 1:
        return nullcontext
    import torch

    count = int(torch.cuda.get_device_properties(0).multi_processor_count * share) // 8 * 8
    green: Any = torch.cuda.green_contexts.GreenContext
    stream = green.create(count, 0).Stream()

    @contextmanager
    def limited() -> Iterator[None]:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield
        torch.cuda.current_stream().wait_stream(stream)

    return limited


def generating(spec: dict[str, Any]) -> tuple[Callable[[], int], Any]:
    from benchmarks.support.gpu_windfall import STARTED, engine_of
    from windfall.types import Request

    os.environ.setdefault(STARTED, str(time.time()))
    job = Job(model=spec["model"], memory=0.25)
    engine, _ = engine_of(job)
    prompts = alike(job, spec["rows"], 256, 0, seed=0).prompts
    added = 0

    def step() -> int:
        nonlocal added
        while len(engine) < spec["rows"]:
            prompt = tuple(prompts[added % len(prompts)])
            engine.add(Request(id=str(added), prompt=prompt, seed=added, max_tokens=768 + added % 256))
            added += 1
        return sum(len(chunk.tokens) for chunk in engine.step())

    return step, None


async def measure(options: argparse.Namespace) -> None:
    from windfall.jobs.machine.mps import Mps

    pairs = (("train", "decode"), ("decode", "decode"))
    print(f"{'':44}{'first':>9}{'second':>9}{'sum':>9}", flush=True)

    def rows(how: str, env: dict[str, str], shares: list[float]) -> None:
        for model in options.models:
            for kinds in pairs:
                for share in shares if kinds[0] == "train" else [1.0]:
                    for count in options.rows:
                        limit = f", {share:.0%} of SMs" if share < 1 else ""
                        name = f"{model} {kinds[0]} + {kinds[1]} of {count}, {how}{limit}"
                        print(f"{name:<44}{compare(kinds, model, count, share, options.seconds, env)}", flush=True)

    if options.rows:
        rows("slices", dict(os.environ), [1.0])
        with tempfile.TemporaryDirectory() as folder:
            async with Mps(Path(folder) / "mps.log", os.environ) as mps:
                rows("MPS", {**os.environ, **mps.environment}, [1.0, *options.sm])
    for model in options.models:
        with Child("train", model, 0, 1.0, dict(os.environ)) as child:
            child.answer()
            child.ask(sleep=True)
            s = child.answer()
        for where in ("memory", "disk"):
            first, later = ([s[f"{where}_{n}_{act}_s"] for act in ("sleep", "wake")] for n in ("first", "next"))
            print(
                f"{model}: {s['gb']:.1f} GB of trainer state to {where} in {later[0]:.2f} s (the first time "
                f"{first[0]:.2f} s), and back in {later[1]:.2f} s (the first time {first[1]:.2f} s)",
                flush=True,
            )
        kept, returned = s["kept_s"], s["returned_s"]
        print(f"{model}: an update takes {kept:.3f} s, with all unused memory returned {returned:.3f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--models", nargs="+", default=["0.6b"])
    parser.add_argument("--rows", nargs="*", type=int, default=[16, 64, 256])
    parser.add_argument("--sm", nargs="*", type=float, default=[0.75, 0.5], help="shares of the trainer under MPS")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        work(json.loads(options.child))
    else:
        asyncio.run(measure(options))


if __name__ == "__main__":
    main()
