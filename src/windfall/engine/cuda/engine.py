"""The engine on a GPU: requests in, a stream of tokens out, and the device never waits for the host.

    step():  plan and launch the next work  ──▶  hand out the tokens of the launch before
                                                 (while the new one runs)

`GraphEngine` keeps the seam of `TorchEngine` and its ways; these differ:

- a chunk may have several tokens, and `step` may return none while the first work runs;
- that a response has ended is known when its tokens come out. What the device computed of it after its end is no token
  and is counted nowhere;
- `swap` lets what is in flight come out first; the next `step` hands it out, and nothing else, with its own version;
- `sleep` gives the memory of the KV pool to others. Responses keep their tokens; the next `step` that has work takes
  the memory back and computes again.

Without a GPU the same engine runs on kernels written in plain torch: slowly, for tests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from windfall.engine.base import Counters
from windfall.engine.cuda.decoder import Decoder
from windfall.engine.cuda.device import DEPTH, Device, Flight
from windfall.engine.cuda.graphs import batch_for
from windfall.engine.cuda.host_state import Words
from windfall.engine.cuda.plan import BatchPlanner, DeviceSequence
from windfall.engine.cuda.splits import Sharing
from windfall.engine.cuda.state import STOPS
from windfall.engine.pages import Pages
from windfall.engine.torch.engine import copy_weights, refuse_unfit
from windfall.errors import WindfallError
from windfall.types import Chunk, Finish, Request

BURST = 8
"""Decode steps of one launch: the most tokens by which the end of a response is noticed late is twice that."""


class GraphEngine:
    def __init__(
        self,
        model: Any,
        *,
        kv_tokens: int,
        page_size: int = 16,
        max_running: int = 256,
        max_rows: int = 2048,
        deterministic: bool = False,
        version: int = 0,
        longest: int | None = None,
        burst: int = BURST,
        ops: Any = None,
        sharing: Sharing | None = None,
    ) -> None:
        """`longest`: no response has more tokens, its prompt counted in. `ops`: the kernels, if not the device's.
        `sharing`: which siblings read their prompt together, if not as many as fit; `Sharing(rows=0)`: none."""
        if deterministic:
            raise WindfallError("the GPU engine has no deterministic mode", fix="Use TorchEngine on a CPU.")
        pages = -(-kv_tokens // page_size)
        each = min(pages, -(-((longest or kv_tokens) + 1) // page_size))
        self.model, self.version = model, version
        self.limit = each * page_size - 1
        slots = min(max_running, max_rows)
        words = Words(slots=slots, pages_each=each, batch=batch_for(slots), stops=STOPS)
        decoder = Decoder.of(model, ops)
        fit = decoder.sharing()
        sharing = replace(sharing, rows=min(sharing.rows, fit.rows)) if sharing else fit
        self._plan = BatchPlanner(Pages(pages, page_size), words, max_rows=max_rows, burst=burst, sharing=sharing)
        self._device = Device(decoder, words, pages=pages, page_size=page_size, burst=burst)
        self._vocabulary = model.get_input_embeddings().num_embeddings
        self._sequences: dict[str, DeviceSequence] = {}
        self._flights: deque[Flight] = deque()
        self._landed: deque[list[Chunk]] = deque()
        """Came out before they were asked for, each of one version."""
        self._ended = 0
        """Responses whose end is among those."""
        self._steps = self._rows = self._made = 0

    def __len__(self) -> int:
        """Responses whose last token has not been handed out."""
        return len(self._sequences) + self._ended

    @property
    def counters(self) -> Counters:
        p = self._plan
        return Counters(
            steps=self._steps, rows=self._rows, made=self._made,
            reused_tokens=p.reused_tokens, preemptions=p.preemptions, waiting=len(p.waiting),
        )  # fmt: skip

    @property
    def asleep(self) -> bool:
        return self._device.pool.data is None

    def add(self, request: Request) -> None:
        if request.id in self._sequences or any(c.id == request.id for chunks in self._landed for c in chunks):
            raise WindfallError("this id is already being generated", where=f"request {request.id}")
        refuse_unfit(request, self._vocabulary, self.limit)
        sequence = self._sequences[request.id] = DeviceSequence(request, list(request.prompt))
        self._plan.add(sequence)

    def cancel(self, id: str) -> None:
        """An id that is not being generated (it may just have finished) is no error."""
        sequence = self._sequences.pop(id, None)
        if sequence is not None:
            self._plan.remove(sequence)
        for n, chunks in enumerate(self._landed):
            self._ended -= sum(c.id == id and c.finish is not None for c in chunks)
            self._landed[n] = [c for c in chunks if c.id != id]

    def step(self) -> list[Chunk]:
        launched = self._launch() if len(self._flights) < DEPTH else False
        if self._landed:
            self._ended -= sum(c.finish is not None for c in self._landed[0])
            return self._landed.popleft()
        if self._flights and (not launched or len(self._flights) == DEPTH):
            return self._collect(self._flights.popleft())
        assert launched or not self._sequences, "there is work, and nothing was launched"
        return []

    def swap(self, version: int, weights: Mapping[str, Tensor] | None = None) -> None:
        """Take `weights` (None: the shared model was changed in place). Running responses keep their tokens and are
        computed again under the new weights; no page of the old ones is used again."""
        self._land()
        if weights is not None:
            copy_weights(self.model, version, weights)
        if self._device.decoder.stale():
            self._device.renew(Decoder.of(self.model, self._device.decoder.ops))
        self.version = version
        self._plan.restart_all()

    def sleep(self) -> None:
        """Give the pool's memory to others until the next step that has work."""
        if not self.asleep:
            self._land()
            self._plan.restart_all()
            self._device.pool.give_up()

    def wake(self) -> None:
        self._device.pool.take()

    def warm(self, *sizes: int, longest: int | None = None) -> None:
        """Have the kernels and the graphs for steps of so many responses, of so many tokens, before they are needed."""
        slots = self._plan.words.slots
        self.wake()
        self._device.warm(
            [batch_for(min(size, slots)) for size in sizes or (slots,)], min(longest or self.limit, self.limit)
        )

    def _launch(self) -> bool:
        if not self._sequences:
            return False
        if self.asleep:
            self.wake()
        work = self._plan.next(in_flight=bool(self._flights))
        if work is None:
            return False
        self._flights.append(self._device.launch(work, self.version))
        self._steps += work.steps + bool(work.parts)
        self._rows += sum(p.stop - p.start for p in work.parts)
        return True

    def _land(self) -> None:
        """Let everything in flight come out."""
        while self._flights:
            chunks = self._collect(self._flights.popleft())
            if chunks:
                self._landed.append(chunks)
                self._ended += sum(c.finish is not None for c in chunks)

    def _collect(self, flight: Flight) -> list[Chunk]:
        """The tokens of a launch, as one chunk for every response that it made any of."""
        tokens, logprobs = flight.landed()
        work, out = flight.work, []
        sampled = [p.sequence for p in work.parts if p.samples]
        begun = dict(zip(sampled, zip(tokens[0].tolist(), logprobs[0].tolist(), strict=True), strict=False))
        steps = tokens[1:, : len(work.rows)]
        counts = (steps >= 0).sum(0)
        columns = zip(work.rows, counts.tolist(), steps.T.tolist(), logprobs[1:].T.tolist(), strict=False)
        for sequence, count, said, sure in columns:
            first = begun.pop(sequence, None)
            if sequence.over or not (count or first):
                continue
            self._rows += count
            said, sure = (said[:count], sure[:count]) if count < len(said) else (said, sure)
            if first:
                said, sure = [first[0], *said], [first[1], *sure]
            out.append(self._append(sequence, said, sure, flight.version))
        for sequence, first in begun.items():  # whatever may make one token only has no row
            if not sequence.over:
                out.append(self._append(sequence, [first[0]], [first[1]], flight.version))
        return out

    def _append(self, s: DeviceSequence, tokens: list[int], logprobs: list[float], version: int) -> Chunk:
        request, position = s.request, s.request.position + s.made
        if len(request.stop) > STOPS:  # more than the device looks for
            end = next((n + 1 for n, t in enumerate(tokens) if t in request.stop), len(tokens))
            tokens, logprobs = tokens[:end], logprobs[:end]
        s.tokens += tokens
        s.made += len(tokens)
        self._made += len(tokens)
        finish: Finish | None = None
        if tokens[-1] in request.stop:
            finish = "stop"
        elif s.made == request.max_tokens:
            finish = "length"
        if finish:
            del self._sequences[request.id]
            self._plan.remove(s)
        return Chunk(
            id=request.id, position=position, tokens=tuple(tokens), logprobs=tuple(logprobs), version=version,
            finish=finish,
        )  # fmt: skip

    def check(self) -> None:
        """Raise AssertionError if a page, a slot or a sequence is not where it should be."""
        self._plan.check()
        assert len(self._flights) <= DEPTH, "too much is in flight"
        live = {id(s) for s in [*self._plan.running, *self._plan.waiting]}
        assert live == {id(s) for s in self._sequences.values()}, "sequences and plan disagree"
        assert not any(s.over for s in self._sequences.values()), "somebody is over and still here"
