"""A model as training sees it: samples in, log-probs out, gradients back.

There are two ways through the model's body: transformers' own module with autograd (`Autograd`: every decoder, any
device), and windfall's (`Blocks`, in blocks.py: dense Llama-family decoders in half precision on a GPU). Which one is
found out at the start: `Blocks` is taken where it knows the module and gives the same hidden states and gradients.
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
from windfall.train.head import Head, Weigh, own_head
from windfall.train.llama import Blocks, PackedRows, Unfit
from windfall.train.sample import Sample

KEEP = {True: LEAST, False: ALL, "auto": "auto"}
"""A recipe's train.checkpoint_activations, as what the layers keep."""


class Autograd:
    """The module itself, as it is in rollout: no module is in training mode, where it might drop out or draw numbers,
    but those that keep or recompute activations, which ask whether they are."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._recomputing = [x for x in model.modules() if hasattr(x, "gradient_checkpointing")]

    def _learning(self, yes: bool) -> None:
        for module in self._recomputing:
            module.training = yes and module.gradient_checkpointing

    def forward(self, rows: PackedRows, *, learning: bool) -> tuple[Tensor, Any]:
        self._learning(learning)
        with torch.set_grad_enabled(learning):
            hidden = self.model.base_model(
                input_ids=rows.ids[None], position_ids=rows.positions[None], use_cache=False, batch=rows.batch
            ).last_hidden_state[0]
            hidden = hidden.index_select(0, rows.wanted)
        return hidden.detach(), hidden

    def backward(self, tape: Any, grad: Tensor) -> None:
        tape.backward(grad)
        self._learning(False)

    def forget(self, tape: Any) -> None:
        """In place of `backward`, where every gradient is zero."""
        del tape
        self.model.eval()


class Learner:
    def __init__(
        self, model: Any, gradients: Gradients | None = None, *, checkpoint_activations: bool | str = "auto",
        say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
    ) -> None:  # fmt: skip
        self.model = model
        self.head = Head(model.get_output_embeddings(), gradients, own=own_head(model))
        self.body: Any = Autograd(model)
        self.pads = Packed.pads(model.device, model.dtype)
        """Whether a pack costs its rows times its longest row, and not its tokens."""
        if not self.pads:
            try:
                blocks = Blocks.of(model, gradients, keep=KEEP[checkpoint_activations])
                compare(blocks, self.body)
                self.body = blocks
            except Unfit as e:
                say(f"training runs transformers' own layers: {e}")
            except Exception as e:  # fault boundary: what fails here would in every step; there is another way
                say(f"training runs transformers' own layers: {type(e).__name__}: {e}")

    @property
    def has_graph(self) -> bool:
        """Autograd keeps what its backward pass needs, unless the module is told to compute it again."""
        return isinstance(self.body, Autograd)

    def score(self, samples: Sequence[Sample], temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of all targets, sample after sample, in float32."""
        rows, targets = lay(samples, self.model.device)
        hidden, _ = self.body.forward(rows, learning=False)
        numbers = self.head.score(hidden, targets, temperature)
        return numbers[0], numbers[1]

    def learn(self, samples: Sequence[Sample], temperature: float, weigh: Weigh) -> None:
        """Adds to the gradients that of minus the sum of weight * log-prob."""
        rows, targets = lay(samples, self.model.device)
        hidden, tape = self.body.forward(rows, learning=True)
        sizes = [len(s.targets) for s in samples]
        back = self.head.learn(hidden, targets, sizes, temperature, weigh)
        if back is None:
            self.body.forget(tape)
        else:
            self.body.backward(tape, back)


def lay(samples: Sequence[Sample], device: torch.device) -> tuple[PackedRows, Tensor]:
    """Samples laid end to end, and the tokens that their rows are to predict. One copy to the device."""
    lengths = [len(s.ids) for s in samples]
    starts = [0, *accumulate(lengths)]
    total, wanted = starts[-1], sum(len(s.targets) for s in samples)
    every = np.empty(2 * total + wanted, np.int64)
    every[:total] = np.fromiter(chain.from_iterable(s.ids for s in samples), np.int64, total)
    every[total : 2 * total] = np.arange(total) - np.repeat(starts[:-1], lengths)
    every[2 * total :] = np.fromiter(chain.from_iterable(s.targets for s in samples), np.int64, wanted)
    every[2 * total :] += np.repeat(starts[:-1], [len(s.targets) for s in samples]) - 1
    there = torch.from_numpy(every)
    if device.type == "cuda":
        there = there.pin_memory().to(device, non_blocking=True)
    ids, positions, rows = there.split((total, total, wanted))
    return PackedRows(ids=ids, positions=positions, wanted=rows, batch=Packed.of(lengths, device)), ids[rows + 1]


def compare(blocks: Blocks, module: Autograd) -> None:
    """Take both ways with two short sequences, forward and, if there are gradients to add to, backward."""
    model, gradients = module.model, blocks.gradients
    size = model.config.vocab_size
    ids = [tuple((7 * i + 3) % size for i in range(n)) for n in (40, 25)]
    made = [Sample(ids=x, targets=tuple(range(1, len(x))), behaviour=np.zeros(0), advantage=0, limit=0) for x in ids]
    rows, _ = lay(made, model.device)
    theirs, graph = module.forward(rows, learning=gradients is not None)
    ours, tape = blocks.forward(rows, learning=gradients is not None)
    _alike("hidden states", ours, theirs)
    if gradients is None:
        return
    push = torch.randn(ours.shape, generator=torch.Generator().manual_seed(0)).to(ours)
    some = [w for layer in (blocks.layers[0], blocks.layers[-1]) for w in (*layer.gate_up.parts, layer.down, layer.out)]
    found = []
    for body, kept in ((blocks, tape), (module, graph)):
        gradients.zero()
        body.backward(kept, push)
        found.append(torch.cat([g.flatten() for g in map(gradients.of, some) if g is not None]))
    gradients.zero()
    _alike("gradients", *found)


def _alike(what: str, ours: Tensor, theirs: Tensor) -> None:
    apart = float((ours.float() - theirs.float()).norm() / theirs.float().norm().clamp(min=1e-20))
    if not apart < 0.1:  # bfloat16 rounds by percents; what is computed otherwise is off by the size of the values
        raise Unfit(f"{what} differ by {apart:.2g}")
