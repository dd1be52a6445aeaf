"""windfall's process of benchmarks/engine/gpu.py: one model with random weights.

    python benchmarks/support/gpu_windfall.py JOB       a Job of gpu_job.py as JSON

The engine is built like in a worker, and is driven by `add` and `step` alone (the warm-up also uses `cancel`).
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `benchmarks` is found

from benchmarks.support.gpu_job import LONGEST, Job, Work
from benchmarks.support.gpu_measure import STARTED, Figure, age_s, measure


class Windfall:
    def __init__(self, engine: Any) -> None:
        self._engine, self._run = engine, itertools.count()

    def generate(self, work: Work) -> list[int]:
        made = self._add(work)
        while len(self._engine):
            self._step(made)
        return list(made.values())

    def warm(self, work: Work) -> None:
        """A graph is captured when its key first occurs, and then kept. With uneven lengths, all keys occur only in a
        complete run; with equal lengths, at the beginning."""
        if min(work.lengths) < max(work.lengths):
            self.generate(work)
            return
        made = self._add(work)
        while min(made.values()) == 0:
            self._step(made)
        for _ in range(2):
            self._step(made)
        for id in made:
            self._engine.cancel(id)
        while len(self._engine):
            self._step(made)

    def _add(self, work: Work) -> dict[str, int]:
        from windfall.types import Request

        run, made = next(self._run), {}
        for n, (prompt, length) in enumerate(zip(work.prompts, work.lengths, strict=True)):
            made[id := f"{run}/{n}"] = 0
            self._engine.add(Request(id=id, prompt=tuple(prompt), seed=n, max_tokens=length))
        return made

    def _step(self, made: dict[str, int]) -> None:
        for chunk in self._engine.step():
            made[chunk.id] += len(chunk.tokens)


def engine_of(job: Job) -> tuple[Any, dict[str, float]]:
    """The engine, and the age of the process in seconds when each part was ready."""
    import torch

    from windfall.engine import factory
    from windfall.link.messages import EngineSpec

    at = {f"imports (torch {torch.__version__})": age_s()}
    spec = EngineSpec(
        model_config=json.dumps(job.config), dtype="bfloat16" if job.device == "cuda" else "float32",
        kv_tokens=4096 if job.tiny else 0, page_size=16, max_running=1024, max_rows=job.max_rows, deterministic=False,
        longest=LONGEST, wanted=1024,
    )  # fmt: skip
    model = factory.build_model(spec, job.device)
    at["module"] = age_s()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02) if parameter.dim() > 1 else parameter.fill_(1)
    if job.device == "cuda":
        torch.cuda.synchronize()
    at["weights"] = age_s()
    engine, _ = factory.build_engine(spec, job.device, model=model, share=job.memory)
    at[type(engine).__name__] = age_s()
    return engine, at


def main() -> None:
    os.environ.setdefault(STARTED, str(time.time()))
    job = Job.parse(sys.argv[1])
    engine, at = engine_of(job)
    windfall = Windfall(engine)
    windfall.generate(Work(prompts=[[5] * 8], lengths=[1]))
    at["first token"] = age_s()
    if "ready" in job.only:
        parts = [f"{name} {t - before:.1f}" for (name, t), before in zip(at.items(), [0, *at.values()], strict=False)]
        Figure(what="ready", case="", value=at["first token"], unit="s", note=", ".join(parts)).emit()
    measure(job, windfall)
    if "memory" in job.only and job.device == "cuda":
        memory(engine)


def memory(engine: Any) -> None:
    """Free the KV pool, as for training on the same GPU, and allocate it again."""
    import torch

    before = torch.cuda.mem_get_info()[0]
    for case, act in (("given up", engine.sleep), ("taken back", engine.wake)):
        began = time.perf_counter()
        act()
        torch.cuda.synchronize()
        took_s = time.perf_counter() - began
        moved = abs(torch.cuda.mem_get_info()[0] - before) or 0
        note = f"{moved / 1e9:.0f} GB" if case == "given up" else ""
        Figure(what="memory", case=case, value=1e3 * took_s, unit="ms", note=note).emit()


if __name__ == "__main__":
    main()
