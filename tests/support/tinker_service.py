"""The service of `windfall tinker` with a trainer and a worker, in this process and without HTTP. Server and trainer
can be killed: nothing is saved then, and the next ones continue."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from tests.support.slot_run import SlotRun, slot_run
from windfall import run_folder as folders
from windfall.algorithms.given import Loss
from windfall.models import tokenizer
from windfall.models.load import TINY
from windfall.models.text import Text
from windfall.recipe.file import load_recipe
from windfall.tinker import calls as c
from windfall.tinker.call_log import Entry
from windfall.tinker.command import BASE
from windfall.tinker.keys import ApiAccount
from windfall.tinker.loop import TinkerLoop
from windfall.tinker.records import TinkerSession
from windfall.tinker.service import TinkerService
from windfall.training import Adam, given
from windfall.types import Sampling

RECIPE = """
[run]
name = "tinker"
threads = 1
deterministic = true
[model]
path = "tiny"
[rollout]
max_tokens = 64
[tinker]
port = 0
save_updates = 2
[policies.base]
frozen = true
[policies.t0]
slot = "train"
lora = { rank = 8 }
[policies.s0]
slot = "sample"
lora = { rank = 8 }
"""
ALICE, BOB = (ApiAccount(name=name, key=f"tml-{name}-secret") for name in ("alice", "bob"))
WAIT_S = 120.0
LORA = c.LoraSpec(rank=4, seed=3)
CROSS_ENTROPY = Loss(name="cross_entropy")


class Server:
    def __init__(self, folder: Path, run: SlotRun) -> None:
        self.folder, self.run = folder, run
        self._stack = contextlib.AsyncExitStack()
        self.service: TinkerService

    async def start(self) -> None:
        loop = TinkerLoop(load_recipe(self.folder / "recipe.toml"), self.folder)
        text = Text(tokenizer.load(folders.policy_folder(self.folder, BASE) / "tokenizer"))
        self.service = await self._stack.enter_async_context(loop.service(self.run.life, lambda policy: text))
        self.running = asyncio.create_task(self.service.run())

    async def kill(self) -> None:
        """End the server with nothing saved, and start the next one. Its links end, so the slots are empty."""
        self.running.cancel()
        self.service._train._loaded.clear()  # nothing is saved
        await self._stack.aclose()
        await self.lose_trainer()
        await self.start()

    async def restart(self) -> None:
        """Stop the server, which saves all models, and start the next one."""
        await self.stop()
        await self.lose_trainer()
        await self.start()

    async def lose_trainer(self) -> None:
        await asyncio.gather(*(self.run.cut(name) for name in self.run.links))

    async def stop(self) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        await self._stack.aclose()

    async def result(self, call: c.Call, account: ApiAccount = ALICE) -> Any:
        """Make a call and wait for its result, over restarts of the server."""
        return await self.outcome((await self.service.submit(account, call)).id, account)

    async def outcome(self, id: str, account: ApiAccount = ALICE) -> Any:
        async with asyncio.timeout(WAIT_S):
            while isinstance(found := await self.service.outcome(account, id, 0.2), c.Pending):
                pass
        return found.result if isinstance(found, c.Done) else found


@contextlib.asynccontextmanager
async def tinker_server(folder: Path) -> AsyncIterator[Server]:
    files = folders.policy_folder(folder, BASE) / "tokenizer"
    files.mkdir(parents=True)
    for file in TINY.glob("tokenizer*"):
        shutil.copy(file, files)
    async with slot_run(folder, RECIPE) as run:
        server = Server(folder, run)
        await server.start()
        try:
            yield server
        finally:
            await server.stop()


class Client:
    """Counts the calls of one model of a session."""

    def __init__(self, server: Server, session: TinkerSession, account: ApiAccount) -> None:
        self.server, self.session, self.account = server, session, account
        self.model, self.seq, self.samples, self.lora = "", 0, 0, LORA

    @classmethod
    async def open(cls, server: Server, account: ApiAccount = ALICE) -> Client:
        session = await server.service.create_session(account)
        client = cls(server, session, account)
        create = c.CreateModel(session=session.id, seq=0, base=server.service.terms.base, lora=LORA)
        client.model = (await client.result(create)).model
        return client

    async def result(self, call: c.Call) -> Any:
        return await self.server.result(call, self.account)

    def next(self, kind: Any, **fields: Any) -> Any:
        """The next call of the model."""
        self.seq += 1
        return kind(model=self.model, seq=self.seq, **fields)

    def gradient(self, ids: Sequence[int], labels: Sequence[int] | None = None) -> c.ForwardBackwardCall:
        sample = given(ids, range(1, len(ids)), [1.0] * (len(ids) - 1), (), labels)
        return self.next(c.ForwardBackwardCall, samples=(sample,), loss=CROSS_ENTROPY)

    def update(self) -> c.OptimStepCall:
        return self.next(c.OptimStepCall, adam=Adam(lr=1e-3))

    def sample(self, sampler: str, prompt: Sequence[int] = (5, 6, 7), **fields: Any) -> c.SampleCall:
        self.samples += 1
        options: dict[str, Any] = {"n": 2, "max_tokens": 6, "seed": self.samples, **fields}
        return c.SampleCall(
            sampler=sampler, seq=self.samples, prompt=tuple(prompt), sampling=Sampling(temperature=1.0), **options
        )

    async def entry(self, call: c.Call) -> Entry:
        return await self.server.service.submit(self.account, call)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
