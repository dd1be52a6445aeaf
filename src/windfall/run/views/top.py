"""`windfall top`: the fleet of a run as a live table, or its last state if the run has ended. Reads only fleet.json."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from windfall import run_folder as folders
from windfall.errors import WindfallError
from windfall.run.views import lenders, rewards, staleness
from windfall.run.views.tables import labeled, plain_table

STYLES = {"ready": "green", "suspect": "yellow", "draining": "yellow", "gone": "dim", "pulling": "cyan"}
WIDE = 160
"""Width, in characters, of output that goes to a file or a pipe."""
COLUMNS = (
    "worker", "lease", "device", "engine", "state", "version", "running", "tok/s", "tokens", "moved", "age", "reason",
)  # fmt: skip
NUMBERS = ("version", "running", "tok/s", "tokens", "moved", "age")
LEFT_OUT = ("moved", "engine", "version", "device", "tokens", "age", "lease")
"""Columns left out on a narrow terminal, in this order, until the table fits."""
REASON_WIDTH = 20
"""The reason is shortened, at most to this many characters, before any column is left out."""
GONE_SHOWN = 8
"""Number of gone workers in the table: those that left last."""
ENDS = {"finished": "finished", "stopped": "stopped", "failed": "failed", True: "ended"}
"""Text for each value of `ended` in fleet.json. Earlier versions wrote True."""


def show(run: Path, *, once: bool = False, every_s: float = 1.0) -> None:
    """Show the table until the run ends or Ctrl-C is pressed. With `once`, or without a terminal, print it once."""
    out = Console(highlight=False)
    if not out.is_terminal:
        out.width = max(out.width, WIDE)
    shown = view(run, out.width)
    if once or not out.is_terminal:
        out.print(shown)
        return
    with Live(shown, console=out, refresh_per_second=4) as screen:
        while folders.held(run):
            screen.update(view(run, out.width))
            time.sleep(every_s)
        screen.update(view(run, out.width))


def view(run: Path, width: int = WIDE) -> Group:
    """The current state of the run in this folder, for a terminal with `width` columns."""
    path, live = run / "fleet.json", folders.held(run)
    snapshot = folders.read_json(path)
    try:
        if snapshot is not None:
            return table(snapshot, live=live, run=run, width=width)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
        pass  # valid JSON, but not written by a controller
    if not path.exists():
        fix = "Start the run first: its controller writes fleet.json."
        raise WindfallError("this run has no fleet.json yet", where=str(run), fix=fix)
    fix = "The run writes it every second: try again." if live else "Resume the run: it writes the file again."
    raise WindfallError("this file is damaged or cannot be read", where=str(path), fix=fix)


def table(snapshot: dict[str, Any], *, live: bool, run: Path, width: int = WIDE) -> Group:
    """The workers in the fleet, then the last few that are gone. `snapshot`: contents of fleet.json."""
    present = [w for w in snapshot["workers"] if w["state"] != "gone"]
    gone = [w for w in snapshot["workers"] if w["state"] == "gone"]
    rows: list[tuple[str | Text, ...]] = []
    for w in present + gone[-GONE_SHOWN:]:
        price = f" ${w['price_usd_per_h']:g}/h" if w["price_usd_per_h"] else ""
        state = w["state"]
        row = (
            w["worker"], w["kind"] + price, w["device"], w.get("engine") or "-",
            Text(state, style=STYLES.get(state, "")),
            str(w["version"]) if w["version"] >= 0 else "-", f"{w['running']}/{w['slots']}" if state != "gone" else "-",
            f"{w['tok_per_s']:,.0f}" if state != "gone" else "-", f"{w['made']:,}", str(w["moved"]), _age(w["age_s"]),
            w["why"],
        )  # fmt: skip
        rows.append(row)
    widths = {name: max([len(name), *(len(row[i]) for row in rows)]) for i, name in enumerate(COLUMNS)}
    widths["reason"] = min(widths["reason"], REASON_WIDTH)
    for name in LEFT_OUT:
        if sum(widths.values()) + len(widths) - 1 > width:  # one space between two columns
            del widths[name]
    shown = [[cell for name, cell in zip(COLUMNS, row, strict=True) if name in widths] for row in rows]
    out = plain_table(list(widths), shown, right=NUMBERS, least=widths)
    advice = [f"advice: {a['count']} workers ({a['lease']}): {a['why']}" for a in snapshot.get("advice", [])]
    stale = staleness.of_snapshot(snapshot["staleness"], width) if snapshot.get("staleness") else []
    busy, lent = snapshot.get("graders"), lenders.of_snapshot(snapshot["workers"])
    graders = [rewards.graders_of_snapshot(busy), *labeled(rewards.servers(busy.get("servers") or ()))] if busy else []
    return Group(Text("\n".join([_header(snapshot, len(present), live, run), *graders, *stale, *lent, *advice])), out)


def _header(s: dict[str, Any], present: int, live: bool, run: Path) -> str:
    c = s["counts"]
    ago = max(0.0, time.time() - s["t"])
    status = "running" if live else ENDS.get(s["ended"], "ended unexpectedly")
    if not live or ago > 5:
        status += f", as of {_age(ago)} ago"
    resume = "" if live or s["ended"] == "finished" else f"resume with: windfall resume {shlex.quote(str(run))}\n"
    return (
        f"{s['run']}: step {s['step']}/{s['steps']}, version {s['version']}, {status}\n{resume}"
        f"workers: {present} in the fleet, {s['lost']} lost; responses: {s['open']} open, {s['queued']} queued, "
        f"{c['moved']} moved; tokens: {c['accepted']:,} accepted since the controller started, "
        f"{c['repeated'] + c['late']} twice" + _prefill(s)
    )


def _prefill(s: dict[str, Any]) -> str:
    """What the prefix caches of the workers save; empty if they have saved nothing."""
    p = s.get("prefill") or {}
    if not p.get("reused"):
        return ""
    kept = [w for w in s["workers"] if w["state"] != "gone" and w.get("kept_sessions")]
    sessions, tokens = (sum(w[k] for w in kept) for k in ("kept_sessions", "kept_tokens"))
    total = p["reused"] + p["prefilled"]
    return (
        f"\nprefill: {p['reused'] / total:.0%} of {total:,} tokens saved, {p['hits']:,} of {p['lookups']:,} turns "
        f"found their prefix; kept: {sessions} sessions with {tokens:,} tokens"
    )


def _age(s: float) -> str:
    """A duration for a table cell.

    >>> [_age(x) for x in (5, 125, 7300)]
    ['5s', '2m05s', '2h01m']
    """
    s = int(s)
    return f"{s}s" if s < 60 else f"{s // 60}m{s % 60:02}s" if s < 3600 else f"{s // 3600}h{s % 3600 // 60:02}m"
