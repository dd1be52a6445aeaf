"""`windfall top`: the fleet of a run as a live table, or its last state if the run has ended. Reads only fleet.json."""

from __future__ import annotations

import json
import shlex
import time
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from windfall import parts
from windfall import run_folder as folders
from windfall.errors import WindfallError
from windfall.run.views import figures, long_responses, moved_weights

STYLES = {"ready": "green", "suspect": "yellow", "draining": "yellow", "gone": "dim", "pulling": "cyan"}
WIDE = 160
"""Width, in characters, of output that goes to a file or a pipe."""
COLUMNS = (
    "worker", "lease", "device", "engine", "state", "version", "running", "tok/s", "tokens", "moved", "age", "reason",
)  # fmt: skip
NUMBERS = ("version", "running", "tok/s", "tokens", "moved", "age")
GONE_SHOWN = 8
"""Number of gone workers in the table: those that left last."""


def show(run: Path, *, once: bool = False, as_json: bool = False, every_s: float = 1.0) -> None:
    """Show the table until the run ends or Ctrl-C is pressed. With `once`, or without a terminal, print it once.
    `as_json`: print fleet.json once, and whether the run is live."""
    if as_json:
        if (shown := snapshot_of_part(run)) is not None:
            print(json.dumps(shown, indent=1))
            return
        if (snapshot := folders.read_json(run / "fleet.json")) is None:
            raise _unreadable(run, folders.held(run))
        print(json.dumps({"live": folders.held(run), **snapshot}, indent=1))
        return
    out = Console(highlight=False)
    if not out.is_terminal:
        out.width = max(out.width, WIDE)
    if once or not out.is_terminal:
        out.print(view(run))
        return
    with Live(view(run), console=out, refresh_per_second=4) as screen:
        while folders.held(run) or folders.held(run, "service"):
            screen.update(view(run))
            time.sleep(every_s)
        screen.update(view(run))


def view_of_part(folder: Path) -> Any:
    """What a part shows of a folder that is its own; None: the folder of a run, or something else."""
    return next((shown for part in parts.found() if (shown := part.view(folder)) is not None), None)


def snapshot_of_part(folder: Path) -> dict[str, Any] | None:
    """The same for --json."""
    return next((found for part in parts.found() if (found := part.snapshot(folder)) is not None), None)


def view(run: Path) -> Group:
    if (shown := view_of_part(run)) is not None:
        return shown
    live, snapshot = folders.held(run), folders.read_json(run / "fleet.json")
    try:
        if snapshot is not None:
            return table(snapshot, live=live, run=run)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
        pass  # valid JSON, but not written by a controller
    raise _unreadable(run, live)


def _unreadable(run: Path, live: bool) -> WindfallError:
    path = run / "fleet.json"
    if not path.exists():
        fix = "Start the run first: its controller writes fleet.json."
        return WindfallError("this run has no fleet.json yet", where=str(run), fix=fix)
    fix = "The run writes it every second: try again." if live else "Resume the run: it writes the file again."
    return WindfallError("this file is damaged or cannot be read", where=str(path), fix=fix)


def table(snapshot: dict[str, Any], *, live: bool, run: Path) -> Group:
    """The workers in the fleet, then the last few that are gone. `snapshot`: contents of fleet.json."""
    present = [w for w in snapshot["workers"] if w["state"] != "gone"]
    gone = [w for w in snapshot["workers"] if w["state"] == "gone"]
    rows = [_row(w) for w in present + gone[-GONE_SHOWN:]]
    policies = snapshot.get("policies") or {"": snapshot}
    lines = [_header(snapshot, len(present), live, run)]
    for name, policy in policies.items():
        if name:
            last = _staleness(policy["staleness"]) or figures.waits(policy)
            lines.append(f"{name}: {'; '.join([_progress(policy, snapshot['steps']), *last])}")
    if graders := snapshot.get("graders"):
        lines.append(f"graders: {figures.graders(graders)}")
    for name, policy in policies.items():
        if weights := moved_weights.of_version(policy.get("weights") or {}):
            lines.append(f"weights{name and f' of {name}'}: {weights}")
    if drafts := long_responses.drafts(snapshot.get("drafts") or {}):
        lines.append(drafts)
    if "" in policies and (stale := policies[""].get("staleness")):
        lines.append("last step: " + ("; ".join(_staleness(stale)) or "nothing was trained"))
    if lenders := [(w, w["lender"]) for w in present if w.get("lender")]:
        used, lent = sum(x["in_use"] for _, x in lenders), sum(x["lent"] for _, x in lenders) / len(lenders)
        slots = f"{sum(x['slots'] for _, x in lenders)} of {sum(w['slots'] for w, _ in lenders)} slots open"
        lines.append(f"lenders: {used} of {len(lenders)} in use, {slots}, {lent:.0%} of their time lent")
    lines += [f"advice: {a['count']} workers ({a['lease']}): {a['why']}" for a in snapshot.get("advice", [])]
    if gathered := long_responses.gathering(snapshot.get("gathering") or {}):
        lines.append(f"advice: {gathered}")
    return Group(Text("\n".join(lines)), figures.plain_table(COLUMNS, rows, right=NUMBERS, whole=True))


def _progress(policy: dict[str, Any], steps: int) -> str:
    step = "not trained" if policy["step"] is None else f"step {policy['step']}/{steps}"
    return f"{step}, version {policy['version']}"


def _staleness(stale: dict[str, Any] | None) -> list[str]:
    """Rows about the staleness of the last step, from fleet.json."""
    stale = stale or {}
    return figures.staleness(
        stale | {f"staleness_{key}": stale[key] for key in ("mean", "max", "bound") & stale.keys()}
    )


def _versions(w: dict[str, Any]) -> str:
    """The versions of a worker's policies, after the base on which they are if that has a name.

    >>> _versions({"version": 12}), _versions({"version": -1})
    ('12', '-')
    >>> _versions({"version": 12, "base": "solver", "versions": {"solver": 12, "verifier": 9}})
    'solver 12/9'
    """
    versions = (w.get("versions") or {"": w["version"]}).values()
    return f"{w.get('base') or ''} {'/'.join(str(v) if v >= 0 else '-' for v in versions)}".strip()


def _row(w: dict[str, Any]) -> list[str | Text]:
    state, price = w["state"], f" ${w['price_usd_per_h']:g}/h" if w["price_usd_per_h"] else ""
    here = state != "gone"
    return [
        w["worker"], w["kind"] + price, w["device"], w.get("engine") or "-", Text(state, style=STYLES.get(state, "")),
        _versions(w), f"{w['running']}/{w['slots']}" if here else "-",
        f"{w['tok_per_s']:,.0f}" if here else "-", f"{w['made']:,}", str(w["moved"]), _age(w["age_s"]), w["why"],
    ]  # fmt: skip


def _header(s: dict[str, Any], present: int, live: bool, run: Path) -> str:
    c, ago = s["counts"], max(0.0, time.time() - s["t"])
    status = "running" if live else s["ended"] or "ended unexpectedly"
    if not live or ago > 5:
        status += f", as of {_age(ago)} ago"
    resume = "" if live or s["ended"] == "finished" else f"resume with: windfall resume {shlex.quote(str(run))}\n"
    progress = "" if "" not in s.get("policies", {"": s}) else f"{_progress(s, s['steps'])}, "
    return (
        f"{s['run']}: {progress}{status}\n{resume}"
        f"workers: {present} in the fleet, {s['lost']} lost; responses: {s['open']} open, {s['queued']} queued, "
        f"{c['moved']} moved; tokens: {c['accepted']:,} accepted since the controller started, "
        f"{c['repeated'] + c['late']} twice"
    )


def _age(s: float) -> str:
    """A duration for a table cell.

    >>> [_age(x) for x in (5, 125, 7300)]
    ['5s', '2m05s', '2h01m']
    """
    s = int(s)
    return f"{s}s" if s < 60 else f"{s // 60}m{s % 60:02}s" if s < 3600 else f"{s // 3600}h{s % 3600 // 60:02}m"
