"""Where the time of vLLM's log-probs goes: the same requests through vLLM's own interface and windfall's engine.

    python benchmarks/engine/vllm_logprobs.py                            Qwen3-0.6B's shape on a GPU
    python benchmarks/engine/vllm_logprobs.py --device cpu --model tiny  a tiny model: the cost of the host

Each way runs `--requests` requests at once, 128 tokens in, `--length` out, with one engine in this process:

    LLMEngine              add_request and step, no log-probs
    LLMEngine, log-probs   the same with logprobs=0: the sampled token's alone
    engine core, log-probs requests go to the engine core, which returns lists and arrays; vLLM's own sampler
    VllmEngine             the same behind VllmEngine, which makes Chunks; where vLLM's sampler is not exact, windfall's

The last way also has seeds: every response continues exactly wherever it is resumed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `benchmarks` is found
sys.path.append(str(Path(__file__).parents[2] / "src"))  # the last place to look: nothing of vLLM's is hidden

from benchmarks.support.gpu_job import SHAPES

PROMPT = 128


def build(args: argparse.Namespace, own_sampler: bool) -> Any:
    from windfall.engine.vllm import factory as vllm_factory
    from windfall.link.messages import EngineSpec

    spec = EngineSpec(
        model_config=json.dumps(SHAPES[args.model]), dtype="bfloat16" if args.device == "cuda" else "float32",
        kv_tokens=args.requests * 2 * (PROMPT + args.length), page_size=16, max_running=args.requests, max_rows=8192,
        deterministic=False, longest=PROMPT + args.length, wanted=args.requests,
    )  # fmt: skip
    return vllm_factory.build(spec, args.device, share=0.7, own_sampler=own_sampler)[0]


def requests(args: argparse.Namespace, run: int) -> list[Any]:
    from windfall.types import Request

    size = SHAPES[args.model]["vocab_size"]
    return [
        Request(id=f"{run}/{n}", prompt=tuple((7 * n + 13 * i + run) % (size - 3) + 3 for i in range(PROMPT)),
                seed=n, max_tokens=args.length)
        for n in range(args.requests)
    ]  # fmt: skip


def through_llm_engine(engine: Any, asked: list[Any], logprobs: int | None) -> int:
    from vllm import SamplingParams  # pyright: ignore
    from vllm.sampling_params import RequestOutputKind  # pyright: ignore

    vllm, made = engine._vllm, 0
    for r in asked:
        params = SamplingParams(
            temperature=1.0, max_tokens=r.max_tokens, ignore_eos=True, detokenize=False, logprobs=logprobs,
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        vllm.add_request(r.id, {"prompt_token_ids": list(r.prompt)}, params)
    while vllm.has_unfinished_requests():
        made += sum(len(o.outputs[0].token_ids) for o in vllm.step())
    return made


def through_core(engine: Any, asked: list[Any]) -> int:
    made = 0
    for r in asked:
        engine.add(r)
    while len(engine):
        made += sum(len(c.tokens) for c in engine.step())
    return made


def timed(args: argparse.Namespace, name: str, run: Callable[[list[Any]], int]) -> None:
    run(requests(args, 0))  # warm-up
    best_s = float("inf")
    for n in range(1, 1 + args.repeats):
        asked, began = requests(args, n), time.perf_counter()
        made = run(asked)
        best_s = min(best_s, time.perf_counter() - began)
        assert made == args.requests * args.length, f"{made} tokens"
    total = args.requests * args.length
    each_us = 1e6 * best_s / total
    print(
        f"{name:<26}{total / best_s:>12,.0f} tok/s{each_us:>10.2f} us/token{1e3 * best_s / args.length:>10.2f} ms/step"
    )


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default="0.6b", choices=list(SHAPES))
    p.add_argument("--device", default="cuda")
    p.add_argument("--requests", type=int, default=256)
    p.add_argument("--length", type=int, default=64)
    p.add_argument("--repeats", type=int, default=2)
    args = p.parse_args()
    native = build(args, own_sampler=False)
    print(f"{native.capabilities.label}, model runner {'V2' if native.capabilities.exact else 'V1'}, {args.device}")
    for name, logprobs in (("LLMEngine", None), ("LLMEngine, log-probs", 0)):
        timed(args, name, lambda asked, n=logprobs: through_llm_engine(native, asked, n))
    timed(args, "engine core, log-probs", lambda asked: through_core(native, asked))
    if native.capabilities.exact:  # the worker builds the same engine
        return
    native.close()
    own = build(args, own_sampler=True)
    timed(args, "VllmEngine", lambda asked: through_core(own, asked))
    own.close()


if __name__ == "__main__":
    main()
