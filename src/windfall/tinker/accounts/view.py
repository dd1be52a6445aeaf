"""What `windfall top` shows of a server, besides its fleet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Group
from rich.text import Text

from windfall import run_folder as folders
from windfall.run.views import figures, top
from windfall.tinker.command import BASE

ACCOUNTS = (
    "account", "sessions", "models", "calls", "waiting", "sampled", "prompts", "trained", "trainer s", "worker s", "$",
)  # fmt: skip
MODELS = ("model", "account", "rank", "slot", "calls", "waiting")
MODELS_SHOWN = 20


def of_folder(run: Path) -> Group | None:
    """None: this is not the folder of a server."""
    snapshot = folders.read_json(run / "fleet.json")
    if not isinstance(snapshot, dict) or not isinstance(server := snapshot.get("server"), dict):
        return None
    try:
        # Slots come and go with models, which have a table of their own.
        policies = {name: each for name, each in snapshot["policies"].items() if name == BASE}
        fleet = top.table(snapshot | {"policies": policies}, live=folders.held(run), run=run)
        return Group(fleet, Text(), *of_server(server))
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
        return None  # another version of windfall wrote it: `windfall top` shows the fleet or says so


def of_server(server: dict[str, Any]) -> list[Any]:
    parts, idle, usd = server["bill"]["accounts"], server["bill"]["idle"], server["bill"]["usd"]
    rates = f"{server['sampled_per_s']:,.0f} tok/s sampled, {server['trained_per_s']:,.0f} tok/s trained"
    head = (
        f"server: {server['base']} at {server['url']}\n"
        f"sessions: {server['sessions']}; models: {len(server['models'])}; {server['calls_per_s']:.1f} calls/s, "
        f"{rates}; ${usd:,.2f}"
    )
    accounts = [
        [
            name, str(a["sessions"]), str(a["models"]), *(_number(a, key) for key in ("calls", "open_calls")),
            *(_number(a, f"{key}_tokens") for key in ("sampled", "prompt", "trained")), *_cost(parts.get(name, {})),
        ]
        for name, a in server["accounts"].items()
    ]  # fmt: skip
    accounts.append(["idle", *[""] * 7, *_cost(idle)])
    models = sorted(server["models"], key=lambda m: (not m["slot"], m["model"]))
    rows = [
        [m["model"], m["account"], str(m["rank"]), m["slot"] or "on disk", f"{m['calls']:,}", str(m["waiting"])]
        for m in models[:MODELS_SHOWN]
    ]
    found: list[Any] = [Text(head), figures.plain_table(ACCOUNTS, accounts, right=ACCOUNTS[1:], whole=True)]
    if rows:
        found += [Text(), figures.plain_table(MODELS, rows, right=("rank", "calls", "waiting"), whole=True)]
    if len(models) > MODELS_SHOWN:
        found.append(Text(f"and {len(models) - MODELS_SHOWN} more models"))
    return found


def _number(account: dict[str, Any], key: str) -> str:
    return f"{account.get(key, 0):,.0f}"


def _cost(part: dict[str, Any]) -> list[str]:
    return [f"{part.get(key, 0.0):,.1f}" for key in ("trainer_s", "worker_s")] + [f"{part.get('usd', 0.0):,.4f}"]
