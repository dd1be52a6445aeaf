"""How long a new GPU worker takes from its first import to its first token, part by part.

    python benchmarks/ready_gpu.py

The Qwen3-0.6B shape. The weights come from memory where a worker pulls them over the network: that time is the
network's. Run it twice: the first run compiles the kernels, and later ones find them in Triton's cache.
"""

from __future__ import annotations

import json
import time

SHAPE = {
    "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 40_960, "tie_word_embeddings": True,
}  # fmt: skip


def part(name: str, since: float) -> float:
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    now = time.perf_counter()
    print(f"{name:36s} {now - since:7.2f} s", flush=True)
    return now


def main() -> None:
    begun = now = time.perf_counter()
    import torch

    now = part("import torch", now)
    from windfall.worker import build

    now = part("import windfall's worker", now)
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM
    now = part("import transformers", now)
    torch.zeros(1, device="cuda")
    now = part("open the GPU", now)
    from windfall.link.messages import Engine

    spec = Engine(
        model_config=json.dumps(SHAPE), dtype="bfloat16", kv_tokens=0, page_size=16, max_running=0, max_rows=2048,
        deterministic=False, longest=1024, wanted=256,
    )  # fmt: skip
    model = build.model_for(spec, "cuda")
    now = part("module", now)
    engine, running = build.engine_for(spec, "cuda", model=model, share=0.4)
    now = part("engine: pool, kernels, two graphs", now)
    weights = {n: torch.zeros(t.shape, dtype=t.dtype, pin_memory=True) for n, t in model.state_dict().items()}
    for t in weights.values():
        t.copy_(0.02 * torch.randn(t.shape, device="cuda"))
    torch.cuda.synchronize()
    begun += time.perf_counter() - now  # not the worker's time
    now = time.perf_counter()
    engine.swap(1, weights)
    now = part("weights into the module", now)
    from windfall.types import Request

    engine.add(Request(id="a", prompt=tuple(range(10, 138)), seed=1, max_tokens=4))
    while not engine.step():
        pass
    now = part("first tokens", now)
    print(f"{'in all':36s} {now - begun:7.2f} s   ({running} responses at once, {type(engine).__name__})")


if __name__ == "__main__":
    main()
