"""From what differs to whether that is too much: a model is taken, with figures, or refused in words."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from windfall.errors import WindfallError
from windfall.selftest import compare, determinism
from windfall.selftest.small_model import Small, small

FIX = "Use another model: docs/models.md lists the families that were checked."
SEEDS = (0, 1)
"""A routed model may send a token elsewhere by one rounding; what is computed wrongly is wrong with any weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Rounding in float32 was up to 7e-4 nats where it was measured (Granite, whose scores are not scaled by default),
    mostly below 1e-4; the smallest difference of a refused model was 0.03 nats."""

    nats: float
    gradient: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Differences:
    """What was measured on the small model. `refused`: why that is too much."""

    nats: float = 0.0
    gradient: float = 0.0
    refused: str = ""


LIMITS = {"cpu": Limits(nats=2e-3, gradient=5e-3), "cuda": Limits(nats=1e-2, gradient=2e-2)}
"""A GPU's kernels sum in other orders, and may round to TF32."""
_kept: dict[Any, Small] = {}


def limits(device: str) -> Limits:
    return LIMITS["cuda" if device.startswith("cuda") else "cpu"]


def engine(
    config: Any, make: Callable[..., Any], *, device: str, longest: int, deterministic: bool = False,
    names: Iterable[str] | None = None,
) -> Differences:  # fmt: skip
    """What is measured, now; raises WindfallError if it is too much."""
    what = f"windfall's engine does not compute {_name(config)} as transformers does"

    def measure(small: Any) -> Differences:
        if deterministic and (why := determinism.depend_on_neighbors(small)):
            return Differences(refused=f"run.deterministic cannot hold for {_name(config)}: {why}")
        most, refused = limits(device).nats, ""
        apart = compare.engine_apart(small, make, longest=longest, most=most)
        if apart.by > most:
            refused = f"{what}: log-probs differ by {apart.by:.2g} nats ({apart.what}); rounding is below {most:g}"
        elif deterministic and not determinism.same(small, make, longest=longest):
            refused = f"run.deterministic does not hold for {_name(config)}: alone and among others its bits differ"
        return Differences(nats=apart.by, refused=refused)

    return _judged(measure, what, config, device, longest, names)


def trainer(config: Any, *, device: str, longest: int, names: Iterable[str] | None = None) -> Differences:
    what = f"windfall's trainer does not compute {_name(config)} as transformers does"

    def measure(small: Any) -> Differences:
        nats, gradient = compare.trainer_apart(small)
        most, refused = limits(device), ""
        if nats.by > most.nats:
            refused = f"{what}: log-probs differ by {nats.by:.2g} nats; rounding is below {most.nats:g}"
        elif gradient.by > most.gradient:
            share = f"{gradient.by:.2g} of its size ({gradient.what}); rounding is below {most.gradient:g}"
            refused = f"{what}: a weight's gradient differs by {share}"
        return Differences(nats=nats.by, gradient=gradient.by, refused=refused)

    return _judged(measure, what, config, device, longest, names, keep=True)


def _judged(
    measure: Callable[[Any], Differences], what: str, config: Any, device: str, longest: int,
    names: Iterable[str] | None, keep: bool = False,
) -> Differences:  # fmt: skip
    first, names = None, None if names is None else list(names)
    for seed in SEEDS:
        try:
            made = _small(config, names, longest, device, seed)
            found = measure(made)
        except WindfallError as e:
            raise WindfallError(f"{what}: {e.what}", where="model.path", fix=FIX) from e
        except Exception as e:  # fault boundary: any model's code, which windfall does not know
            said = f"{type(e).__name__}: {str(e).partition(chr(10))[0]}"
            raise WindfallError(f"{what}: {said}", where="model.path", fix=FIX) from e
        if not found.refused:
            if keep:
                _kept[json.dumps(config.to_dict(), sort_keys=True, default=str), longest, device, seed] = made
            return found
        first = first or found
        if determinism.depend_on_neighbors(made) is None:
            break
    assert first is not None
    raise WindfallError(first.refused, where="model.path", fix=FIX)


def _small(config: Any, names: list[str] | None, longest: int, device: str, seed: int) -> Small:
    """The trainer's is kept for the engine's test, which comes next, and no longer: building takes half the time."""
    key = (json.dumps(config.to_dict(), sort_keys=True, default=str), longest, device, seed)
    kept = _kept.pop(key, None)
    _kept.clear()
    return kept or small(config, names, longest=longest, device=device, seed=seed)


def _name(config: Any) -> str:
    return (getattr(config, "architectures", None) or [config.model_type])[0]
