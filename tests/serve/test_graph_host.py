"""A host whose two tenants run on GraphEngine, with the reference kernels on the CPU or on a GPU if there is one: the
same tokens as alone, blocks under pressure, weights that are held ready, and a failing rollout."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.support.engines import reference_kernels  # noqa: F401  # GraphEngine also runs on a CPU
from tests.support.fleets.lenders import rollout_model, rollout_spec
from tests.support.servers.serving import PATIENT, spec, tiny
from windfall.engine.cuda.engine import GraphEngine
from windfall.engine.torch.engine import TorchEngine
from windfall.errors import WindfallError
from windfall.link.messages import Capacity, Released, Tokens, Work
from windfall.serve import build, rollout_tenant
from windfall.serve.host import Host
from windfall.serve.rollout_tenant import RolloutTenant
from windfall.serve.slo import Objectives
from windfall.types import Chunk, Request, Sampling

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"


class Answers:
    """Collects the tokens of serving requests."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.ended: set[str] = set()

    def __call__(self, chunk: Any) -> None:
        assert isinstance(chunk, Chunk), chunk
        self.tokens.setdefault(chunk.id, []).extend(chunk.tokens)
        if chunk.finish:
            self.ended.add(chunk.id)


class Frames:
    """Collects what the rollout sends."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.released: list[int] = []
        self.ended: set[int] = set()
        self.slots: list[int] = []

    def __call__(self, message: Any) -> None:
        if isinstance(message, Capacity):
            self.slots.append(message.slots)
        if isinstance(message, Released):
            self.released += message.handles
        if isinstance(message, Tokens):
            new, start = array("I", message.tokens), 0
            counts = message.counts or (1,) * len(message.handles)
            for n, (handle, count) in enumerate(zip(message.handles, counts, strict=True)):
                self.tokens.setdefault(handle, []).extend(new[start : start + count])
                start += count
                if n in message.finished:
                    self.ended.add(handle)


@contextmanager
def graph_host(kv_tokens: int = 4096, objectives: Objectives = PATIENT) -> Iterator[Host]:
    model = tiny() if not CUDA else _on_gpu(tiny())
    host = build.build_host(spec(kv_tokens), model, DEVICE, objectives, engine="graph")
    assert isinstance(host.engine, GraphEngine)
    host.start()
    try:
        yield host
    finally:
        host.close()


def _on_gpu(model: Any) -> Any:
    import copy

    return copy.deepcopy(model).to("cuda")


@contextmanager
def rollout(host: Host, frames: Frames) -> Iterator[RolloutTenant]:
    asked = rollout_spec()
    asked = type(asked)(**{**{f: getattr(asked, f) for f in asked.__struct_fields__}, "deterministic": False})
    tenant = RolloutTenant(host, make=lambda: build.build_rollout(host, asked, DEVICE, engine="graph"))
    tenant.start()
    tenant.attach(frames)
    swapped = threading.Event()
    until(lambda: tenant.built or tenant.failed, "the engine is built")
    assert tenant.failed is None
    tenant.swap(1, dict(rollout_model().state_dict()), lambda error: swapped.set() if error is None else None)
    assert swapped.wait(120)
    try:
        yield tenant
    finally:
        tenant.close()


def until(holds: Callable[[], object], what: str, timeout_s: float = 120.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < end_s, f"waited {timeout_s:g} s until {what}"
        time.sleep(0.005)


@contextmanager
def slow_serving(host: Host) -> Iterator[None]:
    """A step of serving takes 50 ms, so that this thread can look at what happens meanwhile."""
    step = host.engine.step
    host.engine.step = lambda *limits: (time.sleep(0.05), step(*limits))[1]
    try:
        yield
    finally:
        host.engine.step = step


def work(handle: int, max_tokens: int = 60) -> Work:
    prompt = array("I", [3 + (handle * 7 + n) % 150 for n in range(20)]).tobytes()
    return Work(handle=handle, prompt=prompt, position=0, seed=handle, max_tokens=max_tokens,
                sampling=Sampling(temperature=0.0), stop=())  # fmt: skip


def ask(host: Host, answers: Answers, ids: range, max_tokens: int = 40, prompt_tokens: int = 30) -> None:
    for n in ids:
        prompt = tuple(3 + (n * 5 + i) % 80 for i in range(prompt_tokens))
        how = Sampling(temperature=0.0)
        host.submit(Request(id=str(n), prompt=prompt, seed=n, max_tokens=max_tokens, sampling=how), answers)


def test_both_tenants_get_what_they_would_get_alone() -> None:
    alone, beside, frames = Answers(), Answers(), Frames()
    with graph_host() as host:
        ask(host, alone, range(6))
        until(lambda: len(alone.ended) == 6, "serving alone has ended")
        with rollout(host, frames) as tenant:
            tenant.add([work(n) for n in range(6)])
            until(lambda: host.metrics.rollout_tokens > 20, "the rollout generates")
            ask(host, beside, range(6))
            until(lambda: len(beside.ended) == 6 and len(frames.ended) == 6, "all have ended")
            assert host.engine.depth == 2, "serving is one launch ahead, with a rollout and without"
            engine: Any = tenant.engine
            assert engine.ready_weights.activation_s > 0
        assert host.rollout is None
        assert host.arena.blocks.held("rollout") == 0
    assert beside.tokens == alone.tokens or CUDA
    assert frames.tokens == generated(range(6)) or CUDA


def test_tokens_in_flight_arrive_although_serving_needs_the_device() -> None:
    """The rollout is one launch ahead when requests come that leave it no time."""
    answers, frames = Answers(), Frames()
    objectives = Objectives(ttft_s=60.0, tpot_s=20.0, max_slowdown=1e-9)
    with graph_host(objectives=objectives) as host, rollout(host, frames) as tenant:
        tenant.add([work(n, 90) for n in range(4)])
        until(lambda: tenant.engine.launched, "the rollout is ahead")
        with slow_serving(host):
            ask(host, answers, range(1), max_tokens=150)
            until(lambda: answers.tokens and not tenant.engine.launched, "its launches are collected")
            tokens = host.metrics.rollout_tokens
            time.sleep(0.1)
            assert not answers.ended
            assert host.metrics.rollout_tokens == tokens, "serving leaves it nothing"
        until(lambda: len(frames.ended) + len(frames.released) == 4, "the responses have ended, or were returned")
    want = generated(range(4), 90)
    assert CUDA or all(want[n][: len(tokens)] == tokens for n, tokens in frames.tokens.items())
    assert sum(map(len, frames.tokens.values())) == host.metrics.rollout_tokens


@pytest.mark.parametrize("paused", [False, True])
def test_tokens_arrive_although_nothing_can_be_launched(paused: bool) -> None:
    """All tokens of a response are in flight when the rollout is paused, or were collected for a swap when it has
    nothing else to do."""
    answers, frames = Answers(), Frames()
    objectives = Objectives(ttft_s=60.0, tpot_s=20.0, max_slowdown=1e-9)
    with graph_host(objectives=objectives) as host, rollout(host, frames) as tenant:
        engine: Any = tenant.engine

        def launch() -> None:
            tenant.pause(True)
            tenant.add([work(0, 4)])
            tenant._run_orders()
            engine.prefill_alone(False)
            assert not engine.step(64, 8)
            if not paused:
                tenant.engine.finish_launches()
                tenant.pause(False)

        with slow_serving(host):
            ask(host, answers, range(1), max_tokens=150)
            until(lambda: answers.tokens, "serving is busy")
            host.call(launch).result()
            until(lambda: frames.ended == {0}, "its tokens have arrived")
            assert not answers.ended
            assert not len(engine)
    assert frames.tokens == generated(range(1), 4)


def test_prompts_that_have_waited_come_before_decode_steps() -> None:
    with graph_host() as host, rollout(host, Frames()) as tenant:
        tenant.pause(True)
        tenant.add([work(0)])
        until(lambda: len(tenant.engine), "the order has run")

        def due(now_s: float) -> bool:
            return host.call(lambda: tenant._load(now_s).prefill_due).result()

        limit_s = rollout_tenant.PREFILL_S
        times = (0.0, 0.9 * limit_s, 1.1 * limit_s, 1.9 * limit_s, 2.1 * limit_s)
        assert [due(t) for t in times] == [False, False, True, True, False], "in turn, if there is never enough time"
        host.call(lambda: tenant._advance(8, 1, prefill=False)).result()
        assert due(3.1 * limit_s), "nothing was prefilled"
        host.call(lambda: tenant._advance(8, 1, prefill=True)).result()
        assert not due(3.1 * limit_s)
        assert due(4.2 * limit_s), "there is more to prefill"


def generated(handles: range, max_tokens: int = 60) -> dict[int, list[int]]:
    """What the rollout's model generates without a host."""
    reference = GraphEngine(rollout_model(), kv_tokens=2048, page_size=8)
    for n in handles:
        item = work(n)
        request = Request(id=str(n), prompt=tuple(array("I", item.prompt)), seed=n, max_tokens=max_tokens,
                          sampling=item.sampling)  # fmt: skip
        reference.add(request)
    want: dict[int, list[int]] = {}
    while len(reference):
        for chunk in reference.step():
            want.setdefault(int(chunk.id), []).extend(chunk.tokens)
    return want


def test_a_burst_of_serving_takes_the_memory_of_the_rollout() -> None:
    answers, frames = Answers(), Frames()
    with graph_host(kv_tokens=1600) as host, rollout(host, frames) as tenant:
        tenant.add([work(n, 90) for n in range(8)])
        until(lambda: host.arena.blocks.held("rollout") > 8, "the rollout holds memory")
        ask(host, answers, range(16), max_tokens=120)
        until(lambda: len(answers.ended) == 16, "serving has ended")
        assert all(len(t) == 120 for t in answers.tokens.values())
        assert host.policy.halvings == 1 or CUDA, "a GPU may have ended the rollout before"
        until(lambda: len(frames.ended) + len(frames.released) == 8, "every response has ended or was returned")
        assert frames.released or CUDA
        host.call(host.engine.check).result()
        host.call(host.arena.blocks.check).result()


def test_serving_takes_all_blocks_and_the_rollout_goes_on_with_the_next_version() -> None:
    answers, frames, again = Answers(), Frames(), Answers()
    with graph_host(kv_tokens=1600) as host, rollout(host, frames) as tenant:
        blocks = host.arena.blocks
        tenant.add([work(n, 90) for n in range(4)])
        ask(host, answers, range(16), max_tokens=40, prompt_tokens=110)  # more than all blocks together
        until(lambda: len(answers.ended) == 16, "serving has ended")
        assert {len(t) for t in answers.tokens.values()} == {40}
        until(lambda: len(frames.ended) + len(frames.released) == 4, "every response has ended or was returned")
        swapped = threading.Event()
        tenant.swap(2, dict(rollout_model().state_dict()), lambda error: swapped.set())
        assert swapped.wait(120)  # the next step of the run: the budget is computed again
        tenant.add([work(n) for n in range(10, 14)])
        until(lambda: frames.ended >= set(range(10, 14)), "the rollout goes on")
        ask(host, again, range(16), max_tokens=40, prompt_tokens=110)
        until(lambda: len(again.ended) == 16, "serving has ended")
        host.call(blocks.check).result()
    assert again.tokens == answers.tokens or CUDA
    made = {n: frames.tokens[n] for n in range(10, 14)}
    assert made == generated(range(10, 14)) or CUDA, "the weights are those that were loaded"


def test_a_load_that_another_one_replaces_is_not_activated() -> None:
    frames, go_on, ended = Frames(), threading.Event(), list[tuple[int, BaseException | None]]()
    with graph_host() as host, rollout(host, frames) as tenant:
        engine: Any = tenant.engine
        load, activated = engine.ready_weights.load, list[int]()

        def slow(version: int, weights: Any) -> None:
            assert version != 2 or go_on.wait(120)
            load(version, weights)

        engine.ready_weights.load = slow
        engine.ready_weights.activate = lambda: activated.append(engine.version)
        weights = dict(rollout_model().state_dict())
        tenant.swap(2, weights, lambda error: ended.append((2, error)))
        tenant.swap(3, weights, lambda error: ended.append((3, error)))
        until(lambda: ended, "version 3 is loaded")
        go_on.set()
        until(lambda: len(ended) == 2, "both have ended")
        assert dict(ended)[3] is None
        assert isinstance(dict(ended)[2], WindfallError)
        assert (engine.version, len(activated)) == (3, 1)


def test_rows_of_the_prefill_are_those_that_no_step_has_computed() -> None:
    with graph_host() as host:
        host.call(lambda: None).result()
        other = TorchEngine(tiny(), kv_tokens=512)
        request = Request(id="0", prompt=tuple(range(3, 33)), seed=0, max_tokens=8, sampling=Sampling(temperature=0.0))
        for engine in (other, host.engine):
            engine.add(request)
            assert engine.prefill_rows == 30
            while len(engine):
                engine.step(10, 1)
                assert engine.prefill_rows in (20, 19, 10, 9, 0)
            assert engine.prefill_rows == 0


def test_a_starved_lender_has_no_slots_until_serving_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_tenant, "STARVED_S", 0.1)
    monkeypatch.setattr(rollout_tenant, "LOOK_S", 0.02)
    monkeypatch.setattr(rollout_tenant, "REPORT_S", 0.02)
    answers, frames = Answers(), Frames()
    objectives = Objectives(ttft_s=60.0, tpot_s=20.0, max_slowdown=1e-9)
    with graph_host(objectives=objectives) as host, rollout(host, frames) as tenant:
        until(lambda: frames.slots and frames.slots[-1] > 0, "the run may use it")
        with slow_serving(host):
            ask(host, answers, range(2), max_tokens=100)
            until(lambda: len(answers.tokens) == 2, "both are running")
            tenant.add([work(n) for n in range(2)])
            until(lambda: sorted(frames.released) == [0, 1], "the responses are returned")
            assert not answers.ended
            reported = len(frames.slots)
            assert frames.slots[-1] == 0, "they would starve again"
            until(lambda: len(frames.slots) > reported + 3, "it is reported again")
            assert set(frames.slots[reported:]) == {0} or answers.ended
        until(lambda: len(answers.ended) == 2, "serving has ended")
        until(lambda: frames.slots[-1] > 0, "the run may use it again")


def test_a_failing_rollout_does_not_end_serving() -> None:
    answers, frames = Answers(), Frames()
    with graph_host() as host, rollout(host, frames) as tenant:
        engine: Any = tenant.engine

        def broken(*limits: int) -> Any:
            raise RuntimeError("an illegal memory access")

        engine.step = broken
        tenant.add([work(0)])
        until(lambda: tenant.failed is not None, "the rollout has failed")
        ask(host, answers, range(3))
        until(lambda: len(answers.ended) == 3, "serving goes on")
        assert host.failed is None
        assert host.arena.blocks.held("rollout") == 0


def test_lending_time_is_counted_for_every_running_request() -> None:
    objectives = Objectives(ttft_s=60.0, tpot_s=20.0, max_slowdown=0.15)
    answers, frames = Answers(), Frames()
    with graph_host(objectives=objectives) as host, rollout(host, frames) as tenant:
        tenant.add([work(n, 90) for n in range(4)])
        until(lambda: host.metrics.rollout_tokens > 40, "the rollout generates")
        steps = host.metrics.rollout_steps
        ask(host, answers, range(8), max_tokens=150)
        until(lambda: len(answers.ended) == 8, "serving has ended")
        assert host.metrics.rollout_waits > 0 or CUDA, "the rollout has to wait for credit"
        assert host.metrics.rollout_steps >= steps
