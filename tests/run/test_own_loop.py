"""A loop of one's own over the verbs, in one process: calls with an id, checkpoints, and the example."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from windfall.errors import WindfallError
from windfall.recipe.file import parse_recipe
from windfall.run.own_loop import OpenedPolicy, open_policy
from windfall.training import CheckpointState, Report, Sample, TrainerLost, samples_of

EXAMPLE = Path(__file__).parents[2] / "examples" / "rl_loop.py"


def play(folder: Path, loop: Callable[[OpenedPolicy], Awaitable[None]], **more: Any) -> None:
    recipe = parse_recipe(
        {
            "run": {"name": "own", "folder": str(folder), "device": "cpu", "threads": 1, "deterministic": True},
            "model": {"path": "tiny"},
            "rollout": {"groups": 2, "group_size": 4, "max_tokens": 24, "order": "context"},
            "train": {"lr": 1e-3},
        }
        | more,
        where="test",
    )

    async def run() -> None:
        async with open_policy(recipe) as opened:
            await loop(opened)

    asyncio.run(asyncio.wait_for(run(), 200))


async def samples(opened: OpenedPolicy, id: str) -> list[Sample]:
    """Four responses; every second one is rewarded."""
    responses = await opened.policy.sample(opened.text.prompt("37+58-12="), 4, id=id, max_tokens=24)
    return [s for n, r in enumerate(responses) for s in samples_of(r, 1.0 - 2 * (n % 2), 24)]


async def step(opened: OpenedPolicy, number: int, again: int = 1) -> Report:
    """A step whose calls are made `again` times each, with the same ids."""
    policy, made = opened.policy, await samples(opened, f"{number}")
    for _ in range(again):
        await policy.forward_backward(made, id=f"{number}/gradient")
    state = CheckpointState(step=number, next_task=number)
    reports = [await policy.optim_step(state, id=f"{number}/step") for _ in range(again)]
    published = [await policy.publish(id=f"{number}/publish") for _ in range(again)]
    assert len(set(map(repr, reports))) == 1
    assert [p.version for p in published] == [number] * again
    return reports[0]


def test_calls_that_are_repeated_with_their_ids_are_performed_once(tmp_path: Path) -> None:
    reports: dict[int, list[Report]] = {1: [], 3: []}
    for again, found in reports.items():

        async def loop(opened: OpenedPolicy, again: int = again, found: list[Report] = found) -> None:
            for number in (1, 2, 3):
                found.append(await step(opened, number, again))

        play(tmp_path / str(again), loop)
    without_memory = [[(r.tokens, r.grad_norm, r.entropy) for r in found] for found in reports.values()]
    assert without_memory[0] == without_memory[1]


def test_sample_with_an_id_that_was_used_returns_the_same_responses(tmp_path: Path) -> None:
    async def loop(opened: OpenedPolicy) -> None:
        prompt = opened.text.prompt("1+1=")
        first, second = await asyncio.gather(*(opened.policy.sample(prompt, 3, id="a", max_tokens=8) for _ in range(2)))
        assert [r.tokens for r in first] == [r.tokens for r in second]
        assert [r.id for r in first] == ["a/0", "a/1", "a/2"]
        other = await opened.policy.sample(prompt, 3, id="b", max_tokens=8)
        assert all(r.reward is None and r.tokens for r in other)

    play(tmp_path, loop)


def test_lengths_of_groups_are_learned_and_groups_forgotten(tmp_path: Path) -> None:
    async def loop(opened: OpenedPolicy) -> None:
        placement = opened.policy._dispatch.placement
        for n in range(3):
            await samples(opened, f"call {n}")
        assert (placement.lengths._groups_seen > 2, placement.lengths._groups, placement._tasks) == (True, {}, {})
        assert placement._by_context, "the order of the recipe"

    play(tmp_path, loop)


@pytest.mark.parametrize(
    ("changes", "where", "what"),
    [
        ({"engine": {"kv_dtype": "fp8"}}, "engine.kv_dtype", "cannot use a KV cache in fp8"),
        ({"train": {"ranks": 2}}, "train.ranks", "in its own process, alone"),
        ({"train": {"ranks": 2, "context_parallel": 2}}, "train.context_parallel", "in its own process, alone"),
        ({"train": {"rendezvous": "10.0.0.5:29400"}}, "train.rendezvous", "in its own process, alone"),
        ({"policies": {"a": {}, "b": {}}, "train": {"lora": {}}}, "policies", "has one policy"),
    ],
)
def test_what_needs_a_whole_run_is_refused(changes: dict[str, Any], where: str, what: str) -> None:
    async def run() -> None:
        async with open_policy(parse_recipe({"model": {"path": "tiny"}, **changes}, where="test")):
            raise AssertionError("opened")

    with pytest.raises(WindfallError, match=what) as e:
        asyncio.run(run())
    assert e.value.where == where
    assert e.value.fix


def test_adapters_are_trained_beside_their_base(tmp_path: Path) -> None:
    """With a KL penalty, whose reference is the base."""

    async def loop(opened: OpenedPolicy) -> None:
        reports = [await step(opened, n) for n in (1, 2)]
        assert [r.kl > 0 for r in reports] == [False, True], "the first adapter changes nothing"
        assert max(r.engine_gap for r in reports) < 1e-3, "the engine has the adapter"
        path = Path(await opened.policy.save(id="save"))
        assert (path / "adapter_model.safetensors").is_file()
        with pytest.raises(WindfallError, match="cannot load a checkpoint while it runs"):
            await opened.policy.load(str(path), id="load")

    play(tmp_path, loop, train={"lr": 1e-2, "lora": {"rank": 4}}, algorithm={"kl": 0.1})


def test_checkpoint_is_saved_and_loaded(tmp_path: Path) -> None:
    async def loop(opened: OpenedPolicy) -> None:
        policy = opened.policy
        await step(opened, 1)
        path = await policy.save(id="save")
        gaps = [await step(opened, 2), await step(opened, 3)]
        loaded = await policy.load(path, id="load")
        assert loaded.version == 1
        repeated = await step(opened, 2)
        assert (repeated.grad_norm, repeated.entropy) == (gaps[0].grad_norm, gaps[0].entropy)

    play(tmp_path, loop)


def test_publish_without_a_completed_step_is_refused(tmp_path: Path) -> None:
    async def loop(opened: OpenedPolicy) -> None:
        with pytest.raises((TrainerLost, WindfallError), match="no step was completed"):
            await opened.policy.publish(id="1/publish")

    play(tmp_path, loop)


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rl_loop", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["rl_loop"] = module
    spec.loader.exec_module(module)
    return module


def test_example_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rl_loop = example()
    arguments = "--steps 2 --groups 2 --group-size 4 --eval-tasks 4 --max-tokens 32 --folder"
    before, after = asyncio.run(rl_loop.run(rl_loop.parse_options([*arguments.split(), str(tmp_path)])))
    out = capsys.readouterr().out
    assert 0.0 <= before <= 1.0
    assert 0.0 <= after <= 1.0
    assert "step   2/2  reward" in out
    assert (tmp_path / "rl-loop" / "checkpoints" / "step-000002" / "model.safetensors").is_file()


def test_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 300
