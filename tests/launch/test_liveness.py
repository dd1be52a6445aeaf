"""Who is held to be frozen or missing, and what is said of workers that end. No processes, no clock."""

from __future__ import annotations

from typing import Any

from windfall.launch.liveness import AGAIN_S, FROZEN_S, LOOK_S, MISSING_S, SILENT_S, Absent, Pulse, WorkerTroubles

LONG = int(FROZEN_S / LOOK_S)


def snapshot(t: float, pid: int = 7, **more: Any) -> dict[str, Any]:
    return {"t": t, "pid": pid, "ended": False, "version": 1, "workers": [], **more}


def test_controller_that_stands_still() -> None:
    pulse = Pulse()
    for t in range(3 * LONG):  # whatever its clock says: that it goes on is enough
        assert not pulse.look(7, snapshot(-t))
        assert pulse.beats
    said = [pulse.look(7, snapshot(5.0)) for _ in range(LONG + 1)]
    assert said == [False] * LONG + [True]
    assert not pulse.beats


def test_controller_that_starts_is_given_time() -> None:
    """What lies there is of the life before; its environment may take minutes to make."""
    pulse = Pulse()
    for before in (snapshot(1.0, pid=7), None):
        for _ in range(10 * LONG):
            assert not pulse.look(8, before)
            assert not pulse.beats
    assert not pulse.look(8, snapshot(1.0, pid=8))
    assert pulse.beats


def test_a_new_life_is_counted_anew() -> None:
    pulse = Pulse()
    for _ in range(LONG):
        assert not pulse.look(7, snapshot(1.0))
    assert not pulse.look(8, snapshot(1.0, pid=8))
    for _ in range(3 * LONG):
        assert not pulse.look(None, snapshot(1.0, pid=8))  # it does not run
        assert not pulse.look(8, snapshot(1.0, pid=8, ended=True))  # it has said that it ends


def test_beats_until_it_is_silent() -> None:
    pulse = Pulse()
    seen = []
    for _ in range(5):
        pulse.look(7, snapshot(1.0))
        seen.append(pulse.beats)
    assert seen == [n * LOOK_S < SILENT_S for n in range(5)]


def test_worker_that_runs_and_is_not_there() -> None:
    absent, looks = Absent(), int(MISSING_S / LOOK_S)
    fleet = snapshot(1.0, workers=[{"worker": "a#2", "state": "ready"}, {"worker": "b", "state": "gone"}])
    for _ in range(looks):
        assert absent.look({"a", "b"}, fleet) == []
    assert absent.look({"a", "b"}, fleet) == ["b"]
    assert absent.look({"a"}, fleet) == []


def test_nobody_is_missing_while_nobody_can_know() -> None:
    absent = Absent()
    for silent in (None, snapshot(1.0, version=None)):
        for _ in range(int(MISSING_S / LOOK_S)):
            assert absent.look({"a"}, snapshot(1.0)) == []
        for _ in range(100):
            assert absent.look({"a"}, silent) == []


def test_each_cause_is_told_once_then_counted() -> None:
    troubles = WorkerTroubles()

    def died(worker: str, code: int, now_s: float, by: str = "itself") -> str | None:
        return troubles.hear("exited", {"worker": worker, "code": code, "by": by}, now_s)

    assert died("w1.1", 1, 0.0) == "worker w1.1 ended with status 1; see workers/w1.1.log"
    for n in range(50):
        assert died(f"w1.{n}", 1, n / 50) is None
    assert died("w2.1", -9, 1.0) == "worker w2.1 was killed (SIGKILL); see workers/w2.1.log"
    said = died("w1.60", 1, AGAIN_S)
    assert said == "worker w1.60 ended with status 1 (and 50 more like it before); see workers/w1.60.log"


def test_what_is_worth_a_word() -> None:
    hear = lambda name, **fields: WorkerTroubles().hear(name, {"worker": "w", **fields}, 0.0)  # noqa: E731
    assert "could not be started: OSError: no" in str(hear("spawn_failed", error="OSError: no"))
    assert "refused" in str(hear("refused"))
    assert "does not end" in str(hear("stuck", pid=1, error="e"))
    for by, code in (("killed", -9), ("stopped", 0), ("itself", 0)):  # as asked for, or by a trace
        assert hear("exited", by=by, code=code) is None
    assert hear("started", pid=1) is None
    assert hear("restarted", pid=1, instead_of="v", after_s=0.0) is None
