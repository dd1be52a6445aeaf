"""The training side of a model: samples in, log-probs out, gradients accumulated.

There are two implementations of the model's body: the module of transformers with autograd (`Autograd`: every decoder,
any device), and windfall's own (`LlamaBody` in llama.py: dense decoders of the Llama family in half precision on a
GPU). The choice is made at the start: `LlamaBody` is used if it supports the module and gives the same hidden states
and gradients.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from windfall.engine.torch.packed import Packed
from windfall.train.activation_memory import ALL, LEAST
from windfall.train.gradients import Gradients
from windfall.train.head import Head, WeightsFn, custom_head
from windfall.train.llama import LlamaBody, PackedRows, UnsupportedModel
from windfall.train.sample import Sample

KEEP = {True: LEAST, False: ALL, "auto": "auto"}
"""From a recipe's train.checkpoint_activations to what the layers keep."""


class Autograd:
    """The module itself, as in rollout: no submodule is in training mode, which might enable dropout, except those that
    recompute activations, because they do so only in training mode."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._recomputing = [x for x in model.modules() if hasattr(x, "gradient_checkpointing")]

    def _set_training(self, training: bool) -> None:
        for module in self._recomputing:
            module.training = training and module.gradient_checkpointing

    def forward(self, rows: PackedRows, *, learning: bool) -> tuple[Tensor, Any]:
        self._set_training(learning)
        with torch.set_grad_enabled(learning):
            hidden = self.model.base_model(
                input_ids=rows.ids[None], position_ids=rows.positions[None], use_cache=False, batch=rows.batch
            ).last_hidden_state[0]
            hidden = hidden.index_select(0, rows.wanted)
        return hidden.detach(), hidden

    def backward(self, tape: Any, grad: Tensor) -> None:
        tape.backward(grad)
        self._set_training(False)

    def discard(self, tape: Any) -> None:
        """Replaces `backward` if every gradient is zero."""
        del tape
        self.model.eval()


class Learner:
    def __init__(
        self, model: Any, gradients: Gradients | None = None, *, checkpoint_activations: bool | str = "auto",
        say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
    ) -> None:  # fmt: skip
        self.model = model
        self.head = Head(model.get_output_embeddings(), gradients, custom=custom_head(model))
        self.body: Any = Autograd(model)
        self.pads = Packed.pads(model.device, model.dtype)
        """Whether the rows of a pack are padded, so that it costs its rows times its longest row."""
        if not self.pads:
            try:
                llama = LlamaBody.of(model, gradients, keep=KEEP[checkpoint_activations])
                compare(llama, self.body)
                self.body = llama
            except UnsupportedModel as e:
                say(f"training uses the layers of transformers: {e}")
            except Exception as e:  # fault boundary: this would fail in every step; Autograd is the fallback
                say(f"training uses the layers of transformers: {type(e).__name__}: {e}")

    @property
    def has_graph(self) -> bool:
        """Whether autograd keeps the activations, unless gradient checkpointing recomputes them."""
        return isinstance(self.body, Autograd)

    def score(self, samples: Sequence[Sample], temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of all targets, sample after sample, in float32."""
        rows, targets = pack_rows(samples, self.model.device)
        hidden, _ = self.body.forward(rows, learning=False)
        numbers = self.head.score(hidden, targets, temperature)
        return numbers[0], numbers[1]

    def learn(self, samples: Sequence[Sample], temperature: float, weights_fn: WeightsFn) -> None:
        """Add the gradient of the negative sum of weight * log-prob."""
        rows, targets = pack_rows(samples, self.model.device)
        hidden, tape = self.body.forward(rows, learning=True)
        sizes = [len(s.targets) for s in samples]
        back = self.head.learn(hidden, targets, sizes, temperature, weights_fn)
        if back is None:
            self.body.discard(tape)
        else:
            self.body.backward(tape, back)


def pack_rows(samples: Sequence[Sample], device: torch.device) -> tuple[PackedRows, Tensor]:
    """Samples concatenated on the device, and the tokens that their rows predict. Makes one copy to the device."""
    lengths = [len(s.ids) for s in samples]
    starts = [0, *accumulate(lengths)]
    total, wanted = starts[-1], sum(len(s.targets) for s in samples)
    packed = np.empty(2 * total + wanted, np.int64)
    packed[:total] = np.fromiter(chain.from_iterable(s.ids for s in samples), np.int64, total)
    packed[total : 2 * total] = np.arange(total) - np.repeat(starts[:-1], lengths)
    packed[2 * total :] = np.fromiter(chain.from_iterable(s.targets for s in samples), np.int64, wanted)
    packed[2 * total :] += np.repeat(starts[:-1], [len(s.targets) for s in samples]) - 1
    on_device = torch.from_numpy(packed)
    if device.type == "cuda":
        on_device = on_device.pin_memory().to(device, non_blocking=True)
    ids, positions, rows = on_device.split((total, total, wanted))
    return PackedRows(ids=ids, positions=positions, wanted=rows, batch=Packed.of(lengths, device)), ids[rows + 1]


def compare(llama: LlamaBody, module: Autograd) -> None:
    """Compare both bodies on two short sequences, with gradients if there are any. UnsupportedModel if they differ."""
    model, gradients = module.model, llama.gradients
    size = model.config.vocab_size
    ids = [tuple((7 * i + 3) % size for i in range(n)) for n in (40, 25)]
    samples = [Sample(ids=x, targets=tuple(range(1, len(x))), behavior=np.zeros(0), advantage=0, limit=0) for x in ids]
    rows, _ = pack_rows(samples, model.device)
    theirs, graph = module.forward(rows, learning=gradients is not None)
    ours, tape = llama.forward(rows, learning=gradients is not None)
    _check_close("hidden states", ours, theirs)
    if gradients is None:
        return
    grad = torch.randn(ours.shape, generator=torch.Generator().manual_seed(0)).to(ours)
    weights = [
        w for layer in (llama.layers[0], llama.layers[-1]) for w in (*layer.gate_up.parts, layer.down, layer.out)
    ]
    found = []
    for body, kept in ((llama, tape), (module, graph)):
        gradients.zero()
        body.backward(kept, grad)
        found.append(torch.cat([g.flatten() for g in map(gradients.of, weights) if g is not None]))
    gradients.zero()
    _check_close("gradients", *found)


def _check_close(what: str, ours: Tensor, theirs: Tensor) -> None:
    difference = float((ours.float() - theirs.float()).norm() / theirs.float().norm().clamp(min=1e-20))
    if not difference < 0.1:  # bfloat16 rounds by percents; a different computation is off by the size of the values
        raise UnsupportedModel(f"{what} differ by {difference:.2g}")
