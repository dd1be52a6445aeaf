"""vLLM's side of benchmarks/engine/long_groups.py: one variant in a process of its own, dummy weights.

    PYTHONPATH=FOLDER_WITH_VLLM python benchmarks/engine/peers/vllm_long_groups.py JOB

Everything is left at its default but for the share of the memory and the longest context. With `ngram`, what it samples
is replaced by the next tokens of the stream (vllm_replay.py).
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))  # so that `benchmarks` is found

from benchmarks.support.long_work import SIBLINGS, LongWork, tail_s

os.environ.update(VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="WARNING", HF_HUB_OFFLINE="1")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
DRAFT = 4


def main() -> None:
    job = json.loads(sys.argv[1])
    work, variant, options = LongWork(**job["work"]), job["variant"], {}
    if variant == "ngram":
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        os.environ["REPLAYED_WORK"] = json.dumps(job["work"])
        options["speculative_config"] = {
            "method": "ngram", "num_speculative_tokens": DRAFT, "prompt_lookup_max": 8, "prompt_lookup_min": 2,
        }  # fmt: skip
        options["worker_cls"] = "benchmarks.engine.peers.vllm_replay.ReplayWorker"
    elif variant == "fp8":
        options["kv_cache_dtype"] = "fp8"
    from vllm import LLM, SamplingParams

    lengths, prompts = work.lengths, work.prompts
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**job["config"], "torch_dtype": "bfloat16"}))
        llm = LLM(
            model=folder, dtype="bfloat16", load_format="dummy", skip_tokenizer_init=True, gpu_memory_utilization=0.8,
            max_model_len=work.prompt + work.longest + 16, disable_log_stats=False, **options,
        )  # fmt: skip
    engine, figures = llm.llm_engine, (0.0, 0.0)
    for turn, most in enumerate((16, work.longest)):  # the first turn: a few tokens of everything
        for n, length in enumerate(lengths):
            params = SamplingParams(
                temperature=1.0, max_tokens=min(most, length), ignore_eos=True, detokenize=False, seed=None
            )  # fmt: skip
            prompt = {"prompt_token_ids": [3 + turn, *prompts[n // SIBLINGS][1:]]}
            engine.add_request(str(turn * len(lengths) + n), prompt, params)
        began, ended = time.perf_counter(), list[float]()
        while engine.has_unfinished_requests():
            ended += [time.perf_counter() for output in engine.step() if output.finished]
        figures = (ended[-1] - began, tail_s(ended))
    counted = {m.name: getattr(m, "value", 0) for m in llm.get_metrics()}
    drafted = int(counted.get("vllm:spec_decode_num_draft_tokens", 0))
    accepted = int(counted.get("vllm:spec_decode_num_accepted_tokens", 0))
    print("FIGURES " + json.dumps([*figures, sum(lengths), drafted, accepted]), flush=True)


if __name__ == "__main__":
    main()
