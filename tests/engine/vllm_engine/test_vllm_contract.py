"""What every engine must do, for vLLM: as in ../test_contract.py and ../test_swap.py, with models that vLLM runs.
Where `capabilities.exact` is true, a response continues token for token. Not covered on a CPU: graphs, bfloat16,
asynchronous scheduling, model runner V2. On a GPU the same file covers them."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engines import vllm_case
from tests.support.engines.adapter_case import RANK, given, merged, random_adapter
from tests.support.engines.small_models import drain, logprobs, requests, tokens
from tests.support.engines.vllm_case import CLOSE, MODELS, build, engine, versions
from windfall.errors import WindfallError
from windfall.types import Chunk, Request, Sampling

Made = dict[str, list[Chunk]]


@pytest.fixture(scope="module", params=list(MODELS))
def model(request: pytest.FixtureRequest) -> Any:
    torch.set_num_threads(1)
    return build(request.param)


@pytest.fixture(scope="module")
def llamas() -> list[Any]:
    return versions("llama", 3)


def oracle(model: Any, r: Request, said: list[int], temperature: float = 1.0) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([[*r.prompt, *said]])).logits[0, len(r.prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1)[torch.arange(len(said)), said]


def test_greedy_equals_transformers_generate(model: Any) -> None:
    asked = requests(10, temperature=0.0, longest=20)
    made = drain(engine(model), asked)
    for r in asked:
        ids = torch.tensor([r.prompt])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=r.max_tokens, do_sample=False, eos_token_id=None
        )
        assert tokens(made[r.id]) == expected[0, len(r.prompt) :].tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_agree_with_transformers(model: Any, temperature: float) -> None:
    asked = requests(8, temperature=temperature, longest=20)
    made = drain(engine(model), asked)
    for r in asked:
        said = tokens(made[r.id])
        expected = oracle(model, r, said, temperature)
        assert torch.allclose(torch.tensor(logprobs(made[r.id])), expected, atol=CLOSE, rtol=0)


def test_response_resumes_from_any_token(model: Any) -> None:
    e = engine(model)
    if not e.capabilities.exact:
        pytest.skip("this engine is not exact")
    request = replace(requests(1, seed=4)[0], max_tokens=36)
    whole = drain(e, [request])[request.id]
    for cut in range(1, 36):
        rest = replace(
            request, prompt=request.prompt + tuple(tokens(whole)[:cut]), position=cut, max_tokens=36 - cut
        )  # fmt: skip
        neighbors = [replace(r, id=f"n{r.id}") for r in requests(cut % 5, seed=cut, longest=36 - cut)]
        resumed = drain(e, [*neighbors, rest])[request.id]
        assert resumed[0].position == cut
        assert tokens(resumed) == tokens(whole)[cut:]
        assert logprobs(resumed) == pytest.approx(logprobs(whole)[cut:], abs=CLOSE)


def test_results_do_not_depend_on_batch_or_order(model: Any) -> None:
    e, asked = engine(model), requests(14, longest=20)
    together = drain(e, asked)
    shuffled = list(asked)
    random.Random(1).shuffle(shuffled)
    again = drain(e, shuffled)
    for r in asked:
        alone = drain(e, [r])[r.id]
        assert tokens(together[r.id]) == tokens(alone) == tokens(again[r.id])
        assert logprobs(together[r.id]) == pytest.approx(logprobs(alone), abs=CLOSE)


def test_same_tokens_as_windfalls_engine(llamas: list[Any]) -> None:
    """With windfall's sampler, a response may move between the two engines."""
    from tests.support.engines.small_models import engine as torch_engine
    from windfall.models import attention

    e, asked = engine(llamas[0]), requests(14, longest=20)
    if not e._own:
        pytest.skip("vLLM draws the tokens itself")
    twin = build("llama")
    twin.set_attn_implementation(attention.NAME)
    made, expected = drain(e, asked), drain(torch_engine(twin), asked)
    assert [tokens(made[r.id]) for r in asked] == [tokens(expected[r.id]) for r in asked]


def test_preempted_requests_generate_the_same_tokens(llamas: list[Any]) -> None:
    asked = [replace(r, prompt=r.prompt[:6], max_tokens=130) for r in requests(10)]
    roomy = drain(engine(llamas[0]), asked)
    crowded = drain(engine(llamas[0], kv_tokens=512), asked)
    assert [tokens(crowded[r.id]) for r in asked] == [tokens(roomy[r.id]) for r in asked]


def test_siblings_share_their_prompt(llamas: list[Any]) -> None:
    prompt = tuple(3 + n % 150 for n in range(150))
    e = engine(llamas[0])
    before = e.counters.reused_tokens
    made = drain(e, [Request(id=str(i), prompt=prompt, seed=i, max_tokens=5) for i in range(6)])
    assert e.counters.reused_tokens > before
    for i in range(6):
        alone = drain(e, [Request(id="x", prompt=prompt, seed=i, max_tokens=5)])["x"]
        assert tokens(made[str(i)]) == tokens(alone)


def test_cancel_at_any_token_does_not_affect_others(llamas: list[Any]) -> None:
    first, second = (replace(r, max_tokens=20) for r in requests(2, seed=9))
    e = engine(llamas[0])
    expected = tokens(drain(e, [second])[second.id])
    for when in range(12):
        e.add(first)
        e.add(second)
        made: list[Chunk] = []
        for _ in range(when):
            made += [c for c in e.step() if c.id == second.id]
        e.cancel(first.id)
        e.check()
        e.add(replace(first, max_tokens=1))  # the same id again, before vLLM has made a step
        rest = drain(e)
        assert len(tokens(rest[first.id])) == 1
        assert tokens(made + rest.get(second.id, [])) == expected
    e.cancel("never heard of")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("when", [2, 5])
def test_running_responses_continue_with_the_new_weights(name: str, when: int) -> None:
    """Some responses decode, some are in the middle of their prefill, some wait. Then the older version returns."""
    models = versions(name, 3)
    e, made = engine(models[0], max_running=4, max_rows=24), Made()
    asked = [replace(r, max_tokens=16 + n) for n, r in enumerate(requests(6, seed=3))]
    for r in asked:
        e.add(r)
    for version in (1, 2, 1):
        step(e, made, when)
        e.swap(version, models[version].state_dict())
        e.check()
    while len(e):
        step(e, made)
    assert any(len({c.version for c in chunks}) >= 3 for chunks in made.values())
    for r in asked:
        said, at = tokens(made[r.id]), 0
        assert len(said) == r.max_tokens
        for c in made[r.id]:
            assert c.position == at
            expected = oracle(models[c.version], r, said[: at + len(c.tokens)])[at:]
            assert torch.allclose(torch.tensor(c.logprobs), expected, atol=CLOSE, rtol=0), f"{r.id} at {at}"
            at += len(c.tokens)
    if e.capabilities.exact:  # from a swap on, the response is a new one with that prefix
        r = asked[0]
        start = next(c.position for c in made[r.id] if c.version == 1)
        end = next((c.position for c in made[r.id] if c.version == 2), r.max_tokens)
        prompt = r.prompt + tuple(tokens(made[r.id])[:start])
        rest = replace(r, prompt=prompt, position=start, max_tokens=end - start)
        resumed = drain(engine(models[1], max_running=4, max_rows=24), [rest])[r.id]
        assert tokens(resumed) == tokens(made[r.id])[start:end]


def step(e: Any, made: Made, count: int = 1) -> None:
    for _ in range(count):
        chunks = e.step()
        assert len({c.version for c in chunks}) <= 1, "one step returns tokens of one version"
        for c in chunks:
            made.setdefault(c.id, []).append(c)


def test_refused_weights_change_nothing(llamas: list[Any]) -> None:
    e, request = engine(llamas[0]), replace(requests(1, seed=2)[0], max_tokens=20)
    expected = tokens(drain(e, [request])[request.id])
    made = Made()
    e.add(request)
    step(e, made, 4)
    with pytest.raises(WindfallError, match="wrong shape"):
        e.swap(1, {**llamas[1].state_dict(), "model.norm.weight": torch.zeros(1)})
    with pytest.raises(WindfallError, match="does not fit"):
        e.swap(1, {"no.such.weight": torch.zeros(1)})
    while len(e):
        step(e, made)
    assert {c.version for c in made[request.id]} == {0}
    assert tokens(made[request.id]) == expected


def test_adapters_are_merged_at_the_swap(llamas: list[Any]) -> None:
    """As a worker gets them in a run that trains adapters."""
    from windfall.weights.merged import MergedWeights

    base, noise = llamas[0].state_dict(), torch.Generator().manual_seed(8)
    layer = "model.layers.1.self_attn.q_proj"
    pair = {
        f"{layer}.lora_A.weight": torch.randn(4, 128, generator=noise),
        f"{layer}.lora_B.weight": torch.randn(128, 4, generator=noise),
    }
    merged = build("llama")
    merged.load_state_dict({**base, f"{layer}.weight": base[f"{layer}.weight"] + 0.1 * (
        pair[f"{layer}.lora_B.weight"] @ pair[f"{layer}.lora_A.weight"]
    )})  # fmt: skip
    e, request = engine(llamas[0]), replace(requests(1, seed=2)[0], max_tokens=20)
    e.swap(1, MergedWeights(base, pair, 0.1))
    said = drain(e, [request])[request.id]
    assert torch.allclose(torch.tensor(logprobs(said)), oracle(merged, request, tokens(said)), atol=CLOSE, rtol=0)


def test_several_adapters_in_one_batch_and_a_swap_of_one(llamas: list[Any]) -> None:
    base = llamas[0]
    adapters: dict[str, Any] = {name: random_adapter(base, n, size=0.2) for n, name in enumerate(("one", "two", "new"))}
    e = engine(base, adapters=4, adapter_rank=RANK)
    for policy in ("one", "two"):
        e.swap(0, given(base, adapters[policy], loaded=True), policy=policy)
    e.swap(0, given(base, {}, loaded=True), policy="none")
    policies = ("one", "two", "none")
    wanted = [replace(r, policy=policies[n % 3], max_tokens=20) for n, r in enumerate(requests(6, seed=3))]
    for r in wanted:
        e.add(r)
    made: dict[str, list[Any]] = {r.id: [] for r in wanted}
    for step in range(200):
        if step == 6:
            e.swap(1, given(base, adapters["new"], loaded=True), policy="one")
        for c in e.step():
            made[c.id].append(c)
    e.check()
    assert len(e) == 0
    oracles = {name: merged(base, adapter) for name, adapter in adapters.items()} | {"none": base}
    for r in wanted:
        said, count = tokens(made[r.id]), len(tokens(c for c in made[r.id] if c.version == 0))
        assert len(said) == 20
        assert (count < 20) == (r.policy == "one")
        first = oracle(oracles[r.policy], r, said)[:count]
        rest = oracle(oracles["new"], r, said)[count:]
        assert torch.allclose(torch.tensor(logprobs(made[r.id])), torch.cat([first, rest]), atol=5 * CLOSE, rtol=0)
    with pytest.raises(WindfallError, match="not loaded"):
        e.add(replace(wanted[0], policy="stranger"))
    e.swap(2, given(llamas[1], adapters["two"]), policy="judge")  # its worker has switched to another base
    assert e.versions == {"judge": 2}
    (said,) = drain(e, [r := replace(wanted[0], policy="judge")]).values()
    expected = oracle(merged(llamas[1], adapters["two"]), r, tokens(said))
    assert torch.allclose(torch.tensor(logprobs(said)), expected, atol=5 * CLOSE, rtol=0)
    assert [path.name for path in Path(e._folders._root.name).iterdir()] == ["4"], "folders of others are gone"


def test_response_ends_with_its_stop_token(model: Any) -> None:
    request = replace(requests(1, temperature=0.0)[0], max_tokens=30)
    e = engine(model)
    whole = tokens(drain(e, [request])[request.id])
    stop = whole[7]
    chunks = drain(e, [replace(request, stop=frozenset({stop, 159}))])[request.id]
    assert tokens(chunks) == whole[: whole.index(stop) + 1]
    assert chunks[-1].finish == "stop"
    assert [c.finish for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert drain(e, [request])[request.id][-1].finish == "length"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"prompt": ()}, "1 or more token ids"),
        ({"prompt": (3, 10**6)}, "1 or more token ids"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**6}, "do not fit"),
        ({"sampling": Sampling(top_p=0.0)}, "top_p"),
        ({"position": -1}, "position"),
    ],
)
def test_bad_requests_are_rejected_without_side_effects(llamas: list[Any], change: dict[str, Any], why: str) -> None:
    good, e = requests(1)[0], engine(llamas[0])
    e.add(good)
    with pytest.raises(WindfallError, match=why):
        e.add(replace(good, id="bad", **change))
    with pytest.raises(WindfallError, match="already"):
        e.add(good)
    assert len(drain(e)[good.id]) == good.max_tokens


def test_cuts_agree_or_are_refused(llamas: list[Any]) -> None:
    """Log-probs are those before the cut, so cuts are allowed only with windfall's sampler."""
    cut = Sampling(top_k=3)
    asked = [replace(r, sampling=cut) for r in requests(4, longest=12)]
    e = engine(llamas[0])
    if not e._own:
        with pytest.raises(WindfallError, match="before"):
            e.add(asked[0])
        return
    made = drain(e, asked)
    for r in asked:
        said = tokens(made[r.id])
        with torch.no_grad():
            logits = llamas[0](torch.tensor([[*r.prompt, *said]])).logits[0, len(r.prompt) - 1 : -1]
        assert all(t in row.topk(3).indices for t, row in zip(said, logits, strict=True))
        assert torch.allclose(torch.tensor(logprobs(made[r.id])), oracle(llamas[0], r, said), atol=CLOSE, rtol=0)


def test_native_sampler_says_whether_it_is_exact(llamas: list[Any]) -> None:
    """Without windfall's sampler, model runner V1 is not exact, and refuses cuts."""
    e = engine(llamas[0], own_sampler=False)
    asked = requests(6, longest=12)
    made = drain(e, asked)
    for r in asked:
        said = tokens(made[r.id])
        assert len(said) == r.max_tokens
        assert torch.allclose(torch.tensor(logprobs(made[r.id])), oracle(llamas[0], r, said), atol=CLOSE, rtol=0)
    if vllm_case.DEVICE == "cpu":
        assert not e.capabilities.exact
    with pytest.raises(WindfallError, match="windfall needs those before"):
        e.add(replace(asked[0], sampling=Sampling(top_p=0.9)))
    with pytest.raises(WindfallError, match=r"temperature 0\.01 instead of 0\.005"):
        e.add(replace(asked[0], sampling=Sampling(temperature=0.005)))


def test_worker_is_refused_if_its_engine_cannot_sample_as_the_run_does(llamas: list[Any]) -> None:
    """When it has built its engine: a response that `add` rejects would count as one without room."""
    vllm_case.close_all()
    spec = vllm_case.spec_of(llamas[0], samplings=(Sampling(), Sampling(top_k=3)))
    with pytest.raises(WindfallError, match="top_k is 3"):
        vllm_case.vllm_factory.build(spec, vllm_case.DEVICE, own_sampler=False, eager=True)


def test_second_engine_of_a_process_may_capture_graphs(llamas: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Model runner V1 leaves graph capture switched off for the whole process; an engine with V2 would then fail with
    "CUDA graph capturing detected at an inappropriate time"."""
    from vllm import LLMEngine  # pyright: ignore
    from vllm.compilation import monitor  # pyright: ignore

    found: list[bool] = []
    whole = LLMEngine.from_engine_args

    def recorded(*args: Any, **kw: Any) -> Any:
        found.append(monitor.cudagraph_capturing_enabled)
        return whole(*args, **kw)

    monkeypatch.setattr(LLMEngine, "from_engine_args", recorded)
    monitor.set_cudagraph_capturing_enabled(False)
    vllm_case.close_all()
    engine(llamas[0])
    assert found == [True]
