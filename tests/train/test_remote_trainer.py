"""The controller's side of the trainer's link: whoever comes back is another, and is not asked to go on midway."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from windfall.link import messages as m
from windfall.link.memory import MemoryLink, pair
from windfall.train.base import TrainerLost
from windfall.train.remote import RemoteTrainer

ENGINE = m.Engine(
    model_config="{}", dtype="float32", kv_tokens=0, page_size=16, max_running=0, max_rows=64, deterministic=True,
    longest=8, wanted=1,
)  # fmt: skip


def hello(step: int) -> m.TrainerHello:
    return m.TrainerHello(
        protocol=m.PROTOCOL, nonce=b"", proof=b"", step=step, next_task=step, micro_tokens=64, model="m", engine=ENGINE,
        version=step, digest="d", url="http://_:1", facts={},
    )  # fmt: skip


def dial(trainer: RemoteTrainer, step: int) -> tuple[MemoryLink, asyncio.Task[None]]:
    ours, theirs = pair()
    return theirs, asyncio.create_task(trainer.attend(ours, hello(step)))


async def answer(link: MemoryLink, reply: object) -> None:
    await link.receive()
    await link.send(reply)


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, 10))


def test_it_answers() -> None:
    async def story() -> None:
        trainer = RemoteTrainer()
        link, attending = dial(trainer, 3)
        assert (await trainer.connected(5)).step == 3
        answering = asyncio.create_task(answer(link, m.Done(s=0.5)))
        assert await trainer.accumulate([]) == 0.5
        await answering
        await link.close()
        await attending

    run(story())


@pytest.mark.parametrize("first_is_frozen", [False, True])
def test_a_successor_is_not_asked_to_go_on_with_the_step_of_another(first_is_frozen: bool) -> None:
    """It has the weights of the last checkpoint: a gradient of a later step must not reach it."""

    async def story() -> None:
        trainer = RemoteTrainer()
        first, attending = dial(trainer, 3)
        await trainer.connected(5)
        if not first_is_frozen:
            await first.close("killed")
            await attending
        second, attending_too = dial(trainer, 0)
        await asyncio.sleep(0.01)
        with pytest.raises(TrainerLost, match="taken its place"):
            await trainer.accumulate([])
        assert (await trainer.connected(5)).step == 0
        answering = asyncio.create_task(answer(second, m.Done(s=0.1)))
        assert await trainer.accumulate([]) == 0.1
        await answering
        await second.close()
        await asyncio.gather(attending, attending_too)

    run(story())


def test_lost_while_it_is_waited_for() -> None:
    async def story() -> None:
        trainer = RemoteTrainer()
        link, attending = dial(trainer, 1)
        await trainer.connected(5)
        asking = asyncio.create_task(trainer.save())
        await asyncio.sleep(0.01)
        await link.close("killed")
        with pytest.raises(TrainerLost, match="killed"):
            await asking
        with pytest.raises(TrainerLost, match="no trainer"):
            await trainer.save()
        await attending

    run(story())
