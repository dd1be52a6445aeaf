"""Which processes count as frozen or missing, and what is reported about workers that end. No processes, no clock."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from windfall.run.liveness import (
    CHECK_S,
    FROZEN_S,
    MISSING_S,
    REPEAT_S,
    SILENT_S,
    Unchanged,
    WorkerProblems,
    missing_workers,
    pulse,
)

FROZEN_CHECKS = int(FROZEN_S / CHECK_S)


def snapshot(t: float, pid: int = 7, **more: Any) -> dict[str, Any]:
    return {"t": t, "pid": pid, "ended": False, "version": 1, "workers": [], **more}


def checked(pid: int | None, snapshots: Iterable[dict[str, Any] | None], silent: Unchanged[int]) -> list[bool]:
    """Whether each check of the controller finds it frozen."""
    return [bool(silent.update(pulse(pid, each))) for each in snapshots]


def test_controller_without_new_snapshots_is_frozen() -> None:
    silent = Unchanged[int](FROZEN_S)
    # The times may even go back: it is enough that they change.
    assert not any(checked(7, (snapshot(-t) for t in range(3 * FROZEN_CHECKS)), silent))
    assert silent.changed_lately(7)
    assert checked(7, [snapshot(5.0)] * (FROZEN_CHECKS + 1), silent) == [False] * FROZEN_CHECKS + [True]
    assert not silent.changed_lately(7)


def test_starting_controller_is_not_frozen() -> None:
    """The snapshot on disk is that of its predecessor. Starting the environment may take minutes."""
    silent = Unchanged[int](FROZEN_S)
    for before in (snapshot(1.0, pid=7), None):
        assert not any(checked(8, [before] * 10 * FROZEN_CHECKS, silent))
        assert not silent.changed_lately(8)
    assert checked(8, [snapshot(1.0, pid=8)], silent) == [False]
    assert silent.changed_lately(8)


def test_new_controller_process_starts_a_new_count() -> None:
    silent = Unchanged[int](FROZEN_S)
    assert not any(checked(7, [snapshot(1.0)] * FROZEN_CHECKS, silent))
    assert checked(8, [snapshot(1.0, pid=8)], silent) == [False]
    for _ in range(3 * FROZEN_CHECKS):
        assert checked(None, [snapshot(1.0, pid=8)], silent) == [False]  # no controller runs
        assert checked(8, [snapshot(1.0, pid=8, ended=True)], silent) == [False]  # it has reported its end


def test_controller_is_alive_until_it_is_silent() -> None:
    silent, seen = Unchanged[int](FROZEN_S), list[bool]()
    for _ in range(5):
        silent.update(pulse(7, snapshot(1.0)))
        seen.append(silent.changed_lately(7))
    assert seen == [n * CHECK_S < SILENT_S for n in range(5)]


def test_process_that_stays_stopped_is_frozen() -> None:
    processes = Unchanged[int](FROZEN_S)
    for _ in range(FROZEN_CHECKS):
        assert processes.update({7: 100}) == []
    assert processes.update({7: 100}) == [7]
    assert processes.update({}) == []  # it continues
    assert processes.update({7: 100}) == []  # and is stopped again


def test_process_that_is_slowed_down_by_stopping_it_is_not_frozen() -> None:
    processes = Unchanged[int](FROZEN_S)
    for check in range(10 * FROZEN_CHECKS):
        assert processes.update({7: 100 + check // 20}) == []


def test_running_worker_outside_the_fleet_is_reported_as_missing() -> None:
    missing, checks = Unchanged[str](MISSING_S), int(MISSING_S / CHECK_S)
    fleet = snapshot(1.0, workers=[{"worker": "a#2", "state": "ready"}, {"worker": "b", "state": "gone"}])
    for _ in range(checks):
        assert missing.update(missing_workers({"a", "b"}, fleet)) == []
    assert missing.update(missing_workers({"a", "b"}, fleet)) == ["b"]
    assert missing.update(missing_workers({"a"}, fleet)) == []


def test_no_worker_is_missing_while_the_fleet_is_unknown() -> None:
    for silent in (None, snapshot(1.0, version=None)):
        assert missing_workers({"a"}, silent) == {}


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
