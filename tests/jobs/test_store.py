"""Jobs on disk: what a kill or a full disk leaves, and in which order jobs start. And the file of a fleet."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import pytest

from windfall.errors import WindfallError
from windfall.jobs import settings, store
from windfall.jobs.machine.host import DeviceHost
from windfall.jobs.settings import FleetSettings
from windfall.jobs.store import Job, Store
from windfall.jobs.turn_log import TurnLog
from windfall.turns.client import KEY, SOCKET


def a_store(folder: Path, *jobs: Job) -> Store:
    found = Store(folder)
    found.load()
    for job in jobs:
        found.path(job.name).mkdir()
        add(found, job)
    return found


def add(found: Store, job: Job) -> None:
    found.record(job)
    found.jobs[job.name] = job


def test_jobs_are_read_back(tmp_path: Path) -> None:
    job = Job(name="a", number=3, state="running", share=2.0, ending="stopped", reason="stopped by a user")
    first = a_store(tmp_path, job)
    again = Store(tmp_path)
    again.load()
    assert again.jobs == first.jobs == {"a": job}
    assert again.next_number() == 4


def test_what_a_kill_left_of_a_submission_is_removed(tmp_path: Path) -> None:
    found = a_store(tmp_path)
    found.begin("half")
    for folder in ("half", "somebody's own"):
        (tmp_path / "jobs" / folder).mkdir()
        (tmp_path / "jobs" / folder / "recipe.toml").touch()
    with pytest.raises(WindfallError, match="is no job"):
        found.begin("half")
    again = a_store(tmp_path)
    assert again.jobs == {}
    assert [path.name for path in (tmp_path / "jobs").iterdir()] == ["somebody's own"]
    again.begin("half")


def test_what_a_kill_left_of_a_removal_is_removed(tmp_path: Path) -> None:
    found = a_store(tmp_path, Job(name="a", number=1, state="done"), Job(name="b", number=2))
    assert found.set_aside("a").is_dir()
    again = Store(tmp_path)
    again.load()
    assert list(again.jobs) == ["b"]
    assert [path.name for path in (tmp_path / "jobs").iterdir()] == ["b"]


@pytest.mark.parametrize("data", [b"", b"{", b'{"name": "a"}', b'{"name": "a", "number": 1, "state": "new"}', b"\xff"])
def test_damaged_job_is_shown_and_the_others_go_on(tmp_path: Path, data: bytes) -> None:
    a_store(tmp_path, Job(name="a", number=1), Job(name="b", number=2))
    (tmp_path / "jobs/a/job.json").write_bytes(data)
    again = Store(tmp_path)
    again.load()
    assert again.jobs["a"].state == "failed"
    assert "job.json is damaged" in again.jobs["a"].reason
    assert [job.name for job in again.waiting()] == ["b"]


def test_order_of_the_queue(tmp_path: Path) -> None:
    """Priority, then jobs that ran before, then the order of submission. A job that is to stop does not start."""
    jobs = [
        Job(name="late", number=4), Job(name="early", number=1), Job(name="ran", number=5, started_s=9.0),
        Job(name="first", number=6, priority=1), Job(name="ends", number=2, ending="stopped"),
        Job(name="done", number=3, state="done"),
    ]  # fmt: skip
    assert [job.name for job in a_store(tmp_path, *jobs).waiting()] == ["first", "ran", "early", "late"]


def test_full_disk_loses_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, job = a_store(tmp_path), Job(name="a", number=1)
    found.path("a").mkdir()
    add(found, job)

    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store, "write", full)
        job.state = "done"
        found.save(job)
        with pytest.raises(WindfallError, match="cannot write the job: No space left"):
            found.record(Job(name="b", number=2))
        found.retry()
        assert found.unsaved == {"a"}
    found.retry()
    assert found.unsaved == set()
    again = Store(tmp_path)
    again.load()
    assert again.jobs["a"].state == "done"


@pytest.mark.parametrize("name", ["", "..", ".hidden", "a/b", "a b", "x" * 49, "é"])
def test_name_that_cannot_be_a_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(WindfallError, match="cannot be the name of a job"):
        a_store(tmp_path).check_name(name)


def test_turn_log_keeps_the_newest(tmp_path: Path) -> None:
    log = TurnLog(tmp_path / "turns.jsonl", most_bytes=200)
    for number in range(30):
        log.add([{"device": "gpu0", "start_s": number}])
    log.close()
    lines = [(tmp_path / name).read_text().splitlines() for name in ("turns.jsonl.1", "turns.jsonl")]
    assert 0 < len(lines[0] + lines[1]) < 30
    assert '"start_s": 29' in (lines[0] + lines[1])[-1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ports = 1", "unknown key 'ports'. Did you mean 'port'?"),
        ("[limits]\nprocess = 1", "unknown key 'limits.process'. Did you mean 'processes'?"),
        ("jobs_at_once = 0", "'jobs_at_once' = 0"),
        ("slice_s = inf", "must be finite"),
        ("port = ", "not valid TOML"),
        ('[model]\npath = "tiny"', "this is the recipe of a run"),
    ],
)
def test_file_of_a_fleet_that_is_not_right_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "fleet.toml").write_text(text)
    with pytest.raises(WindfallError) as refused:
        settings.load(tmp_path / "fleet.toml")
    assert said in str(refused.value)
    assert str(tmp_path / "fleet.toml") in str(refused.value)
    with pytest.raises(WindfallError, match="cannot read the fleet's file"):
        settings.load(tmp_path / "none.toml")


def test_devices_of_trainers_come_first(tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text('devices = "cpu"\ncpu_slots = 3\ntrainers = ["cpu2"]\nfolder = "x"')
    found = settings.load(tmp_path / "fleet.toml")
    assert found.folder == tmp_path / "x"
    places, trainers = settings.places(found)
    assert [place.name for place in places] == ["cpu2", "cpu0", "cpu1"]
    assert [place.name for place in trainers] == ["cpu2"]
    with pytest.raises(WindfallError, match="there is no device 'gpu9'"):
        settings.places(FleetSettings(devices="cpu", trainers=["gpu9"]))


def test_socket_of_turns_is_in_the_folder_unless_its_path_is_too_long(tmp_path: Path) -> None:
    async def main(folder: Path) -> str:
        folder.mkdir()
        settings = FleetSettings(devices="cpu")
        async with DeviceHost(settings, folder / "fork_server.log", preload="windfall.run.preload") as host:
            variables = host.admit("a", share=1.0, priority=0, deadline_s=0.0)
            assert variables == host.admit("a", share=1.0, priority=0, deadline_s=0.0)
            assert Path(variables[SOCKET]).is_socket()
            host.forget("a")
            assert host.admit("a", share=1.0, priority=0, deadline_s=0.0)[KEY] != variables[KEY]
            host.expect("a", 5.0)
            host.expect("unknown", 5.0)
            assert set(host.times()) == {"cpu0", "cpu1"}
        assert not Path(variables[SOCKET]).exists()
        return variables[SOCKET]

    with tempfile.TemporaryDirectory() as short:
        assert asyncio.run(main(Path(short) / "f")) == f"{short}/f/turns.socket"
        assert len(asyncio.run(main(Path(short) / ("x" * 100)))) < 100
