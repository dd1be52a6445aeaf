"""Models from the Hugging Face hub: whether one is in the hub's cache, and why one cannot be downloaded."""

from __future__ import annotations

from windfall.errors import WindfallError

OFFLINE_FIX = (
    "Download it on a machine with a network (hf download {name} --local-dir FOLDER), and give that folder. "
    "Or copy the cache of that machine, and set HF_HOME to the copy. "
    "If you meant a folder: there is no folder {name} here."
)


def is_cached(name: str) -> bool:
    """Whether the hub's cache has this model, or a part of it."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError:  # not a valid id; loading it reports that
        return True


def refusal(name: str, error: BaseException) -> WindfallError | None:
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
