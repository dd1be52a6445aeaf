"""A slot: a policy whose adapter comes and goes while the trainer runs (docs/policies.md#slots).

    empty ── load: a new adapter, or one from a folder ──▶ filled ── load ──▶ filled with another one
      ▲                                                      │
      └───────────────── clear: the link has ended ──────────┘

A slot to train in has an optimizer of its own for each adapter. One to sample from is published. Both score, and so
does a frozen policy beside slots, which has no adapter.

Rules:
- all slots of a trainer share one module and one `Learner`. Every linear layer of the decoder layers has its place for
  adapters from the start, so that nothing which knows the layers must be built again;
- what is wrong with a call is found before anything is changed: a new adapter is in the module beside the old one until
  it is complete. So every WindfallError of a slot means that the slot is as it was;
- an adapter has the same numbers, bit for bit, as in a run with [train.lora] that has the same seed, rank and layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import ValidationError

from windfall import algorithms
from windfall.algorithms.base import Floats
from windfall.algorithms.given import Loss
from windfall.errors import WindfallError
from windfall.link import messages as m
from windfall.recipe.lora import DEFAULT_RANK, Lora
from windfall.recipe.sections import Recipe
from windfall.trainer import checkpoint
from windfall.trainer.model import lora
from windfall.trainer.model.gradients import Gradients
from windfall.trainer.model.logprobs import Learner, PolicyModule
from windfall.trainer.model.lora import Adapters
from windfall.trainer.ranks.ranks import Orders
from windfall.trainer.trained_weights import TrainedWeights
from windfall.trainer.trainer import TorchTrainer, packs
from windfall.training import MAX_TOP, Adam, Report, Sample
from windfall.weights import adapter_folder

NO_FLOATS = np.zeros(0)


class SlotModule:
    """What the slots of a trainer share: the module with the base, and the layers' places for adapters."""

    def __init__(self, model: PolicyModule, recipe: Recipe) -> None:
        places = lora.attach(model.model, Lora(rank=1), base="", seed=0, policy="+places")
        self.active = places.active
        places.remove()
        self.model = model
        # Passes find the sum of a weight by the weight. A slot's own sums would live on in the layers.
        checkpointing = recipe.train.checkpoint_activations
        self.learner = Learner(model, Gradients({}), checkpoint_activations=checkpointing)
        self.numbers = count(1)

    def check(self, samples: Sequence[Sample]) -> None:
        """Refuse what no pass may compute. A wrong index ends a process that uses a GPU."""
        model = self.model.model
        known = len(model.get_input_embeddings().weight)
        answers = len(model.get_output_embeddings().weight)
        context = getattr(model.config, "max_position_embeddings", None)
        for n, sample in enumerate(samples):
            ids, labels = np.asarray(sample.ids, np.int64), sample.labels
            wrong = ids[(ids < 0) | (ids >= known)]
            if len(wrong):
                what = f"token {wrong[0]} is not one of the model's {known}"
            elif labels is not None and len(labels) and labels.max() >= answers:
                what = f"token {int(labels.max())} is not one of the {answers} that the model predicts"
            elif context and len(ids) > context:
                what = f"{len(ids)} tokens are more than the model's context of {context}"
            else:
                continue
            raise WindfallError(what, where=f"sample {n}", fix="Use the tokenizer of the base, or shorten the sample.")


class Slot:
    """`trainer` and `adapters` are None while it is empty."""

    def __init__(
        self,
        name: str,
        kind: Literal["", "train", "sample"],
        module: SlotModule,
        weights: TrainedWeights,
        recipe: Recipe,
        *,
        micro_tokens: int,
        orders: Orders,
    ) -> None:
        """`kind`: "" for a frozen policy. `recipe`: as the policy sees it. `weights`: those of the policy."""
        self.name, self.kind = name, kind
        self._module, self._weights, self._recipe = module, weights, recipe
        self._micro_tokens, self._orders = micro_tokens, orders
        self.trainer: TorchTrainer | None = None

    @property
    def adapters(self) -> Adapters | None:
        return self._weights.adapters

    # the verbs

    def checked(self, order: m.LoadAdapter) -> Callable[[], m.AdapterLoaded]:
        """Check an adapter and the files that it comes from, in any thread. What is returned fills the slot with it."""
        if not self.kind:
            raise self._refused("a frozen policy has no adapter", "Load it into a slot.")
        folder = Path(order.path) if order.path else None
        if order.optimizer:
            self._check_optimizer(folder)
        section = self._section(order, folder)
        return lambda: self._load(order, folder, section)

    def load(self, order: m.LoadAdapter) -> m.AdapterLoaded:
        """Fill the slot with another adapter."""
        return self.checked(order)()

    def _load(self, order: m.LoadAdapter, folder: Path | None, section: Lora) -> m.AdapterLoaded:
        options: dict[str, Any] = {"seed": order.seed, "policy": f"{self.name}+{next(self._module.numbers)}"}
        assert self._weights.base is not None
        adapters = lora.attach(self._module.model.model, section, base=self._weights.base.path, **options)
        try:
            trainer = self._make_trainer(adapters) if self.kind == "train" else None
            if trainer is not None and order.optimizer and folder is not None:
                trainer.restore_optimizer(folder / checkpoint.OPTIMIZER)
        except BaseException:  # raised again: the slot keeps what it has
            adapters.remove()
            raise
        self.clear()
        self.trainer, self._weights.adapters = trainer, adapters
        if trainer is None:
            adapters.freeze()
        config = adapters.config
        parameters = sum(t.numel() for t in adapters.weights().values())
        return m.AdapterLoaded(rank=config.rank, alpha=config.alpha, targets=config.targets, parameters=parameters)

    def clear(self) -> None:
        """Empty the slot."""
        if self.adapters is not None:
            self.adapters.remove()
        self.trainer, self._weights.adapters = None, None

    def save(self, path: Path, *, optimizer: bool) -> Path:
        """Write the adapter into this new folder. Returns its path."""
        adapters = self._filled()
        if optimizer and self.trainer is None:
            raise self._refused("a slot to sample from has no optimizer", "Save it without the state of the optimizer.")
        write = self.trainer.write_optimizer if self.trainer is not None and optimizer else None
        assert self._weights.base is not None
        return checkpoint.save_adapter(
            path, write_model=adapters.save_pretrained, write_optimizer=write, base=self._weights.base
        )

    def copied(self, path: Path) -> Callable[[], Path]:
        """Copy the adapter to host memory. What is returned is `save` of the copy without an optimizer, in any
        thread."""
        assert self._weights.base is not None
        write, base = self._filled().copied(), self._weights.base
        return lambda: checkpoint.save_adapter(path, write_model=write, write_optimizer=None, base=base)

    def forward(self, samples: Sequence[Sample], loss: Loss | None) -> list[Floats]:
        """The log-probs of the targets of each sample."""
        trainer = self._ready(samples, loss)
        return [NO_FLOATS if s.old is None else s.old for s in trainer.forward(samples, loss)]

    def forward_backward(self, samples: Sequence[Sample], loss: Loss | None) -> list[Floats]:
        return self._ready(samples, loss).forward_backward(samples, loss)

    def optim_step(self, adam: Adam | None) -> Report:
        return self._trainable().optim_step(adam)

    def score(self, sequences: Sequence[Sequence[int]], top_k: int) -> tuple[m.ScoredTokens, ...]:
        """What the policy predicts for each token after the first."""
        samples = [_all_targets(ids) for ids in sequences]
        self._module.check(samples)
        if not 0 <= top_k <= min(MAX_TOP, len(self._module.model.model.get_output_embeddings().weight)):
            raise self._refused(f"top_k = {top_k} is not from 0 to {MAX_TOP}", "Ask for fewer tokens.")
        self._module.active.name = self._filled().policy if self.kind else None
        found: dict[int, m.ScoredTokens] = {}
        learner = self._module.learner
        for pack in packs([s for s in samples if s.targets], self._micro_tokens, padded=learner.pads):
            sizes = [len(s.targets) for s in pack]
            columns = [t.split(sizes) for t in learner.top(pack, top_k)]
            for s, logp, ids, values in zip(pack, *columns, strict=True):
                found[id(s)] = m.ScoredTokens(
                    logprobs=_numbers(logp), top_ids=ids.flatten().cpu().numpy().astype(np.uint32),
                    top_logprobs=_numbers(values.flatten()),
                )  # fmt: skip
        nothing = m.ScoredTokens(logprobs=NO_FLOATS, top_ids=np.zeros(0, np.uint32), top_logprobs=NO_FLOATS)
        return tuple(found.get(id(s), nothing) for s in samples)

    def check_publish(self, version: int) -> None:
        """Refuse to publish what has no version."""
        if self.kind != "sample":
            why = "Save its adapter, load that into a slot to sample from, and publish it there."
            raise self._refused("it is not published: it is no slot to sample from", why)
        self._filled()
        if version < 1:
            raise self._refused(f"{version} is not a version of a slot", "Count the versions of a slot from 1.")

    # checks

    def _section(self, order: m.LoadAdapter, folder: Path | None) -> Lora:
        """What to attach. Refuses what is above the limit, and a folder that is damaged or of another base."""
        own, asked = self._recipe.train.lora, order.rank
        limit = (own and own.rank) or DEFAULT_RANK
        if folder is not None:
            asked = adapter_folder.read_config(folder).rank
            if (folder / adapter_folder.STATE).exists():
                checkpoint.check(folder, optimizer=order.optimizer)
            assert self._weights.base is not None
            adapter_folder.check_base(folder, self._weights.base)
        if asked > limit:
            fix = f"Use a rank of at most {limit}, or raise policies.{self.name}.lora.rank and start again."
            raise self._refused(f"the adapter has rank {asked}, and the limit is {limit}", fix)
        given: dict[str, Any] = {"rank": order.rank, "alpha": order.alpha, "targets": list(order.targets)}
        fields = {key: value for key, value in given.items() if value or (key == "rank" and folder is None)}
        try:
            return Lora(path=folder, **fields)
        except ValidationError as e:
            error = e.errors()[0]
            what = f"{'.'.join(map(str, error['loc']))}: {error['msg']}"
            raise self._refused(what, "Give a rank, an alpha above 0, and names of layers.") from e

    def _check_optimizer(self, folder: Path | None) -> None:
        if self.kind != "train":
            raise self._refused("a slot to sample from has no optimizer", "Load without the state of the optimizer.")
        if folder is None or not (folder / checkpoint.OPTIMIZER).is_file():
            what = f"there is no state of an optimizer in {folder}" if folder else "a new adapter has no such state"
            raise self._refused(what, "Load without the state of the optimizer.")

    def _make_trainer(self, adapters: Adapters) -> TorchTrainer:
        view = self._recipe
        return TorchTrainer(
            self._module.model,
            algorithms.make(view.algorithm.name, **view.algorithm.options),
            view,
            micro_tokens=self._micro_tokens,
            orders=Orders(self._orders.ranks),
            adapters=adapters,
            learner=self._module.learner,
        )

    def _ready(self, samples: Sequence[Sample], loss: Loss | None) -> TorchTrainer:
        trainer = self._trainable()
        if loss is None:
            raise self._refused("a slot has no algorithm", "Give a loss with the samples.")
        self._module.check(samples)
        return trainer

    def _trainable(self) -> TorchTrainer:
        if self.kind != "train":
            raise self._refused("nothing is trained in it", "Use a slot to train in.")
        self._filled()
        assert self.trainer is not None
        return self.trainer

    def _filled(self) -> Adapters:
        if self.adapters is None:
            raise self._refused("the slot is empty", "Load an adapter into it.")
        return self.adapters

    def _refused(self, what: str, fix: str) -> WindfallError:
        return WindfallError(what, where=f"policy {self.name!r}", fix=fix)


def _all_targets(ids: Sequence[int]) -> Sample:
    targets = tuple(range(1, len(ids)))
    return Sample(ids=tuple(ids), targets=targets, behavior=NO_FLOATS, advantage=0.0, limit=len(ids))


def _numbers(t: torch.Tensor) -> Floats:
    return t.double().cpu().numpy()
