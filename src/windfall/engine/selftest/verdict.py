"""Checks on a small model of the same architecture whether windfall may run a model, and remembers the result.

    check_engine     wherever an engine is built: workers, generate, eval, the trainer's own engine
    check_trainer    where a run's trainer is built (trainer/selftest.py)

Both raise WindfallError with the measured difference. A passed check is remembered under a hash of everything that
could change the result (configuration, code, package versions, kind of device): in this process, in a file in the cache
folder, and in the run, which sends the trainer's passed checks to its workers (`EngineSpec.checked`). A failed check is
repeated each time.
"""

from __future__ import annotations

import contextlib
import json
import platform
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import xxhash

from windfall.engine.selftest import shrink
from windfall.errors import WindfallError
from windfall.models.load import cache_folder

Fields = Mapping[str, Any]
WEIGHTS_NATS = {4: 5e-3, 2: 0.2}  # largest accepted difference of `check_weights` in nats, by bytes per parameter
ADAPTERS, ADAPTER_RANK = 3, 4  # policies of an engine with adapters in the test, and the rank of their adapters

_passed: set[str] = set()


def check_engine(
    fields: Fields,
    make: Callable[..., Any],
    *,
    device: str,
    longest: int,
    deterministic: bool = False,
    names: Iterable[str] | None = None,
    checked: Iterable[str] = (),
    adapters: bool = False,
) -> str:
    """Raise WindfallError unless the engine computes what transformers computes. `fields`: the model's configuration;
    `make`: builds the engine from (model, kv_tokens, page_size, max_running, max_rows); `names`: the full model's
    weights; `checked`: keys of checks that other processes have passed; `adapters`: it holds several policies
    (here ADAPTERS, of at most ADAPTER_RANK), and is also tested with their adapters. Returns the key of this check."""
    how: dict[str, Any] = {"device": device, "longest": longest, "deterministic": deterministic, "adapters": adapters}

    def test() -> None:
        from windfall.engine.selftest import judge  # imports torch and transformers: only if the result is not known

        judge.judge_engine(config_of(fields), make, names=names, **how)

    return run_once(cache_key("engine", fields, **how), test, checked)


def check_weights(model: Any) -> None:
    """Check the loaded weights with a few tokens: the log-probs must be finite, and equal to those of plain attention
    within the precision of the weights. This finds damaged files and files of another architecture."""
    from windfall.engine.selftest import judge

    nats = judge.weights_difference(model)
    limit = WEIGHTS_NATS[model.dtype.itemsize]
    if not nats < limit:
        what = f"with the loaded weights, windfall's log-probs of a few tokens differ from transformers' by {nats:.2g} "
        what += f"nats on average; rounding to {str(model.dtype).removeprefix('torch.')} is below {limit:g}"
        fix = "Check that the files are complete and that model.dtype is the trained dtype."
        raise WindfallError(what, where="model.path", fix=fix)


def run_once(key: str, test: Callable[[], object], checked: Iterable[str] = ()) -> str:
    """Call `test`, which raises WindfallError if a model fails, unless the check is known to have passed. Returns the
    key."""
    path = cache_folder() / "checked" / key
    if key not in _passed and key not in checked and not path.is_file():
        test()
        with contextlib.suppress(OSError):  # without the file, the next process runs the test again
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    _passed.add(key)
    return key


def cache_key(
    what: str, fields: Fields, *, device: str, longest: int, deterministic: bool = False, adapters: bool = False
) -> str:
    """A hash of everything that the result depends on."""
    irrelevant = ("transformers_version", "_name_or_path", "architectures", "dtype", "torch_dtype")
    named = {name: value for name, value in fields.items() if name not in irrelevant}
    short = longest if longest < 64 else 0  # below 64, the sequences of the test are shorter
    rest = [_kind(device), deterministic, shrink.rope_changes_within(fields, longest), short, *_versions()]
    rest += ["adapters"] if adapters else []
    text = json.dumps([named, rest], sort_keys=True)
    return f"{what}-{fields.get('model_type', 'model')}-{xxhash.xxh3_128_hexdigest(text.encode())}"


def config_of(fields: Fields) -> Any:
    """The configuration as an object of transformers."""
    from transformers import AutoConfig

    return AutoConfig.for_model(**fields)


@cache
def _versions() -> tuple[str, ...]:
    """Versions of torch and transformers, and a hash of windfall's code, which may change without a new version."""
    root, digest = Path(__file__).parents[2], xxhash.xxh3_64()
    for path in sorted(p for part in ("engine", "models", "trainer") for p in (root / part).rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest(), *(metadata.version(name) for name in ("torch", "transformers"))


def _kind(device: str) -> str:
    if not device.startswith("cuda"):
        return f"cpu {platform.machine()}"
    import torch

    return f"cuda {torch.cuda.get_device_capability()}"
