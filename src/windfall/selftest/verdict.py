"""Whether windfall may run a model: measured on a small one of its architecture, remembered, and said in words.

    check_engine     wherever an engine is built: workers, generate, eval, the trainer's own
    check_trainer    where a run's trainer is built

Both raise WindfallError with what was measured. What passed is remembered by everything that could change the answer
(configuration, code, versions, kind of device): in this process, in a file of the cache folder, and by the run, whose
workers are told what its trainer has found (`Engine.checked`). What was refused is measured again each time.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import xxhash

from windfall.errors import WindfallError
from windfall.models import cache_folder
from windfall.selftest import shrink

Fields = Mapping[str, Any]
FIX = "Use another model: docs/models.md lists the families that were checked."
SEEDS = (0, 1)
"""A routed model may send a token elsewhere by one rounding; what is computed wrongly is wrong with any weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Rounding in float32 stays a factor of ten or more below these, everything that was found wrong is above."""

    nats: float
    gradient: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """What was measured on the small model. `refused`: why that is too much."""

    nats: float = 0.0
    gradient: float = 0.0
    refused: str = ""


LIMITS = {"cpu": Limits(nats=2e-3, gradient=5e-3), "cuda": Limits(nats=1e-2, gradient=2e-2)}
"""A GPU's kernels sum in other orders, and may round to TF32."""
WEIGHTS_NATS = {4: 5e-3, 2: 0.2}
"""By bytes of a number."""

_passed: set[str] = set()


def limits(device: str) -> Limits:
    return LIMITS["cuda" if device.startswith("cuda") else "cpu"]


def check_engine(
    fields: Fields, make: Callable[..., Any], *, device: str, longest: int, deterministic: bool = False,
    names: Iterable[str] | None = None, checked: Iterable[str] = (),
) -> str:  # fmt: skip
    """`fields`: the model's configuration; `make`: (model, kv_tokens, page_size, max_running, max_rows) to the engine
    that would run it; `names`: of the full model's weights; `checked`: what others with the same code have found.
    Returns what to tell others."""
    key = key_of("engine", fields, device=device, longest=longest, deterministic=deterministic)
    return _once(key, checked, lambda: judge_engine(
        _config(fields), make, device=device, longest=longest, deterministic=deterministic, names=names
    ))  # fmt: skip


def check_trainer(fields: Fields, *, device: str, longest: int, names: Iterable[str] | None = None) -> str:
    key = key_of("trainer", fields, device=device, longest=longest)
    return _once(key, (), lambda: judge_trainer(
        _config(fields), device=device, longest=longest, names=names
    ))  # fmt: skip


def check_weights(model: Any) -> None:
    """The loaded weights themselves, with a few tokens: numbers that are numbers, and those of plain attention as far
    as the weights' precision goes. A model whose files are damaged, or of another architecture, shows here."""
    from windfall.selftest import compare

    apart = compare.weights_apart(model)
    most = WEIGHTS_NATS[model.dtype.itemsize]
    if not apart < most:
        raise WindfallError(
            f"with the loaded weights, windfall's log-probs of a few tokens differ from transformers' by {apart:.2g} "
            f"nats on average; rounding to {str(model.dtype).removeprefix('torch.')} is below {most:g}",
            where="model.path", fix="Are the model's files whole, and is model.dtype the one it was trained in?",
        )  # fmt: skip


def judge_engine(
    config: Any, make: Callable[..., Any], *, device: str, longest: int, deterministic: bool = False,
    names: Iterable[str] | None = None,
) -> Figures:  # fmt: skip
    """What is measured, now; raises WindfallError if it is too much."""
    from windfall.selftest import compare

    what = f"windfall's engine does not compute {_name(config)} as transformers does"

    def measure(small: Any) -> Figures:
        if deterministic and (why := compare.depends_on_neighbors(small)):
            return Figures(refused=f"run.deterministic cannot hold for {_name(config)}: {why}")
        most, refused = limits(device).nats, ""
        apart = compare.engine_apart(small, make, longest=longest, most=most)
        if apart.by > most:
            refused = f"{what}: log-probs differ by {apart.by:.2g} nats ({apart.what}); rounding is below {most:g}"
        elif deterministic and not compare.same_bits(small, make, longest=longest):
            refused = f"run.deterministic does not hold for {_name(config)}: alone and among others its bits differ"
        return Figures(nats=apart.by, refused=refused)

    return _judged(measure, what, config, device, longest, names)


def judge_trainer(config: Any, *, device: str, longest: int, names: Iterable[str] | None = None) -> Figures:
    from windfall.selftest import compare

    what = f"windfall's trainer does not compute {_name(config)} as transformers does"

    def measure(small: Any) -> Figures:
        nats, gradient = compare.trainer_apart(small)
        most, refused = limits(device), ""
        if nats.by > most.nats:
            refused = f"{what}: log-probs differ by {nats.by:.2g} nats; rounding is below {most.nats:g}"
        elif gradient.by > most.gradient:
            share = f"{gradient.by:.2g} of its size ({gradient.what}); rounding is below {most.gradient:g}"
            refused = f"{what}: a weight's gradient differs by {share}"
        return Figures(nats=nats.by, gradient=gradient.by, refused=refused)

    return _judged(measure, what, config, device, longest, names)


def _judged(
    measure: Callable[[Any], Figures], what: str, config: Any, device: str, longest: int,
    names: Iterable[str] | None,
) -> Figures:  # fmt: skip
    from windfall.selftest import compare
    from windfall.selftest.small import small

    first, names = None, None if names is None else list(names)
    for seed in SEEDS:
        try:
            made = small(config, names, longest=longest, device=device, seed=seed)
            found = measure(made)
        except WindfallError as e:
            raise WindfallError(f"{what}: {e.what}", where="model.path", fix=FIX) from e
        except Exception as e:  # fault boundary: any model's code, which windfall does not know
            said = f"{type(e).__name__}: {str(e).partition(chr(10))[0]}"
            raise WindfallError(f"{what}: {said}", where="model.path", fix=FIX) from e
        if not found.refused:
            return found
        first = first or found
        if compare.depends_on_neighbors(made) is None:
            break
    assert first is not None
    raise WindfallError(first.refused, where="model.path", fix=FIX)


def _once(key: str, checked: Iterable[str], test: Callable[[], Figures]) -> str:
    path = _folder() / key
    if key not in _passed and key not in checked and not path.is_file():
        test()
        _remember(path)
    _passed.add(key)
    return key


def key_of(what: str, fields: Fields, *, device: str, longest: int, deterministic: bool = False) -> str:
    """Of everything that the answer depends on."""
    vague = ("transformers_version", "_name_or_path", "architectures", "dtype", "torch_dtype")
    named = {name: value for name, value in fields.items() if name not in vague}
    short = longest if longest < 64 else 0  # the test's sequences become shorter
    rest = [_kind(device), deterministic, shrink.straddles(fields, longest), short, *_versions()]
    text = json.dumps([named, rest], sort_keys=True)
    return f"{what}-{fields.get('model_type', 'model')}-{xxhash.xxh3_128_hexdigest(text.encode())}"


def _config(fields: Fields) -> Any:
    from transformers import AutoConfig

    rest = {name: value for name, value in fields.items() if name != "model_type"}
    return AutoConfig.for_model(fields["model_type"], **rest)


@cache
def _versions() -> tuple[str, ...]:
    """Of the packages that compute, and of windfall's own code, which may be edited without a new version."""
    root = Path(__file__).parent.parent
    files = sorted(p for part in ("engine", "train", "selftest", "worker") for p in (root / part).rglob("*.py"))
    digest = xxhash.xxh3_64()
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest(), *(metadata.version(name) for name in ("torch", "transformers"))


def _kind(device: str) -> str:
    if not device.startswith("cuda"):
        return f"cpu {platform.machine()}"
    import torch

    return f"cuda {torch.cuda.get_device_capability()}"


def _folder() -> Path:
    return cache_folder() / "checked"


def _remember(path: Path) -> None:
    """If there is a place for it: without, the test is made again by the next process."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError:
        return


def _name(config: Any) -> str:
    return (getattr(config, "architectures", None) or [config.model_type])[0]
