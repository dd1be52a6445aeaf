"""The self-test with the engine and the trainer of a GPU. Skipped without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.hostile import models as hostile
from windfall.engine import factory
from windfall.engine.selftest import judge, verdict
from windfall.errors import WindfallError
from windfall.recipe.file import parse_recipe
from windfall.trainer import derived, selftest

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
WINDOW = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 2}
GRAPHS = {
    "llama": hostile.Architecture(kind="llama"),
    "llama, biases": hostile.Architecture(kind="llama", fields={"attention_bias": True, "mlp_bias": True}),
    "mistral": hostile.Architecture(kind="mistral", fields={**hostile.SHAPE, "sliding_window": 4096}),
    "qwen2, windows": hostile.Architecture(kind="qwen2", fields={**hostile.SHAPE, **WINDOW}),
    "qwen3": hostile.Architecture(kind="qwen3", fields={**hostile.SHAPE, "head_dim": 128}),
}


def check(a: hostile.Architecture, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run the check. Returns the class names of the tested engines."""
    monkeypatch.setattr(verdict, "run_once", lambda key, test, checked=(): test() or key)
    spec = derived.spec(parse_recipe({}, where="here"), a.config(), "bfloat16", a.longest)
    model, kinds = factory.build_full_model(_shrink_fields(a), "bfloat16", "cuda"), []
    real = judge.judge_engine

    def watched(config: Any, make: Any, **how: Any) -> Any:
        def noted(model: Any, **options: Any) -> Any:
            engine = make(model, **options)
            kinds.append(type(engine).__name__)
            return engine

        return real(config, noted, **how)

    monkeypatch.setattr(judge, "judge_engine", watched)
    factory.self_test(spec, "cuda", model)
    return kinds


def _shrink_fields(a: hostile.Architecture) -> dict[str, Any]:
    import json

    return json.loads(a.config().to_json_string(use_diff=False))


@pytest.mark.parametrize("name", GRAPHS)
def test_graph_engine_equals_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(check(GRAPHS[name], monkeypatch)) == {"GraphEngine"}


@pytest.mark.parametrize("name", hostile.ARCHITECTURES)
def test_architecture_is_computed_exactly_or_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    a = hostile.ARCHITECTURES[name]
    for judged, refusal in (
        (lambda: check(a, monkeypatch), a.engine),
        (lambda: selftest.judge_trainer(a.config(), device="cuda", longest=a.longest), a.trainer),
    ):
        if refusal is None:
            judged()
        else:
            with pytest.raises(WindfallError):
                judged()
