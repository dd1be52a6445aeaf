"""What the supervisor restarts, how it stops, and what it shows. Some tests start real runs."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console as Terminal

from tests.support.hostile.files import DAMAGES, FOREIGN_LINES, damage
from windfall import run_folder as folders
from windfall.devices import Place
from windfall.link import auth, invitation
from windfall.processes import fork_client, process
from windfall.processes.process import Handle
from windfall.recipe.file import parse_recipe
from windfall.run.supervisor import Supervisor
from windfall.run.views.console import Console


@pytest.fixture
def output(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    out = io.StringIO()
    monkeypatch.setattr("windfall.run.views.console.Terminal", lambda **o: Terminal(**o, file=out, width=300))
    return out


def supervisor_of(folder: Path, gpus: int = 0, **sections: Any) -> Supervisor:
    recipe = parse_recipe(sections, where="here")
    auth.make_token(folder / "token")
    places = [Place(device="cuda", gpu=str(n)) for n in range(gpus)]
    return Supervisor(recipe, folder, Console(recipe, folder), places)


def test_supervised_run_asks_for_no_workers(tmp_path: Path, output: io.StringIO) -> None:
    (tmp_path / "address.json").write_text(json.dumps({"url": "http://127.0.0.1:81", "port": 81, "pages": ["/page"]}))
    supervisor_of(tmp_path, sft={"path": "rows.jsonl"})._show_how_to_join()
    assert "watch the run: http://127.0.0.1:81/page?key=" in output.getvalue()
    assert "worker" not in output.getvalue()


def test_console_shows_how_to_join_without_the_token(
    tmp_path: Path, output: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "address.json").write_text(json.dumps({"url": "http://127.0.0.1:81", "port": 81}))
    supervisor_of(tmp_path)._show_how_to_join()
    token = (tmp_path / "token").read_text()
    command = f"windfall worker --join http://127.0.0.1:81 --token {tmp_path / 'token'}\n"
    assert f"add a worker from this machine: {command}" in output.getvalue()
    assert "weights" not in output.getvalue()

    monkeypatch.setattr(invitation, "own_address", lambda: "10.0.0.5")
    supervisor_of(tmp_path, fleet={"host": "0.0.0.0"})._show_how_to_join()
    assert f"--join http://10.0.0.5:81 --token {tmp_path / 'token'}" in output.getvalue()
    assert "fleet.weights_port" in output.getvalue()
    assert token not in output.getvalue()  # on a command line it would be visible in the process list

    for name in ("cert.pem", "key.pem"):
        (tmp_path / name).touch()
    tls = {"tls_cert": str(tmp_path / "cert.pem"), "tls_key": str(tmp_path / "key.pem")}
    supervisor_of(tmp_path, fleet=tls)._show_how_to_join()
    assert f"--tls-ca {tmp_path / 'cert.pem'}" in output.getvalue()


def test_own_address_is_reachable_from_outside() -> None:
    assert invitation.own_address() not in ("", "127.0.0.1", "0.0.0.0")


def test_lines_that_cannot_be_shown_do_not_end_the_run(tmp_path: Path, output: io.StringIO) -> None:
    it = supervisor_of(tmp_path)
    for line in FOREIGN_LINES.values():
        it._processes._handle_line(line)
    assert output.getvalue() == ""
    it._processes._handle_line(b'{"t": 1.0, "m": 1.0, "kind": "instant", "name": "worker_lost"}')
    assert "cannot show event 'worker_lost': KeyError" in output.getvalue()
    it._processes._handle_line(
        b'{"t": 1.0, "m": 1.0, "kind": "scalar", "name": "step", "step": 1, "bill": {"holders": 3}}'
    )
    assert "cannot show event 'step': " in output.getvalue()


def test_trainer_is_billed_from_the_start_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that is started again. It is forked after all imports, for which its machine is paid, too."""
    it, environments = supervisor_of(tmp_path)._processes, []

    async def start(*, name: str, env: dict[str, str], **_: Any) -> Handle:
        environments.append(env)
        return Handle(name=name, pid=1, send=lambda number: None)

    monkeypatch.setattr(it._forks, "start", start)
    asyncio.run(it._start_trainer(""))
    monkeypatch.setattr(process, "state", lambda pid: pytest.fail("this would be the start of the forked process"))
    monkeypatch.setenv(process.BEGAN, environments[0][process.BEGAN])
    age_s = process.age_s()
    monkeypatch.undo()
    assert age_s == pytest.approx(process.age_s(), abs=1)


def test_second_ctrl_c_is_offered_only_after_the_first(tmp_path: Path, output: io.StringIO) -> None:
    it = supervisor_of(tmp_path)
    line = b'{"t": 1.0, "m": 1.0, "kind": "instant", "name": "stopping"}'
    it._processes._handle_line(line)
    assert output.getvalue() == ""
    it._processes.stopping = True
    it._processes._handle_line(line)
    assert "press Ctrl-C again" in output.getvalue()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("finished", [False, True])
def test_exit_status_is_that_of_the_signal_unless_the_run_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, status: int, finished: bool
) -> None:
    it = supervisor_of(tmp_path)

    async def run() -> bool:
        os.kill(os.getpid(), number)
        while not it._processes.stopping:
            await asyncio.sleep(0.001)
        return finished

    monkeypatch.setattr(it._processes, "run", run)
    monkeypatch.setattr(it, "_fork_client", contextlib.nullcontext())
    assert asyncio.run(it.run()) == (0 if finished else status)


@pytest.mark.parametrize("kind", sorted(DAMAGES.keys() - {"missing", "a directory"}))
def test_damaged_failure_report_is_ignored(tmp_path: Path, kind: str) -> None:
    path = tmp_path / ".trainer.failure"
    path.write_text(json.dumps({"what": "it broke", "where": "here", "fix": "Mend it."}))
    assert str(folders.failure(tmp_path, "trainer", 1)) == "here: it broke\nMend it."
    damage(path, kind)
    assert folders.failure(tmp_path, "trainer", 1).what == "the trainer ended with status 1"


# real runs


def windfall(here: Path, *args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "windfall.run.cli", *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        cwd=here, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def until(true: Callable[[], Any], timeout_s: float = 240.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s"
        time.sleep(0.005)


def descendants(pid: int) -> set[int]:
    children = {int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}
    return children.union(*(descendants(c) for c in children))


@pytest.mark.parametrize(
    "when", [*(pytest.param(w, marks=pytest.mark.slow) for w in ("controller.log", "address.json")), ".run.lock"]
)
def test_early_ctrl_c_is_not_lost(here: Path, when: str) -> None:
    run = here / "runs" / "small"
    process = windfall(here, "train", "small.toml", "--set", "run.steps=100000")
    try:
        until((run / when).exists)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 130, out + err
    assert "Traceback" not in err
    assert "restarting" not in out


@pytest.mark.slow
def test_second_ctrl_c_kills_all_processes_at_once(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(fork_client.RUNNER, raising=False)  # all its processes are its descendants
    run = here / "runs" / "small"
    process = windfall(here, "train", "small.toml", "--set", "run.steps=100000", "--set", "fleet.workers=1")
    try:
        until(lambda: list((run / "workers").glob("*.log")) if run.exists() else False)
        until(lambda: (run / "trainer.log").exists() and len(descendants(process.pid)) >= 4)
        # Not while a process starts: a fork server frozen at that moment gets the full time of a start.
        until(lambda: (run / "events.jsonl").exists() and '"w1.1"' in (run / "events.jsonl").read_text())
        left = descendants(process.pid)
        controller = json.loads((run / "address.json").read_text())["pid"]
        assert controller in left
        fork_server = next(
            p for p in left if b"windfall.processes.fork_server" in Path(f"/proc/{p}/cmdline").read_bytes()
        )
        for pid in (controller, fork_server):
            os.kill(pid, signal.SIGSTOP)  # so they cannot stop cleanly
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert process.poll() is None
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=240)
    finally:
        process.kill()
    assert time.monotonic() - began < 3.0
    assert process.returncode == 130, out + err
    assert "Traceback" not in err
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in left), 30.0)


BREAKS = """
from pathlib import Path
from windfall.trainer import trainer

real = trainer.TorchTrainer.optim_step

def optim_step(self, adam=None):
    failed = Path("failed")
    if self.optimizer.updates >= 1 and not failed.exists():  # in its second step
        failed.touch()
        raise MemoryError("CUDA out of memory. Tried to allocate 9 GiB")
    return real(self, adam)

trainer.TorchTrainer.optim_step = optim_step
"""
RUN = """
import sys
from pathlib import Path
from windfall.run import liveness, supervisor

liveness.FIRST_DELAY_S = 0.2
real = supervisor.ForkClient
supervisor.ForkClient = lambda **how: real(**{**how, "modules": [*how["modules"], "breaks"]})
from windfall.run import cli
sys.argv = ["windfall", "train", "small.toml", "--set", "run.steps=2", "--set", "checkpoint.every=1"]
cli.main()
"""


@pytest.mark.slow
def test_run_continues_after_its_trainer_has_failed(here: Path) -> None:
    """A real run whose trainer runs out of memory once: it continues from checkpoint and journal."""
    (here / "breaks.py").write_text(BREAKS)
    (here / "run.py").write_text(RUN)
    path = f"{here}:{os.environ.get('PYTHONPATH', '')}"
    process = subprocess.run(
        [sys.executable, "run.py"], capture_output=True, text=True, cwd=here, timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
    )  # fmt: skip
    assert process.returncode == 0, process.stdout + process.stderr
    line = "the trainer failed: MemoryError: CUDA out of memory. Tried to allocate 9 GiB; restarting in 0.2 s"
    assert f"{line} (failure 1 of 4)" in process.stdout.replace("\n", " ")
    log = [json.loads(line) for line in (here / "runs/small/events.jsonl").read_text().splitlines()]
    assert [e["step"] for e in log if (e["kind"], e["name"]) == ("scalar", "step")] == [1, 2]
    assert next(e["why"] for e in log if e["name"] == "trainer_lost").startswith(
        "the trainer failed: MemoryError: CUDA out of"
    )
    assert "Traceback" in (here / "runs/small/trainer.log").read_text()
    second = next(e for e in log if (e["kind"], e["name"], e.get("step")) == ("scalar", "step", 2))
    assert second["restored"] == second["made"] > 0, "what was generated came from the journal"
