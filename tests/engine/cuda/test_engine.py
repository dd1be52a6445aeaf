"""The GPU engine fulfills the engine contract: on the CPU with the reference kernels in plain torch, and on a GPU if
there is one, in float32 and bfloat16. Not covered: real weights, several GPUs, speed.

Siblings form prefix groups wherever possible, unless a test disables that.

gpu_case.py defines what is compared, and which results count as equal.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.engines.gpu_case import CLOSE, MORE, NEVER, Case, cases, graph_engine
from tests.support.engines.small_models import MODELS, build, drain, logprobs, requests, tokens
from windfall.engine.cuda.engine import GraphEngine
from windfall.engine.cuda.graphs import GraphKey
from windfall.engine.torch.engine import TorchEngine
from windfall.errors import WindfallError
from windfall.models import attention
from windfall.types import Chunk, Request, Sampling


@pytest.fixture(scope="module", params=cases([*MODELS, *MORE]))
def every(request: pytest.FixtureRequest) -> Case:
    """Every model, on every device and in every dtype."""
    return Case(*request.param)


@pytest.fixture(scope="module", params=cases(["qwen3"]))
def case(request: pytest.FixtureRequest) -> Case:
    """One model, on every device and in every dtype: for tests that do not depend on the model."""
    return Case(*request.param)


def test_comparison_on_a_gpu_rejects_wrong_tokens() -> None:
    """A wrong token, another length, and a token sampled with another random number are all rejected."""
    case = Case("qwen3", "cpu", torch.float32)
    case.exact, case.close = False, CLOSE["cuda", torch.float32]
    request = replace(requests(1)[0], max_tokens=12)
    (right,) = drain(graph_engine(case.model), [request]).values()
    whole = [replace(right[0], tokens=tuple(tokens(right)), logprobs=tuple(logprobs(right)))]
    case.same(request, right, whole)
    words = whole[0].tokens
    wrong = [
        replace(whole[0], tokens=(*words[:5], (words[5] + 7) % 90 + 3, *words[6:])),
        replace(whole[0], tokens=words[:-1], logprobs=whole[0].logprobs[:-1]),
        *drain(graph_engine(case.model), [replace(request, seed=request.seed + 1)])[request.id][:1],
    ]
    for other in wrong:
        with pytest.raises(AssertionError):
            case.same(request, whole, [other])


def test_greedy_equals_transformers_generate(every: Case) -> None:
    asked = requests(10, temperature=0.0)
    made = drain(every.engine(), asked)
    for r in asked:
        said = tokens(made[r.id])
        assert len(said) == r.max_tokens
        logits = every.logits(r, said)
        taken = logits[torch.arange(len(said)), said]
        assert (taken >= logits.max(-1).values - 2 * every.close).all()
        if every.exact:
            ids = torch.tensor([r.prompt])
            oracle = every.plain.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=r.max_tokens, do_sample=False,
                eos_token_id=None,
            )  # fmt: skip
            assert said == oracle[0, len(r.prompt) :].tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_agree_with_transformers(every: Case, temperature: float) -> None:
    asked = requests(8, temperature=temperature)
    made = drain(every.engine(page_size=8), asked)
    wrong: list[float] = []
    for r in asked:
        said = tokens(made[r.id])
        oracle = torch.log_softmax(every.logits(r, said) / temperature, -1)[torch.arange(len(said)), said]
        wrong += ((torch.tensor(logprobs(made[r.id])) - oracle).abs() * temperature).tolist()
    assert max(wrong) < every.close
    assert sum(wrong) / len(wrong) < every.close / 6


def test_graph_engine_generates_the_same_as_torch_engine(every: Case) -> None:
    """The same samples, also with top-k and top-p, as the engine that runs transformers' own modules."""
    hows = [Sampling(), Sampling(temperature=0.6), Sampling(top_k=5), Sampling(temperature=1.3, top_p=0.8, top_k=20)]
    asked = [replace(r, sampling=hows[i % 4]) for i, r in enumerate(requests(12, seed=3))]
    every.plain.set_attn_implementation(attention.NAME)
    other = drain(TorchEngine(every.plain, kv_tokens=4096), asked)
    every.plain.set_attn_implementation("sdpa")
    made = drain(every.engine(), asked)
    for r in asked:
        every.same(r, made[r.id], other[r.id])


def test_response_resumes_from_any_token(case: Case) -> None:
    request = replace(requests(1, seed=4)[0], max_tokens=36)
    whole = drain(case.engine(), [request])[request.id]
    for cut in range(1, 36):
        end = 36 if cut % 7 == 1 else min(cut + 6, 36)  # the first tokens after the cut depend on everything before it
        so_far = tuple(tokens(whole)[:cut])
        rest = replace(request, prompt=request.prompt + so_far, position=cut, max_tokens=end - cut)
        neighbors = [replace(r, id=f"n{r.id}") for r in requests(cut % 5, seed=cut, longest=end - cut)]
        resumed = drain(case.engine(), [*neighbors, rest])[request.id]
        assert resumed[0].position == cut
        left = replace(whole[0], tokens=tuple(tokens(whole)[cut:end]), logprobs=tuple(logprobs(whole)[cut:end]))
        case.same(rest, resumed, [left])


@pytest.mark.parametrize("burst", [1, 8, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 20))])
def test_evicted_requests_generate_the_same_tokens(case: Case, burst: int) -> None:
    asked = [replace(r, prompt=r.prompt[:6], max_tokens=60) for r in requests(10)]  # small at first, then they grow
    roomy = drain(case.engine(), asked)
    tight = case.engine(kv_tokens=224, max_rows=40, burst=burst)
    crowded = drain(tight, asked)
    assert tight.counters.evictions > 0
    for r in asked:
        case.same(r, crowded[r.id], roomy[r.id])


def test_siblings_share_the_pages_of_their_prompt(case: Case) -> None:
    prompt = tuple(range(3, 53))  # three full pages and two tokens
    e = case.engine(max_rows=256)
    made = drain(e, [Request(id=str(i), prompt=prompt, seed=i, max_tokens=5) for i in range(8)])
    assert e.counters.reused_tokens == 7 * 48
    assert e.counters.rows == 50 + 7 * 2 + 8 * 4
    for i in range(8):
        request = Request(id="x", prompt=prompt, seed=i, max_tokens=5)
        case.same(request, made[str(i)], drain(case.engine(), [request])["x"])


def recorded_groups(e: GraphEngine) -> list[list[list[int]]]:
    """A list that receives the prefix groups of every launch."""
    seen: list[list[list[int]]] = []
    launch = e._device.launch
    e._device.launch = lambda work, version: seen.append(work.prefix_groups.tolist()) or launch(work, version)
    return seen


def test_prefix_group_generates_the_same_as_single_rows(every: Case) -> None:
    """Siblings of two prompts in mixed order, some started elsewhere, ending at different times, and a single row."""
    prompts = [tuple(range(3, 53)), tuple(range(40, 90)), (5, 6, 7)]
    asked = [Request(id=str(n), prompt=prompts[n % 2], seed=n, max_tokens=6 + 2 * n) for n in range(9)]
    said = (11, 12, 13, 14)
    asked += [replace(asked[n], id=f"m{n}", prompt=asked[n].prompt + said, position=4) for n in (0, 1)]
    asked += [Request(id="alone", prompt=prompts[2], seed=5, max_tokens=30)]
    e = every.engine(max_rows=256, burst=4)
    seen = recorded_groups(e)
    made = drain(e, asked)
    whole = {w.window for w in e._device.decoder.layers} & {None}
    fit = 16 // (e._device.decoder.heads // e._device.decoder.kv_heads)
    assert max(count for prefix_groups in seen for _, count, _ in prefix_groups or [[0, 0, 0]]) == (
        min(fit, 6) if whole else 0
    )
    for r in asked:
        every.same(r, made[r.id], drain(every.engine(sharing=NEVER), [r])[r.id])


def test_prefix_groups_survive_preemption_cancel_swap_and_sleep(case: Case) -> None:
    """There is not enough room for all: rows are preempted and find the pages of their prompt again. Then all
    restart."""
    mine = copy.deepcopy(case.model)
    prompt = tuple(range(3, 20))
    asked = [Request(id=str(n), prompt=prompt, seed=n, max_tokens=60) for n in range(10)]
    e = graph_engine(mine, kv_tokens=224, page_size=8, burst=5)
    seen = recorded_groups(e)
    for r in asked:
        e.add(r)
    out = [c for _ in range(8) for c in e.step()]
    e.cancel("3")
    e.swap(1, {k: v.clone() for k, v in mine.state_dict().items()})
    out += [c for _ in range(6) for c in e.step()]
    e.sleep()
    out += [c for chunks in drain(e).values() for c in chunks]
    assert e.counters.evictions > 0
    assert len({str(prefix_groups) for prefix_groups in seen}) > 4
    for r in asked:
        if r.id != "3":
            case.same(r, [c for c in out if c.id == r.id], drain(case.engine(sharing=NEVER), [r])[r.id])


def test_cancel_at_any_time_frees_pages_and_does_not_affect_others(case: Case) -> None:
    first, second = (replace(r, max_tokens=20) for r in requests(2, seed=9))
    oracle = drain(case.engine(), [second])[second.id]
    for when in range(12):
        e = case.engine(max_rows=8, burst=3)
        e.add(first)
        e.add(second)
        out = [c for _ in range(when) for c in e.step() if c.id == second.id]
        e.cancel(first.id)
        e.check()
        rest = drain(e)
        assert first.id not in rest
        case.same(second, [*out, *rest.get(second.id, [])], oracle)
    e.cancel("never heard of")


def other_weights(case: Case) -> dict[str, torch.Tensor]:
    torch.manual_seed(11)
    new = {k: v.detach() + 0.05 * torch.randn(v.shape).to(v) for k, v in case.model.state_dict().items()}
    if case.model.config.tie_word_embeddings:
        new["lm_head.weight"] = new["model.embed_tokens.weight"]
    return new


@pytest.mark.parametrize("when", [0, 1, 2, 4])
def test_swap_between_two_steps(case: Case, when: int) -> None:
    """Pending tokens are returned separately with their own version; then the response continues like in a new
    engine."""
    mine = copy.deepcopy(case.model)
    new = other_weights(case)
    request = replace(requests(1, seed=2)[0], max_tokens=30)
    e = graph_engine(mine, burst=3)
    e.add(request)
    before = [c for _ in range(when) for c in e.step()]
    e.swap(3, new)
    e.check()
    after: list[Chunk] = []
    while len(e):
        chunks = e.step()
        e.check()
        assert len({c.version for c in chunks}) <= 1
        (before if chunks and chunks[0].version == 0 else after).extend(chunks)
    assert {c.version for c in before} <= {0}
    assert {c.version for c in after} == {3}
    assert bool(before) == (when > 0)
    cut = len(tokens(before))
    rest = replace(request, prompt=request.prompt + tuple(tokens(before)), position=cut, max_tokens=30 - cut)
    fresh = copy.deepcopy(case.model)
    fresh.load_state_dict(new)
    case.same(rest, after, drain(graph_engine(fresh), [rest])[request.id], plain=copy.deepcopy(fresh).float().cpu())


def test_wrong_weights_are_rejected_and_none_is_copied(case: Case) -> None:
    mine = copy.deepcopy(case.model)
    e = graph_engine(mine)
    with pytest.raises(WindfallError, match="does not fit"):
        e.swap(4, {"no.such.weight": torch.zeros(1)})
    held = {k: v.clone() for k, v in mine.state_dict().items()}
    with pytest.raises(WindfallError, match="wrong shape"):
        e.swap(4, {**other_weights(case), "model.norm.weight": torch.zeros(1)})
    assert all(torch.equal(v, held[k]) for k, v in mine.state_dict().items())
    assert e.version == 0


@pytest.mark.parametrize("when", range(6))
def test_sleep_at_any_time_frees_memory_and_loses_no_token(case: Case, when: int) -> None:
    asked = requests(6, seed=5)
    oracle = drain(case.engine(), asked)
    e = case.engine(burst=4)
    for r in asked:
        e.add(r)
    out = [c for _ in range(when) for c in e.step()]
    e.sleep()
    assert e.asleep
    e.check()
    e.cancel(asked[0].id)
    rest = [c for chunks in drain(e).values() for c in chunks]
    assert not e.asleep
    for r in asked[1:]:
        case.same(r, [c for c in [*out, *rest] if c.id == r.id], oracle[r.id])
    e.sleep()
    assert e.step() == []
    assert e.asleep, "there is no work to wake up for"


@pytest.mark.parametrize("more", [0, 12])
def test_response_ends_with_its_stop_token(case: Case, more: int) -> None:
    """Also with more stop tokens than the device checks: the host finds the others."""
    request = replace(requests(1, temperature=0.0)[0], max_tokens=30)
    whole = tokens(drain(case.engine(), [request])[request.id])
    stop = whole[7]
    unsaid = [t for t in range(160) if t not in whole][:more]
    e = case.engine()
    chunks = drain(e, [replace(request, stop=frozenset({stop, *unsaid, 2**40}))])[request.id]
    assert tokens(chunks) == whole[: whole.index(stop) + 1]
    assert chunks[-1].finish == "stop"
    assert [c.finish for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert e.counters.generated == whole.index(stop) + 1, "tokens after the end are not counted"
    assert drain(case.engine(), [request])[request.id][-1].finish == "length"


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
def test_bad_requests_are_rejected_without_side_effects(case: Case, change: dict[str, Any], why: str) -> None:
    good = requests(1)[0]
    e = case.engine()
    e.add(good)
    with pytest.raises(WindfallError, match=why):
        e.add(replace(good, id="bad", **change))
    with pytest.raises(WindfallError, match="already"):
        e.add(good)
    assert len(tokens(drain(e)[good.id])) == good.max_tokens


def test_longest_accepted_response_finishes(case: Case) -> None:
    e = case.engine(kv_tokens=100, page_size=8, longest=61)
    prompt = tuple(range(3, 20))
    with pytest.raises(WindfallError, match="do not fit"):
        e.add(Request(id="a", prompt=prompt, seed=1, max_tokens=e.limit - 16))
    asked = [Request(id=n, prompt=prompt, seed=1, max_tokens=e.limit - 17) for n in "ab"]
    made = drain(e, asked)
    assert [len(tokens(made[n])) for n in "ab"] == [e.limit - 17] * 2
    assert drain(case.engine(), [replace(asked[0], id="c", max_tokens=1)])["c"][0].finish == "length"


def test_warm_up_does_not_change_results(case: Case) -> None:
    asked = requests(5)
    e = case.engine()
    e.warm(1, 5)
    made = drain(e, asked)
    assert e.counters.generated == sum(r.max_tokens for r in asked)
    for r in asked:
        case.same(r, made[r.id], drain(case.engine(), [r])[r.id])


@pytest.mark.parametrize("speculation", [False, True])
def test_widths_that_may_be_chosen_are_captured_with_their_batch(
    monkeypatch: pytest.MonkeyPatch, speculation: bool
) -> None:
    """A width that is used for the first time captures nothing while responses run."""
    e = graph_engine(build("llama"), max_running=16, max_rows=64, speculation=speculation)
    keys: list[GraphKey] = []
    monkeypatch.setattr(e._device._graphs, "prepare", keys.append)
    e.warm(1, 16, longest=200)
    widths = {batch: [k.width for k in keys if k.batch == batch] for batch in (1, 16)}
    assert widths == ({1: [1, 2, 4, 8], 16: [1, 2]} if speculation else {1: [1], 16: [1]})


def test_full_row_budget_without_waiting_requests_keeps_full_bursts() -> None:
    e = graph_engine(build("qwen3"), max_running=4, max_rows=4, burst=8)
    launch, steps = e._device.launch, []
    e._device.launch = lambda work, version: steps.append(work.steps) or launch(work, version)
    drain(e, [replace(r, prompt=r.prompt[:1], max_tokens=33) for r in requests(4)])
    assert steps.count(8) >= 3
    assert sum(steps) <= 40
