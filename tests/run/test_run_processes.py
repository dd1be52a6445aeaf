"""What the processes of a run are restarted for, and where they run."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from windfall import errors
from windfall import run_folder as folders
from windfall.devices import Place
from windfall.errors import WindfallError
from windfall.link import auth
from windfall.processes import process
from windfall.processes.process import Handle
from windfall.recipe.file import parse_recipe
from windfall.run import liveness
from windfall.run.run_processes import RunProcesses
from windfall.turns.client import DEVICES
from windfall.types import Lease


@pytest.fixture
def output(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What is shown."""
    out = io.StringIO()
    monkeypatch.setattr("tests.run.test_run_processes.show", lambda line: print(line, file=out))
    return out


def show(line: str) -> None:
    del line


def processes_of(folder: Path, gpus: int = 0, forks: Any = None, **sections: Any) -> RunProcesses:
    recipe = parse_recipe(sections, where="here")
    auth.make_token(folder / "token")
    places = [Place(device="cuda", gpu=str(n)) for n in range(gpus)]
    return RunProcesses(
        recipe, folder, forks, {}, notice=lambda line: show(line), on_event=lambda event: None, places=places
    )


def ends(*codes: int | OSError, then: Callable[[], None] = lambda: None) -> tuple[Callable[[], Any], list[int]]:
    """A function that starts processes that end with these statuses, and the number that it has started."""
    left, started = list(codes), [0]

    async def start() -> Handle:
        started[0] += 1
        code = left.pop(0)
        then()
        if isinstance(code, OSError):
            raise code
        handle = Handle(name="it", pid=1, send=lambda number: None)
        handle.ended(code)
        return handle

    return start, started


def test_killed_controller_is_restarted_and_ended_one_is_not(tmp_path: Path, output: io.StringIO) -> None:
    start, started = ends(-9, TimeoutError("waited 30 s for the fork server to fork it"), 0)
    asyncio.run(processes_of(tmp_path)._keep_running("controller", start))
    assert started == [3]
    assert "the controller was killed (SIGKILL); restarting it" in output.getvalue()
    assert "the controller could not be started: waited 30 s" in output.getvalue()


@pytest.mark.parametrize("role", ["controller", "trainer"])
@pytest.mark.parametrize("code", [0, -signal.SIGTERM, -signal.SIGKILL])
def test_nothing_is_restarted_while_stopping(tmp_path: Path, role: str, code: int) -> None:
    it = processes_of(tmp_path)
    start, started = ends(code, -9, -9, then=lambda: setattr(it, "stopping", True))
    asyncio.run(it._keep_running(role, start))
    assert started == [1]


def test_nothing_is_started_after_an_early_stop(tmp_path: Path) -> None:
    it = processes_of(tmp_path)
    it.stopping = True
    start, started = ends(0)
    asyncio.run(it._keep_running("controller", start))
    assert started == [0]


def test_error_without_a_report_shows_the_end_of_the_log(tmp_path: Path) -> None:
    (tmp_path / "trainer.log").write_text("much\n" * 50 + "ValueError: last word\n")
    with pytest.raises(WindfallError, match="last word"):
        asyncio.run(processes_of(tmp_path)._keep_running("trainer", ends(2)[0]))


def crash(folder: Path, what: str = "the trainer failed: OutOfMemoryError: CUDA out of memory") -> None:
    error = WindfallError(what, where="trainer.log", fix="Lower train.micro_tokens.")
    folders.fail(folder, "trainer", error)


def test_failed_trainer_is_restarted_and_the_cause_is_shown(
    tmp_path: Path, output: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "FIRST_DELAY_S", 0.001)
    it = processes_of(tmp_path)

    def happens() -> None:
        crash(tmp_path)
        if started[0] == 3:  # a step was completed since the last failure
            it._handle_line(json.dumps({"t": 1.0, "m": 1.0, "kind": "scalar", "name": "step", "step": 3}).encode())

    start, started = ends(*[1] * 9, then=happens)
    with pytest.raises(WindfallError, match=r"out of memory \(4 times in a row, with no new step") as failed:
        asyncio.run(it._keep_running("trainer", start))
    assert started == [2 + liveness.MAX_FAILURES]
    assert failed.value.fix == "Lower train.micro_tokens."
    assert output.getvalue().count("CUDA out of memory; restarting in ") == 1 + liveness.MAX_FAILURES
    assert "(failure 1 of 4)" in output.getvalue()


def test_error_that_the_user_must_fix_ends_the_run_at_once(tmp_path: Path) -> None:
    start, started = ends(2, 0, then=lambda: crash(tmp_path, "no such model"))
    with pytest.raises(WindfallError, match="no such model"):
        asyncio.run(processes_of(tmp_path)._keep_running("trainer", start))
    assert started == [1]


def test_failed_controller_is_not_restarted(tmp_path: Path) -> None:
    start, started = ends(1, 0)
    with pytest.raises(WindfallError, match="the controller ended with status 1"):
        asyncio.run(processes_of(tmp_path)._keep_running("controller", start))
    assert started == [1]


@pytest.mark.parametrize(
    ("role", "code", "limit"),
    [
        ("trainer", -6, liveness.MAX_FAILURES),
        ("trainer", -11, liveness.MAX_FAILURES),
        ("trainer", -9, liveness.MAX_KILLS),
        ("controller", -9, liveness.MAX_KILLS),
    ],
)
def test_process_that_always_dies_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str, code: int, limit: int
) -> None:
    """A signal is a failure, too: NCCL ends a process that waits too long with SIGABRT, the kernel one that needs too
    much memory with SIGKILL. How long each process lived does not matter."""
    monkeypatch.setattr(liveness, "FIRST_DELAY_S", 0.001)
    monkeypatch.setattr(liveness, "MAX_KILL_DELAY_S", 0.001)
    start, started = ends(*[code] * 99)
    with pytest.raises(WindfallError, match=rf"the {role} was killed \(SIG.*\) \({limit} times in a row, with no new"):
        asyncio.run(processes_of(tmp_path)._keep_running(role, start))
    assert started == [limit]


@pytest.mark.parametrize("role", ["controller", "trainer"])
def test_kills_with_steps_in_between_do_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    monkeypatch.setattr(liveness, "MAX_KILL_DELAY_S", 0.001)
    it = processes_of(tmp_path)

    def happens() -> None:
        it._newest_steps = {"": started[0] // 10}
        it.stopping = started[0] == 3 * liveness.MAX_KILLS

    start, started = ends(*[-9] * 99, then=happens)
    asyncio.run(it._keep_running(role, start))
    assert started == [3 * liveness.MAX_KILLS]


@pytest.mark.parametrize("role", ["controller", "trainer"])
def test_process_that_is_stopped_while_it_starts_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: io.StringIO, role: str
) -> None:
    """It has neither connected nor written a snapshot. One that only takes long to start is left alone."""
    monkeypatch.setattr(liveness, "CHECK_S", 0.01)
    monkeypatch.setattr(liveness, "FROZEN_S", 0.1)

    async def main() -> None:
        it = processes_of(tmp_path)
        start = {"argv": ["sleep", "600"], "env": dict(os.environ), "log": tmp_path / "log"}
        frozen, slow = (process.start(name=name, **start) for name in (role, "rank-1"))
        it._controller, ranks = (frozen, [slow]) if role == "controller" else (None, [frozen, slow])
        it._ranks = {"": ranks}
        watching = asyncio.create_task(it._watch())
        try:
            os.kill(frozen.pid, signal.SIGSTOP)
            async with asyncio.timeout(60):
                assert await frozen.wait() == -signal.SIGKILL
            assert slow.running
        finally:
            watching.cancel()
            for handle in (frozen, slow):
                await handle.terminate(0.0)

    asyncio.run(main())
    assert output.getvalue() == f"the {role} has been frozen for 0.1 s; killing it\n"


@pytest.mark.parametrize("pid", [1234, 999])
def test_frozen_trainer_is_killed_only_if_we_started_it(tmp_path: Path, pid: int, output: io.StringIO) -> None:
    async def main() -> list[int]:
        sent: list[int] = []
        it = processes_of(tmp_path)
        it._kill_frozen_trainer()  # nothing was reported
        it._trainers[""] = Handle(name="trainer", pid=1234, send=sent.append)
        (tmp_path / ".trainer.frozen").write_text(json.dumps({"pid": pid}))
        it._kill_frozen_trainer()
        assert not (tmp_path / ".trainer.frozen").exists()
        return sent

    assert asyncio.run(main()) == ([signal.SIGKILL] if pid == 1234 else [])


POLICIES = {"a": {"lora": {"rank": 4}}, "b": {"lora": {"rank": 4}}, "c": {}, "d": {"model": "x", "frozen": True}}


def test_every_base_has_a_trainer_of_its_own(tmp_path: Path) -> None:
    """Each with its part of the GPUs, its own log, and its own place where its ranks meet."""
    started: list[tuple[str, list[str], str, str, str]] = []

    class Forks:
        async def start(self, *, name: str, argv: list[str], env: dict[str, str], log: Path) -> Handle:
            meeting = env["WINDFALL_RENDEZVOUS"].rpartition("/")[2].partition(".ranks-")[2].partition(".")[0]
            started.append((name, argv[3:], env.get("CUDA_VISIBLE_DEVICES", ""), log.name, meeting))
            return Handle(name=name, pid=len(started), send=lambda number: None)

    it = processes_of(tmp_path, 4, Forks(), policies=POLICIES)

    async def main() -> None:
        for base in it.recipe.bases():
            handle = await it._start_trainer(base)
            assert handle.name == f"trainer-{base}"

    asyncio.run(main())
    assert started == [
        ("trainer-a", ["a"], "0", "trainer-a.log", "trainer-a"),
        ("rank-1-a", ["a"], "1", "rank-1-a.log", "trainer-a"),
        ("trainer-c", ["c"], "2", "trainer-c.log", "trainer-c"),
        ("rank-1-c", ["c"], "3", "rank-1-c.log", "trainer-c"),
        ("trainer-d", ["d"], "", "trainer-d.log", ""),
    ]
    assert [[handle.name for handle in ranks] for ranks in it._ranks.values()] == [
        ["trainer-a", "rank-1-a"], ["trainer-c", "rank-1-c"], ["trainer-d"],
    ]  # fmt: skip


def test_trainer_of_a_base_is_restarted_by_the_steps_of_all_policies(
    tmp_path: Path, output: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "FIRST_DELAY_S", 0.001)
    it = processes_of(tmp_path, policies=POLICIES)

    def happens() -> None:
        folders.fail(tmp_path, "trainer-a", WindfallError("out of memory"))
        folders.fail(tmp_path, "trainer-c", WindfallError("of another trainer"))
        if started[0] in (2, 3):  # two policies make their first step
            event = {"t": 1.0, "m": 1.0, "kind": "scalar", "name": "step", "step": 1, "policy": "abc"[started[0] - 2]}
            it._handle_line(json.dumps(event).encode())

    start, started = ends(*[1] * 9, then=happens)
    with pytest.raises(WindfallError, match=r"out of memory \(4 times in a row, with no new step"):
        asyncio.run(it._keep_running("trainer-a", start))
    assert started == [2 + liveness.MAX_FAILURES]
    assert "of another trainer" not in output.getvalue()


class Starts:
    """Takes the place of a ForkClient: records what was started. `fails`: the next start raises."""

    def __init__(self) -> None:
        self.handles: dict[str, Handle] = {}
        self.started: dict[str, tuple[str, str, str]] = {}
        self.devices: dict[str, str] = {}
        self.fails = False

    async def start(self, *, name: str, argv: list[str], env: dict[str, str], log: Path) -> Handle:
        del log
        if self.fails:
            raise OSError("too many processes")
        self.devices[name] = env.get(DEVICES, "")
        options = ("--device", "--memory")
        device, memory = (argv[argv.index(option) + 1] if option in argv else "" for option in options)
        self.started[name] = (env.get("CUDA_VISIBLE_DEVICES", "all"), device, memory)
        self.handles[name] = Handle(name=name, pid=len(self.handles), send=lambda number: None)
        return self.handles[name]


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_workers_spread_over_the_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """The trainer has the first GPU. A worker that ends, or is not started, leaves its place."""

    async def main() -> None:
        (tmp_path / "workers").mkdir()
        sections = {"run": {"device": device}, "fleet": {"workers": 3}, "train": {"ranks": 1}}
        client = Starts()
        it = processes_of(tmp_path, 2, client, **sections)

        async def url() -> str:
            return "http://127.0.0.1:1"

        monkeypatch.setattr(it, "_controller_url", url)
        await it._providers()
        local: Any = it._scaled["local"]
        client.fails = True
        with pytest.raises(OSError, match="too many"):
            await local.spawn("w1.1", Lease())
        client.fails = False
        for name in ("w1.2", "w2.1", "w3.1"):
            await local.spawn(name, Lease())
        client.handles["w2.1"].ended(-9)
        await asyncio.sleep(0)
        await local.spawn("w2.2", Lease())
        assert client.started == {
            "w1.2": ("1", device, "0.2"), "w2.1": ("0", device, "0.4"), "w3.1": ("1", device, "0.2"),
            "w2.2": ("0", device, "0.4"),
        }  # fmt: skip

    asyncio.run(main())


def test_workers_avoid_the_gpus_of_all_ranks(tmp_path: Path) -> None:
    it = processes_of(tmp_path, 4, fleet={"workers": 2}, train={"ranks": 2})
    assert [it._gpus.assign(name) for name in ("w1", "w2")] == [2, 3]


# the reader of the event log

EVENT = b'{"t": 1.0, "m": 1.0, "kind": "scalar", "name": "step", "step": 3}\n'


def test_error_in_the_log_reader_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    it = processes_of(tmp_path)

    def fails(line: bytes) -> None:
        raise RuntimeError(f"unexpected {len(line)} bytes")

    async def main() -> None:
        async with it._reading_events():
            (tmp_path / "events.jsonl").write_bytes(EVENT)
            await asyncio.sleep(30)

    monkeypatch.setattr(it, "_handle_line", fails)
    with pytest.raises(RuntimeError, match="unexpected"):
        asyncio.run(asyncio.wait_for(errors.guard(main()), 240))


def test_event_log_that_is_unreadable_for_a_moment_is_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: io.StringIO
) -> None:
    it, path, fails = processes_of(tmp_path), tmp_path / "events.jsonl", [True, True]
    real = Path.open

    def opens(self: Path, *args: Any, **options: Any) -> Any:
        if self == path and fails:
            fails.pop()
            raise OSError(5, "Input/output error")
        return real(self, *args, **options)

    async def main() -> None:
        async with it._reading_events():
            path.write_text(EVENT.decode())
            monkeypatch.setattr(Path, "open", opens)
            async with asyncio.timeout(10):
                while it._newest_steps != {"": 3}:
                    await asyncio.sleep(0.01)

    asyncio.run(errors.guard(main()))


def test_advice_is_acted_on_at_the_source_that_it_is_about(tmp_path: Path) -> None:
    kind = "spot cpu at $2.00/h"

    async def main() -> dict[str, int]:
        sources = {"slurm": {"workers_max": 9, "price_usd_per_h": 2.0}, "ray": {"workers": 2}}
        it = processes_of(tmp_path, fleet={"host": "0.0.0.0", "max_usd_per_h": 10.0, **sources})
        await it._providers()
        for step in (1, 2):
            row = {"worker": "slurm1.1-r1#2", "state": "ready", "lease": kind, "kind": "spot", "price_usd_per_h": 2.0}
            advice = [{"lease": kind, "now": 1, "count": 30, "why": ""}]
            it._autoscale({"advised": step, "workers": [row], "advice": advice})
        return {name: provider._count for name, provider in it._scaled.items()}  # pyright: ignore

    assert asyncio.run(main()) == {"slurm": 5, "ray": 2}


def test_processes_on_shared_devices_know_their_names(tmp_path: Path) -> None:
    """Rank 0 takes the turns of all devices of its trainer; a worker those of its own."""
    client: Any = Starts()
    places = [Place(device="cpu", name=f"cpu{n}") for n in range(3)]
    recipe = parse_recipe({"run": {"device": "cpu"}, "fleet": {"workers": 2}, "train": {"ranks": 2}}, where="here")
    auth.make_token(tmp_path / "token")
    it = RunProcesses(
        recipe, tmp_path, client, {}, notice=show, on_event=lambda event: None, places=places, trainer_places=places[:2]
    )

    async def main() -> None:
        (tmp_path / "workers").mkdir()
        it._controller_url = url  # pyright: ignore
        await it._start_trainer("")
        await it._providers()
        await it._scaled["local"].spawn("w1.1", Lease())  # pyright: ignore

    async def url() -> str:
        return "http://127.0.0.1:1"

    asyncio.run(main())
    assert client.devices == {"trainer": "cpu0,cpu1", "rank-1": "cpu0,cpu1", "w1.1": "cpu2"}
