"""vLLM's side of benchmarks/engine/gpu.py: one model in a process of its own, dummy weights, its public API alone.

    PYTHONPATH=FOLDER_WITH_VLLM python benchmarks/engine/peers/vllm_gpu.py JOB       a Job of gpu_job.py as JSON

Everything is left at its default (compiled, CUDA graphs, prefix caching, asynchronous scheduling, the engine in a
process of its own) but for the share of the memory, the longest context, which is what the workloads need, and graphs
for batches of up to 1024: by default they end at 512, and 1024 requests were slower than 256 (17k, 28k tok/s).
It gives no log-probs unless the case says so; windfall always does. Requests have no seeds, which would slow it down.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))  # so that `benchmarks` is found

from benchmarks.support.gpu_job import LONGEST, Job, Work, alike
from benchmarks.support.gpu_measure import STARTED, Figure, age_s, best_s, measure

os.environ.setdefault(STARTED, str(time.time()))
os.environ.update(VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="WARNING", HF_HUB_OFFLINE="1")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # used for top-k and top-p only, and compiled at first use


class Vllm:
    def __init__(self, llm, logprobs: int | None = None) -> None:
        self._llm, self._logprobs = llm, logprobs

    def generate(self, work: Work) -> list[int]:
        from vllm import SamplingParams

        prompts = [{"prompt_token_ids": prompt} for prompt in work.prompts]
        params = [
            SamplingParams(
                temperature=1.0, max_tokens=length, ignore_eos=True, detokenize=False, logprobs=self._logprobs
            )
            for length in work.lengths
        ]  # fmt: skip
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]

    def warm(self, work: Work) -> None:
        """Graphs are there since the start: a few tokens of everything will do."""
        self.generate(Work(prompts=work.prompts, lengths=[min(8, length) for length in work.lengths]))


def main() -> None:
    job = Job.parse(sys.argv[1])
    import vllm
    from vllm import LLM

    imported_s = age_s()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(job.config))
        llm = LLM(
            model=folder,
            dtype="bfloat16",
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=LONGEST,
            gpu_memory_utilization=job.memory,
            max_cudagraph_capture_size=1024,
        )
    made_s = age_s()
    peer = Vllm(llm)
    peer.generate(Work(prompts=[[5] * 8], lengths=[1]))
    if "ready" in job.only:
        parts = f"imports (vLLM {vllm.__version__}) {imported_s:.1f}, LLM {made_s - imported_s:.1f}"
        Figure(what="ready", case="", value=age_s(), unit="s", note=parts).emit()
    measure(job, peer)
    if "rollout" in job.only:
        works = [alike(job, 256, 128, 256, 1000 + seed) for seed in range(2)]
        rate = works[0].tokens / best_s(Vllm(llm, logprobs=0), works)
        Figure(what="rollout", case="256 x 128 in, 256 out, with log-probs", value=rate, unit="tok/s").emit()


if __name__ == "__main__":
    main()
