"""The loop of supervised fine-tuning, over the verbs (verbs.py). It runs in the controller's process.

    for every step    forward_backward    a batch of rows, cross entropy: the mean over the targets of the batch
                      optim_step          with the settings of [train]
                      publish, save       when a checkpoint is due
                      forward             on the rows for evaluation, when that is due

The state is the step and the weights: rows follow from the step. If the trainer is lost, the loop continues from the
step of the next one, which is that of the last checkpoint, and repeats the same batches.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from windfall.algorithms.given import Loss
from windfall.controller.assembly import ControllerLife
from windfall.controller.generation import make_admission, now_s
from windfall.controller.loop import WHY_SKIPPED
from windfall.controller.rollout.stream import Stopped
from windfall.models.text import Text
from windfall.recipe.sections import Recipe
from windfall.sft import files, rows
from windfall.sft.rows import Example
from windfall.training import CheckpointState, TrainerLost

CROSS_ENTROPY = Loss(name="cross_entropy")


class SupervisedLoop:
    def __init__(self, recipe: Recipe, folder: Path) -> None:
        self.recipe, self.section = recipe, recipe.sft
        self._folder = folder
        self._data: list[Example] = []
        self._held_out: list[Example] = []

    async def run(self, life: ControllerLife, text: Callable[[str], Text]) -> CheckpointState:
        """Make all steps that are left. Returns the state that was reached and saved."""
        self._life, self._policy, self._trainer, self._events = life, life.lead, life.lead.trainer, life.events
        state = self._policy.state
        try:
            while True:
                try:
                    await self._policy.connected()
                    if not self._data:
                        await self._read(text(""))
                    state = await self._policy.restore(make_admission(self.recipe))
                    return await self._train(state)
                except TrainerLost as e:
                    self._events.instant("trainer_lost", step=self._policy.state.step, why=str(e))
        except Stopped:
            self._events.instant("stopped", step=self._policy.state.step)
            return self._policy.state

    def snapshot(self) -> dict[str, Any]:
        return {}

    async def _read(self, text: Text) -> None:
        files.check_unchanged(self.recipe, self._folder)
        hello = self._policy.hello
        context = json.loads(hello.engine.model_config).get("max_position_embeddings")
        limit = min(filter(None, (self.section.max_tokens, context)), default=None)
        # Tokenizing a large data set takes minutes, in which links must be answered.
        self._data, self._held_out = await asyncio.to_thread(self._tokenize, text, limit)
        if not self._life.resumed:
            self._events.instant(
                "sft_start",
                model=self.recipe.model.path,
                file=files.paths(self.recipe)[0].name,
                rows=len(self._data),
                held_out=len(self._held_out),
                tokens=sum(len(e.ids) for e in self._data),
                targets=sum(len(e.targets) for e in self._data),
                steps=self.recipe.run.steps,
                **hello.facts,
            )

    def _tokenize(self, text: Text, limit: int | None) -> tuple[list[Example], list[Example]]:
        (path, train), (held_out_path, held_out) = files.read(self.recipe)
        return rows.tokenize(train, text, limit, path), rows.tokenize(held_out, text, limit, held_out_path)

    async def _train(self, state: CheckpointState) -> CheckpointState:
        steps, saved = self.recipe.run.steps, state
        if state.step in (0, steps):  # after the last step: it may have been lost
            await self._evaluate(state.step)
        while state.step < steps and not self._life.stop.is_set():
            state = self._policy.state = await self._step(state.step + 1)
            if state.step == steps or state.step % self.recipe.checkpoint.every == 0:
                saved = await self._save(state)
            every = self.section.eval_every
            if state.step == steps or (every and state.step % every == 0):
                await self._evaluate(state.step)
        if saved != state:
            await self._save(state)
        if state.step < steps:
            self._events.instant("stopped", step=state.step)
        return state

    async def _step(self, step: int) -> CheckpointState:
        began = now_s()
        chosen = rows.batch(step, len(self._data), self.section.batch, self.recipe.run.seed)
        examples = [self._data[n] for n in chosen]
        targets = sum(len(e.targets) for e in examples)
        samples = [e.sample(1 / targets) for e in examples]
        gradient = await self._trainer.forward_backward(samples, CROSS_ENTROPY, id=f"{step}/forward_backward")
        state = CheckpointState(step=step, next_task=0)
        report = await self._trainer.optim_step(state, id=f"{step}/optim_step")
        if report.skipped:
            why = WHY_SKIPPED[report.skipped]
            self._events.instant("update_skipped", step=step, why=why, updates=1, of=1)
        took_s, tokens = now_s() - began, sum(len(e.ids) for e in examples)
        self._events.scalar(
            "sft",
            step=step,
            steps=self.recipe.run.steps,
            loss=gradient.loss,
            targets=targets,
            tokens=tokens,
            rows=len(examples),
            grad_norm=report.grad_norm,
            lr=report.lr,
            entropy=report.entropy,
            s=took_s,
            tok_per_s=tokens / max(took_s, 1e-9),
            peak_bytes=report.peak_bytes,
        )
        return state

    async def _save(self, state: CheckpointState) -> CheckpointState:
        """Publish the weights, and write a checkpoint of them."""
        await self._policy.offer(await self._trainer.publish(id=f"{state.step}/publish"))
        with self._events.span("checkpoint", step=state.step) as span:
            span["path"] = await self._trainer.save(id=f"{state.step}/save")
        self._policy.saved(state)
        return state

    async def _evaluate(self, step: int) -> None:
        """Log the mean loss of a target of the held-out rows."""
        if not self._held_out:
            return
        began, total, size = now_s(), 0.0, self.section.batch
        for start in range(0, len(self._held_out), size):
            samples = [e.sample(1.0) for e in self._held_out[start : start + size]]
            scored = await self._trainer.forward(samples, CROSS_ENTROPY, id=f"{step}/eval/{start}")
            total -= sum(float(s.old.sum()) for s in scored if s.old is not None)
        targets = sum(len(e.targets) for e in self._held_out)
        self._events.scalar("sft_eval", step=step, loss=total / targets, targets=targets, s=now_s() - began)
