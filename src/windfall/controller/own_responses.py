"""Responses that a loop of its own asks for, on whatever workers there are: generates them and waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext

from windfall.controller.ledger.episode import Episode
from windfall.controller.rollout.dispatch import Dispatch
from windfall.controller.rollout.stop_strings import StopStrings
from windfall.errors import WindfallError

LOOK_S = 0.02
"""Seconds between looks for stop strings. With many responses: ten times what a look takes."""


class OwnResponses:
    """Their owner (dispatch.ResponseOwner)."""

    def __init__(self, dispatch: Dispatch) -> None:
        self._dispatch = dispatch
        self._waiting: dict[str, asyncio.Future[None]] = {}
        """By id of a response that is being generated."""
        self._watched: dict[str, tuple[Episode, StopStrings]] = {}
        """Those of them that stop strings may end."""
        self._watching: asyncio.Task[None] | None = None

    async def generate(
        self, group: str, episodes: Sequence[Episode], stops: StopStrings | None = None,
        turn: Callable[[Episode], AbstractAsyncContextManager[None]] = lambda _: nullcontext(),
    ) -> None:  # fmt: skip
        """Generate these responses to one prompt, each within its `turn`. Canceled: no worker goes on with them."""
        tasks = [asyncio.create_task(self._generate(episode, stops, turn)) for episode in episodes]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._dispatch.group_done(group, len(episodes))

    async def _generate(
        self, episode: Episode, stops: StopStrings | None,
        turn: Callable[[Episode], AbstractAsyncContextManager[None]],
    ) -> None:  # fmt: skip
        async with turn(episode):
            self._waiting[episode.id] = ended = asyncio.get_running_loop().create_future()
            try:
                self._dispatch.open(episode, self)
                if stops:
                    self._watch(episode, stops)
                await ended
                if stops:
                    self._cut_at_stop(episode, stops, whole=True)
                self._dispatch.close(episode.id)
            except BaseException:  # raised again: no worker may go on with a response that is not wanted any more
                self._dispatch.withdraw([episode.id] if episode.id in self._dispatch.ledger.entries else [])
                raise
            finally:
                self._watched.pop(episode.id, None)
                del self._waiting[episode.id]

    def _watch(self, episode: Episode, stops: StopStrings) -> None:
        self._watched[episode.id] = episode, stops
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._look_for_stops(), name="stop strings")

    async def _look_for_stops(self) -> None:
        loop, spent_s = asyncio.get_running_loop(), 0.0
        try:
            while self._watched:
                await asyncio.sleep(max(LOOK_S, 10 * spent_s))
                began_s = loop.time()
                for episode, stops in list(self._watched.values()):
                    if episode.finish is None and self._cut_at_stop(episode, stops):
                        self.turn_ended(episode.id)
                spent_s = loop.time() - began_s
        except Exception as e:  # fault boundary: raised where the responses are waited for
            self.fail(e)

    def _cut_at_stop(self, episode: Episode, stops: StopStrings, *, whole: bool = False) -> bool:
        """Whether a stop string ends the response. `whole`: look at all of it."""
        length = stops.end(episode.id, episode.tokens, 0, whole=whole)
        if length is None:
            return False
        if episode.finish is None or length < len(episode.tokens):
            self._dispatch.cut(episode.id, length)
        episode.finish = "stop"
        return True

    def fail(self, error: BaseException) -> None:
        """End the wait for all responses with this error."""
        for id in list(self._waiting):
            self._fail(id, error)

    def turn_ended(self, id: str) -> None:
        if id in self._waiting and not self._waiting[id].done():
            self._waiting[id].set_result(None)

    def rejected(self, id: str, why: str) -> None:
        self._fail(id, WindfallError(why, where=f"response {id}"))

    def _fail(self, id: str, error: BaseException) -> None:
        if id in self._waiting and not self._waiting[id].done():
            self._waiting[id].set_exception(error)
