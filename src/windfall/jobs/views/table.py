"""Jobs and devices of a service as text: `windfall jobs`, and `windfall top` for the folder of a service.

Everything is shown from one snapshot: what `GET /jobs` answers, and what the service writes to jobs.json every second.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.text import Text

from windfall import run_folder as folders
from windfall.errors import WindfallError
from windfall.run.views import figures

FILE = "jobs.json"
STYLES = {"running": "green", "queued": "cyan", "failed": "red", "over_budget": "yellow", "stopped": "yellow"}
COLUMNS = ("job", "state", "share", "step", "tok/s", "left", "device time", "$", "note")
NUMBERS = ("share", "step", "tok/s", "left", "device time", "$")
DEVICE_COLUMNS = ("device", "now", "idle", "used by")
ENDED_SHOWN = 8
"""Number of ended jobs in `windfall top`: those that ended last. `windfall jobs` shows all."""
USERS_SHOWN = 4
"""Number of jobs that the row of a device names: those that used it most."""
OLD_S = 5.0
"""A snapshot that is older was not written by a service that runs."""
ENDED = ("done", "stopped", "failed", "over_budget")


def is_service(folder: Path) -> bool:
    """Whether this is the folder of a service, and not of a run."""
    return (folder / FILE).is_file()


def of_folder(folder: Path) -> Group:
    """What `windfall top` shows of the folder of a service."""
    try:
        return table(_read(folder), ended=ENDED_SHOWN, now_s=time.time())
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError):  # JSON, but not written by a service
        raise _damaged(folder) from None


def snapshot_of(folder: Path) -> dict[str, Any]:
    """What `windfall top --json` prints of the folder of a service."""
    return {"live": folders.held(folder, "service"), **_read(folder)}


def _read(folder: Path) -> dict[str, Any]:
    if (found := folders.read_json(folder / FILE)) is None:
        raise _damaged(folder)
    return found


def _damaged(folder: Path) -> WindfallError:
    fix = "The service writes it every second: start it with `windfall up`."
    return WindfallError("this file is damaged or cannot be read", where=str(folder / FILE), fix=fix)


def table(snapshot: Mapping[str, Any], *, ended: int | None = None, now_s: float | None = None) -> Group:
    """All jobs and devices. `ended`: upper limit for the number of ended jobs. With `now_s`, the age of an old snapshot
    is shown."""
    jobs: dict[str, Any] = snapshot["jobs"]
    over = [name for name, job in jobs.items() if job["state"] in ENDED]
    hidden = set[str]()
    if ended is not None and len(over) > ended:
        hidden = set(sorted(over, key=lambda name: jobs[name].get("ended_s") or 0.0)[: len(over) - ended])
    devices: dict[str, Any] = snapshot.get("devices") or {}  # a job's token does not show them
    rows = [_job_row(name, job, device_s(devices, name)) for name, job in jobs.items() if name not in hidden]
    lines = [_header(snapshot, now_s)]
    if not jobs:
        lines.append("submit one: windfall train recipe.toml --on URL")
    if hidden:
        lines.append(f"{len(hidden)} jobs that ended earlier are not shown: windfall jobs")
    parts = [Text("\n".join(lines)), figures.plain_table(COLUMNS, rows, right=NUMBERS, whole=True)]
    if devices:
        parts.append(figures.plain_table(DEVICE_COLUMNS, [_device_row(*d) for d in devices.items()], right=("idle",)))
    return Group(*parts)


def one(name: str, job: Mapping[str, Any], devices: Mapping[str, Any] | None = None) -> Text:
    """Everything about one job. `devices`: those of the snapshot, if they may be shown."""
    used = {device: float(d["used_s"].get(name, 0.0)) for device, d in (devices or {}).items()}
    rows = [
        ("state", _plain(str(job["state"])) + (f": {reason}" if (reason := note(job)) else "")),
        ("serves", _plain(str(job["serves"]))) if job.get("serves") else ("step", f"{job['step']} of {job['steps']}"),
        ("share, priority", f"{job['share']:g}, {job['priority']}"),
        ("speed", f"{job['tokens_per_s']:,.0f} tokens/s" if job["tokens_per_s"] else "-"),
        ("time left", duration(job["eta_s"]) if job["state"] == "running" else "-"),
        ("bill", _bill(job)),
    ]
    if job.get("deadline"):
        rows.append(("deadline", time.strftime("%Y-%m-%d %H:%M", time.localtime(job["deadline"])) + _late(job)))
    if total := sum(used.values()):
        each = ", ".join(f"{device} {duration(s)}" for device, s in used.items() if s)
        rows.append(("device time", f"{duration(total)} ({each})"))
    if job.get("folder"):
        rows.append(("folder", _plain(str(job["folder"]))))
    return Text("\n".join([name, *figures.labeled(rows)]))


def note(job: Mapping[str, Any]) -> str:
    """Why the job is in its state, or what it waits for."""
    return _plain(str(job.get("reason") or job.get("waiting_for") or "")) + _late(job)


def device_s(devices: Mapping[str, Any], name: str) -> float:
    """Seconds of all devices that a job has used."""
    return sum(float(device["used_s"].get(name, 0.0)) for device in devices.values())


def duration(seconds: float | None) -> str:
    """
    >>> [duration(s) for s in (None, 5.2, 125, 7300, 200_000)]
    ['-', '5s', '2m05s', '2h01m', '2d07h']
    """
    if seconds is None:
        return "-"
    s = int(seconds)
    if s < 3600:
        return f"{s}s" if s < 60 else f"{s // 60}m{s % 60:02}s"
    return f"{s // 3600}h{s % 3600 // 60:02}m" if s < 86400 else f"{s // 86400}d{s % 86400 // 3600:02}h"


def _header(snapshot: Mapping[str, Any], now_s: float | None) -> str:
    states = [job["state"] for job in snapshot["jobs"].values()]
    counts = [f"{states.count(state)} {state}" for state in ("running", "queued", *ENDED) if state in states]
    line = "jobs: " + (", ".join(counts).replace("_", " ") or "none")
    if bill := snapshot.get("bill"):
        line += f"; bill: ${bill['usd']:,.2f}, of which ${bill['idle_usd']:,.2f} idle"
        if removed := bill.get("removed_usd"):
            line += f", ${removed:,.2f} of removed jobs"
        if machines := bill.get("machines"):
            line += f"; machines that joined: {', '.join(map(_plain, machines))}"
    age_s = 0.0 if now_s is None else now_s - float(snapshot["time_s"])
    if age_s > OLD_S:
        line += f"\nas of {duration(age_s)} ago: the service does not run; continue its jobs with `windfall up`"
    return line


def _job_row(name: str, job: Mapping[str, Any], used_s: float) -> list[str | Text]:
    state, running = str(job["state"]), job["state"] == "running"
    share = f"{job['share']:g}" + (f" (priority {job['priority']})" if job["priority"] else "")
    return [
        name,
        Text(_plain(state.replace("_", " ")), style=STYLES.get(state, "")),
        share,
        f"{job['step']}/{job['steps']}",
        f"{job['tokens_per_s']:,.0f}" if running else "-",
        duration(job["eta_s"]) if running else "-",
        duration(used_s) if used_s else "-",
        _bill(job),
        note(job),
    ]


def _bill(job: Mapping[str, Any]) -> str:
    return f"{job['usd']:,.2f}" + (f" of {job['max_usd']:,.2f}" if job["max_usd"] else "")


def _late(job: Mapping[str, Any]) -> str:
    """What is wrong with the deadline, if it is not met at the present speed."""
    deadline, eta_s = job.get("deadline"), job.get("eta_s")
    if not deadline or eta_s is None or job["state"] != "running" or time.time() + eta_s <= deadline:
        return ""
    return f" (predicted to end {duration(time.time() + eta_s - deadline)} after its deadline)"


def _device_row(name: str, device: Mapping[str, Any]) -> list[str | Text]:
    used = {job: float(s) for job, s in device["used_s"].items() if s}
    total = sum(used.values()) + float(device["idle_s"])
    most = sorted(used.items(), key=lambda item: -item[1])
    users = [f"{job} {figures.percent(s, total)}" for job, s in most[:USERS_SHOWN]]
    if len(most) > USERS_SHOWN:
        others_s = sum(s for _, s in most[USERS_SHOWN:])
        users.append(f"{len(most) - USERS_SHOWN} others {figures.percent(others_s, total)}")
    doing = {"train": "trains", "rollout": "generates"}.get(device["kind"], "")
    now = Text(f"{device['job']} {doing}" if device["job"] else "idle", style="" if device["job"] else "dim")
    return [name, now, figures.percent(float(device["idle_s"]), total), ", ".join(users) or "-"]


def _plain(text: str) -> str:
    """Without control characters: what a job says must not move the cursor of the one who reads it.

    >>> _plain("a\\x1b[2Jb\\nc")
    'a?[2Jb c'
    """
    return "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in text)
