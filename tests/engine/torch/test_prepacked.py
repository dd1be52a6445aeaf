"""Copies of linear weights give the same results, apply only inside the block and in its thread, and follow changes
after a drop."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from windfall.engine.torch import prepacked
from windfall.engine.torch.prepacked import LARGE, PrepackedLinears

pytestmark = pytest.mark.skipif(
    not prepacked._gains(torch.zeros(1, 1)), reason="weights are packed only on x86-64 CPUs, where torch uses oneDNN"
)


def layers() -> torch.nn.Sequential:
    torch.manual_seed(0)
    large = torch.nn.Linear(512, LARGE // 512)
    assert large.weight.numel() >= LARGE
    return torch.nn.Sequential(large, torch.nn.Linear(LARGE // 512, 24), torch.nn.Linear(24, 512, bias=False))


@pytest.mark.parametrize("rows", [1, 2, 3, 16, 32, 128, 129])
def test_results_are_those_of_the_module_for_every_number_of_rows(rows: int) -> None:
    model, x = layers(), torch.randn(1, rows, 512)
    with torch.inference_mode():
        wanted = model(x)
        with PrepackedLinears(model):
            found = model(x)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_layer_computes_with_its_copy_only_inside_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, called = layers(), torch.randn(16, 512), list[str]()
    for name in ("_onednn", "_transposed"):
        real = getattr(prepacked, name)
        monkeypatch.setattr(prepacked, name, lambda *a, _n=name, _f=real: (called.append(_n), _f(*a))[1])
    linears = PrepackedLinears(model)
    with linears, torch.inference_mode():
        model(x)
    assert called == ["_onednn", "_transposed", "_transposed"]
    with pytest.raises(ZeroDivisionError), linears:
        raise ZeroDivisionError
    model(x).sum().backward()
    assert len(called) == 3
    assert all(p.grad is not None for p in model.parameters())


def test_threads_that_share_a_module_do_not_disturb_each_other() -> None:
    """One thread trains while two engines are inside their blocks. The engines leave them one after the other."""
    model, x, inside = layers(), torch.randn(16, 512), threading.Barrier(3, timeout=60)
    with torch.inference_mode():
        wanted = model(x)

    def generate(trained: threading.Event) -> torch.Tensor:
        with torch.inference_mode(), PrepackedLinears(model):
            inside.wait()
            assert trained.wait(60)
            return model(x)

    trained = [threading.Event(), threading.Event()]
    with ThreadPoolExecutor(2) as pool:
        engines = [pool.submit(generate, event) for event in trained]
        inside.wait()
        for engine, event in zip(engines, trained, strict=True):
            model.zero_grad()
            model(x).sum().backward()
            assert all(p.grad is not None for p in model.parameters())
            event.set()
            torch.testing.assert_close(engine.result(60), wanted, rtol=1e-4, atol=1e-5)
    assert not any("forward" in layer.__dict__ for layer in model)


def test_new_weights_count_after_a_drop() -> None:
    model, x = layers(), torch.randn(16, 512)
    linears = PrepackedLinears(model)
    with torch.inference_mode(), linears:
        old = model(x)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2.0)
    with torch.inference_mode():
        linears.drop()
        with linears:
            new = model(x)
        torch.testing.assert_close(new, model(x), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(new, old)
