"""Weights on the server's disk: those that clients have saved under names, and when the others may be removed.

A folder of weights stays as long as it has a name, or something uses it: a sampler, or a model that began with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from windfall.errors import WindfallError
from windfall.tinker.accounts.keys import ApiAccount
from windfall.tinker.calls import Refusal
from windfall.tinker.disk.records import NamedWeights
from windfall.tinker.disk.store import TinkerStore

PARTS = {"training": "weights", "sampler": "sampler_weights"}
"""The part of a path that says what kind of saved weights these are, by kind."""


def path_of(model: str, part: str, name: str) -> str:
    """
    >>> path_of("s:train:0", "weights", "final")
    'tinker://s:train:0/weights/final'
    """
    return f"tinker://{model}/{part}/{name}"


class SavedWeights:
    def __init__(self, folder: Path, store: TinkerStore) -> None:
        """`folder`: that of all models."""
        self._folder, self._store = folder, store
        self.named: dict[str, NamedWeights] = {}
        """Weights that have a name, by path."""
        self.used: list[Callable[[], Iterable[Path | None]]] = []
        """Each returns folders that something uses."""

    def restore(self) -> None:
        self.named = {row["path"]: NamedWeights.read(row) for row in self._store.rows("select * from checkpoint")}

    def clear(self) -> None:
        """Remove what a killed server was about to write or to remove."""
        for folder in self._folder.iterdir() if self._folder.is_dir() else ():
            for path in self._unused(_contents(folder)):
                shutil.rmtree(path, ignore_errors=True)
            _remove_empty(folder)

    def folder_of(self, model: str) -> Path:
        """Where everything of a model is saved."""
        return self._folder / model.replace(":", "_")

    def get(self, account: str, path: str, *, optimizer: bool = False) -> NamedWeights:
        """Weights that the account may read, with the state of their optimizer. Raises Refusal."""
        found = self.named.get(path)
        if found is None or (found.account != account and not found.public):
            raise Refusal(404, f"there are no weights {path!r}")
        if optimizer and found.kind != "training":
            raise Refusal(400, f"{path} has no state of the optimizer: it was saved for sampling")
        return found

    def of(self, account: ApiAccount, model: str = "") -> list[NamedWeights]:
        """The saved weights of an account, or of one of its models, newest first."""
        mine = (p for p in self.named.values() if p.account == account.name and model in ("", p.model))
        return sorted(mine, key=lambda p: -p.created)

    def size_of(self, account: str) -> int:
        """Bytes of the weights that an account has saved under names."""
        return sum(p.bytes for p in self.named.values() if p.account == account)

    def folder(self, path: str) -> Path:
        """Raises WindfallError if there are none."""
        found = self.named.get(path)
        if found is None:
            raise WindfallError("there are no such weights", where=path, fix="They were deleted, or never saved.")
        return found.folder

    def _own(self, account: ApiAccount, path: str) -> NamedWeights:
        found = self.get(account.name, path)
        if found.account != account.name:
            raise Refusal(403, f"{path} belongs to another account")
        return found

    async def change(
        self, account: ApiAccount, path: str, *, expires_s: float | bool | None = False, public: bool | None = None
    ) -> None:
        """Change when weights are deleted (`expires_s` from now; None: never), or whether other accounts may read
        them."""
        found = self._own(account, path)
        if not isinstance(expires_s, bool):
            found.expires = None if expires_s is None else time.time() + expires_s
        found.public = found.public if public is None else public
        await self._store.write(found.row())

    async def delete(self, account: ApiAccount, path: str) -> None:
        await self._remove(self._own(account, path))

    async def remove_expired(self, now: float) -> None:
        for found in list(self.named.values()):
            if found.expires is not None and found.expires < now:
                await self._remove(found)

    async def _remove(self, found: NamedWeights) -> None:
        self.named.pop(found.path, None)
        await self._store.write(("delete from checkpoint where path = ?", (found.path,)))
        await self.discard({found.folder})

    async def discard_model(self, model: str) -> None:
        """Remove what is unused in the folder of a model that is unloaded."""
        await self.discard(_contents(self.folder_of(model)))
        _remove_empty(self.folder_of(model))

    async def discard(self, folders: Collection[Path]) -> None:
        """Remove those of these folders that nothing uses any more."""
        for folder in self._unused(folders):
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def _unused(self, folders: Collection[Path]) -> list[Path]:
        used = {p.folder for p in self.named.values()}.union(*(users() for users in self.used))
        return [folder for folder in folders if folder not in used]


def link_tree(source: Path, target: Path) -> None:
    """A copy that shares the bytes, where the file system can."""
    shutil.rmtree(target, ignore_errors=True)
    try:
        shutil.copytree(source, target, copy_function=_link)
    except (OSError, shutil.Error) as e:
        raise WindfallError(f"cannot be copied: {e}", where=str(source), fix="Save the weights again.") from e


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def size(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _contents(model: Path) -> list[Path]:
    """Everything in the folder of a model: weights that were saved, and states."""
    if not model.is_dir():
        return []
    parts = [model / part for part in PARTS.values()]
    return [
        *(path for part in parts if part.is_dir() for path in part.iterdir()),
        *(path for path in model.iterdir() if path not in parts),
    ]


def _remove_empty(model: Path) -> None:
    """Remove the folder of a model if nothing is left in it. Nothing may be writing there."""
    for folder in (*(model / part for part in PARTS.values()), model):
        with contextlib.suppress(OSError):  # it is not empty, or not there
            folder.rmdir()
