"""Random runs of the GPU engine with an emulated device that stores tokens in place of keys and values.

The emulated pool holds (token, version) in every slot of a page. A step reads the whole context of each row through the
page table, like attention, and the next token is a hash of what it read. So the output changes if a sequence writes to
the page of another, reads a page too early, keeps a page of old weights or loses one. The shared prefix of a group is
read through the page table of its first row, and every group is compared with the pages of its sequences. About half of
the evicted sequences keep their pages in host memory, which has room for few of them. Not covered: numerics (see
test_engine.py and test_saved_kv.py).
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.engines.small_models import build
from windfall.engine.cuda.engine import GraphEngine
from windfall.engine.cuda.host_state import STOPS, HostState
from windfall.engine.cuda.splits import PrefixSharing
from windfall.engine.saved_kv import CHUNK_BYTES, PageCopy, SavedKV
from windfall.engine.scheduler import Launch
from windfall.engine.scheduler import Sequence as Running
from windfall.types import Chunk, Request

VOCABULARY = 40
EAGER = PrefixSharing(max_rows=3, min_tokens=4, min_saved_tokens=1)
"""Prefix groups wherever possible, so small that many are divided."""
PROMPTS = [tuple(range(3, 3 + n)) for n in (1, 2, 4, 9, 30)] + [(9,) * 12, (*range(3, 20), 7, 7)]


def following(context: Sequence[int], seed: int, position: int, version: int) -> int:
    """The token after `context`."""
    return zlib.crc32(np.array([*context, seed, position, version], np.int64).tobytes()) % VOCABULARY


def expected_groups(rows: Sequence[Running], sharing: PrefixSharing, size: int) -> list[list[int]]:
    """The prefix groups by definition: one row after the other, one page after the other."""

    def prompt_pages(s: Running) -> list[int]:
        # The tests also use a `position` past the end of the prompt: then no page is a page of the prompt.
        return s.pages[: max(len(s.request.prompt) - s.request.position - 1, 0) // size]

    out, first = [], 0
    while first < len(rows):
        mine, end = prompt_pages(rows[first]), first + 1
        while end < min(len(rows), first + sharing.max_rows) and mine and prompt_pages(rows[end])[-1:] == mine[-1:]:
            end += 1
        held = [prompt_pages(s) for s in rows[first:end]]
        tokens = 0
        for column in zip(*held, strict=False):
            if len(set(column)) > 1:
                break
            tokens += size
        if end - first > 1 and tokens >= sharing.min_tokens:
            out.append([first, end - first, tokens])
        first = end
    return out if sum((count - 1) * tokens for _, count, tokens in out) >= sharing.min_saved_tokens else []


@dataclass
class FinishedLaunch:
    work: Launch
    versions: Mapping[str, int]
    tokens: np.ndarray

    def wait(self) -> tuple[np.ndarray, np.ndarray]:
        return self.tokens, self.tokens.astype(np.float32)

    def device_s(self) -> float:
        return 0.0


class Emulated:
    """Replaces the engine's `DeviceRunner`. Runs every launch at once, in order."""

    def __init__(self, host_state: HostState, pages: int, size: int, sharing: PrefixSharing) -> None:
        self.host_state, self.pages, self.size, self.sharing = host_state, pages, size, sharing
        self.shared_rows = 0
        """Number of rows in prefix groups, over all launches."""
        self.image = host_state.data.copy()
        self.pool = SimpleNamespace(data=self._blank(), allocate=self._allocate, free=self._free_pool)
        self.decoder = SimpleNamespace(stale=lambda: False)
        self.version = 0

    def _blank(self) -> np.ndarray:
        return np.full((self.pages, self.size, 2), -1, np.int64)

    def _allocate(self) -> None:
        self.pool.data = self._blank() if self.pool.data is None else self.pool.data

    def _free_pool(self) -> None:
        self.pool.data = None

    def part(self, name: str) -> np.ndarray:
        w = self.host_state
        return self.image[w.offsets[name] : w.offsets[name] + w.sizes[name]]

    def launch(self, work: Launch, versions: Mapping[str, int]) -> FinishedLaunch:
        self.version = versions[""]
        out = np.full((1 + work.steps, self.host_state.slots), -1, np.int64)
        assert work.prefix_groups.tolist() == expected_groups(work.rows, self.sharing, self.size)
        if work.steps:
            self.host_state.set_rows(work.slots, len(work.slots))
            self.host_state.set_prefix_groups(work.prefix_groups, len(work.slots), len(work.prefix_groups))
        places, values = self.host_state.take_changes()
        self.image[places] = values
        assert all(p.start < p.stop for p in work.prefill), "a part without a row"
        for p in work.prefill:  # a layer writes all keys and values before it reads any
            for n in range(p.start, p.stop):
                self._write(p.sequence.slot, n, p.sequence.tokens[n])
        for n, p in enumerate(p for p in work.prefill if p.samples):
            assert self.part("length")[p.sequence.slot] == p.stop - 1
            out[0, n] = self._draw(p.sequence.slot)
        assert len({int(s) for s in work.slots}) == len(work.rows)
        reads = self._reads(len(work.slots), len(work.prefix_groups)) if work.steps else []
        for step in range(work.steps):
            active = [(n, int(s)) for n, s in enumerate(work.slots) if self.part("left")[s] > 0]
            for _, slot in active:
                self._write(slot, self.part("length")[slot], self.part("last")[slot])
            for n, slot in active:
                out[1 + step, n] = self._draw(slot, *reads[n])
        return FinishedLaunch(work, versions, out)

    def _write(self, slot: int, n: int, token: int) -> None:
        page = self.part("table")[slot * self.host_state.pages_each + n // self.size]
        self.pool.data[page, n % self.size] = token, self.version

    def _reads(self, rows: int, prefix_groups: int) -> list[tuple[int, int]]:
        """For every row: the slot whose page table has its shared prefix, and its length. From the device's state."""
        slots, shared = self.part("rows")[:rows], self.part("shared_tokens")[:rows]
        out = [(int(s), 0) for s in slots]
        names = ("group_first", "group_count", "group_tokens")
        for first, count, tokens in zip(*(self.part(n)[:prefix_groups].tolist() for n in names), strict=True):
            assert (self.part("length")[slots[first : first + count]] >= tokens).all(), "the prefix is not computed yet"
            out[first : first + count] = [(int(slots[first]), tokens)] * count
        assert [tokens for _, tokens in out] == shared.tolist()
        self.shared_rows += int((shared > 0).sum())
        return out

    def _draw(self, slot: int, leader: int = 0, shared: int = 0) -> int:
        length, position = self.part("length"), self.part("position")
        at = np.arange(length[slot] + 1)
        table = self.part("table")[np.where(at < shared, leader, slot) * self.host_state.pages_each + at // self.size]
        read = self.pool.data[table, at % self.size]
        assert (read[:, 1] == self.version).all(), "a row reads KV that was not written with these weights"
        token = following(read[:, 0].tolist(), int(self.part("seed")[2 * slot]), int(position[slot]), self.version)
        self.part("last")[slot] = token
        length[slot] += 1
        position[slot] += 1
        stops = self.part("stop")[slot * STOPS : (slot + 1) * STOPS]
        self.part("left")[slot] = 0 if token in stops else self.part("left")[slot] - 1
        return token


class EmulatedHostPages:
    """Replaces the engine's `HostPages`. A chunk forgets what it had when it is written."""

    def __init__(self, device: Emulated, chunk_pages: int) -> None:
        self._device, self._chunk_pages = device, chunk_pages
        self._chunks: dict[int, np.ndarray] = {}

    def run(self, copies: Sequence[PageCopy]) -> None:
        pool = self._device.pool.data
        for c in copies:
            places = slice(c.first, c.first + len(c.pages))
            assert 0 <= c.first < places.stop <= self._chunk_pages
            if c.save:
                self._chunks[c.chunk] = np.full((self._chunk_pages, *pool.shape[1:]), -1, np.int64)
                self._chunks[c.chunk][places] = pool[c.pages]
            else:
                pool[c.pages] = self._chunks[c.chunk][places]

    def measured(self) -> list[tuple[int, float]]:
        return []

    def free(self) -> None:
        self._chunks.clear()


@cache
def model() -> Any:
    return build("llama")


class EngineRun:
    """An engine with its requests and results."""

    def __init__(self, **options: Any) -> None:
        self.engine = GraphEngine(model(), **{"sharing": EAGER, **options})
        plan = self.engine._scheduler
        emulated: Any = Emulated(plan.host_state, plan.pages.count, plan.pages.size, plan.sharing)
        self.engine._device = emulated
        saved = plan.saved = SavedKV(page_size=plan.pages.size, page_bytes=CHUNK_BYTES // 2, max_rows=plan.max_rows,
                                     free_bytes=lambda: 60 * CHUNK_BYTES)  # fmt: skip
        host_pages: Any = EmulatedHostPages(emulated, saved.chunk_pages)
        self.engine._host_pages = host_pages
        rng = random.Random(plan.pages.count)
        saved.is_cheaper = lambda *_: rng.random() < 0.5
        self.asked: dict[str, Request] = {}
        self.said: dict[str, list[int]] = {}
        self.ended: set[str] = set()
        self.canceled: set[str] = set()

    def add(self, **fields: Any) -> None:
        request = Request(id=str(len(self.asked)), **fields)
        self.asked[request.id], self.said[request.id] = request, []
        self.engine.add(request)

    def cancel(self, id: str) -> None:
        self.engine.cancel(id)
        self.canceled.add(id)

    def step(self) -> None:
        chunks = self.engine.step()
        self.engine.check()
        assert len({c.version for c in chunks}) <= 1, "a frame has one version"
        assert len({c.id for c in chunks}) == len(chunks)
        for c in chunks:
            self._take(c)
        assert len(self.engine) == len(self.asked.keys() - self.ended - self.canceled)

    def _take(self, c: Chunk) -> None:
        request, said = self.asked[c.id], self.said[c.id]
        assert c.tokens
        assert c.id not in self.ended | self.canceled
        assert c.position == request.position + len(said)
        for token in c.tokens:
            assert not said or said[-1] not in request.stop, "the response continues after its end"
            position = request.position + len(said)
            assert token == following([*request.prompt, *said], request.seed, position, c.version)
            said.append(token)
        end = "stop" if said[-1] in request.stop else "length" if len(said) == request.max_tokens else None
        assert c.finish == end
        if c.finish:
            self.ended.add(c.id)


@settings(max_examples=120, deadline=None)
@given(
    data=st.data(), pages=st.integers(10, 26), slots=st.integers(1, 6), rows=st.integers(1, 30),
    burst=st.integers(1, 9),
)  # fmt: skip
def test_every_response_is_returned_once_and_complete(
    data: st.DataObject, pages: int, slots: int, rows: int, burst: int
) -> None:
    run = EngineRun(kv_tokens=4 * pages, page_size=4, max_running=slots, max_rows=rows, burst=burst)
    for _ in range(data.draw(st.integers(1, 40))):
        match data.draw(st.sampled_from(["add"] * 5 + ["cancel", "swap", "sleep"] + ["step"] * 4)):
            case "add":
                prompt = data.draw(st.sampled_from(PROMPTS))
                room = run.engine.limit - len(prompt)
                run.add(
                    prompt=prompt, seed=data.draw(st.integers(0, 3)), position=data.draw(st.integers(0, 2)),
                    max_tokens=min(room, data.draw(st.sampled_from([1, 2, 7, 40, 100]))),
                    stop=frozenset(data.draw(st.sampled_from([(), (5,), (5, 6, 7), range(20, 30)]))),
                )  # fmt: skip
            case "cancel" if run.asked:
                run.cancel(data.draw(st.sampled_from(sorted(run.asked))))
            case "swap":
                run.engine.swap(run.engine.version + 1)
            case "sleep":
                run.engine.sleep()
        run.engine.check()
        if data.draw(st.booleans()):
            run.step()
    for _ in range(5000):  # all remaining responses must finish
        if not len(run.engine):
            break
        run.step()
    assert run.ended | run.canceled == run.asked.keys()
    assert run.engine.step() == []  # pending launches have only discarded tokens
    assert run.engine._scheduler.pages.free == pages
    assert run.engine.counters.generated >= sum(len(s) for s in run.said.values())


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.sampled_from(PROMPTS[:4]), st.integers(10, 36)), min_size=4, max_size=12),
    burst=st.integers(1, 6), rows=st.integers(2, 12), late=st.integers(0, 8),
)  # fmt: skip
def test_sequences_grow_until_no_page_is_left(lengths: list[Any], burst: int, rows: int, late: int) -> None:
    """Short at first, so that many are admitted; then most of them must be evicted."""
    run = EngineRun(kv_tokens=44, page_size=4, max_running=8, max_rows=rows, burst=burst)
    for n, (prompt, most) in enumerate(lengths):
        run.add(prompt=prompt, seed=n, max_tokens=min(most, run.engine.limit - len(prompt)))
        for _ in range(late if n % 3 == 2 else 0):
            run.step()
    while len(run.engine):
        run.step()
    assert run.ended == run.asked.keys()


def test_youngest_sequence_is_evicted_when_no_page_is_left() -> None:
    run = EngineRun(kv_tokens=44, page_size=4, max_running=8, max_rows=64, burst=3)
    for n in range(8):
        run.add(prompt=(3 + n, 4), seed=n, max_tokens=30)
    while len(run.engine):
        run.step()
    assert run.engine.counters.evictions >= 6
    assert run.engine.counters.kv_restored > 0
    assert [len(said) for said in run.said.values()] == [30] * 8


def test_pending_launch_is_collected_before_any_eviction() -> None:
    """The first response ends in a pending launch when the second one needs a page: then a page is free."""
    run = EngineRun(kv_tokens=24, page_size=4, max_running=2, max_rows=64, burst=4)
    run.add(prompt=(3, 4, 5, 6), seed=1, max_tokens=9)
    run.add(prompt=(7, 4, 5, 6), seed=2, max_tokens=19)
    while len(run.engine):
        run.step()
    assert run.engine.counters.evictions == 0


@pytest.mark.parametrize("most", [1, 20])
def test_response_canceled_in_flight_returns_nothing(most: int) -> None:
    run = EngineRun(kv_tokens=512, page_size=4, max_running=4, max_rows=64)
    run.add(prompt=(3, 4, 5), seed=1, max_tokens=most)
    run.add(prompt=(3, 4, 5), seed=2, max_tokens=20)
    run.step()
    assert len(run.engine._pending) == 1
    run.cancel("0")
    while len(run.engine):
        run.step()
    assert (run.said["0"], len(run.said["1"])) == ([], 20)


def test_only_changes_are_uploaded_and_at_most_two_launches_are_pending() -> None:
    run = EngineRun(kv_tokens=4096, page_size=16, max_running=32, max_rows=512)
    for n in range(32):
        run.add(prompt=PROMPTS[4], seed=n, max_tokens=100)
    run.step()
    run.step()
    sent = []
    take_changes = run.engine._scheduler.host_state.take_changes
    run.engine._scheduler.host_state.take_changes = lambda: sent.append(took := take_changes()) or took
    for _ in range(4):
        run.step()
        assert len(run.engine._pending) == 1
    assert max(len(places) for places, _ in sent) <= 32 + 2, "only new pages and the ring row"


def test_siblings_form_prefix_groups_wherever_they_were_started() -> None:
    """Six siblings, two of them started elsewhere; then one is canceled and others end."""
    run = EngineRun(kv_tokens=4096, page_size=4, max_running=16, max_rows=512)
    prompt = PROMPTS[4]
    for n in range(6):
        said = (5,) * (n if n > 3 else 0)
        run.add(prompt=prompt + said, position=len(said), seed=n, max_tokens=20 + 20 * n)
    run.add(prompt=(7, *prompt), seed=7, max_tokens=60)
    seen = []
    launch = run.engine._device.launch
    run.engine._device.launch = lambda work, versions: (
        seen.append(work.prefix_groups.tolist()) or launch(work, versions)
    )
    run.step()
    assert seen[0] == [[0, 3, 28], [3, 3, 28]]
    run.cancel("1")
    while len(run.engine):
        run.step()
    assert [[0, 3, 28], [3, 2, 28]] in seen
    assert seen[-1] == []
    assert run.engine._device.shared_rows > 0  # pyright: ignore[reportAttributeAccessIssue]


def test_shared_page_of_generated_tokens_forms_no_prefix_group() -> None:
    """After a swap, two equal responses share a page. It is not part of their prompt: `position` covers all of that."""
    run = EngineRun(kv_tokens=4096, page_size=4, max_running=16, max_rows=512, burst=3)
    for _ in range(2):
        run.add(prompt=(3,), position=1, seed=0, max_tokens=20)
    run.step()
    run.engine.swap(1)
    run.step()
    work = run.engine._pending[0].work
    first, second = (s.pages for s in work.rows)
    assert len(first) == 2
    assert first[:-1] == second[:-1]
    assert work.prefix_groups.tolist() == []
    while len(run.engine):
        run.step()


def test_prefix_groups_that_save_too_little_are_not_used() -> None:
    """Groups must save at least `min_saved_tokens` tokens."""
    for worth, prefix_groups in ((2 * 28, [[0, 3, 28]]), (2 * 28 + 1, [])):
        sharing = PrefixSharing(max_rows=8, min_tokens=4, min_saved_tokens=worth)
        run = EngineRun(kv_tokens=4096, page_size=4, max_running=16, max_rows=512, sharing=sharing)
        for n in range(3):
            run.add(prompt=PROMPTS[4], seed=n, max_tokens=5)
        run.step()
        assert run.engine._pending[0].work.prefix_groups.tolist() == prefix_groups
        assert run.engine._pending[0].work.longest == 34 - 28 * bool(prefix_groups)


@pytest.mark.parametrize("every", [1, 3, 8])
def test_while_prompts_wait_few_launches_decode(every: int) -> None:
    run = EngineRun(kv_tokens=4096, page_size=16, max_running=48, max_rows=64)
    run.engine.decode_after(every)
    for n in range(40):
        run.add(prompt=tuple(range(n + 3, n + 33)), seed=n, max_tokens=50)
    steps = []
    launch = run.engine._device.launch
    run.engine._device.launch = lambda work, versions: steps.append(work.steps) or launch(work, versions)
    while len(run.engine):
        run.step()
    prefills = steps.index(8)
    assert prefills >= 40 * 30 // 64 - 1
    assert steps[: 2 * every] == ([0] * (every - 1) + [1]) * 2
    assert set(steps[prefills:]) <= {8, 4, 2, 1, *range(1, 8)}
