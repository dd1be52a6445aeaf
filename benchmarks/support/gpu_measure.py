"""How benchmarks/engine/gpu.py measures engines: the same way for all, through `generate` alone.

- decode: the same requests with SHORT and with LONG tokens; the time of a step is the difference of the times divided
  by the difference of the lengths. The prompts are in the prefix cache, so almost no prefill is included;
- everything else is timed from the first request added to the last token returned, with prompts that the engine has not
  seen; only returned tokens count, and all requested tokens must be returned;
- each measurement follows a warm-up of the same sizes; short ones are timed twice, and the better time counts.

Figures are written to standard output, one JSON object per line. It imports only the standard library.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from dataclasses import asdict, dataclass
from typing import Protocol

from benchmarks.support.gpu_job import PEAK_FLOP_PER_S, Job, Work, alike, floor_ms, groups, prefill_flop

PROMPT, SHORT, LONG = 192, 16, 144
STARTED = "ENGINE_GPU_STARTED"
"""Environment variable with the start time of the process, from time.time()."""


class Generates(Protocol):
    def generate(self, work: Work) -> list[int]:
        """Run all requests. Returns the number of tokens of each."""
        ...

    def warm(self, work: Work) -> None:
        """Compile and capture everything that work of these sizes needs."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    what: str
    case: str
    value: float
    unit: str
    share: float | None = None
    """Share of the GPU's limit."""
    note: str = ""

    def emit(self) -> None:
        print(json.dumps({"figure": asdict(self)}), flush=True)

    @staticmethod
    def parse(line: str) -> Figure | None:
        """The figure in a line of output; None if the line is something else."""
        if not line.startswith('{"figure"'):
            return None
        return Figure(**json.loads(line)["figure"])


def age_s() -> float:
    """Seconds since the process was started."""
    return time.time() - float(os.environ.get(STARTED, time.time()))


def measure(job: Job, engine: Generates) -> None:
    seeds = itertools.count(1)  # new prompts for every measurement
    if "rollout" in job.only:
        for count in job.rollouts:
            prompt, length = (16, 24) if job.tiny else (128, 256)
            works = [alike(job, count, prompt, length, next(seeds)) for _ in range(3 if count <= 256 else 2)]
            rollout(engine, works, "rollout", f"{count} x {prompt} in, {length} out")
    if "group" in job.only:
        works = [groups(job, next(seeds)) for _ in range(2)]
        one = works[0]
        mean = one.tokens / len(one.lengths)
        case = f"{len(one.lengths) // 8} x 8, {len(one.prompts[0])} in, to {max(one.lengths)} out, mean {mean:.0f}"
        rollout(engine, works, "group", case)
    if "decode" in job.only:
        for batch in job.batches:
            decode(job, engine, batch, next(seeds))
    if "prefill" in job.only:
        count, prompt = (2, 64) if job.tiny else (64, 1024)
        once_s = best_s(engine, [alike(job, count, prompt, 1, next(seeds)) for _ in range(3)])
        rate = count * prompt / once_s
        share = count * prefill_flop(job.config, prompt) / once_s / PEAK_FLOP_PER_S
        Figure(what="prefill", case=f"{count} x {prompt}", value=rate, unit="tok/s", share=share).emit()


def decode(job: Job, engine: Generates, batch: int, seed: int) -> None:
    prompt, short, long = (24, 4, 20) if job.tiny else (PROMPT, SHORT, LONG)
    works = [alike(job, batch, prompt, length, seed) for length in (short, long)]
    timed_s(engine, works[1])
    timed_s(engine, works[0])
    short_s, long_s = (min(timed_s(engine, work) for _ in range(2)) for work in works)
    step_ms = 1e3 * (long_s - short_s) / (long - short)
    share = floor_ms(job.config, batch, prompt + (short + long) / 2) / step_ms
    Figure(what="decode", case=f"batch {batch}", value=step_ms, unit="ms", share=share).emit()


def rollout(engine: Generates, works: list[Work], what: str, case: str) -> None:
    Figure(what=what, case=case, value=works[0].tokens / best_s(engine, works), unit="tok/s").emit()


def best_s(engine: Generates, works: list[Work]) -> float:
    """Seconds of the fastest work. The first one is the warm-up."""
    engine.warm(works[0])
    return min(timed_s(engine, work) for work in works[1:])


def timed_s(engine: Generates, work: Work) -> float:
    began = time.perf_counter()
    made = engine.generate(work)
    took_s = time.perf_counter() - began
    wrong = [n for n, (got, asked) in enumerate(zip(made, work.lengths, strict=True)) if got != asked]
    if wrong:
        raise RuntimeError(f"request {wrong[0]} got {made[wrong[0]]} of {work.lengths[wrong[0]]} tokens")
    return took_s
