"""Which processes count as frozen or missing, and what is reported about workers that end. No processes, no clock."""

from __future__ import annotations

from typing import Any

from windfall.run.liveness import (
    CHECK_S,
    FROZEN_S,
    MISSING_S,
    REPEAT_S,
    SILENT_S,
    ControllerPulse,
    MissingWorkers,
    StoppedProcesses,
    WorkerProblems,
)

FROZEN_CHECKS = int(FROZEN_S / CHECK_S)


def snapshot(t: float, pid: int = 7, **more: Any) -> dict[str, Any]:
    return {"t": t, "pid": pid, "ended": False, "version": 1, "workers": [], **more}


def test_controller_without_new_snapshots_is_frozen() -> None:
    pulse = ControllerPulse()
    for t in range(3 * FROZEN_CHECKS):  # the times may even go back: it is enough that they change
        assert not pulse.update(7, snapshot(-t))
        assert pulse.alive
    frozen = [pulse.update(7, snapshot(5.0)) for _ in range(FROZEN_CHECKS + 1)]
    assert frozen == [False] * FROZEN_CHECKS + [True]
    assert not pulse.alive


def test_starting_controller_is_not_frozen() -> None:
    """The snapshot on disk is that of its predecessor. Starting the environment may take minutes."""
    pulse = ControllerPulse()
    for before in (snapshot(1.0, pid=7), None):
        for _ in range(10 * FROZEN_CHECKS):
            assert not pulse.update(8, before)
            assert not pulse.alive
    assert not pulse.update(8, snapshot(1.0, pid=8))
    assert pulse.alive


def test_new_controller_process_starts_a_new_count() -> None:
    pulse = ControllerPulse()
    for _ in range(FROZEN_CHECKS):
        assert not pulse.update(7, snapshot(1.0))
    assert not pulse.update(8, snapshot(1.0, pid=8))
    for _ in range(3 * FROZEN_CHECKS):
        assert not pulse.update(None, snapshot(1.0, pid=8))  # no controller runs
        assert not pulse.update(8, snapshot(1.0, pid=8, ended=True))  # it has reported its end


def test_controller_is_alive_until_it_is_silent() -> None:
    pulse = ControllerPulse()
    seen = []
    for _ in range(5):
        pulse.update(7, snapshot(1.0))
        seen.append(pulse.alive)
    assert seen == [n * CHECK_S < SILENT_S for n in range(5)]


def test_process_that_stays_stopped_is_frozen() -> None:
    processes = StoppedProcesses()
    for _ in range(FROZEN_CHECKS):
        assert processes.update({7: 100}) == []
    assert processes.update({7: 100}) == [7]
    assert processes.update({}) == []  # it continues
    assert processes.update({7: 100}) == []  # and is stopped again


def test_process_that_is_slowed_down_by_stopping_it_is_not_frozen() -> None:
    processes = StoppedProcesses()
    for check in range(10 * FROZEN_CHECKS):
        assert processes.update({7: 100 + check // 20}) == []


def test_running_worker_outside_the_fleet_is_reported_as_missing() -> None:
    missing, checks = MissingWorkers(), int(MISSING_S / CHECK_S)
    fleet = snapshot(1.0, workers=[{"worker": "a#2", "state": "ready"}, {"worker": "b", "state": "gone"}])
    for _ in range(checks):
        assert missing.update({"a", "b"}, fleet) == []
    assert missing.update({"a", "b"}, fleet) == ["b"]
    assert missing.update({"a"}, fleet) == []


def test_no_worker_is_missing_while_the_fleet_is_unknown() -> None:
    missing = MissingWorkers()
    for silent in (None, snapshot(1.0, version=None)):
        for _ in range(int(MISSING_S / CHECK_S)):
            assert missing.update({"a"}, snapshot(1.0)) == []
        for _ in range(100):
            assert missing.update({"a"}, silent) == []


def test_each_cause_is_reported_once_then_counted() -> None:
    problems = WorkerProblems()

    def died(worker: str, code: int, now_s: float, by: str = "itself") -> str | None:
        return problems.describe("exited", {"worker": worker, "code": code, "by": by}, now_s)

    assert died("w1.1", 1, 0.0) == "worker w1.1 ended with status 1; see workers/w1.1.log"
    for n in range(50):
        assert died(f"w1.{n}", 1, n / 50) is None
    assert died("w2.1", -9, 1.0) == "worker w2.1 was killed (SIGKILL); see workers/w2.1.log"
    line = died("w1.60", 1, REPEAT_S)
    assert line == "worker w1.60 ended with status 1 (and 50 more before it); see workers/w1.60.log"


def test_only_unexpected_exits_are_reported() -> None:
    describe = lambda name, **fields: WorkerProblems().describe(name, {"worker": "w", **fields}, 0.0)  # noqa: E731
    assert "could not be started: OSError: no" in str(describe("spawn_failed", error="OSError: no"))
    assert "refused" in str(describe("refused"))
    assert "does not end" in str(describe("stuck", pid=1, error="e"))
    for by, code in (("killed", -9), ("stopped", 0), ("itself", 0)):  # on request, or by a trace
        assert describe("exited", by=by, code=code) is None
    assert describe("started", pid=1) is None
    assert describe("restarted", pid=1, instead_of="v", after_s=0.0) is None
