"""Long responses of groups on a GPU: what drafts from siblings and an fp8 KV cache gain.

    python benchmarks/engine/long_groups.py                                  the 3B shape, 24 groups of 8, ten minutes
    python benchmarks/engine/long_groups.py --models 3b 8b --groups 1 4 24   other shapes and batches
    python benchmarks/engine/long_groups.py --vllm FOLDER                    vLLM, which is in FOLDER, on the same work
    python benchmarks/engine/long_groups.py --folder FOLDER --prompts FILE   a model with weights: what it says itself
    python benchmarks/engine/long_groups.py --device cpu --tiny              check that the benchmark itself works

Weights are random, so there is nothing to say; what a response says is replayed. The engine computes and samples as
always, and then each sampled token is replaced by the next token of a prepared stream. A stream alternates between
stretches of the group's common text and tokens of its own, with the mean lengths COMMON:OWN of `--streams`. 30:6 allows
about as many tokens per step as Seer reports for reasoning models (1.7 to 2.5), 4:12 hardly more than one.

- tokens/s: of all responses, prompts of 512 tokens, up to 8,192 tokens each (log-normal lengths, mean about 2,300)
- tail: seconds from the end of the 90th percentile of the responses to the last one
- per step: tokens that a response got from a step; drafted and accepted as the engine counts them
- promised: tokens per step that 3 drafted tokens would have given, whether the engine drafted or not
- gain: tokens/s relative to the first variant of the same streams
- vLLM: as it is by default, with drafts from each response's own text (`ngram`, 4 tokens: the streams are replayed
  there, too), and with an fp8 KV cache. Its suffix drafts need a package of their own and are not measured
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `benchmarks` is found

import torch

from benchmarks.support.gpu_job import SHAPES
from benchmarks.support.long_work import LONGEST, PROMPT, SIBLINGS, LongWork, tail_s
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


class Figures(NamedTuple):
    """Of one rollout of all groups."""

    seconds: float
    tail_s: float
    tokens: int
    drafted: int
    accepted: int
    promised: float = 1.0
    """Tokens per step that drafts of 3 tokens would give, by what was right in other texts."""


def measure(model: Any, work: LongWork, variant: str, prompts: list[list[int]]) -> Figures:
    drafts, kv = VARIANTS[variant]
    lengths = work.lengths
    ops = __import__(decoder.KERNELS[model.device.type], fromlist=["sample"])
    longest = max(map(len, prompts)) + max(lengths)
    kv_tokens = min(sum(lengths) + len(lengths) * (longest - max(lengths) + 64), len(lengths) * longest)
    if model.device.type == "cuda":
        c = model.config
        head = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        per_token = 2 * c.num_hidden_layers * c.num_key_value_heads * head
        room = int(torch.cuda.mem_get_info()[0] * 0.9) // (per_token * (1 if kv else 2))
        kv_tokens = min(kv_tokens, room)
    engine = GraphEngine(
        model, kv_tokens=max(kv_tokens, longest + 64), max_running=len(lengths), longest=longest + 16,
        ops=replaying(ops, work.said().to(model.device)) if work.stream else None, speculation=drafts,
        kv_dtype=torch.float8_e4m3fn if kv else None,
    )  # fmt: skip
    engine.warm(len(lengths), longest=longest)
    figures = Figures(0.0, 0.0, 0, 0, 0)
    for turn in range(2):  # the first time, graphs are captured: a run does that once
        for n, length in enumerate(lengths):
            group = f"{turn}.{n // SIBLINGS}"
            prompted = tuple(prompts[n // SIBLINGS])
            engine.add(Request(id=f"{group}/{n}", group=group, prompt=prompted, seed=n, max_tokens=length))
        before = replace(engine.counters)
        began, ended, tokens = time.perf_counter(), list[float](), 0
        while len(engine):
            for chunk in engine.step():
                tokens += len(chunk.tokens)
                ended += [time.perf_counter()] if chunk.finish else []
        now = engine.counters
        drafted, accepted = now.drafted - before.drafted, now.accepted - before.accepted
        promised = engine._draft_length.tokens_per_step(4) if engine._draft_length else 1.0
        figures = Figures(ended[-1] - began, tail_s(ended), tokens, drafted, accepted, promised)
    engine.sleep()
    return figures


def beside_vllm(folder: str, config: dict[str, Any], work: LongWork, variant: str) -> Figures:
    """The same of vLLM, in a process of its own."""
    job = {"config": config, "work": asdict(work), "variant": variant}
    command = [sys.executable, str(Path(__file__).parent / "peers" / "vllm_long_groups.py"), json.dumps(job)]
    path = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
    log = Path(tempfile.gettempdir(), f"vllm-{variant}.log")
    with log.open("w") as file:
        env = {**os.environ, "PYTHONPATH": path}
        subprocess.run(command, env=env, stdout=file, stderr=subprocess.STDOUT, timeout=580)
    for line in log.read_text().splitlines():
        if line.startswith("FIGURES "):
            return Figures(*json.loads(line[8:]))
    raise SystemExit(f"vLLM ({variant}) failed: {log}\n{log.read_text()[-4000:]}")


class Table:
    def __init__(self) -> None:
        self._first: dict[LongWork, Figures] = {}
        head = "model, groups, streams, variant, tokens/s, gain, tail s, gain, per step, promised, drafted, accepted"
        print("".join(f"{h:>10}" for h in head.split(", ")))

    def show(self, model: str, work: LongWork, variant: str, figures: Figures) -> None:
        first = self._first.setdefault(work, figures)
        seconds, tail, tokens, drafted, accepted, promised = figures
        rate = tokens / seconds
        cells = (
            Path(model).name[:9], work.groups, work.stream, variant, f"{rate:,.0f}",
            f"{rate * first.seconds / first.tokens:.2f}x", f"{tail:.1f}", f"{first.tail_s / max(tail, 1e-9):.2f}x",
            f"{tokens / max(1, tokens - accepted):.2f}", f"{promised:.2f}", drafted, accepted,
        )  # fmt: skip
        print("".join(f"{cell!s:>10}" for cell in cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["3b"], choices=MODELS)
    parser.add_argument("--groups", nargs="+", type=int, default=[24])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--streams", nargs="+", default=["30:6", "4:12"])
    parser.add_argument("--longest", type=int, default=LONGEST)
    parser.add_argument("--folder", help="a model with weights, in Hugging Face format; needs --prompts")
    parser.add_argument("--prompts", type=Path, help="JSON list of texts: the prompts of the groups")
    parser.add_argument("--vllm", metavar="FOLDER", help="also measure the vLLM in this folder")
    parser.add_argument("--vllm-variants", nargs="+", default=["plain", "ngram", "fp8"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    prompt = PROMPT
    if args.tiny:
        args.models, args.groups, args.longest, prompt = ["tiny"], [2], 96, 24
        args.variants = [v for v in args.variants if VARIANTS[v][1] is None or args.device == "cuda"]
    if args.device == "cpu":
        import tests.support.engines.reference_kernels  # noqa: F401  (the kernels in plain torch)
    texts: list[list[int]] = []
    if args.folder:
        from windfall.models.load import load, load_tokenizer

        tokenizer = load_tokenizer(args.folder)
        texts = [
            tokenizer.apply_chat_template([{"role": "user", "content": t}], add_generation_prompt=True)["input_ids"]
            for t in json.loads(args.prompts.read_text())
        ]
        args.models, args.streams = [args.folder], [""]
    where = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(f"{where}, torch {torch.__version__}, responses of up to {args.longest} tokens")
    table = Table()
    for name in args.models:
        dtype = "bfloat16" if args.device == "cuda" else "float32"
        model = load(name, dtype=dtype, device=args.device) if args.folder else build(name, args.device)
        rows = [(n, stream) for n in args.groups for stream in args.streams]
        works = [LongWork(n, args.longest, prompt, stream, model.config.vocab_size) for n, stream in rows]
        for work in works:
            prompts = texts[: work.groups] if texts else work.prompts
            for variant in args.variants:
                table.show(name, work, variant, measure(model, work, variant, prompts))
        del model
        if args.vllm:
            gc.collect()
            torch.cuda.empty_cache()
            for work in works:
                for variant in args.vllm_variants:
                    named = "vLLM" if variant == "plain" else f"vL {variant}"
                    table.show(name, work, named, beside_vllm(args.vllm, MODELS[name], work, variant))


if __name__ == "__main__":
    main()
