"""What windfall's own engines have in common: sequences, a scheduler, and pages that sequences and engines share.

    engine.add(request)        at any time between two steps
    chunks = engine.step()     launches the next work and returns new tokens
    engine.cancel(id)          frees its pages at once; no more chunks are returned for it
    engine.swap(version, ...)  sets new weights between two steps; running responses continue with them
    engine.sleep()             frees the memory of the KV cache until the next step that has work

An engine shares the model with its creator. It never waits for anything but the device and starts no thread: that is
left to the worker around it.

An engine with adapters holds several policies of one base (`_hold_adapters`). Each has a number, which its rows use,
and its own part of the prefix cache: a swap of one of them leaves the others as they are.

A server that lends its GPU runs two such engines in turn (serve/host.py). Their pages are in one memory (`kv`), and the
limits of `step` decide how long one of them has the device.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from windfall.engine.base import Counters, Engine, check_policy, check_request, duplicate_id
from windfall.engine.held_policies import AdapterRoom
from windfall.engine.module_weights import copy_weights
from windfall.engine.scheduler import Scheduler
from windfall.engine.scheduler import Sequence as SequenceState
from windfall.types import Chunk, Finish, Request
from windfall.weights.merged import AdapterPair, MergedWeights

if TYPE_CHECKING:
    from typing import Any

    from windfall.engine.cuda.ready_weights import ReadyWeights
    from windfall.engine.torch.arena import TenantKV

Shape = tuple[int, int, bool]
"""Rows of a step, the tokens that they attend to, and whether it has a prefill."""


class AdapterMemory(Protocol):
    """Where an engine has the matrices of its adapters, by number."""

    def check(self, pairs: Mapping[str, AdapterPair]) -> None:
        """Raise WindfallError if an adapter with these matrices cannot be used."""

    def hold(self, number: int, pairs: Mapping[str, AdapterPair], scale: float) -> None:
        """Copy these matrices, which were checked. Nothing is in flight."""


class PagedEngine(Engine):
    burst = 1
    """Upper limit for the decode steps of a launch."""
    depth = 1
    """Upper limit for the launches in flight. 1: `step` returns the tokens of its own launch."""
    last_step: Shape = (0, 0, False)
    """Shape of a step of the launch whose tokens were returned last. 0 rows: no launch, or one whose steps differ."""
    last_steps = 1
    """Number of steps of that launch."""
    device_s: float | None = None
    """How long the device took for that launch (seconds); None: no launch, or it is not known."""
    ready_weights: ReadyWeights | None = None
    """Host memory from which the weights get to the device; None: they are copied there directly."""

    def __init__(self, model: Any, scheduler: Scheduler, *, version: int, limit: int, kv: TenantKV | None) -> None:
        """`kv`: pages in memory that another engine shares."""
        self.model = model
        self.versions = {"": version}
        self.limit = limit
        self.kv_tokens = 0 if kv is not None else scheduler.pages.count * scheduler.pages.size
        self.kv = kv
        self._scheduler = scheduler
        self._vocabulary = model.get_input_embeddings().num_embeddings
        self._sequences: dict[str, SequenceState] = {}
        self._counters = scheduler.counters
        self._adapters: AdapterMemory | None = None
        self._room = AdapterRoom()

    def _hold_adapters(self, memory: AdapterMemory, count: int, rank: int) -> None:
        """Hold up to `count` policies, whose adapters have at most this rank. None of them is there yet."""
        self._adapters, self._room, self.versions = memory, AdapterRoom(count, rank), {}
        self.capabilities = replace(self.capabilities, adapters=count)

    @property
    def version(self) -> int:
        return self.versions.get("", 0)

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def counters(self) -> Counters:
        return replace(self._counters, waiting=len(self._scheduler.waiting))

    def add(self, request: Request) -> None:
        if request.id in self._sequences:
            raise duplicate_id(request)
        check_request(request, self._vocabulary, self.limit)
        check_policy(request, self.versions)
        sequence = self._sequences[request.id] = SequenceState(
            request, list(request.prompt), experts_sent=request.experts_known
        )
        if self._adapters is not None:
            sequence.adapter = list(self.versions).index(request.policy)
        self._scheduler.add(sequence)

    def cancel(self, id: str) -> None:
        sequence = self._sequences.pop(id, None)
        if sequence is not None:
            self._scheduler.remove(sequence)

    @abstractmethod
    def step(self, most_rows: int | None = None, most_steps: int | None = None, prefill: bool = True) -> list[Chunk]:
        """Launch at most `most_steps` decode steps, of at most `most_rows` rows each, prefill included. 0 rows: launch
        nothing, and return the tokens of the oldest launch in flight. `prefill`: whether prompts may be computed."""

    def collect(self) -> list[list[Chunk]]:
        launches: list[list[Chunk]] = []
        while self.unread:
            launches.append(self.step(most_rows=0))
        return launches

    def _append(self, s: SequenceState, tokens: list[int], logprobs: list[float], versions: Mapping[str, int]) -> Chunk:
        """Add generated tokens to a sequence. The last one may end it."""
        request, position = s.request, s.request.position + s.generated
        s.tokens += tokens
        s.generated += len(tokens)
        self._counters.generated += len(tokens)
        finish: Finish | None = None
        if tokens[-1] in request.stop:
            finish = "stop"
        elif s.generated == request.max_tokens:
            finish = "length"
        if finish:
            del self._sequences[request.id]
            self._scheduler.remove(s)
        return Chunk(
            id=request.id,
            position=position,
            tokens=tuple(tokens),
            logprobs=tuple(logprobs),
            version=versions[request.policy],
            finish=finish,
        )

    def swap(self, version: int, weights: Mapping[str, Tensor] | None = None, *, policy: str = "") -> None:
        self.finish_launches()
        adapters, given = self._adapters, None
        if adapters is not None and weights is not None:
            weights = given = MergedWeights.of(weights)
        versions = self._room.swapped(self.versions, policy, version, weights, busy=bool(self._sequences))
        if adapters is not None and given is not None:
            adapters.check(given.pairs)
            if not given.base_is_loaded:
                copy_weights(self.model, version, given.base)
            adapters.hold(list(versions).index(policy), given.pairs, given.scale)
        elif weights is not None:
            copy_weights(self.model, version, weights)
        self.versions = versions
        if adapters is None or (given is not None and not given.base_is_loaded):
            self._scheduler.restart_all()
        if adapters is not None:
            self._scheduler.restart(policy)

    def warm(self, *sizes: int, longest: int | None = None, shorter: bool = False) -> None:
        """Do what would delay the first steps: compile kernels, capture graphs. See GraphEngine."""

    @property
    @abstractmethod
    def asleep(self) -> bool: ...

    @abstractmethod
    def _free_memory(self) -> None:
        """Return the memory of the KV cache to the device. The contents are lost."""

    def sleep(self) -> None:
        if not self.asleep:
            self.finish_launches()
            self._scheduler.restart_all()
            self._free_memory()

    # For a server that runs two engines in turn.

    @property
    def sequences(self) -> list[SequenceState]:
        """All responses in the order in which they are computed. For reading only."""
        return [*self._scheduler.running, *self._scheduler.waiting]

    @property
    def prefill_rows(self) -> int:
        """Rows that are still to be prefilled."""
        return self._scheduler.prefill_rows

    @property
    def prefilling(self) -> int:
        """Running responses that are being prefilled."""
        return self._scheduler.prefilling

    @property
    def unread(self) -> bool:
        """Whether there may be tokens that `step` has not returned: of launches in flight, or of finished ones."""
        return False

    @property
    def launched(self) -> Sequence[tuple[Shape, int]]:
        """For the launches in flight, the shapes of their steps, and the number of such steps."""
        return ()

    def finish_launches(self) -> None:
        """Wait until the device has run all launches. The next steps return their tokens."""

    def prefill_alone(self, alone: bool) -> None:
        """Whether a launch with a prefill has only one decode step: its tokens come sooner. The default with `kv`."""
        self._scheduler.single_step_with_prefill = alone

    def decode_after(self, prefills: int) -> None:
        """Upper limit for the launches from one decode step to the next while prompts wait for room in a launch."""
        self._scheduler.prefills_per_decode = prefills

    def check(self) -> None:
        self._scheduler.check()
        live = {id(s) for s in self.sequences}
        assert live == {id(s) for s in self._sequences.values()}, "sequences and schedule disagree"
        assert not any(s.finished for s in self._sequences.values()), "a finished sequence was not removed"
