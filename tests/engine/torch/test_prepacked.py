"""Prepacked linear layers give the same results, leave the module that they were made from alone, and follow its
weights after a swap."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from tests.support.engines.small_models import build, drain, engine, requests
from windfall.engine.torch import prepacked as module
from windfall.engine.torch.prepacked import ROWS, PrepackedLinear, drop_copies, prepacked
from windfall.models.attention import NAME

pytestmark = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="weights are packed by MKL, on x86-64")


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(200, 1700), nn.Linear(1700, 24), nn.Linear(24, 200, bias=False))


def llama() -> Any:
    model = build("llama")
    model.set_attn_implementation(NAME)
    return model


def copies(tree: Any) -> list[bool]:
    return [layer.copy is not None for layer in tree.modules() if isinstance(layer, PrepackedLinear)]


@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_one_copy_gives_the_results_of_the_weights_for_every_number_of_rows(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            for layer in prepacked(layers()):
                layer(torch.randn(ROWS[0], layer.in_features))
                copy = layer.copy
                assert copy is not None
                for rows in range(1, ROWS[-1] + 3):
                    # As a module gets it: with a dimension of one before, and not always contiguous.
                    x = torch.randn(1, layer.in_features, rows).transpose(1, 2)
                    wanted = linear(x.contiguous(), layer.weight, layer.bias)
                    torch.testing.assert_close(layer(x), wanted, rtol=1e-4, atol=1e-5)
                assert layer.copy is copy
    finally:
        torch.set_num_threads(before)


def test_the_module_itself_is_not_changed_and_shares_its_weights() -> None:
    model, x = layers(), torch.randn(16, 200)
    tree = prepacked(model)
    with torch.inference_mode():
        tree(x)
    assert copies(tree) == [True] * 3
    assert [type(layer) for layer in model] == [nn.Linear] * 3
    assert all(a is b for a, b in zip(model.parameters(), tree.parameters(), strict=True))
    model(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_new_weights_count_after_a_drop() -> None:
    model, x = layers(), torch.randn(16, 200)
    tree = prepacked(model)
    with torch.inference_mode():
        old = tree(x)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2.0)
    drop_copies(tree)
    assert copies(tree) == [False] * 3
    with torch.inference_mode():
        new = tree(x)
        torch.testing.assert_close(new, model(x), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(new, old)


@pytest.mark.parametrize("kind", ["half precision", "no memory"])
def test_a_module_that_does_not_gain_is_used_itself(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = layers()
    if kind == "half precision":
        model.bfloat16()
    else:
        monkeypatch.setattr(module, "free_bytes", lambda _: 1 << 20)
    assert prepacked(model) is model


def test_engines_that_share_a_module_follow_their_own_swaps() -> None:
    """Two engines and their creator share a module. What one engine does to its copies is not seen by the other."""
    model = llama()
    first, second = engine(model), engine(model)
    asked = requests(12)
    old = drain(first, asked)
    assert drain(second, asked) == old
    assert any(copies(first._runner.model))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn_like(p))
    first.swap(1)
    assert not any(copies(first._runner.model))
    assert any(copies(second._runner.model))
    new = drain(first, asked)
    second.swap(1)
    assert drain(second, asked) == new != old
    first.sleep()
    assert not any(copies(first._runner.model))


def test_deterministic_mode_computes_with_the_module_itself() -> None:
    model = llama()
    assert engine(model, deterministic=True)._runner.model is model
    assert type(engine(model)._runner.model.lm_head) is PrepackedLinear
