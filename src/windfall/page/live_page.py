"""The page of a run on the controller's port, and the sample of responses.

    event log ──▶ RunHistory ──▶ Feed ──▶ viewers
    finished responses ──▶ ResponseSampler ──step──▶ thread ──▶ file

Rule: none of this may delay or end the run. What takes long runs in one thread, which gets the next sample only when it
has written the last one. An error turns off the part that failed and is logged once, as `page_failed`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from aiohttp import web

from windfall import run_folder as folders
from windfall.controller.rollout.stream import Rollout
from windfall.events.log import Event, EventLog
from windfall.link import auth
from windfall.link.socket import Port
from windfall.models import tokenizer
from windfall.models.text import Text
from windfall.page.feed import TICK_S, Feed
from windfall.page.history import RunHistory
from windfall.page.runs import recipe_facts, status
from windfall.page.samples import ResponseSampler, SampledResponse, SampleFile, describe
from windfall.page.server import PageServer
from windfall.recipe.sections import Recipe
from windfall.types import Response, Task, policy_of

log = logging.getLogger(__name__)


class LivePage:
    def __init__(self, recipe: Recipe, folder: Path, events: EventLog) -> None:
        self._recipe, self._folder, self._events = recipe, folder, events
        self._history, self._samples = RunHistory(), SampleFile(folder, recipe.log.samples_mb)
        self._sampler, self._texts = ResponseSampler(recipe.log.samples), dict[str, Text]()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="samples")
        self._writing: Future[None] | None = None
        self._failed: set[str] = set()
        self._how = ""
        """How the run has ended."""
        name = recipe.run.name
        self.feed = Feed(
            self._history, name=folder.resolve().name, recipe=recipe_facts(folder),
            status=lambda: self._how or status(self._history, running=self._history.ended is None),
        )  # fmt: skip
        key = auth.page_key(auth.read_token(folder / "token"))
        self.server = PageServer(self.feed, self._samples, key, title=f"{name} · windfall")

    def observe(self, event: Event) -> None:
        """An event that is in the log already, or was just written."""
        self._history.add(event)
        if event["name"] == "step" and event["kind"] == "scalar":
            self._write_sample(event["step"], event["t"])

    def attach(self, rollout: Rollout) -> None:
        """SampledResponse the responses of this rollout."""
        if self._recipe.log.samples:
            rollout.on_finished = self._finished

    def _finished(self, task: Task, response: Response) -> None:
        self._guard("samples", lambda: self._sampler.offer(task, response))

    def _write_sample(self, step: int, t: float) -> None:
        sample = self._sampler.take()
        if sample and (self._writing is None or self._writing.done()):
            self._writing = self._thread.submit(self._write, sample, step, t)

    def _write(self, sample: list[SampledResponse], step: int, t: float) -> None:
        def write() -> None:
            self._samples.write([describe(s, step, t, self._decoder) for s in sample])

        self._guard("samples", write)

    def _decoder(self, role: str) -> Callable[[list[int]], str]:
        policy = policy_of(role)
        if policy not in self._texts:  # instances of its own: the event loop uses the others
            self._texts[policy] = Text(tokenizer.load(folders.policy_folder(self._folder, policy) / "tokenizer"))
        return self._texts[policy].decode

    def pages(self) -> Mapping[str, Callable[[web.Request], Awaitable[web.StreamResponse]]]:
        return self.server.handlers() if self._recipe.log.page else {}

    def listening(self, port: Port) -> None:
        self.server.welcome = port.welcome

    async def run(self, snapshot: Callable[[], dict[str, Any] | None]) -> None:
        """Serve viewers, forever. `snapshot` returns the last state of the fleet."""
        while True:
            await asyncio.sleep(TICK_S)
            self.feed.snapshot = snapshot()
            self._guard("page", self.feed.tick)

    async def close(self, how: str) -> None:
        """Let the last sample be written, and viewers see `how` the run has ended: the event `end` comes later, when
        the page is no longer served."""
        self._how = how
        self._guard("page", self.feed.tick)
        await asyncio.sleep(0.05 if self.feed.viewers else 0)
        await asyncio.to_thread(self._thread.shutdown)

    def _guard(self, part: str, call: Callable[[], object]) -> None:
        if part in self._failed:
            return
        try:
            call()
        except Exception as e:  # fault boundary: a page that fails must not end the run
            self._failed.add(part)
            log.exception("%s failed and is turned off", part)
            if part == "page":
                self._events.instant("page_failed", why=f"{type(e).__name__}: {e}"[:400])
