"""`windfall top`: the fleet of a run as a live table, or as it was when the run ended. Reads fleet.json only."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from windfall import run_folder as folders
from windfall.errors import WindfallError

STYLES = {"ready": "green", "suspect": "yellow", "draining": "yellow", "gone": "dim", "pulling": "cyan"}
COLUMNS = ("worker", "lease", "device", "state", "version", "running", "tok/s", "made", "moved", "age", "why")
GONE_SHOWN = 8
ENDS = {"finished": "finished", "stopped": "stopped", "failed": "ended by an error", True: "ended"}
"""By `ended` of fleet.json; True was written by earlier versions."""


def show(run: Path, *, once: bool = False, every_s: float = 1.0) -> None:
    """Until the run ends or Ctrl-C; `once`, or not on a terminal: one table."""
    out = Console(highlight=False)
    shown = view(run)
    if once or not out.is_terminal:
        out.print(shown)
        return
    with Live(shown, console=out, refresh_per_second=4) as screen:
        while folders.held(run):
            screen.update(view(run))
            time.sleep(every_s)
        screen.update(view(run))


def view(run: Path) -> Group:
    """The run as its folder shows it now."""
    path, live = run / "fleet.json", folders.held(run)
    said = folders.read_json(path)
    try:
        if said is not None:
            return table(said, live=live, run=run)
    except (KeyError, TypeError, ValueError, AttributeError):
        pass  # it is JSON, and not what a controller writes
    if not path.exists():
        raise WindfallError("no fleet has been written down here", where=str(run), fix="Has this run been started?")
    fix = "The next start of the run writes it anew." if not live else "The run writes it every second: look again."
    raise WindfallError("this file is damaged, or cannot be read", where=str(path), fix=fix)


def table(said: dict[str, Any], *, live: bool, run: Path) -> Group:
    """Those that are here, then the last few that are gone."""
    here = [w for w in said["workers"] if w["state"] != "gone"]
    gone = [w for w in said["workers"] if w["state"] == "gone"]
    out = Table(box=None, pad_edge=False)
    for name in COLUMNS:
        numbers = name in ("version", "running", "tok/s", "made", "moved", "age")
        out.add_column(name, justify="right" if numbers else "left", no_wrap=True, overflow="ellipsis")
    for w in here + gone[-GONE_SHOWN:]:
        price = f" ${w['price_usd_per_h']:g}/h" if w["price_usd_per_h"] else ""
        state = w["state"]
        out.add_row(
            escape(w["worker"]), w["kind"] + price, escape(w["device"]), Text(state, style=STYLES.get(state, "")),
            str(w["version"]) if w["version"] >= 0 else "-", f"{w['running']}/{w['slots']}" if state != "gone" else "-",
            f"{w['tok_per_s']:,.0f}" if state != "gone" else "-", f"{w['made']:,}", str(w["moved"]), _age(w["age_s"]),
            escape(w["why"]),
        )  # fmt: skip
    advice = [f"worth having: {a['count']} of {a['lease']} ({a['why']})" for a in said.get("advice", [])]
    return Group(Text("\n".join([_head(said, len(here), live, run), *advice])), out)


def _head(said: dict[str, Any], here: int, live: bool, run: Path) -> str:
    c = said["counts"]
    ago = max(0.0, time.time() - said["t"])
    when = "running" if live else ENDS.get(said["ended"], "ended without a word")
    if not live or ago > 5:
        when += f", as of {_age(ago)} ago"
    onward = "" if live or said["ended"] == "finished" else f"go on with: windfall resume {shlex.quote(str(run))}\n"
    return (
        f"{said['run']}: step {said['step']}/{said['steps']}, version {said['version']}, {when}\n{onward}"
        f"{here} workers here, {said['lost']} lost; {said['open']} responses open, {said['queued']} queued, "
        f"{c['moved']} moved; tokens: {c['accepted']:,} accepted, {c['repeated'] + c['late']} generated twice"
    )


def _age(s: float) -> str:
    """
    >>> [_age(x) for x in (5, 125, 7300)]
    ['5s', '2m05s', '2h01m']
    """
    s = int(s)
    return f"{s}s" if s < 60 else f"{s // 60}m{s % 60:02}s" if s < 3600 else f"{s // 3600}h{s % 3600 // 60:02}m"
