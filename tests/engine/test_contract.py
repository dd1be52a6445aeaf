"""What every engine must do, over several architectures, in both modes, and with speculation: then drafts of random
length are verified in every step. Not covered: a GPU, bfloat16, real weights.

cuda/test_engine.py has what is particular to that engine, vllm_engine/ that of vLLM; test_speculation.py has responses
whose drafts are mostly right.
"""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.engines.adapter_case import RANK, given, random_adapter
from tests.support.engines.gpu_case import graph_engine
from tests.support.engines.small_models import MODELS, drain, engine, logprobs, requests, tokens
from tests.support.quick_cases import quick_cases
from windfall.engine.base import Engine
from windfall.errors import WindfallError
from windfall.types import Request, Sampling

MODES = pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
MODE_VALUES = [(False, False), (True, False), (True, True)]
MODES_AND_SPECULATION = pytest.mark.parametrize(
    ("deterministic", "speculation"), MODE_VALUES, ids=["fast", "deterministic", "speculation"]
)
TWO_MODELS_MODES_AND_SPECULATION = pytest.mark.parametrize(
    ("plain", "deterministic", "speculation"),
    quick_cases(
        [(name, *mode) for name in MODELS for mode in MODE_VALUES],
        quick=[("mistral-window", False, False), ("llama", True, False), ("mistral-window", True, True)],
    ),
    indirect=["plain"],
)
SPECULATION = pytest.mark.parametrize("speculation", [False, True], ids=["plain", "speculation"])
pytestmark = pytest.mark.usefixtures("any_width")
TWO_MODELS = pytest.mark.parametrize(
    "plain", [pytest.param(n, marks=[pytest.mark.slow] if n == "qwen3" else []) for n in MODELS], indirect=True
)
"""For what has nothing to do with the layers of a model, apart from windows."""


def check_every_method(e: Engine, expected: dict[str, list[int]]) -> None:
    """Call every method of the interface once, on an engine without responses. `expected`: tokens of `requests(3)`."""
    first, second, third = requests(3, longest=20)
    before = e.counters
    assert (len(e), e.step(), e.waiting) == (0, [], False)
    assert e.capabilities.name
    assert e.limit > len(first.prompt) + first.max_tokens
    for r in (first, second):
        e.add(r)
    with pytest.raises(WindfallError, match="already"):
        e.add(first)
    assert len(e) == 2
    e.cancel(first.id)
    e.cancel("never heard of")
    assert len(e) == 1
    e.add(third)
    chunks = e.step()
    chunks += [c for launch in e.collect() for c in launch]
    assert e.collect() == [], "the device has nothing to compute"
    e.check()
    e.sleep()
    e.check()
    rest = drain(e)
    for r in (second, third):
        mine = [c for c in chunks if c.id == r.id] + rest[r.id]
        assert tokens(mine) == expected[r.id]
        assert [c.finish for c in mine] == [None] * (len(mine) - 1) + ["length"]
        assert {c.version for c in mine} == {e.version}
    after = e.counters
    assert after.generated - before.generated >= second.max_tokens + third.max_tokens
    assert after.steps > before.steps
    assert after.waiting == 0
    e.swap(e.version)
    assert (len(e), e.step()) == (0, [])


def graph_engine_of_copy(model: Any, **options: Any) -> Engine:
    return graph_engine(copy.deepcopy(model), **options)


@pytest.mark.parametrize(
    ("make", "adapters", "speculation"),  # every pair of values
    [
        (engine, 0, False), (engine, 1, True), (engine, 3, False),
        (graph_engine_of_copy, 0, True), (graph_engine_of_copy, 1, False), (graph_engine_of_copy, 3, True),
    ],
)  # fmt: skip
def test_every_method(model: Any, make: Any, speculation: bool, adapters: int) -> None:
    """With adapters, the responses are those of a policy without one, beside others (test_adapters.py has them)."""
    expected = {id: tokens(chunks) for id, chunks in drain(engine(model), requests(3, longest=20)).items()}
    e = make(model, speculation=speculation, adapters=adapters, adapter_rank=RANK)
    for policy in ("", "solver", "verifier")[:adapters]:
        e.swap(0, given(model, random_adapter(model, 1) if policy else {}, loaded=True), policy=policy)
    for group, id in (("g0", "0"), ("g0", "elsewhere"), ("", "alone")):
        e.remember(group, id, 0, expected["2"])
        e.remember(group, id, len(expected["2"]), (5, 6))
    check_every_method(e, expected)
    e.close()


@MODES_AND_SPECULATION
def test_greedy_equals_transformers_generate(plain: Any, model: Any, deterministic: bool, speculation: bool) -> None:
    asked = requests(10, temperature=0.0, longest=20)
    made = drain(engine(model, deterministic=deterministic, speculation=speculation), asked)
    for r in asked:
        ids = torch.tensor([r.prompt])
        oracle = plain.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=r.max_tokens, do_sample=False, eos_token_id=None
        )
        assert tokens(made[r.id]) == oracle[0, len(r.prompt) :].tolist()


@MODES
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_agree_with_transformers(plain: Any, model: Any, deterministic: bool, temperature: float) -> None:
    asked = requests(8, temperature=temperature, longest=20)
    made = drain(engine(model, deterministic=deterministic), asked)
    for r in asked:
        said = tokens(made[r.id])
        with torch.no_grad():
            logits = plain(torch.tensor([[*r.prompt, *said]])).logits[0, len(r.prompt) - 1 : -1]
        oracle = torch.log_softmax(logits / temperature, -1)[torch.arange(len(said)), said]
        assert torch.allclose(torch.tensor(logprobs(made[r.id])), oracle, atol=1e-4, rtol=0)


@TWO_MODELS
def test_deterministic_results_do_not_depend_on_batch_or_order(model: Any) -> None:
    asked = requests(14, longest=20)
    together = drain(engine(model, deterministic=True), asked)
    shuffled = list(asked)
    random.Random(1).shuffle(shuffled)
    # Fewer at once, smaller steps and other pages give other chunks, neighbors and tiles.
    otherwise = drain(engine(model, deterministic=True, max_running=5, max_rows=23, page_size=16), shuffled)
    drafted = drain(engine(model, deterministic=True, max_running=5, speculation=True), shuffled)
    for r in asked:
        alone = drain(engine(model, deterministic=True), [r])[r.id]
        for other in (together[r.id], otherwise[r.id], drafted[r.id]):
            assert tokens(other) == tokens(alone)
            assert logprobs(other) == logprobs(alone)  # bit for bit


@TWO_MODELS
def test_deterministic_response_resumes_from_any_token_bit_for_bit(model: Any) -> None:
    request = replace(requests(1, seed=4)[0], max_tokens=36)
    whole = drain(engine(model, deterministic=True), [request])[request.id]
    for cut in range(1, 36):
        end = 36 if cut % 7 == 1 else min(cut + 6, 36)  # the first tokens after the cut depend on everything before it
        so_far = tuple(tokens(whole)[:cut])
        rest = replace(request, prompt=request.prompt + so_far, position=cut, max_tokens=end - cut)
        neighbors = [replace(r, id=f"n{r.id}") for r in requests(cut % 5, seed=cut, longest=end - cut)]
        e = engine(model, deterministic=True, speculation=cut % 2 == 0)
        e.remember(request.group, request.id, 0, tokens(whole))
        resumed = drain(e, [*neighbors, rest])[request.id]
        assert resumed[0].position == cut
        assert tokens(resumed) == tokens(whole)[cut:end]
        assert logprobs(resumed) == logprobs(whole)[cut:end]


def test_fast_mode_differs_only_by_rounding(model: Any, record_property: Any) -> None:
    """A token may change only where the random number is within rounding of a boundary: rare, and counted."""
    asked = requests(14, longest=20)
    together = drain(engine(model), asked)
    changed = total = 0
    for r in asked:
        alone = drain(engine(model), [r])[r.id]
        a, b = tokens(alone), tokens(together[r.id])
        same = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
        total += len(a)
        changed += same < len(a)
        assert logprobs(alone)[:same] == pytest.approx(logprobs(together[r.id])[:same], abs=1e-4)
    record_property("responses_changed", changed)
    record_property("tokens", total)
    assert changed <= 1


@TWO_MODELS_MODES_AND_SPECULATION
def test_evicted_requests_generate_the_same_tokens(model: Any, deterministic: bool, speculation: bool) -> None:
    asked = [replace(r, prompt=r.prompt[:6], max_tokens=60) for r in requests(10)]  # small at first, then they grow
    roomy = drain(engine(model, deterministic=deterministic), asked)
    tight = engine(model, deterministic=deterministic, kv_tokens=224, max_rows=40, speculation=speculation)
    crowded = drain(tight, asked)
    assert tight.counters.evictions > 0
    assert [tokens(crowded[r.id]) for r in asked] == [tokens(roomy[r.id]) for r in asked]


def test_siblings_share_the_pages_of_their_prompt(model: Any) -> None:
    prompt = tuple(range(3, 53))  # three full pages and two tokens
    e = engine(model, max_rows=256)
    made = drain(e, [Request(id=str(i), prompt=prompt, seed=i, max_tokens=5) for i in range(8)])
    assert e.counters.reused_tokens == 7 * 48
    assert e.counters.rows == 50 + 7 * 2 + 8 * 4
    for i in range(8):
        alone = drain(engine(model), [Request(id="x", prompt=prompt, seed=i, max_tokens=5)])["x"]
        assert tokens(made[str(i)]) == tokens(alone)


@TWO_MODELS_MODES_AND_SPECULATION
def test_cancel_at_any_token_frees_pages_and_does_not_affect_others(
    model: Any, deterministic: bool, speculation: bool
) -> None:
    first, second = requests(2, seed=9)
    first, second = replace(first, max_tokens=20), replace(second, max_tokens=20)
    oracle = tokens(drain(engine(model, deterministic=deterministic), [second])[second.id])
    for when in range(12):
        e = engine(model, deterministic=deterministic, max_rows=8, speculation=speculation)
        e.add(first)
        e.add(second)
        out = []
        for _ in range(when):
            out += [c for c in e.step() if c.id == second.id]
        e.cancel(first.id)
        e.check()
        out += drain(e).get(second.id, [])
        assert tokens(out) == oracle
    e.cancel("never heard of")


@SPECULATION
def test_swap_between_two_steps(plain: Any, model: Any, speculation: bool) -> None:
    """Running responses keep their tokens and continue with the new weights like a new engine."""
    other = type(plain)(copy.deepcopy(plain.config)).eval()
    torch.manual_seed(11)
    new = {k: v + 0.05 * torch.randn_like(v) for k, v in plain.state_dict().items()}
    if plain.config.tie_word_embeddings:
        new["lm_head.weight"] = new["model.embed_tokens.weight"]
    other.load_state_dict(new)
    other.set_attn_implementation("windfall")
    mine = type(plain)(copy.deepcopy(plain.config)).eval()
    mine.load_state_dict(plain.state_dict())
    mine.set_attn_implementation("windfall")
    request = replace(requests(1, seed=2)[0], max_tokens=30)
    e = engine(mine, deterministic=True, speculation=speculation)
    e.add(request)
    before = [c for _ in range(7) for c in e.step()]
    count = len(tokens(before))
    e.swap(3, new)
    e.check()
    after = drain(e)[request.id]
    assert {c.version for c in before} == {0}
    assert {c.version for c in after} == {3}
    prompt = request.prompt + tuple(tokens(before))
    rest = replace(request, prompt=prompt, position=count, max_tokens=30 - count)
    assert tokens(after) == tokens(drain(engine(other, deterministic=True), [rest])[request.id])
    with pytest.raises(WindfallError, match="does not fit"):
        e.swap(4, {"no.such.weight": torch.zeros(1)})
    held = {k: v.clone() for k, v in mine.state_dict().items()}
    misshapen = {**new, "model.norm.weight": torch.zeros(1)}
    with pytest.raises(WindfallError, match="wrong shape"):
        e.swap(4, misshapen)
    assert all(torch.equal(v, held[k]) for k, v in mine.state_dict().items())  # nothing was copied


@SPECULATION
def test_response_ends_with_its_stop_token(model: Any, speculation: bool) -> None:
    request = replace(requests(1, temperature=0.0)[0], max_tokens=30)
    whole = tokens(drain(engine(model), [request])[request.id])
    stop = whole[7]
    e = engine(model, speculation=speculation)
    e.remember(request.group, "sibling", 0, whole)
    chunks = drain(e, [replace(request, stop=frozenset({stop}))])[request.id]
    assert tokens(chunks) == whole[: whole.index(stop) + 1]
    assert chunks[-1].finish == "stop"
    assert [c.finish for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert drain(engine(model), [request])[request.id][-1].finish == "length"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"prompt": ()}, "1 or more token ids"),
        ({"prompt": (3, 10**6)}, "1 or more token ids"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**6}, "do not fit"),
        ({"sampling": Sampling(top_p=0.0)}, "top_p"),
        ({"sampling": Sampling(temperature=-1.0)}, "temperature"),
        ({"position": -1}, "position"),
    ],
)
@pytest.mark.parametrize("plain", ["llama"], indirect=True)
def test_bad_requests_are_rejected_without_side_effects(model: Any, change: dict[str, Any], why: str) -> None:
    good = requests(1)[0]
    e = engine(model)
    e.add(good)
    with pytest.raises(WindfallError, match=why):
        e.add(replace(good, id="bad", **change))
    with pytest.raises(WindfallError, match="already"):
        e.add(good)
    assert len(drain(e)[good.id]) == good.max_tokens


def test_next_turn_prefills_only_what_is_new(model: Any) -> None:
    first = Request(id="1", prompt=tuple(range(3, 103)), seed=1, max_tokens=12)
    e, fresh = engine(model, deterministic=True), engine(model, deterministic=True)
    said = (*first.prompt, *tokens(drain(e, [first])["1"]), *range(5, 25))
    second = replace(first, id="2", prompt=said, position=32)
    prefilled = e.counters.prefilled
    again = drain(e, [second])["2"]
    assert e.counters.prefilled - prefilled < 40
    assert tokens(again) == tokens(drain(fresh, [second])["2"])
