"""What a run and its environment servers share: settings on which they must agree, and both directions of a link."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from windfall import envs
from windfall.envs.data import files as data_files
from windfall.errors import WindfallError, run_until_first
from windfall.link.base import FrameTooLarge, Link, clip

OWN_KEYS = ("memory_mb", "path")
"""Keys that may differ between a run and a server. Instead of paths, the contents of the files are compared."""


def settings_of(section: Any, seed: int, evaluation: dict[str, Any] | None) -> dict[str, Any]:
    """What an environment is built from as plain data, by recipe key. `section` is an env section of windfall.recipe;
    for `evaluation` see EnvPool."""
    found = {f"env.{key}": value for key, value in envs.section_dict(section).items() if key not in OWN_KEYS}
    found |= {f"eval.{key}": value for key, value in (evaluation or {}).items() if key != "path"}
    rewards = [Path(file.rpartition(":")[0]) for file in found.get("env.rewards", ()) if ".py:" in file]
    if rewards:
        found["env.rewards"] = [reward.rpartition("/")[2] for reward in found["env.rewards"]]
    files = {f"contents of {file.name}": [file] for file in rewards}
    if section.name == "dataset":
        files["contents of env.path"] = list(data_files.find(section.path, section.split, section.subset).files)
    if evaluation:
        where = (Path(evaluation["path"]), evaluation.get("split"), evaluation.get("subset"))
        files["contents of the evaluation's data"] = list(data_files.find(*where, key="eval").files)
    return found | {"run.seed": seed} | {key: _digest(paths) for key, paths in files.items()}


def _digest(files: list[Path]) -> str:
    digest = xxhash.xxh3_128()
    for path in files:
        try:
            with path.open("rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
        except OSError as e:
            raise WindfallError(f"cannot read the file: {e.strerror or e}", where=str(path)) from e
    return digest.hexdigest()


def difference(server: dict[str, Any], run: dict[str, Any]) -> str:
    """Which settings differ, in words; "" if none does.

    >>> difference({"env.size": 4, "run.seed": 0}, {"env.size": 3, "run.seed": 0})
    'env.size is 4 there and 3 here'
    >>> difference({"env.task": "sums"}, {})
    "env.task is 'sums' there and not set here"
    """
    said = []
    for key in (key for key in {**run, **server} if server.get(key) != run.get(key)):
        if key.startswith("contents"):
            said.append(f"the {clip(key)} differ")
        else:
            there, here = (repr(part[key])[:80] if key in part else "not set" for part in (server, run))
            said.append(f"{clip(key)} is {there} there and {here} here")
    return "; ".join(said[:5]) + (f"; and {len(said) - 5} more" if len(said) > 5 else "")


async def exchange(
    link: Link, outbox: asyncio.Queue[Any], handle: Callable[[Any], None], unsendable: Callable[[Any, str], None]
) -> None:
    """Send what is in the outbox, and handle what arrives. Runs until the link ends, and raises LinkClosed then, or
    what `handle` raises. `unsendable` gets a message that cannot be encoded or is too large, and why; the link
    continues."""

    async def write() -> None:
        while True:
            message = await outbox.get()
            try:
                await link.send(message)
            except (FrameTooLarge, UnicodeError, OverflowError) as error:
                unsendable(message, clip(error))

    async def read() -> None:
        while True:
            handle(await link.receive())

    await run_until_first(write(), read())
