"""Decides whether a model passes the self-test: it returns the measured differences, or raises with the reason."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from windfall.engine.selftest import compare, determinism
from windfall.engine.selftest.small_model import SmallModel, build_small_model
from windfall.errors import WindfallError

FIX = "Use another model: docs/models.md lists the families that were checked."
SEEDS = (0, 1)
"""Seeds of the random weights. In a model with experts, a rounding error may route a token to another expert, while a
real error shows with any weights. So such a model is refused only if it fails with all seeds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DifferenceLimits:
    """Largest accepted differences. Measured rounding in float32 was up to 7e-4 nats (Granite, which does not scale its
    attention scores by default), mostly below 1e-4; the smallest difference of a refused model was 0.03 nats."""

    nats: float
    gradient: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The differences measured on the small model. `refused`: why they are too large; empty if they are not."""

    nats: float = 0.0
    gradient: float = 0.0
    refused: str = ""


_cached: dict[Any, SmallModel] = {}


def limits(device: str) -> DifferenceLimits:
    """GPU kernels sum in other orders and may round to TF32, so their limits are larger."""
    return (
        DifferenceLimits(nats=1e-2, gradient=2e-2)
        if device.startswith("cuda")
        else DifferenceLimits(nats=2e-3, gradient=5e-3)
    )


def judge_engine(
    config: Any,
    make: Callable[..., Any],
    *,
    device: str,
    longest: int,
    deterministic: bool = False,
    names: Iterable[str] | None = None,
) -> Measured:
    """Measure the engine that `make` builds. Raises WindfallError if it differs too much from transformers."""
    what = f"windfall's engine does not compute {architecture(config)} as transformers does"

    def measure(small: SmallModel) -> Measured:
        if deterministic and (why := determinism.neighbor_dependence(small)):
            return Measured(refused=f"run.deterministic cannot hold for {architecture(config)}: {why}")
        limit, refused = limits(device).nats, ""
        found = compare.engine_difference(small, make, longest=longest, limit=limit)
        if found.size > limit:
            refused = f"{what}: log-probs differ by {found.size:.2g} nats ({found.where}); rounding is below {limit:g}"
        elif deterministic and not determinism.batch_invariant(small, make, longest=longest):
            refused = f"run.deterministic does not hold for {architecture(config)}: results alone and in a batch differ"
        return Measured(nats=found.size, refused=refused)

    return judge(measure, what, config, device, longest, names)


def judge(
    measure: Callable[[SmallModel], Measured],
    what: str,
    config: Any,
    device: str,
    longest: int,
    names: Iterable[str] | None,
    keep: bool = False,
) -> Measured:
    """Measure a small model. Raises WindfallError with `what` if it is refused. `keep`: the next test of this model may
    use the same small model."""
    first, names = None, None if names is None else list(names)
    for seed in SEEDS:
        try:
            small = _small_model(config, names, longest, device, seed)
            measured = measure(small)
        except WindfallError as e:
            raise WindfallError(f"{what}: {e.what}", where="model.path", fix=FIX) from e
        except Exception as e:  # fault boundary: foreign model code
            error = f"{type(e).__name__}: {str(e).partition(chr(10))[0]}"
            raise WindfallError(f"{what}: {error}", where="model.path", fix=FIX) from e
        if not measured.refused:
            if keep:
                _cached[_key(config, longest, device, seed)] = small
            return measured
        first = first or measured
        if determinism.neighbor_dependence(small) is None:
            break
    assert first is not None
    raise WindfallError(first.refused, where="model.path", fix=FIX)


def _small_model(config: Any, names: list[str] | None, longest: int, device: str, seed: int) -> SmallModel:
    """Build the small model, or reuse that of the trainer's test, which runs before: building takes half the time."""
    cached = _cached.pop(_key(config, longest, device, seed), None)
    _cached.clear()
    return cached or build_small_model(config, names, longest=longest, device=device, seed=seed)


def _key(config: Any, *rest: Any) -> Any:
    return json.dumps(config.to_dict(), sort_keys=True, default=str), *rest


def architecture(config: Any) -> str:
    """The name of the model's class, for messages."""
    return (getattr(config, "architectures", None) or [config.model_type])[0]
