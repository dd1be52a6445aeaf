"""`windfall tinker` in this process, in a thread of its own: all that it has is that of a run, but the
links between its parts are in memory (slot_run.py). Server and trainer can be killed, and the next ones continue."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tests.support.runs.slot_run import Build, SlotRun, slot_run
from windfall import run_folder as folders
from windfall.algorithms.given import Loss
from windfall.controller.assembly import ControllerLife
from windfall.engine.factory import build_engine
from windfall.models import tokenizer
from windfall.models.load import TINY
from windfall.models.text import Text
from windfall.recipe.file import load_recipe
from windfall.tinker import calls as c
from windfall.tinker.accounts.keys import ApiAccount
from windfall.tinker.command import BASE
from windfall.tinker.disk.call_log import Entry
from windfall.tinker.disk.records import TinkerSession
from windfall.tinker.loop import TinkerLoop
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
groups = 2
group_size = 2
max_tokens = 128
[fleet]
trainer_price_usd_per_h = 36.0
[tinker]
port = 0
save_updates = 2
accounts = "{accounts}"
[policies.base]
frozen = true
[policies.t0]
slot = "train"
lora = {{ rank = 8 }}
[policies.s0]
slot = "sample"
lora = {{ rank = 8 }}
[policies.s1]
slot = "sample"
lora = {{ rank = 8 }}
"""
MODEL = "tiny"
ALICE, BOB = (ApiAccount(name=name, key=f"tml-{name}-secret") for name in ("alice", "bob"))
ACCOUNTS = "".join(f'[{account.name}]\nkey = "{account.key}"\n' for account in (ALICE, BOB))
WAIT_S = 120.0
LORA = c.LoraSpec(rank=4, seed=3)
CROSS_ENTROPY = Loss(name="cross_entropy")
T = TypeVar("T")


class Loop(TinkerLoop):
    found: TinkerService

    @contextlib.asynccontextmanager
    async def service(self, life: ControllerLife, text: Callable[[str], Text]) -> AsyncIterator[TinkerService]:
        async with super().service(life, text) as self.found:
            yield self.found


class Server:
    """`key`: that of alice. The event loop of the server runs in a thread: `play` gets a script there."""

    key = ALICE.key

    def __init__(self, folder: Path, recipe: str = RECIPE, build: Build = build_engine) -> None:
        self.folder, self.accounts = folder, folder / "accounts.toml"
        self._recipe, self._build = recipe, build
        self.url = ""
        self.submitted: list[c.Call] = []
        """The calls that clients have made, also those that were made again."""
        self.run: SlotRun
        self._loop: Loop
        self._serving: asyncio.Task[Any]
        self._thread_loop: asyncio.AbstractEventLoop
        self._ready, self._over = threading.Event(), asyncio.Event()
        self._error: BaseException | None = None

    @property
    def service(self) -> TinkerService:
        return self._loop.found

    def play(self, script: Callable[[Server], Awaitable[T]], timeout_s: float = 250.0) -> T:
        """Run a script in the event loop of the server."""

        async def played() -> T:
            async with asyncio.timeout(timeout_s):
                return await script(self)

        return asyncio.run_coroutine_threadsafe(played(), self._thread_loop).result()

    # the thread

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as e:  # raised in the thread of the tests
            self._error = e
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._thread_loop = asyncio.get_running_loop()
        files = folders.policy_folder(self.folder, BASE) / "tokenizer"
        files.mkdir(parents=True)
        for file in TINY.glob("tokenizer*"):
            shutil.copy(file, files)
        self.accounts.write_text(ACCOUNTS)
        async with slot_run(self.folder, self._recipe.format(accounts=self.accounts), build=self._build) as self.run:
            await self.start()
            self._ready.set()
            await self._over.wait()
            self.run.life.stop.set()
            await self._serving

    @classmethod
    @contextlib.contextmanager
    def serving(cls, folder: Path, recipe: str = RECIPE, build: Build = build_engine) -> Iterator[Server]:
        """`build`: the engine of the worker."""
        found = cls(folder, recipe, build)
        thread = threading.Thread(target=found._run, name="windfall tinker")
        thread.start()
        assert found._ready.wait(WAIT_S), f"the server does not listen after {WAIT_S:g} s"
        if found._error is None:
            yield found
            found._thread_loop.call_soon_threadsafe(found._over.set)
        thread.join(WAIT_S)
        assert not thread.is_alive(), f"the server does not end within {WAIT_S:g} s"
        if found._error is not None:
            raise found._error

    # in the event loop

    async def start(self) -> None:
        self._loop = Loop(load_recipe(self.folder / "recipe.toml"), self.folder)
        self._serving = asyncio.create_task(self._loop.run(self.run.life, self._text))
        report = lambda: self._loop._report  # noqa: E731
        async with asyncio.timeout(WAIT_S):
            while not ((found := report()) and found.url):
                if self._serving.done():
                    await self._serving
                await asyncio.sleep(0.01)
        self.url, submit = found.url, self.service.submit

        async def submitted(account: ApiAccount, call: c.Call, body: bytes) -> Entry:
            self.submitted.append(call)
            return await submit(account, call, body)

        self.service.submit = submitted

    def _text(self, policy: str) -> Text:
        folder = folders.policy_folder(self.folder, policy) / "tokenizer"
        return Text(tokenizer.load(folder), tokenizer.stop_ids(folder))

    async def kill(self) -> None:
        """End the server with nothing saved, and start the next one. Its links end, so the slots are empty."""
        self.service._train._loaded.clear()  # nothing is saved
        await self.restart()

    async def restart(self) -> None:
        """Stop the server, which saves all models, and start the next one."""
        self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)
        await self.lose_trainer()
        await self.start()

    async def lose_trainer(self) -> None:
        await asyncio.gather(*(self.run.cut(name) for name in self.run.links))

    async def submit(self, account: ApiAccount, call: c.Call) -> Entry:
        return await self.service.submit(account, call, c.encode(call))

    async def result(self, call: c.Call, account: ApiAccount = ALICE) -> Any:
        """Make a call and wait for its result, over restarts of the server."""
        return await self.outcome((await self.submit(account, call)).id, account)

    async def outcome(self, id: str, account: ApiAccount = ALICE) -> Any:
        async with asyncio.timeout(WAIT_S):
            while isinstance(found := await self.service.outcome(account, id, 0.2), c.Pending):
                pass
        return found.result if isinstance(found, c.Done) else found


class Client:
    """Counts the calls of one model of a session. For scripts in the event loop of the server."""

    def __init__(self, server: Server, session: TinkerSession, account: ApiAccount) -> None:
        self.server, self.session, self.account = server, session, account
        self.model, self.seq, self.samples, self.lora = "", 0, 0, LORA

    @classmethod
    async def open(cls, server: Server, account: ApiAccount = ALICE) -> Client:
        session = await server.service.sessions.create(account)
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
        return await self.server.submit(self.account, call)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
