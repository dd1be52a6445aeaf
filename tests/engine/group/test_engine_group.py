"""An engine group beside a single engine: the contract of engines, swaps and sleep. All children are real
processes. Not covered: GPUs."""

from __future__ import annotations

import copy
import os
import queue
import signal
import threading
import time
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.engine import test_contract as contract
from tests.support.continuation import versions, weights
from tests.support.engine_groups import WAIT_S, Case, Made, asked, check, cpu_s, spec_of, wait_for
from tests.support.small_models import build, drain, engine, requests, tokens
from windfall.engine.base import Counters
from windfall.engine.engine_thread import EngineThread
from windfall.engine.group import group as groups
from windfall.errors import WindfallError
from windfall.link.messages import Work, columns
from windfall.trainer.own_engine.trainer_engine import TrainerEngine, TrainerTurn
from windfall.types import Chunk
from windfall.weights.merged import LORA_A, LORA_B, WEIGHT, MergedWeights


@pytest.fixture
def contracts(case: Case, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The tests of the contract, with a group instead of an engine."""

    def make(model: Any, *, deterministic: bool = False, **options: Any) -> Any:
        return case.engine(model, deterministic=deterministic, **options)

    monkeypatch.setattr(contract, "engine", make)
    return contract


def test_contract_of_engines(contracts: Any, models: list[Any]) -> None:
    plain, model = build("llama"), models[0]
    contracts.test_greedy_equals_transformers_generate(plain, model, True)
    contracts.test_logprobs_agree_with_transformers(plain, model, True, 0.7)
    contracts.test_response_ends_with_its_stop_token(model)
    wanted = requests(3, longest=20)
    expected = {id: tokens(chunks) for id, chunks in drain(engine(model, deterministic=True), wanted).items()}
    contracts.check_every_method(contracts.engine(model, deterministic=True), expected)


@pytest.mark.slow
def test_contract_under_pressure(contracts: Any, models: list[Any]) -> None:
    """The engines of the children are those of engine/test_contract.py, and test_children_lost.py cancels."""
    contracts.test_cancel_at_any_token_frees_pages_and_does_not_affect_others(models[0], True)
    contracts.test_evicted_requests_generate_the_same_tokens(models[0], True)


@pytest.mark.parametrize(
    "parameters", contract.test_bad_requests_are_rejected_without_side_effects.pytestmark[0].args[1]
)
def test_bad_requests_are_rejected(contracts: Any, models: list[Any], parameters: Any) -> None:
    contracts.test_bad_requests_are_rejected_without_side_effects(models[0], *parameters)


def test_tokens_are_those_of_one_engine_and_both_children_work(case: Case, models: list[Any]) -> None:
    e, made, wanted = case.engine(models[0]), Made(), asked(10)
    before = e.counters
    for r in wanted:
        e.add(r)
    assert [len(c.responses) for c in e._children] == [5, 5]
    assert (e.slots, e.limit) == (32, 4095)
    made.finish(e)
    check(wanted, made, models)
    generated = e.counters.generated - before.generated
    assert generated == sum(r.max_tokens for r in wanted)
    assert e.step() == []


def test_running_responses_continue_with_the_new_weights(case: Case, models: list[Any]) -> None:
    e, made, wanted = case.engine(models[0]), Made(), asked()
    for r in wanted:
        e.add(r)
    for version in (1, 2):
        made.more(e, 30)
        case.publish(version, models[version].state_dict())
        e.swap(version)
        assert e.version == version
        e.check()
    made.finish(e)
    assert {c.version for chunks in made.values() for c in chunks} == {0, 1, 2}
    check(wanted, made, models)


def test_weights_that_are_not_published_or_do_not_fit_change_nothing(case: Case, models: list[Any]) -> None:
    e, made, wanted = case.engine(models[0]), Made(), asked(4)
    for r in wanted:
        e.add(r)
    made.more(e, 8)
    with pytest.raises(WindfallError, match="does not publish version 7"):
        e.swap(7)
    made.more(e, 8)
    case.publish(1, {**weights(models[1]), "model.norm.weight": torch.zeros(1)})
    with pytest.raises(WindfallError, match="wrong shape"):
        e.swap(1)
    assert e.version == 0
    made.finish(e)
    check(wanted, made, models)


def test_version_that_is_overwritten_while_it_is_loaded(case: Case, models: list[Any]) -> None:
    """The copy may be a mixture: nothing is generated with it. The next version is loaded as a whole."""
    e, made, wanted = case.engine(models[0]), Made(), asked(4)
    for r in wanted:
        e.add(r)
    made.more(e, 8)
    case.publish(1, models[1].state_dict())
    calls = 0

    def find(version: int) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:  # opened; now one child has copied it
            case.publisher.publish(2, models[1].state_dict())
            case.publisher.publish(3, models[2].state_dict())
        return case.publisher.find(version)

    case.find = find
    try:
        with pytest.raises(RuntimeError, match="version 1 was overwritten"):
            e.swap(1)
        made.step(e)  # what had arrived before
        before = made.tokens()
        for _ in range(3):
            made.step(e)
        assert made.tokens() == before
    finally:
        case.find = lambda version: case.publisher.find(version)
    e.swap(3)
    made.finish(e)
    assert {c.version for chunks in made.values() for c in chunks} == {0, 3}
    check(wanted, made, [models[0], models[1], models[1], models[2]])


def test_sleep_loses_no_token(case: Case, models: list[Any]) -> None:
    e, made, wanted = case.engine(models[0]), Made(), asked(6)
    for r in wanted:
        e.add(r)
    for _ in range(3):
        made.more(e, 12)
        e.sleep()
        assert not any(c.held for c in e._children)
        e.sleep()
        e.check()
    made.more(e, 12)
    e.sleep()
    case.publish(1, models[1].state_dict())
    e.swap(1)
    made.finish(e)
    assert {c.version for chunks in made.values() for c in chunks} == {0, 1}
    check(wanted, made, models)


def test_version_overwritten_during_sleep_waits_for_the_next_swap(case: Case, models: list[Any]) -> None:
    e, made, wanted = case.engine(models[0]), Made(), asked(2)
    for r in wanted:
        e.add(r)
    made.more(e, 4)
    e.sleep()
    for version in (1, 2):
        case.publish(version, models[version].state_dict())
    made.step(e)  # what had arrived before
    before = made.tokens()
    for _ in range(3):
        made.step(e)
    assert made.tokens() == before
    e.swap(2)
    made.finish(e)
    check(wanted, made, models)


def test_paused_and_idle_children_use_no_cpu(case: Case, models: list[Any]) -> None:
    e, made = case.engine(models[0]), Made()
    for r in asked(4, tokens=100):
        e.add(r)
    made.more(e, 10)

    def used_s(seconds: float = 1.0) -> float:
        before = [*map(cpu_s, case.pids()), time.thread_time(), time.process_time()]
        time.sleep(seconds)
        after = [*map(cpu_s, case.pids()), time.thread_time(), time.process_time()]
        return sum(after) - sum(before)

    e.pause()
    steps = e.counters.steps
    assert used_s() <= 0.05, "paused"
    assert e.counters.steps == steps
    made.more(e, 10)
    for r in list(e._responses):
        e.cancel(r)
    e.pause()
    assert used_s() <= 0.05, "idle"


def test_children_stop_soon_if_nothing_takes_their_tokens(case: Case, models: list[Any]) -> None:
    e, made = case.engine(models[0]), Made()
    for r in asked(4, tokens=100):
        e.add(r)
    made.more(e, 10)
    wait_for(lambda: len(e._arrived) == 2 * groups.WINDOW, "all windows are full")
    steps = e.counters.steps
    time.sleep(0.3)
    assert e.counters.steps == steps
    e.check()


def adapters(model: Any, seed: int, rank: int = 2) -> dict[str, torch.Tensor]:
    """An adapter of some of the model's matrices, large enough to change what is generated."""
    random = torch.Generator().manual_seed(seed)
    out = {}
    for name, weight in model.state_dict().items():
        if name.endswith(("q_proj.weight", "down_proj.weight")):
            for part, shape in ((LORA_A, (rank, weight.shape[1])), (LORA_B, (weight.shape[0], rank))):
                out[name.removesuffix(WEIGHT) + part] = torch.randn(shape, generator=random) * 0.3
    return out


def merge(model: Any, change: dict[str, torch.Tensor]) -> Any:
    merged = copy.deepcopy(model)
    merged.load_state_dict(dict(MergedWeights(model.state_dict(), change, 0.5)))
    return merged


def test_adapters_are_merged(case: Case, models: list[Any]) -> None:
    changes = [adapters(models[0], seed) for seed in range(3)]
    merged = [merge(models[0], change) for change in changes]
    e, made, wanted = case.adapted_engine(models[0], changes[0], 0.5), Made(), asked(4)
    for r in wanted:
        e.add(r)
    for version in (1, 2):
        made.more(e, 16)
        e.sleep()
        made.more(e, 16)
        e.sleep()
        case.publisher.publish(version, changes[version], base=case.base.manifest.digest, scale=0.5)
        e.swap(version)
    made.finish(e)
    assert {c.version for chunks in made.values() for c in chunks} == {0, 1, 2}
    check(wanted, made, merged)


def test_trainer_and_children_take_turns(case: Case, models: list[Any]) -> None:
    """A trainer's thread takes its turn again and again: while it has it, no child makes a step. Each second time it
    frees the memory, and in the end it publishes a new version."""
    group = case.engine(models[0])
    turn = TrainerTurn(group.pause)
    published = SimpleNamespace(version=0)
    e = TrainerEngine(group, turn.engines, published=lambda: published, share_memory=True)
    e.swap(0)
    made, wanted, overlaps = Made(), asked(6), list[int]()
    for r in wanted:
        e.add(r)
    more = [threading.Event() for _ in range(8)]

    def train() -> None:
        for n, event in enumerate(more):
            event.wait(60.0)
            with turn:
                if n % 2:
                    e.make_room()
                steps = group.counters.steps
                time.sleep(0.05)
                overlaps.append(group.counters.steps - steps)
                if n == 6:
                    e.invalidate()
                    case.publish(1, models[1].state_dict())
                    published.version = 1

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    for event in more[:7]:
        made.more(e, 8)
        event.set()
    wait_for(lambda: made.step(e) or len(overlaps) >= 7, "the update")
    for _ in range(5):
        made.step(e)
    before = made.tokens()
    made.step(e)
    assert (made.tokens(), e.waiting) == (before, True), "nothing is generated between an update and its load"
    e.swap(1)
    made.more(e, 8)
    more[7].set()
    thread.join(60.0)
    made.finish(e)
    assert overlaps == [0] * 8
    assert {c.version for chunks in made.values() for c in chunks} == {0, 1}
    check(wanted, made, models)


def test_group_behind_the_thread_of_an_engine(case: Case, models: list[Any]) -> None:
    """As the trainer wires it: it is built in the engine's thread, and the controller sees one worker. While the
    controller pauses that worker, nothing is generated; a child that is killed does not show."""
    turn, frames, errors = TrainerTurn(case.group.pause), queue.SimpleQueue[Any](), queue.SimpleQueue[Any]()
    case._spec = None

    def make() -> tuple[Any, int]:
        with turn.engines:
            slots = case.group.build(spec_of(models[0]))
        return TrainerEngine(case.group, turn.engines, share_memory=True), slots

    case.publish(0, models[0].state_dict())
    host = EngineThread(None, make=make)
    host.start()
    host.attach(frames.put)
    host.swap(0, None, errors.put)
    assert errors.get(timeout=WAIT_S) is None
    assert (host.slots, host.longest) == (32, 4095)
    wanted, made = asked(6, tokens=60), Made()
    host.add(
        Work(
            handle=int(r.id), prompt=array("I", r.prompt).tobytes(), position=r.position, seed=r.seed,
            max_tokens=r.max_tokens, sampling=r.sampling, stop=tuple(r.stop),
        )
        for r in wanted
    )  # fmt: skip

    def take(count: int) -> None:
        for _ in range(count):
            frame = frames.get(timeout=WAIT_S)
            for n, (handle, position, token, logprob) in enumerate(
                zip(frame.handles, frame.positions, *columns(frame), strict=True)
            ):
                finish = frame.finished.get(n)
                chunk = Chunk(
                    id=str(handle), position=position, tokens=(token,), logprobs=(logprob,), version=frame.version,
                    finish=finish,
                )  # fmt: skip
                made.setdefault(chunk.id, []).append(chunk)

    take(10)
    os.kill(case.pids()[1], signal.SIGKILL)
    take(10)
    host.pause(True)
    with turn:
        pass
    steps = case.group.counters.steps
    time.sleep(0.2)
    assert case.group.counters.steps == steps
    host.pause(False)
    case.publish(1, models[1].state_dict())
    host.swap(1, None, errors.put)
    assert errors.get(timeout=WAIT_S) is None
    while host.stats().running or not frames.empty():
        take(1)
    host.close()
    assert host.failed is None
    assert {c.version for chunks in made.values() for c in chunks} == {0, 1}
    check(wanted, made, models)


def test_counters_of_all_children_are_added(case: Case, models: list[Any]) -> None:
    e = case.engine(models[0], max_running=2)
    for r in asked(8, tokens=6):
        e.add(r)
    made, seen = Made(), list[Counters]()
    while len(e):
        made.step(e)
        seen.append(e.counters)
    assert max(c.waiting for c in seen) >= 2, "the responses without a slot in both children"
    assert [c.steps for c in seen] == sorted(c.steps for c in seen)
    assert seen[-1].waiting == 0


def test_sleep_gives_memory_back(case_without_free_memory: Case) -> None:
    """Weights of 50 MB in each child. Pages of the KV cache take no memory on a CPU before they are used."""
    case = case_without_free_memory
    shape: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4}
    config = LlamaConfig(
        vocab_size=4000, num_attention_heads=8, num_key_value_heads=8, tie_word_embeddings=True, **shape
    )
    e, request = case.engine(LlamaForCausalLM(config).eval()), asked(1)[0]
    nbytes = case.publisher.readable[0].manifest.nbytes

    def memory() -> list[int]:
        """Bytes of each child that are not shared with other processes."""
        status = [Path(f"/proc/{pid}/status").read_text() for pid in case.pids()]
        return [1024 * int(next(x for x in s.splitlines() if x.startswith("RssAnon")).split()[1]) for s in status]

    before, made = memory(), Made()
    e.sleep()
    for full, asleep in zip(before, memory(), strict=True):
        assert full - asleep > 0.9 * nbytes
    small = memory()
    e.add(request)
    made.more(e, 2)
    assert all(awake - asleep > 0.9 * nbytes for asleep, awake in zip(small, memory(), strict=True))


@pytest.mark.slow
def test_greedy_tokens_of_another_architecture(case: Case) -> None:
    (model,) = versions("qwen3", 1)
    e, made, wanted = case.engine(model, deterministic=False), Made(), asked(4, tokens=8)
    for r in wanted:
        e.add(r)
    made.finish(e)
    alone = drain(engine(model), wanted)
    assert [tokens(made[r.id]) for r in wanted] == [tokens(alone[r.id]) for r in wanted]
