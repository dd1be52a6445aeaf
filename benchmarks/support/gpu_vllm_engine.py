"""vLLM as a windfall engine in benchmarks/engine/gpu.py: one model with random weights, in a process of its own.

    PYTHONPATH=FOLDER_WITH_VLLM python benchmarks/support/gpu_vllm_engine.py JOB       a Job of gpu_job.py as JSON

The engine is built like in a worker with `--engine vllm`, and is driven by `add` and `step` alone, as windfall's own.
Compared with peers/vllm_gpu.py, which uses vLLM's public API without log-probs and seeds, this shows what windfall's
interface costs: every token has its log-prob and is drawn with the seed of its response. The weights stay as vLLM
fills them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `benchmarks` is found
sys.path.append(str(Path(__file__).parents[2] / "src"))  # the last place to look: nothing of vLLM's is hidden

from benchmarks.support.gpu_job import LONGEST, Job, Work, alike
from benchmarks.support.gpu_measure import STARTED, Figure, age_s, best_s, measure
from benchmarks.support.gpu_windfall import Windfall


class VllmAsEngine(Windfall):
    def warm(self, work: Work) -> None:
        """Graphs are there since the start: a few tokens of everything will do."""
        self.generate(Work(prompts=work.prompts, lengths=[min(8, length) for length in work.lengths]))


def engine_of(job: Job) -> Any:
    from windfall.engine.vllm import factory as vllm_factory
    from windfall.link.messages import EngineSpec

    spec = EngineSpec(
        model_config=json.dumps(job.config), dtype="bfloat16" if job.device == "cuda" else "float32",
        kv_tokens=4096 if job.tiny else 0, page_size=16, max_running=1024, max_rows=job.max_rows, deterministic=False,
        longest=256 if job.tiny else LONGEST, wanted=1024,
    )  # fmt: skip
    return vllm_factory.build(spec, job.device, share=job.memory)[0]


def main() -> None:
    os.environ.setdefault(STARTED, str(time.time()))
    job = Job.parse(sys.argv[1])
    engine = engine_of(job)
    made_s = age_s()
    peer = VllmAsEngine(engine)
    peer.generate(Work(prompts=[[5] * 8], lengths=[1]))
    if "ready" in job.only:
        sampler = "windfall's sampler" if engine._own else "vLLM's sampler"
        note = f"{engine.capabilities.label}, {sampler}, exact: {engine.capabilities.exact}; built {made_s:.1f}"
        Figure(what="ready", case="", value=age_s(), unit="s", note=note).emit()
    measure(job, peer)
    if "rollout" in job.only and not job.tiny:
        works = [alike(job, 256, 128, 256, 1000 + seed) for seed in range(2)]
        rate = works[0].tokens / best_s(peer, works)
        Figure(what="rollout", case="256 x 128 in, 256 out, with log-probs", value=rate, unit="tok/s").emit()
    engine.close()


if __name__ == "__main__":
    main()
