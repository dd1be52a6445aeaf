"""Siblings on two workers, over real links: each engine remembers what the other one generates."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from tests.support.fleets.listening_controller import Worker, episode, expected, opened
from windfall.controller.workers.members import WorkerState
from windfall.types import Capabilities

TOKENS = 300


def remembering(worker: Worker, *, drafts: bool = True) -> dict[str, list[int]]:
    """What the worker's engine is given to remember, by text."""
    texts: dict[str, list[int]] = {}

    def remember(group: str, id: str, position: int, tokens: Sequence[int]) -> None:
        text = texts.setdefault(f"{group} {id}", [])
        assert position == len(text), "no gap, and nothing twice"
        text += tokens

    worker.engine.capabilities = Capabilities(name="test", drafts=drafts)
    worker.engine.remember = remember
    return texts


def test_engines_get_the_texts_of_siblings_on_the_other_worker(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path) as (s, start):
            a, b = start(name="a"), start(name="b")
            texts, not_drafting = remembering(a), remembering(b, drafts=False)
            await s.until(lambda: all(s.state(name) is WorkerState.READY for name in "ab"), "both are ready")
            group = [episode(f"7/{n}", TOKENS) for n in range(8)]
            for e in group:
                s.dispatch.open(e, s.listener)
            await s.until(lambda: sum(e.id in s.ended for e in group) == 8, "all have ended")
            elsewhere = [e for e in group if e.worker_runs[0][0] == "b"]
            assert 0 < len(elsewhere) < 8, "every worker has four slots"
            for e in elsewhere:
                known = texts.get(f"7 {e.id}", [])
                assert known == expected(e)[: len(known)], "they are its tokens"
            assert sum(map(len, texts.values())) > TOKENS, "many of them"
            assert texts.keys() <= {f"7 {e.id}" for e in elsewhere}, "and none that the worker generates itself"
            assert not not_drafting
            for e in group:
                s.dispatch.close(e.id)
            s.dispatch.group_done("7", 8)
            texts.clear()
            s.dispatch.drain("b", "enough")
            again = episode("15/0", TOKENS)
            s.dispatch.open(again, s.listener)
            await s.until(lambda: again.id in s.ended, "the task was drawn again")
            assert texts.keys() == {"15 epoch/15/0", "15 epoch/15/1"}
            assert all(len(text) == TOKENS for text in texts.values())

    asyncio.run(main())
