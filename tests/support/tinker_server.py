"""`windfall tinker` in this process, in a thread of its own: loop, service, trainer and worker are those of a run, and
the links between them are in memory (slot_run.py)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.slot_run import slot_run
from windfall import run_folder as folders
from windfall.models import tokenizer
from windfall.models.text import Text
from windfall.recipe.file import load_recipe
from windfall.tinker.loop import TinkerLoop

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
[tinker]
port = 0
[policies.base]
frozen = true
[policies.t0]
slot = "train"
lora = { rank = 8 }
[policies.t1]
slot = "train"
lora = { rank = 8 }
[policies.s0]
slot = "sample"
lora = { rank = 8 }
[policies.s1]
slot = "sample"
lora = { rank = 8 }
"""
MODEL = "tiny"
WAIT_S = 120.0


class InProcess:
    """A server that listens. `key`: that of its only account."""

    def __init__(self, folder: Path, recipe: str = RECIPE) -> None:
        self.folder, self._recipe = folder, recipe
        self.url, self.key = "", ""
        self.error: BaseException | None = None
        self._ready, self._over = threading.Event(), asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as e:  # the test raises it
            self.error = e
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with slot_run(self.folder, self._recipe) as run:
            loop = TinkerLoop(load_recipe(self.folder / "recipe.toml"), self.folder)
            serving = asyncio.create_task(loop.run(run.life, self._text))
            while not serving.done() and not (self.folder / "tinker.json").is_file():
                await asyncio.sleep(0.01)
            if not serving.done():
                found = folders.read_json(self.folder / "tinker.json") or {}
                self.url = f"http://127.0.0.1:{found['port']}"
                key = self.folder / "tinker.key"
                self.key = key.read_text().strip() if key.is_file() else ""
                self._ready.set()
            over = asyncio.create_task(self._over.wait())
            await asyncio.wait([serving, over], return_when=asyncio.FIRST_COMPLETED)
            run.life.stop.set()
            await serving

    def _text(self, policy: str) -> Text:
        folder = folders.policy_folder(self.folder, policy) / "tokenizer"
        return Text(tokenizer.load(folder), tokenizer.stop_ids(folder))

    def wait(self) -> None:
        assert self._ready.wait(WAIT_S), f"the server does not listen after {WAIT_S:g} s"
        if self.error is not None:
            raise self.error

    def stop(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._over.set)


@contextmanager
def served(folder: Path, recipe: str = RECIPE) -> Iterator[InProcess]:
    found = InProcess(folder, recipe)
    thread = threading.Thread(target=found.run, name="windfall tinker")
    thread.start()
    try:
        found.wait()
        yield found
    finally:
        if thread.is_alive():
            found.stop()
        thread.join(WAIT_S)
    assert not thread.is_alive(), f"the server does not end within {WAIT_S:g} s"
    if found.error is not None:
        raise found.error
