"""The device's side of the engine: the pool, the state, and launches that the host does not wait for.

A launch sends what changed in the words, runs a prefill and a burst of steps, and copies the tokens into memory that
the host can read; an event says when they are there. Tokens go into a ring: row 0 of a launch has those of the prefill,
row n those of step n, as (tokens, bits of the log-probs).

Rules:
- everything runs on the stream that is current when it is asked for, so launches never overlap, and neither do they and
  what else the process does on that stream (a trainer that shares the module);
- at most `DEPTH` launches are in flight: ring and host memory have room for one more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from windfall.engine.cuda.decoder import Decoder
from windfall.engine.cuda.graphs import GraphKey, Graphs, batch_for
from windfall.engine.cuda.host_state import Words
from windfall.engine.cuda.plan import Launch, PrefillPart
from windfall.engine.cuda.state import STOPS, DeviceState, Families, Pool, Spans

DEPTH = 2
FAMILIES = ("family_first", "family_count", "family_tokens", "shared")
ALIGN = 32
"""Arrays of one upload begin at multiples of so many words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Flight:
    """A launch whose tokens have not been handed out."""

    work: Launch
    version: int
    drawn: Tensor
    """(1 + steps, 2, batch) int32 in host memory; not to be read before `landed`."""
    event: Any

    def landed(self) -> tuple[np.ndarray, np.ndarray]:
        """Waits. Tokens and log-probs, (1 + steps, batch) each."""
        if self.event is not None:
            self.event.synchronize()
        both = self.drawn.numpy()
        return both[:, 0], both[:, 1].view(np.float32)


class Device:
    def __init__(self, decoder: Decoder, words: Words, *, pages: int, page_size: int, burst: int) -> None:
        self.decoder, self.words, self.burst = decoder, words, burst
        self.device = decoder.device
        self.pool = Pool(
            layers=len(decoder.layers), pages=pages, page_size=page_size, kv_heads=decoder.kv_heads, head=decoder.head,
            dtype=decoder.dtype, device=str(self.device),
        )  # fmt: skip
        decoder.reach(words.pages_each * page_size + 2)  # a response that has ended stands one token behind its end
        self.image = torch.from_numpy(words.data.copy()).to(self.device)
        self.state, self._rows, self._turn = views(self.image, words)
        self._nobody = torch.full_like(self._rows, words.slots)
        self._families = [section(self.image, words, n) for n in FAMILIES]
        self._no_family = torch.zeros_like(self._rows)
        batch, turns = len(self._rows), DEPTH + 1
        self._drawn = torch.zeros(2, batch, dtype=torch.int32, device=self.device)
        self._ring = torch.zeros(turns * (1 + burst), 2, batch, dtype=torch.int32, device=self.device)
        self._pinned = self.device.type == "cuda"
        self._landing = torch.zeros(self._ring.shape, dtype=torch.int32, pin_memory=self._pinned)
        self._uploads = [torch.zeros(0, dtype=torch.int32)] * turns
        self._launches = 0
        self._graphs = Graphs(self._step, self.device)
        self._processors = torch.cuda.get_device_properties(self.device).multi_processor_count if self._pinned else 1

    @torch.inference_mode()
    def launch(self, work: Launch, version: int) -> Flight:
        turn = self._launches % (DEPTH + 1)
        self._launches += 1
        row = turn * (1 + self.burst)
        kind = self.kind(work)
        if work.steps:
            self.words.rows(work.slots, kind.batch)
            if kind.families:
                self.words.families(work.families, kind.batch, kind.families)
            self.words.turn(row + 1)
        places, values, *prefill = self._send(turn, [*self.words.take(), *flat(work.parts)])
        self.image.index_copy_(0, places.long(), values)
        if work.parts:
            self._prefill(work.parts, prefill, self._ring[row])
        if work.steps:
            self._graphs.run(kind, work.steps)
        landing = self._landing[row : row + 1 + work.steps]
        landing.copy_(self._ring[row : row + 1 + work.steps], non_blocking=True)
        event = None
        if self._pinned:
            event = torch.cuda.Event(blocking=True)
            event.record()
        return Flight(work=work, version=version, drawn=landing, event=event)

    def kind(self, work: Launch) -> GraphKey:
        cut = any(cuts(s.request.sampling) for s in work.rows)
        shared = int(work.families[:, 2].max(initial=0))
        return self._kind(batch_for(len(work.rows)), work.longest, cut, len(work.families), shared)

    def _kind(self, batch: int, longest: int, cut: bool, families: int = 0, shared: int = 0) -> GraphKey:
        families = _rounded(families) if families else 0
        return GraphKey(
            batch, cut, self._cuts(batch, longest), families, self._cuts(families, shared) if families else 1
        )

    def _cuts(self, count: int, longest: int) -> int:
        """Into how many parts the contexts of so many rows, or families, are cut."""
        return self.decoder.ops.splits_for(count, self.decoder.kv_heads, _rounded(longest), self._processors)

    @torch.inference_mode()
    def warm(self, batches: Sequence[int], longest: int) -> None:
        """Have the kernels and these sizes of step before they are needed. Nothing changes: all rows are nobody's."""
        for batch in batches:
            self._graphs.prepare(self._kind(batch, longest, False))
            fit = self.decoder.sharing().rows
            if self._pinned and batch >= fit > 1:  # the kernels only: graphs when they are needed
                self._step(self._kind(batch, longest, False, batch // fit, longest // 2), True)
        count = min(64, self.words.pages_each * self.pool.page_size)
        rows = [np.arange(count), np.full(count, self.words.slots), np.arange(count)]
        arrays = [*rows, *([n] for n in (self.words.slots, 0, count, 0, count - 1, self.words.slots))]
        at = [torch.tensor(np.asarray(a, np.int32), device=self.device) for a in arrays]
        spans = Spans(
            slot=at[3], first=at[4], count=at[5], start=at[6], row_slot=at[1], row_position=at[2], longest=count
        )
        logits = self.decoder.prefill(at[0], spans, self.state, self.pool, at[7])
        tokens, bits = self._drawn[0, :1], self._drawn[1, :1]
        self.decoder.ops.draw(logits, at[8], self.state, tokens, bits.view(torch.float32), False)

    def renew(self, decoder: Decoder) -> None:
        """The module's weights are elsewhere now."""
        self._graphs.drop()
        self.decoder = decoder
        decoder.reach(self.words.pages_each * self.pool.page_size + 2)

    def _step(self, kind: GraphKey, dry: bool) -> None:
        rows = (self._nobody if dry else self._rows)[: kind.batch]
        logits = self.decoder.decode(rows, self.state, self.pool, kind.splits, self._families_of(kind, dry))
        tokens, bits = self._drawn[0, : kind.batch], self._drawn[1, : kind.batch]
        self.decoder.ops.draw(logits, rows, self.state, tokens, bits.view(torch.float32), kind.cut)
        if not dry:
            self._ring.index_copy_(0, self._turn, self._drawn[None])
            self._turn.add_(1)

    def _families_of(self, kind: GraphKey, dry: bool) -> Families | None:
        if not kind.families:
            return None
        first, count, tokens, shared = [self._no_family] * 4 if dry else self._families
        n = kind.families
        return Families(
            first=first[:n], count=count[:n], tokens=tokens[:n], shared=shared[: kind.batch], parts=kind.shares
        )

    def _prefill(self, parts: list[PrefillPart], arrays: list[Tensor], out: Tensor) -> None:
        ids, row_slot, row_position, slot, first, count, start, wanted, slots = arrays
        spans = Spans(
            slot=slot, first=first, count=count, start=start, row_slot=row_slot, row_position=row_position,
            longest=max(p.stop - p.start for p in parts),
        )  # fmt: skip
        logits = self.decoder.prefill(ids, spans, self.state, self.pool, wanted)
        if len(slots):
            tokens, bits = out[0, : len(slots)], out[1, : len(slots)]
            cut = any(cuts(p.sequence.request.sampling) for p in parts if p.samples)
            self.decoder.ops.draw(logits, slots, self.state, tokens, bits.view(torch.float32), cut)

    def _send(self, turn: int, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        """All of them in one copy, from memory that no launch in flight is read from."""
        starts = np.cumsum([0, *(-(-len(a) // ALIGN) * ALIGN for a in arrays)]).tolist()
        if len(self._uploads[turn]) < starts[-1]:
            self._uploads[turn] = torch.zeros(2 * starts[-1], dtype=torch.int32, pin_memory=self._pinned)
        sent = self._uploads[turn][: starts[-1]]
        words = sent.numpy()
        for a, at in zip(arrays, starts, strict=False):
            words[at : at + len(a)] = a
        there = sent.to(self.device, non_blocking=True)
        return [there[at : at + len(a)] for a, at in zip(arrays, starts, strict=False)]


def cuts(how: Any) -> bool:
    return how.top_k > 0 or how.top_p < 1


def _rounded(n: int) -> int:
    """Up to a power of two: few kinds, whatever the figures."""
    return 1 << max(0, n - 1).bit_length()


def section(image: Tensor, words: Words, name: str, dtype: torch.dtype = torch.int32) -> Tensor:
    return image[words.at[name] : words.at[name] + words.sizes[name]].view(dtype)


def views(image: Tensor, words: Words) -> tuple[DeviceState, Tensor, Tensor]:
    """The state, the rows of a step, and where its tokens go."""

    def part(name: str, dtype: torch.dtype = torch.int32) -> Tensor:
        return section(image, words, name, dtype)

    state = DeviceState(
        last=part("last"), length=part("length"), left=part("left"), position=part("position"),
        seed=part("seed", torch.int64), temperature=part("temperature", torch.float32), top_k=part("top_k"),
        top_p=part("top_p", torch.float32), stop=part("stop").view(-1, STOPS),
        table=part("table").view(-1, words.pages_each),
    )  # fmt: skip
    return state, part("rows"), part("turn", torch.int64)


def flat(parts: Sequence[PrefillPart]) -> list[np.ndarray]:
    """A prefill as arrays: the rows' tokens, slots and positions; of the chunks slot, first row, count and start; the
    rows whose logits are wanted, and their slots."""
    if not parts:
        return []
    slot, count, start, samples = np.array(
        [(p.sequence.slot, p.stop - p.start, p.start, p.samples) for p in parts], np.int32
    ).T
    first = np.cumsum(count, dtype=np.int32) - count
    ids = np.array([t for p in parts for t in p.sequence.tokens[p.start : p.stop]], np.int32)
    position = np.arange(len(ids), dtype=np.int32) - np.repeat(first - start, count)
    asked = samples == 1
    return [
        ids, np.repeat(slot, count), position, slot, first, count, start, (first + count - 1)[asked], slot[asked],
    ]  # fmt: skip
