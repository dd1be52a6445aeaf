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
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import xxhash

from windfall.errors import WindfallError
from windfall.models.load import cache_folder
from windfall.selftest import shrink

Fields = Mapping[str, Any]


WEIGHTS_NATS = {4: 5e-3, 2: 0.2}
"""By bytes of a number."""

_passed: set[str] = set()


def check_engine(
    fields: Fields, make: Callable[..., Any], *, device: str, longest: int, deterministic: bool = False,
    names: Iterable[str] | None = None, checked: Iterable[str] = (),
) -> str:  # fmt: skip
    """`fields`: the model's configuration; `make`: (model, kv_tokens, page_size, max_running, max_rows) to the engine
    that would run it; `names`: of the full model's weights; `checked`: what others with the same code have found.
    Returns what to tell others."""
    key = key_of("engine", fields, device=device, longest=longest, deterministic=deterministic)

    def test() -> object:
        from windfall.selftest import judge  # imports torch and transformers: only if the answer is not known

        how: dict[str, Any] = {"device": device, "longest": longest, "names": names}
        return judge.engine(_config(fields), make, deterministic=deterministic, **how)

    return _once(key, checked, test)


def check_trainer(fields: Fields, *, device: str, longest: int, names: Iterable[str] | None = None) -> str:
    key = key_of("trainer", fields, device=device, longest=longest)

    def test() -> object:
        from windfall.selftest import judge

        return judge.trainer(_config(fields), device=device, longest=longest, names=names)

    return _once(key, (), test)


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


def _once(key: str, checked: Iterable[str], test: Callable[[], object]) -> str:
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
