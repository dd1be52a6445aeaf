"""Long responses of groups on a GPU: what drafts from siblings and an fp8 KV cache gain.

    python benchmarks/engine/long_groups.py                                  the 3B shape, 24 groups of 8, ten minutes
    python benchmarks/engine/long_groups.py --models 3b 8b --groups 1 4 24   other shapes and batches
    python benchmarks/engine/long_groups.py --device cpu --tiny              check that the benchmark itself works

Weights are random, so there is nothing to say; what a response says is replayed. The engine computes and samples as
always, and then each sampled token is replaced by the next token of a prepared stream. A stream alternates between
stretches of the group's common text and tokens of its own, with the mean lengths COMMON:OWN of `--streams`. 30:6 allows
about as many tokens per step as Seer reports for reasoning models (1.7 to 2.5), 4:12 hardly more than one.

- tokens/s: of all responses, prompts of 512 tokens, up to 8,192 tokens each (log-normal lengths, mean about 2,300)
- tail: seconds from the end of the 90th percentile of the responses to the last one
- per step: tokens that a response got from a step; drafted and accepted as the engine counts them
- gain: tokens/s relative to the first variant of the same streams
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `benchmarks` is found

import torch

from benchmarks.support.gpu_job import SHAPES
from windfall.engine.cuda import decoder, skeleton
from windfall.engine.cuda.engine import GraphEngine
from windfall.types import Request

LLAMA_3B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 3072, "intermediate_size": 8192,
    "num_hidden_layers": 28, "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 128_256, "max_position_embeddings": 131_072, "rope_theta": 500_000.0, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True, "bos_token_id": 0,
    "eos_token_id": 1,
}  # fmt: skip
MODELS = {**SHAPES, "3b": LLAMA_3B}
VARIANTS = {"plain": (False, None), "drafts": (True, None), "fp8": (False, "fp8"), "both": (True, "fp8")}
PROMPT, LONGEST, SIBLINGS = 512, 8192, 8
COMMON_TEXT = 1000
"""Tokens of a group's common text."""


def streams(groups: int, lengths: list[int], common: int, own: int, vocabulary: int) -> torch.Tensor:
    """(responses, longest) tokens: what each response says."""
    rng = random.Random("streams")
    out = torch.zeros(len(lengths), max(lengths) + 1, dtype=torch.int32)
    for group in range(groups):
        text = [rng.randrange(3, vocabulary) for _ in range(COMMON_TEXT)]
        for n in range(group * SIBLINGS, (group + 1) * SIBLINGS):
            said: list[int] = []
            while len(said) < out.shape[1]:
                at = rng.randrange(COMMON_TEXT)
                said += text[at : at + 1 + int(rng.expovariate(1 / common))]
                said += [rng.randrange(3, vocabulary) for _ in range(1 + int(rng.expovariate(1 / own)))]
            out[n] = torch.tensor(said[: out.shape[1]], dtype=torch.int32)
    return out


def replaying(ops: Any, said: torch.Tensor) -> Any:
    """The kernels, with sampled tokens replaced by those of the stream that the request's seed names."""

    def sample(logits: Any, rows: Any, state: Any, tokens: Any, logprobs: Any, truncate: bool, width: int = 1) -> None:
        ops.sample(logits, rows, state, tokens, logprobs, truncate, width)
        at = rows.long().repeat_interleave(width)
        position = state.position[at].long() + torch.arange(width, device=rows.device).repeat(len(rows))
        replayed = said[state.seed[at], position.clamp_max(said.shape[1] - 1)]
        tokens.copy_(torch.where(tokens >= 0, replayed, tokens))

    return SimpleNamespace(**{**vars(ops), "sample": sample})


def build(name: str, device: str) -> Any:
    fields = dict(MODELS[name])
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = skeleton.ModelSkeleton(fields, dtype=dtype, device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02) if parameter.dim() > 1 else parameter.fill_(1)
    return model


def measure(
    model: Any, said: torch.Tensor, lengths: list[int], variant: str, prompt: int
) -> tuple[float, float, int, int]:
    """(seconds, seconds of the tail, tokens drafted, tokens accepted) of one rollout of all groups."""
    drafts, kv = VARIANTS[variant]
    ops = __import__(decoder.KERNELS[model.device.type], fromlist=["sample"])
    longest = prompt + max(lengths)
    kv_tokens = min(sum(lengths) + len(lengths) * (prompt + 64), len(lengths) * longest)
    if model.device.type == "cuda":
        per_token = 2 * model.config.num_hidden_layers * model.config.num_key_value_heads * model.config.head_dim
        room = int(torch.cuda.mem_get_info()[0] * 0.9) // (per_token * (1 if kv else 2))
        kv_tokens = min(kv_tokens, room)
    engine = GraphEngine(
        model, kv_tokens=max(kv_tokens, longest + 64), max_running=len(lengths), longest=longest + 16,
        ops=replaying(ops, said), speculation=drafts, kv_dtype=torch.float8_e4m3fn if kv else None,
    )  # fmt: skip
    engine.warm(len(lengths), longest=longest)
    rng = random.Random("prompts")
    prompts = [[rng.randrange(3, 500) for _ in range(prompt)] for _ in range(len(lengths) // SIBLINGS)]
    whole = tail = 0.0
    before = after = replace(engine.counters)
    for turn in range(2):  # the first time, graphs are captured: a run does that once
        for n, length in enumerate(lengths):
            group = f"{turn}.{n // SIBLINGS}"
            prompted = tuple(prompts[n // SIBLINGS])
            engine.add(Request(id=f"{group}/{n}", group=group, prompt=prompted, seed=n, max_tokens=length))
        before = replace(engine.counters)
        began, ended = time.perf_counter(), list[float]()
        while len(engine):
            ended += [time.perf_counter() for chunk in engine.step() if chunk.finish]
        whole, tail = ended[-1] - began, ended[-1] - ended[int(0.9 * len(ended)) - 1]
        after = replace(engine.counters)
    engine.sleep()
    return whole, tail, after.drafted - before.drafted, after.accepted - before.accepted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["3b"], choices=MODELS)
    parser.add_argument("--groups", nargs="+", type=int, default=[24])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--streams", nargs="+", default=["30:6", "4:12"])
    parser.add_argument("--longest", type=int, default=LONGEST)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if args.tiny:
        args.models, args.groups, args.longest, prompt = ["tiny"], [2], 96, 24
        args.variants = [v for v in args.variants if VARIANTS[v][1] is None or args.device == "cuda"]
    else:
        prompt = PROMPT
    where = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(f"{where}, torch {torch.__version__}, responses of up to {args.longest} tokens after {prompt}")
    head = (
        "model",
        "groups",
        "streams",
        "variant",
        "tokens/s",
        "gain",
        "tail s",
        "gain",
        "per step",
        "drafted",
        "accepted",
    )
    print("".join(f"{h:>10}" for h in head))
    for name in args.models:
        model = build(name, args.device)
        for groups in args.groups:
            rng = random.Random("lengths")
            scale = args.longest / LONGEST
            count = groups * SIBLINGS
            lengths = [max(1, min(args.longest, int(scale * rng.lognormvariate(7.45, 0.8)))) for _ in range(count)]
            for stream in args.streams:
                common, own = map(int, stream.split(":"))
                said = streams(groups, lengths, common, own, model.config.vocab_size).to(args.device)
                first: tuple[float, float] | None = None
                for variant in args.variants:
                    seconds, tail, drafted, accepted = measure(model, said, lengths, variant, prompt)
                    first = first or (seconds, tail)
                    row_steps = max(1, sum(lengths) - accepted)
                    cells = (
                        name, groups, stream, variant, f"{sum(lengths) / seconds:,.0f}", f"{first[0] / seconds:.2f}x",
                        f"{tail:.1f}", f"{first[1] / max(tail, 1e-9):.2f}x", f"{sum(lengths) / row_steps:.2f}",
                        drafted, accepted,
                    )  # fmt: skip
                    print("".join(f"{cell!s:>10}" for cell in cells), flush=True)
        del model


if __name__ == "__main__":
    main()
