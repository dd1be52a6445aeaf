"""The controller process ends with an error when something that it needs fails. No trainer, no workers."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import shutil
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.support.fleets.listening_controller import SPEC, Pulling
from tests.support.hostile.files import DAMAGES, FOREIGN_LINES, damage
from windfall import errors
from windfall import run_folder as folders
from windfall.controller import process as controller
from windfall.controller.fleet_report import read_history
from windfall.controller.ledger.journal_format import TurnGraded
from windfall.controller.process import ControllerProcess
from windfall.controller.tasks.admission import Admission
from windfall.controller.workers.members import WorkerState
from windfall.errors import WindfallError
from windfall.events.log import EventLog, read
from windfall.link import auth
from windfall.models import load
from windfall.recipe.file import load_recipe, parse_recipe
from windfall.recipe.sections import Recipe
from windfall.training import CheckpointState, TrainerLost
from windfall.types import Capabilities, Lease
from windfall.worker.controller_client import ControllerClient


def admission() -> Admission:
    return Admission(batch=2, steps=9)


class FullDisk(io.BytesIO):
    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def run(folder: Path, disturb: Callable[[ControllerProcess], Any]) -> ControllerProcess:
    """Run a controller until it ends; `disturb` is called soon."""
    auth.make_token(folder / "token")

    async def main() -> ControllerProcess:
        events = EventLog(folder / "events.jsonl")
        it = ControllerProcess(Recipe(), folder, events, resumed=False)
        asyncio.get_running_loop().call_later(0.1, disturb, it)
        async with asyncio.timeout(10):
            await errors.guard(it.run())
        events.close()
        return it

    return asyncio.run(main())


def stop(it: ControllerProcess) -> None:
    it.life.stop.set()


def test_stop_before_a_trainer_has_connected(tmp_path: Path) -> None:
    run(tmp_path, stop)
    assert [e["name"] for e in read(tmp_path / "events.jsonl")] == ["stopped", "end"]
    assert json.loads((tmp_path / "fleet.json").read_text())["ended"] == "stopped"


def test_each_policy_is_evaluated_on_as_many_tasks_as_it_asks_for(tmp_path: Path) -> None:
    auth.make_token(tmp_path / "token")
    policies = {"solver": {}, "verifier": {"eval": {"tasks": 0}}, "critic": {"eval": {"tasks": 3}}}
    recipe = parse_recipe({"policies": policies, "eval": {"tasks": 8}}, where="here")
    it = ControllerProcess(recipe, tmp_path, EventLog(tmp_path / "events.jsonl"), resumed=False)
    gate, tasks = SimpleNamespace(admissions=dict.fromkeys(policies, admission())), {}
    generation: Any = SimpleNamespace(gate=gate, groups={}, rollout=None)
    hello: Any = SimpleNamespace(micro_tokens=64)
    for name, policy in it.life.policies.items():
        policy._hello = hello
        policy.assemble(generation)
        assert policy.evaluation is not None
        tasks[name] = policy.evaluation._held_out.tasks if policy.evaluation.due(0) else 0
    assert tasks == {"solver": 8, "verifier": 0, "critic": 3}


def test_chat_arguments_that_the_template_does_not_read_are_named(tmp_path: Path) -> None:
    auth.make_token(tmp_path / "token")
    shutil.copytree(load.resolve("tiny"), tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text("{% if think %}...{% endif %}{{ messages[0].content }}")
    recipe = Recipe.model_validate({"chat": {"arguments": {"think": True, "thnik": True}}})
    events = EventLog(tmp_path / "events.jsonl")
    ControllerProcess(recipe, tmp_path, events, resumed=False)._text("")
    events.close()
    (warning,) = read(tmp_path / "events.jsonl")
    assert warning["why"] == "chat.arguments.thnik has no effect: no chat template reads it"


def test_history_is_read_in_little_memory(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    for step in (50, 100, 150, 200):
        log.scalar("eval", step=step, reward=0.5)
    log.scalar("step", step=200, lengths=[list(range(1000, 3000))], bill={"holders": {}})
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(200 * (tmp_path / "events.jsonl").read_bytes().splitlines(keepends=True)[-1])
    log.instant("resumed", step=150)
    log.close()
    log = EventLog(tmp_path / "events.jsonl")
    tracemalloc.start()
    try:
        history = read_history(log)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        log.close()
    assert history.evaluated == {"": {50, 100, 150}}
    assert history.billed_s == pytest.approx(time.monotonic(), abs=60.0)
    assert peak < 500_000 < (tmp_path / "events.jsonl").stat().st_size / 4


def test_foreign_lines_in_the_log_are_skipped(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.scalar("eval", step=0, reward=0.5)
    log.close()
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(b"".join(line + b"\n" for line in FOREIGN_LINES.values()))
    run(tmp_path, stop)
    assert [e["reward"] for e in read(tmp_path / "events.jsonl") if e["name"] == "eval"] == [0.5]


@pytest.mark.parametrize("name", ["address.json", "fleet.json"])
@pytest.mark.parametrize("kind", sorted(DAMAGES.keys() - {"a directory"}))
def test_damaged_files_of_the_previous_controller_are_replaced(tmp_path: Path, name: str, kind: str) -> None:
    (tmp_path / name).write_text(json.dumps({"url": "http://127.0.0.1:1", "port": 1, "pid": 1}))
    damage(tmp_path / name, kind)
    run(tmp_path, stop)
    assert folders.address(tmp_path) is not None
    assert json.loads((tmp_path / "fleet.json").read_text())["ended"] == "stopped"


def test_failed_watch_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def watch(self: object) -> None:
        await asyncio.sleep(0.1)
        raise OSError(errno.EIO, "disk failed")

    monkeypatch.setattr("windfall.controller.rollout.dispatch.Dispatch.watch", watch)
    with pytest.raises(OSError, match="disk failed"):
        run(tmp_path, lambda it: None)


def test_error_in_a_callback_ends_the_controller_with_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Earlier it was only logged, and the run hung or repeated the error."""

    async def tick(self: object) -> None:
        asyncio.get_running_loop().call_later(0.05, lambda: {}["unexpected"])
        await asyncio.sleep(60)

    monkeypatch.setattr("windfall.controller.assembly.ControllerLife.tick", tick)
    auth.make_token(tmp_path / "token")
    folders.write_recipe(Recipe(), tmp_path)
    assert controller.main(tmp_path) == 1
    report = folders.read_json(tmp_path / ".controller.failure")
    assert report is not None
    assert report["what"] == "the controller failed: KeyError: 'unexpected'"
    assert report["where"] == str(tmp_path / "controller.log")
    assert "Traceback (most recent call last)" in capfd.readouterr().err
    assert json.loads((tmp_path / "fleet.json").read_text())["ended"]


def test_error_while_serving_a_worker_ends_the_controller(tmp_path: Path) -> None:
    """The web server would only log it."""

    async def worker(link: object, attend: object) -> None:
        raise AssertionError("a rule is broken")

    def dials(it: ControllerProcess) -> None:
        monkey(it)
        url = json.loads((tmp_path / "address.json").read_text())["url"]
        agent = ControllerClient(
            url, "t", name="w", lease=Lease(), build=lambda spec: (None, 1), puller=Pulling(), say=print
        )
        tasks.append(asyncio.get_running_loop().create_task(agent.run()))

    def monkey(it: ControllerProcess) -> None:
        it.gate.worker = worker  # type: ignore[method-assign]

    tasks: list[Any] = []
    with pytest.raises(AssertionError, match="a rule is broken"):
        run(tmp_path, dials)


@pytest.mark.parametrize("failures", [5, 1000])
def test_snapshots_may_fail_a_few_times(tmp_path: Path, failures: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "SNAPSHOT_S", 0.01)
    tried, real = [0], folders.replace

    def replace(path: Path, text: str) -> None:
        if path.name == "fleet.json":
            tried[0] += 1
            if tried[0] <= failures:
                raise OSError(errno.ENOSPC, "No space left on device")
        real(path, text)

    def stop_later(it: ControllerProcess) -> None:
        if tried[0] > failures + 5:
            stop(it)
        else:
            asyncio.get_running_loop().call_later(0.05, stop_later, it)

    monkeypatch.setattr(folders, "replace", replace)
    if failures < controller.SNAPSHOT_TRIES:
        run(tmp_path, stop_later)
        return
    with pytest.raises(WindfallError, match="No space left on device") as caught:
        run(tmp_path, lambda it: None)
    assert caught.value.where == str(tmp_path / "fleet.json")


def test_journal_that_cannot_be_written_ends_the_run(tmp_path: Path) -> None:
    """The failure occurs in a callback, whose caller cannot see it."""

    def fill(it: ControllerProcess) -> None:
        it.journal.open(0)
        it.journal._file = FullDisk()
        it.journal.write_grade(TurnGraded(id="1/0", reward=1.0))
        it.dispatch._schedule_soon()

    with pytest.raises(WindfallError, match="cannot write the journal: No space left on device") as caught:
        run(tmp_path, fill)
    assert caught.value.where == str(tmp_path / "journal" / "000000.wal")


def test_event_log_that_cannot_be_written_ends_the_run(tmp_path: Path) -> None:
    def fill(it: ControllerProcess) -> None:
        it.events._file = io.TextIOWrapper(FullDisk())  # pyright: ignore
        asyncio.get_running_loop().call_soon(it.events.instant, "x")

    with pytest.raises(WindfallError, match="cannot write the event log") as caught:
        run(tmp_path, fill)
    assert caught.value.where == str(tmp_path / "events.jsonl")


def test_snapshot_has_the_newest_gone_workers(tmp_path: Path) -> None:
    def come_and_go(it: ControllerProcess) -> None:
        members = it.dispatch.members
        for n in range(200):
            members.join(f"w{n}", Lease(), 0.0)
            if n % 10:
                members.move(f"w{n}", WorkerState.GONE, "why")
        it._snapshot()
        workers = json.loads((tmp_path / "fleet.json").read_text())["workers"]
        shown.append([int(w["worker"][1:]) for w in workers])
        for n in range(0, 200, 10):
            members.move(f"w{n}", WorkerState.GONE, "why")
        stop(it)

    shown: list[list[int]] = []
    run(tmp_path, come_and_go)
    here, gone = list(range(0, 200, 10)), [n for n in range(200) if n % 10][-50:]
    assert shown == [sorted(here + gone)]


@pytest.mark.parametrize("another", [False, True])
def test_long_journal_is_read_without_blocking_the_loop(
    tmp_path: Path, another: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    auth.make_token(tmp_path / "token")
    hello: Any = SimpleNamespace(
        step=3, next_task=6, open_tasks=(), facts={"pid": 1}, digest="d", version=3, url="u", model="m",
        engine=SimpleNamespace(model_config="{}"), policy="", replay=(), selection=(),
    )  # fmt: skip

    async def main() -> None:
        it = ControllerProcess(Recipe(), tmp_path, EventLog(tmp_path / "events.jsonl"), resumed=False)
        rollout: Any = SimpleNamespace(history=None, contexts={})
        it.life.rollout, policy = rollout, it.life.lead
        policy.trainer.hello = policy._hello = hello
        find, go_on = it.journal.read, threading.Event()
        monkeypatch.setattr(it.journal, "read", lambda *at: go_on.wait(30) and find(*at))

        async def restore() -> CheckpointState:
            await it.life._reload()
            return await policy.restore(admission())

        connecting = asyncio.create_task(restore())
        for _ in range(6):
            await asyncio.sleep(0.01)
        assert not connecting.done()
        if another:
            it.trainer.hello = SimpleNamespace()  # pyright: ignore
        go_on.set()
        await asyncio.wait([connecting])
        if another:  # the first trainer's weights and step are no longer valid
            with pytest.raises(TrainerLost):
                connecting.result()
            assert it.dispatch.lead.offer is None
        else:
            assert connecting.result() == CheckpointState(step=3, next_task=6)
            assert rollout.history == {}
        it.journal.close()
        it.events.close()

    asyncio.run(main())


@pytest.mark.parametrize(("gap", "why"), [(0.07, "differed by 0.07 nats"), (float("nan"), "some were not finite")])
def test_run_goes_back_from_fp8_once_and_for_good(tmp_path: Path, gap: float, why: str) -> None:
    """Workers that join later get the new spec, and so do those of the next controller."""
    auth.make_token(tmp_path / "token")
    recipe = parse_recipe({"engine": {"kv_dtype": "fp8"}}, where="here")
    hello: Any = SimpleNamespace(model="m", policy="", engine=msgspec.structs.replace(SPEC, kv_dtype="fp8"))
    kinds: list[str] = []

    async def main() -> None:
        for resumed in (False, True):
            log = EventLog(tmp_path / "events.jsonl")
            it = ControllerProcess(recipe, tmp_path, log, resumed=resumed)
            it.trainer.hello = hello
            it.dispatch.members.join("w", Lease(), 0.0)
            it.dispatch.accounts.join(0.0, "w", kind="spot", usd_per_h=None, trainer=False)
            it.dispatch.members.join("lender", Lease(kind="borrowed"), 0.0, lends=True)
            it.dispatch.members.join("local-1", Lease(), 0.0).engine = Capabilities(name="cuda")
            it._set_terms(hello)
            for step in (1, 2):
                kinds.append(it.gate.terms[""].engine.kv_dtype)  # pyright: ignore
                it.life.leave_fp8(step, gap)
            draining = [w.id for w in it.dispatch.members.here() if w.state is WorkerState.DRAINING]
            assert draining == ([] if resumed else ["w"]), "a lender and the engine of a rank have no cache in fp8"
            it.journal.close()
            log.close()

    asyncio.run(main())
    assert kinds == ["fp8", "bf16", "bf16", "bf16"]
    (event,) = [e for e in read(tmp_path / "events.jsonl") if e["name"] == "kv_dtype"]
    assert (event["step"], event["kv_dtype"], event["gap"]) == (1, "bf16", 0.07 if gap == gap else None)
    assert why in event["why"]


@pytest.mark.parametrize(("logged", "gap"), [([], (1, 3)), ([1], (2, 3)), ([1, 2, 3], None)])
def test_steps_missing_from_the_log_are_reported_once(
    tmp_path: Path, logged: list[int], gap: tuple[int, int] | None
) -> None:
    auth.make_token(tmp_path / "token")
    log = EventLog(tmp_path / "events.jsonl")
    for step in logged:
        log.scalar("step", step=step)
    hello: Any = SimpleNamespace(
        step=3, next_task=6, open_tasks=(), facts={"pid": 1}, digest="d", version=3, url="u", model="m",
        engine=SimpleNamespace(model_config="{}"), policy="", replay=(), selection=(),
    )  # fmt: skip

    async def main() -> None:
        it = ControllerProcess(Recipe(), tmp_path, log, resumed=bool(logged))
        policy = it.life.lead
        policy.trainer.hello = policy._hello = hello
        await policy.restore(admission())
        await policy.restore(admission())
        it.journal.close()

    asyncio.run(main())
    log.close()
    gaps = [(e["first"], e["last"]) for e in read(tmp_path / "events.jsonl") if e["name"] == "log_gap"]
    assert gaps == ([gap] if gap else [])


@pytest.mark.parametrize(
    ("change", "void"),
    [("rollout.reward_timeout_s=9.0", False), ("rollout.reward_tries=9", False), ("train.micro_tokens=99", False),
     ("train.checkpoint_activations=true", False), ("train.engine_gap_alarm=0.01", False),
     ("train.engine_gap_limit=0.9", False), ("env.path='/moved.jsonl'", False), ("run.steps=99", False),
     ("run.device='cpu'", False), ("eval.tasks=3", False), ("run.seed=3", True), ("run.deterministic=true", True),
     ("model.dtype='bfloat16'", True), ("model.path='smollm2-135m'", True), ("env.rewards=['exact']", True),
     ("algorithm.kl=0.1", True), ("rollout.temperature=0.5", True), ("train.lr=0.5", True),
     ("rollout.staleness=2", False), ("rollout.on_new_weights='finish'", False)],
)  # fmt: skip
def test_journal_is_void_only_if_tokens_could_differ(tmp_path: Path, change: str, void: bool) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[env]\nname = "dataset"\npath = "rows.jsonl"\n')
    before, after = load_recipe(recipe), load_recipe(recipe, [change])
    assert before != after
    assert (controller.settings_digest(before) != controller.settings_digest(after)) is void
