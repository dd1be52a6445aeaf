"""Responses that a loop of its own asks for, on whatever workers there are: generates them and waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from windfall.controller.ledger.episode import Episode
from windfall.controller.rollout.dispatch import Dispatch
from windfall.controller.rollout.stop_strings import StopStrings
from windfall.errors import WindfallError

LOOK_S = 0.02
"""Seconds between looks for stop strings."""


class OwnResponses:
    """Their owner (dispatch.ResponseOwner)."""

    def __init__(self, dispatch: Dispatch) -> None:
        self._dispatch = dispatch
        self._waiting: dict[str, asyncio.Future[None]] = {}
        """By id of a response that is being generated."""

    async def generate(
        self, group: str, episodes: Sequence[Episode], stops: StopStrings | None = None,
        ended: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Generate these responses to one prompt. Canceled: no worker goes on with them. `ended`: called for each of
        them once it is not generated any more."""
        loop = asyncio.get_running_loop()
        for episode in episodes:
            self._waiting[episode.id] = loop.create_future()
            self._waiting[episode.id].add_done_callback(lambda _: ended())
        try:
            for episode in episodes:
                self._dispatch.open(episode, self)
            await self._ended(episodes, stops)
            for episode in episodes:
                self._dispatch.close(episode.id)
        except BaseException:  # raised again: no worker may go on with responses that are not wanted any more
            self._dispatch.withdraw([e.id for e in episodes if e.id in self._dispatch.ledger.entries])
            raise
        finally:
            for episode in episodes:
                self._waiting.pop(episode.id).cancel()
            self._dispatch.group_done(group, len(episodes))

    async def _ended(self, episodes: Sequence[Episode], stops: StopStrings | None) -> None:
        left = [(episode, self._waiting[episode.id]) for episode in episodes]
        ends = [end for _, end in left]
        while stops and left:
            await asyncio.wait([end for _, end in left], timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
            for episode, end in left:
                if (length := stops.end(episode.id, episode.tokens, 0, whole=end.done())) is not None:
                    self._dispatch.cut(episode.id, length)
                    if not end.done():
                        end.set_result(None)
            left = [(episode, end) for episode, end in left if not end.done()]
        await asyncio.gather(*ends)

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
