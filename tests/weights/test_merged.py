"""Merged weights: one rounding, one matrix at a time, and nothing is copied if anything does not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.engines.small_models import build
from windfall.engine.module_weights import copy_weights
from windfall.errors import WindfallError
from windfall.models import load
from windfall.weights import merged
from windfall.weights.merged import AdapterPair, MergedWeights

Q = "model.layers.0.self_attn.q_proj"
V = "model.layers.1.self_attn.v_proj"


def adapter(model: Any, *layers: str, rank: int = 3) -> dict[str, Tensor]:
    torch.manual_seed(3)
    out: dict[str, Tensor] = {}
    for name in layers:
        outputs, inputs = model.state_dict()[f"{name}.weight"].shape
        out[f"{name}.lora_A.weight"], out[f"{name}.lora_B.weight"] = (
            torch.randn(rank, inputs),
            torch.randn(outputs, rank),
        )
    return out


def base(model: Any, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {name: t.clone().to(dtype) for name, t in model.state_dict().items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_engine_gets_the_sum_rounded_once(dtype: torch.dtype) -> None:
    model = build("llama").to(dtype)
    weights, extra = base(model, dtype), {n: t.to(dtype) for n, t in adapter(model, Q, V).items()}
    copy_weights(model, 1, MergedWeights(weights, extra, 0.25))
    for name, now in model.state_dict().items():
        layer = name.removesuffix(".weight")
        expected = weights[name]
        if layer in (Q, V):
            a, b = extra[f"{layer}.lora_A.weight"].double(), extra[f"{layer}.lora_B.weight"].double()
            exact = weights[name].double() + 0.25 * b @ a
            expected = exact.to(dtype)
            assert not torch.equal(now, weights[name])
            if (
                dtype == torch.bfloat16
            ):  # float32 sums may round to the other neighbor only if they are next to the middle
                assert float((now != expected).double().mean()) < 1e-3
        assert torch.allclose(now, expected, rtol=1e-6 if dtype == torch.float32 else 2**-7, atol=1e-6), name


def test_mapping_reads_like_a_dict_of_tensors() -> None:
    model = build("llama")
    weights = base(model)
    both = MergedWeights(weights, adapter(model, Q), 2.0)
    assert list(both) == list(weights)
    assert len(both) == len(weights)
    assert both[f"{V}.weight"] is weights[f"{V}.weight"]
    assert both[f"{Q}.weight"].dtype == weights[f"{Q}.weight"].dtype
    into = torch.empty_like(weights[f"{Q}.weight"])
    both.copy_into(f"{Q}.weight", into)
    assert torch.equal(into, both[f"{Q}.weight"])
    assert not torch.equal(into, weights[f"{Q}.weight"])


def test_base_that_is_loaded_is_not_copied_again() -> None:
    model = build("llama")
    weights, extra = base(model), adapter(model, Q)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(7.0)  # as if they were loaded
    copy_weights(model, 2, MergedWeights(weights, extra, 1.0, base_is_loaded=True))
    state = model.state_dict()
    pair = AdapterPair(extra[f"{Q}.lora_A.weight"], extra[f"{Q}.lora_B.weight"])
    assert torch.equal(state[f"{Q}.weight"], merged.merge(weights[f"{Q}.weight"], pair, 1.0))
    assert all((t == 7.0).all() for name, t in state.items() if name != f"{Q}.weight")


def test_no_weight_is_computed_before_it_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """All names and shapes are checked first, and then each adapted matrix is computed once."""
    model, computed = build("llama"), []
    both = MergedWeights(base(model), adapter(model, Q, V), 1.0)
    real = merged.merge
    monkeypatch.setattr(merged, "merge", lambda *args: computed.append(1) or real(*args))
    with pytest.raises(WindfallError, match="does not fit the model"):
        copy_weights(build("qwen3"), 1, both)
    assert computed == []
    copy_weights(model, 1, both)
    assert len(computed) == 2


@pytest.mark.parametrize("name", ["lm_head", "model.embed_tokens"])
def test_adapter_of_one_of_two_tied_weights_needs_an_engine_with_both(name: str) -> None:
    model = build("llama")
    weights = base(model)
    given = MergedWeights(weights, adapter(model, name), 1.0)
    with pytest.raises(WindfallError, match=f"an adapter of '{name}.weight', which is one tensor with"):
        copy_weights(model, 1, given)
    assert all(torch.equal(t, weights[n]) for n, t in model.state_dict().items()), "nothing was changed"
    load.untie(model)
    copy_weights(model, 1, given)
    assert [n for n, t in model.state_dict().items() if not torch.equal(t, weights[n])] == [f"{name}.weight"]
    assert torch.equal(model.state_dict()[f"{name}.weight"], given[f"{name}.weight"])


def test_adapter_that_does_not_fit_is_refused() -> None:
    model = build("llama")
    weights, good = base(model), adapter(model, Q)
    other = {n.replace("layers.0", "layers.9"): t for n, t in good.items()}
    with pytest.raises(WindfallError, match=r"for another model: the base has no weight 'model\.layers\.9\.self_attn"):
        MergedWeights(weights, other, 1.0)
    wide = good | {f"{Q}.lora_A.weight": torch.zeros(3, 64)}
    with pytest.raises(WindfallError, match=r"another shape: .* is 48 x 48, but the adapter has 48 x 3 and 3 x 64"):
        MergedWeights(weights, wide, 1.0)
    ranks = good | {f"{Q}.lora_A.weight": torch.zeros(4, 48)}
    with pytest.raises(WindfallError, match="another shape"):
        MergedWeights(weights, ranks, 1.0)
    half = {f"{Q}.lora_A.weight": good[f"{Q}.lora_A.weight"]}
    with pytest.raises(WindfallError, match="is not one of two matrices"):
        MergedWeights(weights, half, 1.0)
