"""The bill invariant computes the paid seconds of a trainer that is killed at the moment its worker joins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.chaos import InvariantBroken, bill_invariant
from windfall.controller.cost.accounts import Accounts
from windfall.types import LOCAL

BILLED_S, CONTROLLER_S, JOINED_S, DOWN_S, END_S = 10.0, 11.0, 12.0, 2.0, 20.0
"""The last bill of a killed controller, the start of the next one, and when the trainer's worker joins it. The trainer
is killed then or soon afterwards. Its next process needs `DOWN_S` to boot. The run ends at `END_S`."""


class Log:
    """Reports the trainer's worker to the accounts of a controller, and writes the events of an event log."""

    def __init__(self, accounts: Accounts) -> None:
        self.accounts = accounts
        self.events: list[dict[str, Any]] = []

    def join(self, now_s: float, worker: str, started_s: float) -> None:
        self.accounts.join(
            now_s, worker, kind="reserved", usd_per_h=80.0, trainer=True, started_s=started_s, name=LOCAL
        )
        self.events.append({"m": now_s, "name": "worker_joined", "worker": worker, "lease": "reserved"})

    def lose(self, now_s: float, worker: str) -> None:
        self.accounts.gone(now_s, worker, heard_s=now_s)
        self.events.append({"m": now_s, "name": "worker_lost", "worker": worker})

    def bill(self, now_s: float) -> None:
        bill = msgspec.to_builtins(self.accounts.step(now_s))
        self.events.append({"m": now_s, "name": "step", "bill": bill})


@pytest.mark.parametrize("alive_s", [0.0, 0.5])
def test_trainer_killed_as_its_worker_joins_is_billed_until_then(alive_s: float, tmp_path: Path) -> None:
    first = Log(Accounts())
    first.join(0.0, LOCAL, started_s=0.0)
    first.bill(BILLED_S)
    killed_s = JOINED_S + alive_s
    second = Log(Accounts(billed_s=BILLED_S))
    second.join(JOINED_S, LOCAL, started_s=0.0)
    second.lose(killed_s, LOCAL)
    second.join(killed_s + DOWN_S, f"{LOCAL}#2", started_s=killed_s)
    second.bill(END_S)
    assert second.accounts.totals(END_S).all.total_s == pytest.approx(END_S - BILLED_S), "the machine was never free"

    def check() -> None:
        log = tmp_path / "events.jsonl"
        log.write_text("".join(json.dumps(event) + "\n" for event in (*first.events, *second.events)))
        bill_invariant.check(log, [0.0, CONTROLLER_S], [0.0, killed_s], [])

    check()
    second.events[-1]["bill"]["holders"]["trainer"]["seconds"]["lost"] = 0.0
    with pytest.raises(InvariantBroken, match=r"trainer: 18\.000000 s are billed, but 20\.000000 s elapsed"):
        check()
