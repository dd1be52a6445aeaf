"""From a model's name to a folder in Hugging Face format, and from there to a module and a tokenizer.

    "tiny"           ships with windfall: a Llama of 0.8 M parameters for the demo and the tests
    "smollm2-135m"   in the cache folder, where `make smollm2` puts it (scripts/convert_smollm2.py)
    a folder         used as it is
    "owner/name"     from the Hugging Face hub, if it can be reached

A folder may also hold a LoRA adapter in PEFT format (a checkpoint of a run with [train.lora], for example). It is
loaded as its base model with the adapter merged into it, so everything that takes a model takes an adapter.

`resolve` does not import torch; the functions that load do.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from windfall.errors import WindfallError, nearest
from windfall.models import multimodal
from windfall.run_folder import read_json
from windfall.weights import adapter_folder, merged
from windfall.weights.adapter_folder import AdapterBase

TINY = Path(__file__).parent / "base_models" / "tiny"
SMOLLM2 = "smollm2-135m"
NAMED = ("tiny", SMOLLM2)

OFFLINE_FIX = (
    "Download it on a machine with a network (hf download {name} --local-dir FOLDER), and give that folder. "
    "Or copy the cache of that machine, and set HF_HOME to the copy. "
    "If you meant a folder: there is no folder {name} here."
)


def cache_folder() -> Path:
    return Path(os.environ.get("WINDFALL_CACHE", Path.home() / ".cache" / "windfall"))


def resolve(name: str) -> Path | str:
    """The model's folder, or its hub id. Raises WindfallError for a name that cannot be either. Uses no network."""
    if name == "tiny":
        return TINY
    if name == SMOLLM2:
        converted = cache_folder() / name
        if not (converted / "config.json").is_file():
            raise WindfallError(f"{name} is not installed", where="model.path", fix="In a clone: make smollm2")
        return converted
    path = Path(name).expanduser()
    if name and path.is_dir():
        if not (path / "config.json").is_file() and not adapter_folder.is_adapter(path):
            raise WindfallError("no config.json in this folder", where=name, fix="It must be in Hugging Face format.")
        return path
    if "/" in name and path.parent.is_dir():  # the user meant a path
        near = nearest(path.as_posix(), [p.as_posix() for p in path.parent.iterdir() if p.is_dir()])
        raise WindfallError("no such folder", where=name, fix=near)
    if name.count("/") == 1 and not path.is_absolute() and not name.startswith((".", "~")):
        return name
    fix = f"{nearest(name, NAMED)} Or give a folder in Hugging Face format, or a hub id such as owner/name."
    raise WindfallError(f"no model {name!r}", fix=fix)


def check_kind(name: str) -> None:
    """Refuse a model that reads more than text, as far as its config.json is on this machine. Uses no network."""
    multimodal.refuse(config(name), name)


def config(name: str) -> dict[str, Any]:
    """The configuration of a model, or of the base of an adapter. Empty if it is not on this machine. Uses no
    network."""
    where = resolve(name)
    if isinstance(where, Path) and adapter_folder.is_adapter(where):
        return config(adapter_base(where))
    file = where / "config.json" if isinstance(where, Path) else _cached_config(where)
    return (read_json(file) if file is not None else None) or {}  # loading it reports what is wrong with it


def load(name: str, *, dtype: str, device: str, check: Callable[[Any], None] | None = None) -> Any:
    """`check`: refuses a model by its configuration, before its weights are read."""
    import torch
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
    from transformers.utils import logging

    from windfall.models import attention

    logging.disable_progress_bar()
    where = fetch(name)
    if isinstance(where, Path) and adapter_folder.is_adapter(where):
        return _load_merged(where, dtype=dtype, device=device, check=check)
    try:
        multimodal.refuse(PreTrainedConfig.get_config_dict(where)[0], name)
        if check is not None:
            check(AutoConfig.from_pretrained(where))
        read: Any = AutoModelForCausalLM.from_pretrained(
            where,
            dtype=getattr(torch, dtype),
            attn_implementation=attention.NAME,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except WindfallError:
        raise
    except (OSError, ValueError, SafetensorError) as e:
        raise _unreadable("model", where, e) from e
    except Exception as e:  # fault boundary: foreign model code; some models support only their own attention
        raise unsupported(e, str(where)) from e
    model, loaded = read
    _refuse_incomplete(loaded, where)
    return model.to(device).eval()


def _load_merged(folder: Path, *, dtype: str, device: str, check: Callable[[Any], None] | None) -> Any:
    import torch

    config, path = adapter_folder.read_config(folder), adapter_base(folder)
    model = load(path, dtype=dtype, device=device, check=check)
    weights = model.state_dict()
    tensors = adapter_folder.read_tensors(folder, weights)
    found = merged.pairs(tensors, {name: t.shape for name, t in weights.items()}, str(folder))
    if adapter_folder.read_base(folder) is not None:
        digest = adapter_folder.base_digest(weights)
        adapter_folder.check_base(folder, AdapterBase(path=path, dtype=dtype, digest=digest))
    if any(not merged.is_repeated(name) for name in found):
        untie(model)
        weights = model.state_dict()
    with torch.no_grad():
        for name, pair in found.items():
            weights[name].copy_(merged.merge(weights[name], pair, config.scale))
    return model


def untie(model: Any) -> None:
    """Give the head a matrix of its own if it has that of the embeddings."""
    import torch

    head = model.get_output_embeddings()
    if head.weight is model.get_input_embeddings().weight:
        head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=head.weight.requires_grad)
        model.config.tie_word_embeddings = False


def adapter_base(folder: Path) -> str:
    """The name of the base model of the adapter in this folder: as in the recipe of its run, or as PEFT wrote it."""
    base = adapter_folder.read_base(folder)
    named = adapter_folder.read_config(folder).base if base is None else base.path
    fix = f"Set base_model_name_or_path in {adapter_folder.CONFIG} to a folder or a hub id."
    if not named:
        raise WindfallError("the adapter does not name its base model", where=str(folder), fix=fix)
    try:
        where = resolve(named)
    except WindfallError as e:
        raise WindfallError(f"the base model of this adapter: {e.what}: {named}", where=str(folder), fix=e.fix) from e
    if isinstance(where, Path) and adapter_folder.is_adapter(where):
        what = f"the base model of this adapter is an adapter itself: {named}"
        raise WindfallError(what, where=str(folder), fix="Export that adapter first: windfall export")
    return named


def _refuse_incomplete(loaded: dict[str, Any], where: Path | str) -> None:
    """Raise WindfallError for weights that are missing from the files or have the wrong shape: transformers would
    initialize them randomly. It does not count tied weights and computed buffers as missing."""
    fix = "Does config.json belong to these weights? Download the folder again, or repeat save_pretrained."
    wrong = [
        f"{name} ({list(found)} in the file, {list(wanted)} by config.json)"
        for name, found, wanted in sorted(loaded["mismatched_keys"])
    ]
    for names, what in (
        (wrong, "weights have the wrong shape for the model"),
        (sorted(loaded["missing_keys"]), "weights are missing from the model's files"),
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise WindfallError(f"{what}: {', '.join(names[:3])}{more}", where=str(where), fix=fix)


def unsupported(e: Exception, where: str) -> WindfallError:
    what = f"transformers cannot build this model with windfall's attention: {type(e).__name__}: {e}"
    return WindfallError(what, where=where, fix="Use another model: docs/models.md lists those that were checked.")


def load_tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    where = fetch(name)
    if isinstance(where, Path) and adapter_folder.is_adapter(where) and not (where / "tokenizer_config.json").is_file():
        return load_tokenizer(adapter_base(where))
    try:
        return AutoTokenizer.from_pretrained(where)
    except Exception as e:  # fault boundary: tokenizer code of any kind
        raise _unreadable("tokenizer", where, e) from e


def _unreadable(what: str, where: Path | str, error: Exception) -> WindfallError:
    if isinstance(where, str) and (refused := hub_refusal(where, error)) is not None:
        return refused
    message = f"cannot load the {what}: {type(error).__name__}: {error}"
    fix = "Is the folder complete? In Hugging Face format it has config.json, model.safetensors and tokenizer.json."
    return WindfallError(message, where=str(where), fix=fix)


def fetch(name: str) -> Path | str:
    """Like `resolve`, and says so if the model will be downloaded."""
    if line := preparation(name):
        print(f"{line} ...", file=sys.stderr, flush=True)
    return resolve(name)


def preparation(name: str) -> str:
    """What the first load of this model does beyond loading it, for people who wait. Empty: nothing."""
    where = resolve(name)
    if isinstance(where, str) and _cached_config(where) is None:
        return f"downloading {where} from the Hugging Face hub into its cache: once"
    return ""


def _cached_config(name: str) -> Path | None:
    """config.json of this model in the hub's cache. None: the cache does not have the model."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:  # not a valid id; loading it reports that
        return None
    return Path(found) if isinstance(found, str) else None


def hub_refusal(name: str, error: BaseException) -> WindfallError | None:
    """Why the model could not be downloaded. None: the error has another reason."""
    from huggingface_hub import constants, errors

    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)

    def failed(*kinds: type[BaseException]) -> bool:
        return any(isinstance(e, kinds) for e in chain)

    if failed(errors.GatedRepoError):
        fix = "Accept its terms on its page, and log in: hf auth login (or set HF_TOKEN)."
        return WindfallError("access to this model of the Hugging Face hub is restricted", where=name, fix=fix)
    if failed(errors.RepositoryNotFoundError):
        fix = "Check the spelling. If it is private, log in: hf auth login (or set HF_TOKEN). Or give a folder."
        return WindfallError("the Hugging Face hub has no such model", where=name, fix=fix)
    if failed(errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError):
        why = "is turned off by HF_HUB_OFFLINE" if constants.HF_HUB_OFFLINE else "cannot be reached from here"
        what = f"the Hugging Face hub {why}, and the model is not in its cache ({constants.HF_HUB_CACHE})"
        return WindfallError(what, where=name, fix=OFFLINE_FIX.format(name=name))
    return None
