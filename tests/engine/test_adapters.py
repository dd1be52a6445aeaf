"""What every engine must do that holds several policies of one base: each response is that of its own policy, in any
batch; a swap of one policy leaves tokens and cache of the others. Not covered: a GPU (cuda/test_adapters.py)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from tests.support.engines.adapter_case import RANK, given, merged, random_adapter
from tests.support.engines.continuation import check_continuation, of_chunks
from tests.support.engines.gpu_case import graph_engine
from tests.support.engines.small_models import MODELS, drain, engine, logprobs, requests, tokens
from tests.support.quick_cases import quick_cases
from windfall.errors import WindfallError
from windfall.types import Request
from windfall.weights.merged import MergedWeights

CLOSE = 2e-4
"""Largest difference of log-probs between merged and unmerged adapters in float32."""
MAKE: dict[str, Callable[..., Any]] = {
    "torch": engine,
    "torch-deterministic": lambda model, **how: engine(model, deterministic=True, **how),
    "cuda": lambda model, **how: graph_engine(copy.deepcopy(model), **how),
}
ENGINES = pytest.mark.parametrize("kind", MAKE)
HOW: dict[str, Any] = {"max_running": 6, "max_rows": 24}  # some responses wait, and prompts are prefilled in chunks


def with_adapters(kind: str, model: Any, adapters: dict[str, Any], **how: Any) -> Any:
    """An engine that holds these adapters by policy; None: a policy without one."""
    e = MAKE[kind](model, adapters=max(3, len(adapters)), adapter_rank=RANK, **{**HOW, **how})
    for n, (policy, adapter) in enumerate(adapters.items()):
        e.swap(0, given(model, adapter or {}, loaded=n > 0), policy=policy)
    return e


def asked(policies: list[str], count: int = 9) -> list[Request]:
    """Requests of these policies in turn. Siblings, which have the same prompt, may have different policies."""
    return [
        replace(r, policy=policies[n % len(policies)], max_tokens=12 + n) for n, r in enumerate(requests(count, seed=3))
    ]


def three(model: Any) -> dict[str, Any]:
    """Two adapters of different layers and ranks, and a policy without one. One changes the head and the embeddings,
    which are one matrix in some of the models."""
    return {
        "solver": random_adapter(model, 1),
        "verifier": random_adapter(model, 2, rank=2, parts=("k_proj", "down_proj", "lm_head", "embed_tokens")),
        "reference": None,
    }


@ENGINES
@pytest.mark.parametrize(
    ("plain", "count"),
    quick_cases(product(MODELS, [1, 3]), quick=[("llama", 1), *((n, 3) for n in MODELS)]),
    indirect=["plain"],
)
def test_each_response_is_that_of_its_own_policy(model: Any, kind: str, count: int) -> None:
    adapters = dict(list(three(model).items())[:count])
    wanted = asked(list(adapters))
    made = drain(with_adapters(kind, model, adapters), wanted)
    for policy, adapter in adapters.items():
        own = [replace(r, policy="") for r in wanted if r.policy == policy]
        alone = drain(MAKE[kind](merged(model, adapter) if adapter else model, **HOW), own)
        for r in own:
            assert tokens(made[r.id]) == tokens(alone[r.id])
            assert logprobs(made[r.id]) == pytest.approx(logprobs(alone[r.id]), abs=CLOSE)
    changed = [r for r in wanted if adapters[r.policy]]
    base = drain(MAKE[kind](model, **HOW), [replace(r, policy="") for r in changed])
    assert any(tokens(base[r.id]) != tokens(made[r.id]) for r in changed), "the adapters change nothing"


@pytest.mark.parametrize("plain", ["llama"], indirect=True)
def test_deterministic_bits_do_not_depend_on_other_adapters(model: Any) -> None:
    adapters = three(model)
    wanted = asked(list(adapters))
    together = drain(with_adapters("torch-deterministic", model, adapters), wanted)
    for policy, adapter in adapters.items():
        own = [r for r in wanted if r.policy == policy]
        alone = drain(with_adapters("torch-deterministic", model, {policy: adapter}, max_running=2), own)
        for r in own:
            assert logprobs(together[r.id]) == logprobs(alone[r.id])  # bit for bit
            assert tokens(together[r.id]) == tokens(alone[r.id])


@pytest.mark.parametrize("plain", ["llama"], indirect=True)
@ENGINES
def test_swap_of_one_policy_leaves_the_others(model: Any, kind: str) -> None:
    adapters, new = three(model), random_adapter(model, 7)
    e = with_adapters(kind, model, adapters)
    wanted = asked(list(adapters), 6)
    made: dict[str, list[Any]] = {r.id: [] for r in wanted}
    for r in wanted:
        e.add(r)
    prefilled = 0
    for step in range(1000):
        if step == 8:
            prefilled = e.counters.prefilled
            running = {s for s in e._scheduler.running if s.request.policy != "solver"}
            e.swap(1, given(model, new, loaded=True), policy="solver")
            e.check()
            assert {s for s in e._scheduler.running if s.request.policy != "solver"} == running
            assert not any(s.request.policy == "solver" for s in e._scheduler.running)
            assert e.versions == {"solver": 1, "verifier": 0, "reference": 0}
        for c in e.step():
            made[c.id].append(c)
        e.check()
    assert not len(e)
    assert prefilled
    models = {
        ("solver", 0): merged(model, adapters["solver"]), ("solver", 1): merged(model, new),
        ("verifier", 0): merged(model, adapters["verifier"]), ("reference", 0): model,
    }  # fmt: skip
    seen = set()
    for r in wanted:
        said = of_chunks(made[r.id])
        assert len(said) == r.max_tokens
        seen |= {(r.policy, t.version) for t in said}
        check_continuation(
            replace(r, policy=""), said, lambda v, r=r: MAKE[kind](models[r.policy, v], **HOW), tolerance=CLOSE
        )
    assert seen == models.keys()


@pytest.mark.parametrize("plain", ["llama"], indirect=True)
@ENGINES
def test_layers_and_rank_of_an_adapter_may_change(model: Any, kind: str) -> None:
    """Of the one matrix of head and embeddings, too."""
    e = with_adapters(kind, model, {"solver": random_adapter(model, 1), "reference": None})
    (request,) = asked(["solver"], 1)
    versions = [
        random_adapter(model, 5, rank=1, parts=("v_proj", "lm_head", "embed_tokens")),
        random_adapter(model, 6, parts=("lm_head",)),
        random_adapter(model, 7, rank=2, parts=("q_proj",)),
    ]
    for version, adapter in enumerate(versions, 1):
        e.swap(version, given(model, adapter, loaded=True), policy="solver")
        made = drain(e, [request])[request.id]
        alone = drain(MAKE[kind](merged(model, adapter), **HOW), [replace(request, policy="")])[request.id]
        assert tokens(made) == tokens(alone)
        assert logprobs(made) == pytest.approx(logprobs(alone), abs=CLOSE)


@pytest.mark.parametrize("plain", ["llama"], indirect=True)
@ENGINES
def test_prefix_cache_is_by_policy_and_survives_swaps_of_others(model: Any, kind: str) -> None:
    """All requests have one prompt of three full pages and two tokens."""
    adapters, prompt = three(model), tuple(range(3, 53))
    e = with_adapters(kind, model, adapters, max_rows=64)

    def reused(policy: str) -> int:
        before = e.counters.reused_tokens
        drain(e, [Request(id="x", prompt=prompt, seed=1, max_tokens=3, policy=policy)])
        return e.counters.reused_tokens - before

    assert [reused("solver"), reused("solver"), reused("verifier"), reused("verifier")] == [0, 48, 0, 48]
    e.swap(1, given(model, adapters["solver"], loaded=True), policy="solver")
    assert [reused("verifier"), reused("solver"), reused("solver")] == [48, 0, 48]
    e.swap(1, given(model, adapters["solver"], loaded=True), policy="solver")  # the same version, other weights
    assert reused("solver") == 0
    e.swap(2, None, policy="solver")
    assert reused("verifier") == 48


@pytest.mark.parametrize("plain", ["llama"], indirect=True)
@ENGINES
def test_what_does_not_fit_is_refused_and_changes_nothing(model: Any, kind: str) -> None:
    adapters = three(model)
    e = with_adapters(kind, model, adapters)
    assert e.capabilities.adapters == 3
    wanted = asked(list(adapters), 3)
    for r in wanted:
        e.add(r)
    with pytest.raises(WindfallError, match="'stranger' are not loaded; loaded are: 'solver'"):
        e.add(replace(wanted[0], id="other", policy="stranger"))
    with pytest.raises(WindfallError, match="no room for another policy"):
        e.swap(0, given(model, {}, loaded=True), policy="stranger")
    with pytest.raises(WindfallError, match=f"rank {RANK + 1}"):
        e.swap(1, given(model, random_adapter(model, 5, rank=RANK + 1), loaded=True), policy="solver")
    bad = {"lora_A": torch.zeros(2, 48), "lora_B": torch.zeros(160, 2)}
    norm = {f"model.norm.{name}.weight": t for name, t in bad.items()}
    wrong = MergedWeights({"model.norm.weight": torch.zeros(160, 48)}, norm, 1.0, base_is_loaded=True)
    with pytest.raises(WindfallError, match=r"an adapter of 'model\.norm' is not supported"):
        e.swap(1, wrong, policy="solver")
    assert e.versions == {"solver": 0, "verifier": 0, "reference": 0}
    made = drain(e)
    again = drain(with_adapters(kind, model, adapters), wanted)
    assert all(tokens(made[r.id]) == tokens(again[r.id]) for r in wanted)


@pytest.mark.parametrize("plain", ["llama"], indirect=True)
@ENGINES
def test_policies_of_another_base_take_the_place_of_the_first(model: Any, kind: str) -> None:
    """A worker that switches to a base of the same shape keeps its engine. Its responses were canceled."""
    other, adapter = copy.deepcopy(model), random_adapter(model, 5)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(-0.7)
    e = with_adapters(kind, copy.deepcopy(model), three(model))
    request = asked(["solver"], 1)[0]
    e.add(request)
    with pytest.raises(WindfallError, match="no room for another policy"):
        e.swap(1, given(other, adapter), policy="judge")
    e.cancel(request.id)
    with pytest.raises(WindfallError, match="no room for another policy"):
        e.swap(1, given(model, adapter, loaded=True), policy="judge")
    e.swap(1, given(other, adapter), policy="judge")
    e.swap(2, given(other, {}, loaded=True), policy="reference")
    assert e.versions == {"judge": 1, "reference": 2}
    wanted = asked(["judge", "reference"], 4)
    made = drain(e, wanted)
    for r in wanted:
        oracle = merged(other, adapter) if r.policy == "judge" else other
        assert tokens(made[r.id]) == tokens(drain(MAKE[kind](oracle, **HOW), [replace(r, policy="")])[r.id])


@pytest.mark.parametrize("plain", ["llama"], indirect=True)
@ENGINES
def test_engine_without_adapters_holds_one_policy(model: Any, kind: str) -> None:
    e = MAKE[kind](copy.deepcopy(model), **HOW)
    adapter = random_adapter(model, 1)
    e.swap(4, given(model, adapter), policy="solver")
    request = asked(["solver"], 1)[0]
    with pytest.raises(WindfallError, match="not loaded"):
        e.add(replace(request, policy=""))
    e.add(request)
    with pytest.raises(WindfallError, match="no room for another policy, and holds 'solver'"):
        e.swap(5, given(model, {}), policy="verifier")
    made = drain(e)[request.id]
    assert {c.version for c in made} == {4}
    assert tokens(made) == tokens(drain(MAKE[kind](merged(model, adapter), **HOW), [replace(request, policy="")])["0"])
    e.swap(5, given(model, {}), policy="verifier")
    assert e.versions == {"verifier": 5}
