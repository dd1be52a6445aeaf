"""The controller's side of the trainer's link: a trainer that dials in again is a new one, and does not continue a
step."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from windfall.controller import remote_trainer
from windfall.controller.remote_trainer import RemoteTrainer
from windfall.controller.rollout.dispatch import Dispatch
from windfall.errors import WindfallError
from windfall.events.log import EventLog
from windfall.link import messages as m
from windfall.link.base import FrameTooLarge
from windfall.link.memory import MemoryLink, pair
from windfall.training import Sample, TrainerLost

ENGINE = m.EngineSpec(
    model_config="{}", dtype="float32", kv_tokens=0, page_size=16, max_running=0, max_rows=64, deterministic=True,
    longest=8, wanted=1,
)  # fmt: skip


@pytest.fixture
def trainer(tmp_path: Path) -> RemoteTrainer:
    return RemoteTrainer(Dispatch(events=EventLog(tmp_path / "events.jsonl")).weights)


def hello(step: int) -> m.TrainerHello:
    return m.TrainerHello(
        protocol=m.PROTOCOL, nonce=b"", proof=b"", step=step, next_task=step, micro_tokens=64, model="m", engine=ENGINE,
        version=step, digest="d", facts={},
    )  # fmt: skip


def dial(trainer: RemoteTrainer, step: int) -> tuple[MemoryLink, asyncio.Task[None]]:
    ours, theirs = pair()
    return theirs, asyncio.create_task(trainer.attend(ours, hello(step)))


async def answer(link: MemoryLink, reply: object) -> None:
    await link.receive()
    await link.send(reply)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 240))


def test_request_is_answered(trainer: RemoteTrainer) -> None:
    async def scenario() -> None:
        link, serving = dial(trainer, 3)
        assert (await trainer.connected(5)).step == 3
        answering = asyncio.create_task(answer(link, m.GradientAdded(s=0.5)))
        assert (await trainer.forward_backward([], id="1")).s == 0.5
        await answering
        await link.close()
        await serving

    run(scenario())


@pytest.mark.parametrize("final", [False, True])
def test_failure_is_a_lost_trainer_unless_a_person_must_fix_it(trainer: RemoteTrainer, final: bool) -> None:
    async def scenario() -> None:
        link, serving = dial(trainer, 3)
        await trainer.connected(5)
        failed = m.Failed(error="OutOfMemoryError: CUDA out of memory", final=final)
        answering = asyncio.create_task(answer(link, failed))
        with pytest.raises(WindfallError if final else TrainerLost, match="CUDA out of memory"):
            await trainer.forward_backward([], id="1")
        await answering
        await link.close()
        await serving

    run(scenario())


def test_failed_trainer_is_not_used_again_while_its_process_ends(trainer: RemoteTrainer) -> None:
    async def scenario() -> None:
        link, serving = dial(trainer, 3)
        await trainer.connected(5)
        answering = asyncio.create_task(answer(link, m.Failed(error="MemoryError", final=False)))
        with pytest.raises(TrainerLost, match="MemoryError"):
            await trainer.forward_backward([], id="1")
        await answering
        waiting = asyncio.create_task(trainer.connected(5))  # the link of the failed trainer is still open
        await asyncio.sleep(0.05)
        assert not waiting.done()
        _, next_serving = dial(trainer, 2)
        assert (await waiting).step == 2
        await link.close()
        await serving
        next_serving.cancel()

    run(scenario())


@pytest.mark.parametrize("first_is_frozen", [False, True])
def test_new_trainer_does_not_continue_the_step_of_another(trainer: RemoteTrainer, first_is_frozen: bool) -> None:
    """It has the weights of the last checkpoint, so it must not get a gradient of a later step."""

    async def scenario() -> None:
        first, serving = dial(trainer, 3)
        await trainer.connected(5)
        if not first_is_frozen:
            await first.close("killed")
            await serving
        second, second_serving = dial(trainer, 0)
        await asyncio.sleep(0.01)
        with pytest.raises(TrainerLost, match="has replaced it"):
            await trainer.forward_backward([], id="1")
        assert (await trainer.connected(5)).step == 0
        answering = asyncio.create_task(answer(second, m.GradientAdded(s=0.1)))
        assert (await trainer.forward_backward([], id="1")).s == 0.1
        await answering
        await second.close()
        await asyncio.gather(serving, second_serving)

    run(scenario())


def test_trainer_lost_during_a_request(trainer: RemoteTrainer) -> None:
    async def scenario() -> None:
        link, serving = dial(trainer, 1)
        await trainer.connected(5)
        asking = asyncio.create_task(trainer.save(id="1"))
        await asyncio.sleep(0.01)
        await link.close("killed")
        with pytest.raises(TrainerLost, match="killed"):
            await asking
        with pytest.raises(TrainerLost, match="no trainer"):
            await trainer.save(id="1")
        await serving

    run(scenario())


def sample(tokens: int, mark: float = 0.0) -> Sample:
    ids = tuple(range(200_000, 200_000 + tokens))
    return Sample(
        ids=ids, targets=tuple(range(1, tokens)), behavior=np.full(tokens - 1, -0.5), advantage=mark, limit=9,
        old=np.full(tokens - 1, -0.5),
    )  # fmt: skip


def sent_and_received(*samples: Sample) -> tuple[Sample, ...]:
    return m.decoder(m.ForwardBackward)(m.encode(m.ForwardBackward(id="1.0", samples=samples))).samples


def test_engines_of_a_sample_survive_the_wire() -> None:
    sent = replace(sample(9), engines=(("torch", 5), ("vllm", 3)))
    assert sent_and_received(sent)[0].engines == sent.engines


def test_large_batch_is_sent_in_several_messages(trainer: RemoteTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_trainer, "FRAME_BYTES", 1 << 16)
    samples = [sample(n, mark) for mark, n in enumerate((700, 900, 1500, 20, 20, 5000, 30))]
    frames: list[Any] = []

    async def play(link: MemoryLink) -> None:
        while True:
            order: Any = await link.receive()
            frames.append(order)
            if isinstance(order, m.Forward):
                await link.send(m.LogProbs(old=tuple(np.full(3, float(s.advantage)) for s in order.samples)))
            else:
                await link.send(m.GradientAdded(s=0.5))

    async def scenario() -> None:
        link, serving = dial(trainer, 3)
        await trainer.connected(5)
        playing = asyncio.create_task(play(link))
        took_s = (await trainer.forward_backward(samples, id="1")).s
        assert took_s == 0.5 * len(frames)
        assert len(frames) > 2
        assert [s.advantage for f in frames for s in f.samples] == list(range(7))
        sizes = [len(m.encode(f)) for f in frames]
        alone = len(m.encode(m.ForwardBackward(id="1.0", samples=(samples[5],))))
        assert all(size < 1 << 16 for size in sizes if size != alone), sizes
        frames.clear()
        prepared = await trainer.forward(samples, id="0")
        assert len(frames) > 2
        assert [s.old[0] for s in prepared if s.old is not None] == list(range(7))
        frames.clear()
        await trainer.forward_backward([], id="1")
        assert frames == [m.ForwardBackward(id="1.0", samples=())]
        playing.cancel()
        await link.close()
        await serving

    run(scenario())


def test_lag_survives_the_wire() -> None:
    lag = np.array([2, 1, 0], np.uint16)
    older, fresh = sent_and_received(replace(sample(4), lag=lag), sample(4))
    assert older.lag is not None
    assert older.lag.dtype == np.uint16
    assert older.lag.tolist() == [2, 1, 0]
    assert fresh.lag is None


def test_lag_counts_toward_the_size_of_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a lag, messages are split as before it existed: a split changes the order of summation."""
    fresh = [sample(101) for _ in range(8)]
    older = [replace(s, lag=np.ones(100, np.uint16)) for s in fresh]
    monkeypatch.setattr(remote_trainer, "FRAME_BYTES", 4 * (5 * (101 + 100) + 16 * 100 + 160))
    assert [len(part) for part in remote_trainer.message_parts(fresh)] == [4, 4]
    assert [len(part) for part in remote_trainer.message_parts(older)] == [3, 3, 2]
    for part in remote_trainer.message_parts(older):
        assert len(m.encode(m.ForwardBackward(id="1.0", samples=part))) <= remote_trainer.FRAME_BYTES


def test_sample_over_the_frame_limit_ends_the_run_with_a_reason(trainer: RemoteTrainer) -> None:
    """It is not a lost trainer: the next one could not receive the sample either, and the run would retry forever."""

    async def scenario() -> None:
        ours, _ = pair()
        serving = asyncio.create_task(trainer.attend(ours, hello(1)))
        await trainer.connected(5)

        async def send(message: object) -> None:
            raise FrameTooLarge("an Accumulate of 300,000,000 bytes")

        ours.send = send  # type: ignore[method-assign]
        with pytest.raises(WindfallError, match="an Accumulate of 300,000,000 bytes"):
            await trainer.forward_backward([sample(4)], id="1")
        await ours.close()
        await serving

    run(scenario())
