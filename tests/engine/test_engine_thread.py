"""The engine's thread: orders between two steps, one frame per step, and no other thread touches the engine."""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from tests.support.engines.hashing_engine import Hashing
from windfall.engine.base import Counters
from windfall.engine.engine_thread import EngineThread, tokens_frame
from windfall.errors import WindfallError
from windfall.link.messages import Rejected, Released, Tokens, Work, columns
from windfall.types import Chunk, Request, Sampling

WAIT_S = 10.0


class Gated(Hashing):
    """Makes one step per `allow`. Records the calling threads, and checks that no call arrives during a step."""

    def __init__(self) -> None:
        super().__init__(Counter())
        self.allowed, self.stepping = threading.Semaphore(0), threading.Event()
        self.calls: list[str] = []
        self.threads: set[str] = set()
        self.raises: Exception | None = None

    def _note(self, what: str) -> None:
        self.threads.add(threading.current_thread().name)
        assert not self.stepping.is_set(), f"{what} in the middle of a step"
        self.calls.append(what)

    def allow(self, steps: int = 1) -> None:
        self.allowed.release(steps)

    def add(self, request: Request) -> None:
        self._note(f"add {request.id}")
        if request.max_tokens > 1000:
            raise WindfallError("does not fit")
        super().add(request)

    def cancel(self, id: str) -> None:
        self._note(f"cancel {id}")
        super().cancel(id)

    def swap(self, version: int, weights: Mapping[str, Any] | None = None, *, policy: str = "") -> None:
        self._note(f"swap {version}")
        if weights:
            raise WindfallError("version does not fit the model")
        super().swap(version, weights)

    def step(self) -> list[Chunk]:
        self._note("step")
        self.stepping.set()
        assert self.allowed.acquire(timeout=WAIT_S), "nobody allowed this step"
        self.stepping.clear()
        if self.raises:
            raise self.raises
        return super().step()


def work(handle: int, max_tokens: int = 100, position: int = 0) -> Work:
    return Work(
        handle=handle, prompt=(5, handle), position=position, seed=handle, max_tokens=max_tokens, sampling=Sampling(),
        stop=(),
    )  # fmt: skip


def wait(holds: Callable[[], object], what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end, f"waited {WAIT_S:g} s until {what}"
        time.sleep(0.001)


class Rig:
    def __init__(self) -> None:
        self.engine = Gated()
        self.host = EngineThread(self.engine, 4)
        self.frames: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.failures: list[str] = []
        self.host.start(lambda: self.failures.append(threading.current_thread().name))
        self.host.attach(self.frames.put)

    def standing(self) -> None:
        wait(self.engine.stepping.is_set, "the engine is in a step")

    def done(self) -> None:
        """Wait until all orders so far are carried out. Call this while no step is in progress."""
        flag = threading.Event()
        self.host._orders.put(flag.set)
        assert flag.wait(WAIT_S)

    def next(self) -> Any:
        return self.frames.get(timeout=WAIT_S)

    def step(self) -> Tokens:
        """Let the engine finish its current step."""
        self.standing()
        self.engine.allow()
        frame = self.next()
        assert isinstance(frame, Tokens)
        return frame


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.host.cancel(range(100))
    made.host.pause(False)
    made.engine.allow(1000)
    made.host.close(WAIT_S)
    assert not made.host._thread.is_alive()
    assert made.engine.threads <= {"engine"}, "somebody else touched the engine"


def test_orders_wait_for_the_end_of_a_step(rig: Rig) -> None:
    rig.host.add([work(1), work(2)])
    rig.standing()
    rig.host.add([work(3)])
    rig.host.cancel([1])
    rig.host.swap(7, None, lambda error: None)
    time.sleep(0.02)
    assert rig.engine.calls == ["add 1", "add 2", "step"]
    first, second = rig.step(), rig.step()
    rig.standing()
    assert rig.engine.calls == ["add 1", "add 2", "step", "add 3", "cancel 1", "swap 7", "step", "step"]
    assert (first.handles, first.version) == ((1, 2), 0)
    assert (second.handles, second.version, second.positions) == ((2, 3), 7, (1, 0))


def test_frame_has_all_responses_and_finish_reasons(rig: Rig) -> None:
    rig.host.add([work(1, max_tokens=1), work(2, max_tokens=2, position=9)])
    first, second = rig.step(), rig.step()
    assert (first.handles, first.positions, first.finished) == ((1, 2), (0, 9), {0: "length"})
    assert (second.handles, second.positions, second.finished) == ((2,), (10,), {0: "length"})
    assert [len(columns(f)[0]) for f in (first, second)] == [2, 1]
    rig.done()
    assert (len(rig.engine), rig.host._running) == (0, {})
    assert rig.host.stats().made == 3


def test_pause_keeps_running_responses(rig: Rig) -> None:
    rig.host.add([work(1)])
    rig.standing()
    rig.host.pause(True)
    assert rig.step().positions == (0,)
    rig.done()
    rig.engine.allow(5)
    time.sleep(0.03)
    assert rig.frames.empty()
    assert (len(rig.engine), rig.engine.calls.count("step"), rig.host.stats().idle_s) == (1, 1, 0.0)
    rig.host.add([work(2)])  # taken, but not begun
    rig.done()
    assert rig.frames.empty()
    rig.host.pause(False)
    after = rig.next()
    assert (after.handles, after.positions) == ((1, 2), (1, 0))


def test_weights_of_another_model_are_reported_and_do_no_harm(rig: Rig) -> None:
    said: list[BaseException | None] = []
    rig.host.add([work(1)])
    rig.standing()
    rig.host.swap(2, {"w": 1}, said.append)
    rig.host.swap(3, None, said.append)
    rig.step()
    assert rig.step().version == 3
    assert [str(e) for e in said] == ["version does not fit the model", "None"]


def test_engine_error_is_reported(rig: Rig) -> None:
    rig.host.add([work(1)])
    rig.standing()
    rig.engine.raises = RuntimeError("device lost")
    rig.engine.allow()
    wait(lambda: rig.failures, "the failure was told")
    assert rig.failures == ["engine"]
    assert rig.host.failed is rig.engine.raises
    assert rig.frames.empty()


def test_blocked_emit_stops_the_engine(rig: Rig) -> None:
    taken = threading.Semaphore(0)
    out: list[Any] = []

    def emit(message: object) -> None:
        taken.acquire()
        out.append(message)

    rig.host.attach(emit)
    rig.host.add([work(1, max_tokens=20)])
    rig.engine.allow(20)
    time.sleep(0.03)
    assert rig.engine.calls.count("step") == 1, "no step before the last one's frame is taken"
    taken.release(20)
    wait(lambda: len(out) == 20, "all frames are out")
    assert [f.positions[0] for f in out] == list(range(20))
    assert out[-1].finished == {0: "length"}


def test_attach_drops_responses_of_the_last_link(rig: Rig) -> None:
    rig.host.add([work(1), work(2)])
    rig.step()
    rig.standing()
    rig.host.pause(True)
    new: queue.SimpleQueue[Any] = queue.SimpleQueue()
    rig.host.attach(new.put)
    rig.host.add([work(3)])
    rig.engine.allow(2)
    assert new.get(timeout=WAIT_S).handles == (3,), "attaching ends a pause"
    assert rig.next().handles == (1, 2)
    assert rig.frames.empty()
    assert {"cancel 1", "cancel 2"} <= set(rig.engine.calls)


def test_detach_drops_all_responses(rig: Rig) -> None:
    rig.host.add([work(1)])
    rig.standing()
    rig.host.detach()
    rig.step()
    rig.done()
    rig.host.add([work(2, max_tokens=1)])
    rig.engine.allow()
    rig.done()
    wait(lambda: len(rig.engine) == 0, "nothing runs")
    assert rig.frames.empty(), "nobody is there to hear"


def test_release_is_confirmed_after_the_tokens(rig: Rig) -> None:
    rig.host.add([work(1), work(2)])
    rig.standing()
    rig.host.release((1, 77))
    rig.engine.allow(2)
    frames = [rig.next() for _ in range(3)]
    assert [getattr(f, "handles", None) for f in frames] == [(1, 2), (1, 77), (2,)]
    assert isinstance(frames[1], Released)


def test_finish_stops_generation(rig: Rig) -> None:
    rig.host.add([work(1), work(2)])
    rig.standing()
    frames_then: list[int] = []
    rig.host.finish(lambda: frames_then.append(rig.frames.qsize()))
    rig.engine.allow(5)
    wait(lambda: frames_then, "it has finished")
    rig.done()
    assert (frames_then, rig.frames.qsize(), len(rig.engine)) == ([1], 1, 0)


def test_only_work_that_does_not_fit_is_rejected(rig: Rig) -> None:
    rig.host.add([work(1), work(2, max_tokens=5000), work(3)])
    rejected = rig.next()
    assert isinstance(rejected, Rejected)
    assert (rejected.handle, "does not fit" in rejected.why) == (2, True)
    assert rig.step().handles == (1, 3)


@pytest.mark.parametrize(("limit", "invalid"), [(0, False), (4000, False), (9000, True)])
def test_rejection_of_work_that_fits_says_that_it_is_invalid(rig: Rig, limit: int, invalid: bool) -> None:
    rig.engine.limit = limit  # type: ignore[attr-defined]
    rig.host.add([work(2, max_tokens=5000)])
    rejected = rig.next()
    assert isinstance(rejected, Rejected)
    assert rejected.invalid == invalid


def test_stats_have_the_engine_s_counters(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    counters = Counters(evictions=2, kv_restored=300, waiting=4)
    monkeypatch.setattr(Gated, "counters", counters)
    stats = rig.host.stats()
    assert (stats.evictions, stats.kv_restored, stats.waiting) == (2, 300, 4)


def test_stats_show_a_stuck_engine(rig: Rig) -> None:
    assert (rig.host.stats().running, rig.host.stats().idle_s) == (0, 0.0)
    rig.host._stepped_s -= 1000.0  # so long ago
    rig.host.add([work(1)])
    rig.standing()
    assert rig.host.stats().idle_s < 500, "time without work is not held against it"
    rig.host._stepped_s -= 1000.0
    stuck = rig.host.stats()
    assert (stuck.running, stuck.steps) == (1, 0)
    assert stuck.idle_s >= 1000
    rig.step()
    assert (rig.host.stats().steps, rig.host.stats().made) == (1, 1)
    assert rig.host.stats().idle_s < 500


def test_frame_has_the_version_of_every_policy() -> None:
    chunks = [
        Chunk(id=str(n), position=n, tokens=(5,), logprobs=(-0.5,), version=version) for n, version in ((1, 4), (2, 7))
    ]
    frame = tokens_frame(chunks, {1: "solver", 2: "verifier", 3: "reference"})
    assert frame.by_policy == {"solver": 4, "verifier": 7}
    alone = tokens_frame(chunks[:1])
    assert (alone.version, alone.versions, alone.by_policy) == (4, {}, {"": 4})


def test_failed_swap_of_one_policy_stops_the_engine_until_that_policy_is_swapped(rig: Rig) -> None:
    errors: list[BaseException | None] = []
    rig.engine.swap, rig.engine.versions = Swaps(), {"solver": 0, "verifier": 0}
    rig.host.swap(1, None, errors.append, policy="solver")
    rig.host.swap(1, {"breaks": 1}, errors.append, policy="verifier")
    rig.host.swap(2, None, errors.append, policy="solver")
    rig.host.add([work(1)])
    rig.done()
    assert [type(e) for e in errors] == [type(None), RuntimeError, type(None)]
    assert not rig.engine.stepping.is_set()
    rig.host.swap(1, None, errors.append, policy="verifier")
    rig.step()


def test_policy_that_takes_the_place_of_a_half_loaded_one_is_generated(rig: Rig) -> None:
    errors: list[BaseException | None] = []
    rig.engine.swap, rig.engine.versions = Swaps(), {"solver": 0}
    rig.host.swap(1, {"breaks": 1}, errors.append, policy="solver")
    rig.done()
    rig.engine.versions = {"verifier": 1}
    rig.host.swap(1, None, errors.append, policy="verifier")
    rig.host.add([work(1)])
    rig.step()


class Swaps:
    """A swap that fails if it is given weights."""

    def __call__(self, version: int, weights: Any = None, *, policy: str = "") -> None:
        if weights:
            raise RuntimeError("out of memory in the middle of the copy")
