"""Slots between controller, trainer and worker: two slots to sample from give different responses in one engine, those
of their adapters; a lost link empties a slot and nothing else."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.runs.slot_run import SlotRun, slot_run
from tests.trainer.test_slots import ADAM, CROSS_ENTROPY, PPO, draw
from windfall.trainer import checkpoint
from windfall.trainer.trainer import TorchTrainer
from windfall.training import AdapterSpec, TrainerLost, VerbRefused

RECIPE = """
[run]
name = "slots"
threads = 1
deterministic = true
[model]
path = "tiny"
[rollout]
groups = 2
group_size = 2
max_tokens = 64
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
PROMPTS = [[5, 9, 11, 4], [20, 21, 22], [7] * 6]
FEW = AdapterSpec(rank=3, alpha=30.0, seed=1, targets=("q_proj", "mlp", "lm_head", "embed_tokens"))
MANY = AdapterSpec(rank=8, alpha=40.0, seed=2)


async def train(run: SlotRun, name: str, steps: range) -> list[Any]:
    """Returns log-probs and norms."""
    trainer, out = run.trainer(name), []
    for step in steps:
        gradients = [await trainer.forward_backward(draw(9 * step + n), loss, id=f"{step}/{n}")
                     for n, loss in enumerate((CROSS_ENTROPY, PPO))]  # fmt: skip
        out += [logp.tobytes() for gradient in gradients for logp in gradient.logprobs]
        out.append((await trainer.optim_step(adam=ADAM, id=f"{step}")).grad_norm)
    return out


async def check_sampled(run: SlotRun, name: str) -> list[tuple[int, ...]]:
    """Responses of a policy are those that the trainer's pass over them says: each token was the most likely one, with
    this log-prob."""
    responses = await run.sample(name, PROMPTS, 5)
    scores = await run.trainer(name).score([r.prompt + r.tokens for r in responses], 1, id="")
    for response, found in zip(responses, scores, strict=True):
        at = slice(len(response.prompt) - 1, None)
        np.testing.assert_array_equal(found.top_ids[at, 0], response.tokens)
        np.testing.assert_allclose(found.logprobs[at], response.logprobs, rtol=1e-4, atol=1e-4)
    return [r.tokens for r in responses]


@pytest.mark.timeout(240)
def test_slots_are_trained_published_and_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with slot_run(tmp_path, RECIPE) as run:
            assert run.policy("base").hello.engine.adapters == 3, "workers do not hold slots to train in"
            for name, spec in (("t0", FEW), ("t1", MANY)):
                loaded = await run.trainer(name).load_adapter(spec, id="")
                assert (loaded.spec.rank, loaded.spec.alpha, loaded.spec.seed) == (spec.rank, spec.alpha, spec.seed)
                await train(run, name, range(2))
                await run.trainer(name).save_adapter(str(tmp_path / name), optimizer=True, id="")
            for slot, source in (("s0", "t0"), ("s1", "t1")):
                await run.trainer(slot).load_adapter(path=str(tmp_path / source), id="")
                await run.offer(slot, 1)
            found = {name: await check_sampled(run, name) for name in ("s0", "s1", "base")}
            assert len({str(tokens) for tokens in found.values()}) == 3
            # The same slot with an adapter of another rank and other layers, and the reverse.
            await run.trainer("s0").load_adapter(path=str(tmp_path / "t1"), id="")
            await run.trainer("s1").load_adapter(path=str(tmp_path / "t0"), id="")
            for slot in ("s0", "s1"):
                await run.offer(slot, 2)
            assert await check_sampled(run, "s0") == found["s1"]
            assert await check_sampled(run, "s1") == found["s0"]
            await check_a_save_holds_up_no_other_slot(run, tmp_path, monkeypatch)
            await check_lost_links(run, tmp_path)

    asyncio.run(asyncio.wait_for(main(), 220))


async def check_a_save_holds_up_no_other_slot(run: SlotRun, folder: Path, patch: pytest.MonkeyPatch) -> None:
    written, save = threading.Event(), checkpoint.save_adapter

    def save_later(*args: Any, **options: Any) -> Path:
        assert written.wait(60)
        return save(*args, **options)

    with patch.context() as patched:
        patched.setattr(checkpoint, "save_adapter", save_later)
        saving = asyncio.create_task(run.trainer("t0").save_adapter(str(folder / "beside"), id=""))
        await asyncio.sleep(0)
        await run.trainer("t1").forward(draw(3), PPO, id="")
        assert not saving.done()
        written.set()
        await saving


async def check_lost_links(run: SlotRun, folder: Path) -> None:
    t0, t1, s0 = (run.trainer(name) for name in ("t0", "t1", "s0"))
    digest = run.policy("s0").hello.digest
    ahead = await train(run, "t0", range(2, 4))
    await t1.forward_backward(draw(50), CROSS_ENTROPY, id="")
    await t0.forward_backward(draw(51), CROSS_ENTROPY, id="")
    await run.cut("t0")
    for call in (
        t0.optim_step(adam=ADAM, id=""),
        t0.forward_backward(draw(1), PPO, id=""),
        t0.publish(id="", version=9),
    ):
        with pytest.raises(VerbRefused, match=r"the slot is empty|no slot to sample from"):
            await call
    with pytest.raises(VerbRefused, match="no layer named 'nothing'"):
        await t0.load_adapter(AdapterSpec(rank=2, alpha=1.0, targets=("nothing",)), id="")
    await t0.load_adapter(path=str(folder / "t0"), optimizer=True, id="")
    assert await train(run, "t0", range(2, 4)) == ahead, "bit for bit"
    assert (await t1.optim_step(adam=ADAM, id="")).tokens == sum(len(s.targets) for s in draw(50)), (
        "it kept its gradient"
    )

    before = await run.sample("s0", PROMPTS, 5)
    await run.cut("s0")
    assert [r.tokens for r in await run.sample("s0", PROMPTS, 5)] == [r.tokens for r in before], "workers have it"
    with pytest.raises(VerbRefused, match="the slot is empty"):
        await s0.publish(id="", version=3)
    await s0.load_adapter(path=str(folder / "t0"), id="")
    with pytest.raises(VerbRefused, match="0 is not a version"):
        await s0.publish(id="")
    with pytest.raises(VerbRefused, match="version 2 is not newer than 2"):
        await s0.publish(id="", version=2)
    await run.offer("s0", 3)
    await check_sampled(run, "s0")
    assert digest != run.policy("s0").hello.digest
    await check_memory(run, folder)
    canceled = asyncio.create_task(t1.score([[5] * 40], 3, id=""))
    await asyncio.sleep(0)
    canceled.cancel()
    both = await asyncio.gather(t1.score([[5, 6, 7]], 2, id=""), t1.optim_step(adam=ADAM, id=""))
    assert both[0][0].top_ids.shape == (2, 2)
    assert both[1].skipped == "nothing"
    await run.links["t1"].close("the last one")
    with pytest.raises(TrainerLost):
        await t1.score([[5, 6, 7]], id="")


async def check_memory(run: SlotRun, folder: Path) -> None:
    """A call for which the memory of a GPU does not suffice empties the slot, and only that one."""
    t0, t1 = run.trainer("t0"), run.trainer("t1")

    def too_large(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8 GiB.")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchTrainer, "_forward_backward_given", too_large)
        with pytest.raises(VerbRefused, match="the slot is empty now: CUDA out of memory"):
            await t0.forward_backward(draw(1), PPO, id="")
    with pytest.raises(VerbRefused, match="the slot is empty"):
        await t0.forward_backward(draw(1), PPO, id="")
    await t1.forward_backward(draw(1), PPO, id="")
    await t1.optim_step(adam=ADAM, id="")
    await t0.load_adapter(path=str(folder / "t0"), id="")
