"""Children of an engine group that die, freeze or cannot be built: no token is lost, and no process is left over. All
children are real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from tests.support.continuation import of_chunks
from tests.support.engine_groups import Case, Made, alive, asked, check, parent, spec_of, wait_for
from windfall.devices import Place
from windfall.engine.group import group as groups
from windfall.engine.group.group import EngineGroup
from windfall.engine.group.messages import ChildFailed
from windfall.errors import WindfallError


@pytest.mark.parametrize("whom", [*(pytest.param(w, marks=pytest.mark.slow) for w in ("one", "both")), "fork server"])
def test_killed_children_lose_no_token(case: Case, models: list[Any], whom: str) -> None:
    e, made, wanted = case.engine(models[0]), Made(), asked()
    for r in wanted:
        e.add(r)
    made.more(e, 40)
    pids, generated = case.pids(), e.counters.generated
    for pid in {"one": pids[:1], "both": pids, "fork server": [parent(pids[0])]}[whom]:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: made.step(e) or any(c.failures for c in e._children), "the group has noticed")
    e.check()
    made.finish(e)
    check(wanted, made, models)
    assert e.counters.generated >= generated
    killed = pids[:1] if whom == "one" else pids
    wait_for(lambda: e.step() or all(c.ready for c in e._children), "all children are back")
    assert set(case.pids()) & set(pids) == set(pids) - set(killed)
    made, again = Made(), asked(6)
    for r in again:
        e.add(r)
    assert all(len(c.responses) == 3 for c in e._children), "the new child works, too"
    made.finish(e)
    check(again, made, models)


@pytest.mark.parametrize("trainer_waits", [False, True])
def test_frozen_child_is_killed(
    case: Case, models: list[Any], monkeypatch: pytest.MonkeyPatch, trainer_waits: bool
) -> None:
    e, made, wanted = case.engine(models[0]), Made(), asked(4)
    monkeypatch.setattr(groups, "ORDER_S", 2.0)
    for r in wanted:
        e.add(r)
    made.more(e, 8)
    frozen = case.pids()[0]
    os.kill(frozen, signal.SIGSTOP)
    if trainer_waits:
        e.sleep()
        assert not any(c.lock.locked() for c in e._children)
    wait_for(lambda: made.step(e) or not alive(frozen), "it is killed")
    monkeypatch.undo()
    assert any("engine 0 of the trainer ended: it has not responded for 2 s" in line for line in case.said)
    case.said.clear()
    made.finish(e)
    check(wanted, made, models)


def test_response_canceled_while_no_child_is_there(case: Case, models: list[Any]) -> None:
    e, made, wanted = case.engine(models[0]), Made(), asked(3)
    for r in wanted:
        e.add(r)
    made.more(e, 6)
    for pid in case.pids():
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: e._unplaced, "its responses wait")
    assert e.counters.waiting >= 1
    e.cancel(wanted[0].id)
    made.finish(e)
    # It has no chunk if its child was slow to begin and the 6 tokens came from the other one.
    assert len(of_chunks(made.get(wanted[0].id, []))) < wanted[0].max_tokens
    check(wanted[1:], made, models)


@pytest.mark.slow
def test_child_that_cannot_be_built_ends_the_group_with_its_error(case: Case, models: list[Any]) -> None:
    case.engine(models[0])
    case._spec = None
    small = msgspec.structs.replace(spec_of(models[0]), kv_tokens=0, longest=1 << 40)
    with pytest.raises(WindfallError, match="one response may have") as e:
        case.group.build(small)
    assert e.value.where == "fleet.worker_memory"
    with pytest.raises(WindfallError, match="one response may have"):
        case.group.step()
    broken = msgspec.structs.replace(spec_of(models[0]), dtype="no_such_dtype")
    with pytest.raises(ChildFailed, match="no_such_dtype"):
        case.group.build(broken)
    assert case.engine(models[0]).slots == 32, "it can be built again"


@pytest.mark.slow
def test_child_that_dies_again_and_again_ends_the_group(
    case: Case, models: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    e = case.engine(models[0])
    case._spec = None
    drive = e._drive

    async def die(child: Any, link: Any) -> None:
        if child.number == 0:
            os.kill(link.handle.pid, signal.SIGKILL)
        await drive(child, link)

    monkeypatch.setattr(e, "_drive", die)
    os.kill(case.pids()[0], signal.SIGKILL)

    with pytest.raises(ChildFailed, match=r"engine 0 failed 4 times in a row: the process was killed \(SIGKILL\)"):
        wait_for(lambda: e.step() or time.sleep(0.01), "the group gives up")
    assert any("engine 0 of the trainer ended: the process was killed (SIGKILL)" in line for line in case.said)


ORPHANS = """
import sys, time
from pathlib import Path
from tests.support.continuation import versions
from tests.support.engine_groups import Case
case = Case(Path(sys.argv[1]))
case.engine(versions("llama", 1)[0])
print(*case.pids(), sep="\\n", flush=True)
time.sleep(600)
"""


def test_processes_die_with_the_trainer(tmp_path: Path) -> None:
    trainer = subprocess.Popen([sys.executable, "-c", ORPHANS, str(tmp_path)], stdout=subprocess.PIPE)
    assert trainer.stdout is not None
    pids = [int(trainer.stdout.readline()) for _ in range(2)]
    pids.append(parent(pids[0]))
    assert all(map(alive, pids))
    trainer.kill()
    wait_for(lambda: not any(map(alive, pids)), "the children and the fork server are gone")
    trainer.communicate()


@pytest.mark.slow
def test_close_ends_the_processes(tmp_path: Path, models: list[Any]) -> None:
    case = Case(tmp_path, children=1)
    case.engine(models[0])
    pids = [*case.pids(), parent(case.pids()[0])]
    case.close()
    assert not any(map(alive, pids))


STUCK = """
import os, pathlib, time
folder = pathlib.Path(os.environ["STUCK"])
with (folder / "starts").open("a") as file: file.write(f"{os.getpid()}\\n")
while not (folder / "go").exists(): time.sleep(0.01)
"""


@pytest.mark.slow
def test_fork_server_killed_while_it_starts_is_replaced(
    tmp_path: Path, models: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stuck_engine.py").write_text(STUCK)
    monkeypatch.setenv("STUCK", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    starts = tmp_path / "starts"
    group = EngineGroup([Place()], cast(Any, None), folder=tmp_path / "engines", modules=["stuck_engine"])
    building = threading.Thread(target=group.build, args=(spec_of(models[0]),), daemon=True)
    try:
        wait_for(lambda: starts.exists() and starts.read_text().count("\n") == 1, "the fork server starts")
        os.kill(int(starts.read_text()), signal.SIGKILL)
        building.start()
        wait_for(lambda: starts.read_text().count("\n") == 2, "another one starts")
        (tmp_path / "go").touch()
        wait_for(lambda: not building.is_alive(), "the engine is built")
        assert group.slots == 16
    finally:
        group.close()
