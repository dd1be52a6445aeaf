"""Copies of saved weights, each in a model of its own that cannot be trained."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import replace

from windfall.errors import WindfallError
from windfall.tinker.accounts.keys import ApiAccount
from windfall.tinker.calls import Refusal
from windfall.tinker.disk.records import NamedWeights
from windfall.tinker.disk.saved_weights import link_tree
from windfall.tinker.models.client_models import ClientModels
from windfall.tinker.models.model import TrainedModel


class WeightCopies:
    def __init__(self, models: ClientModels) -> None:
        self._models, self._weights, self._shared = models, models.weights, models.shared
        self._tasks: dict[str, asyncio.Task[NamedWeights]] = {}
        """Copies that are being made, by path."""

    async def copy(self, account: ApiAccount, path: str, *, expires_s: float | None, key: str) -> NamedWeights:
        """A copy of weights for the account. The same key is the same copy. Raises Refusal."""
        source = self._weights.get(account.name, path)
        id = f"{uuid.uuid5(uuid.NAMESPACE_URL, f'{account.name} {key} {path}')}:copy:0"
        target = f"tinker://{id}/{path.removeprefix(f'tinker://{source.model}/')}"
        if (found := self._weights.named.get(target)) is not None:
            return found
        self._shared.keys.check_disk(account.name, self._weights.size_of(account.name))
        if (task := self._tasks.get(target)) is None:
            made = replace(
                source, path=target, account=account.name, model=id, created=time.time(), public=False,
                expires=None if expires_s is None else time.time() + expires_s,
                folder=self._weights.folder_of(id) / source.folder.relative_to(self._weights.folder_of(source.model)),
            )  # fmt: skip
            task = self._tasks[target] = asyncio.create_task(self._copy(source, made))
            task.add_done_callback(lambda _: self._tasks.pop(target))
        return await asyncio.shield(task)

    async def _copy(self, source: NamedWeights, made: NamedWeights) -> NamedWeights:
        try:
            await asyncio.to_thread(link_tree, source.folder, made.folder)
        except WindfallError as e:
            raise Refusal(400, str(e)) from e
        of = self._models.all[source.model]
        model = self._models.all[made.model] = TrainedModel(
            id=made.model, account=made.account, session="", base=of.base, spec=of.spec, created=made.created,
            shared=self._shared, weights=self._weights, unloaded=True, seen=made.created,
        )  # fmt: skip
        self._weights.named[made.path] = made
        await self._shared.store.write(model.row(), made.row())
        return made
