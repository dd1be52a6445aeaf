"""What `windfall top` and the summary of a run show of lenders: servers that lend a run what they do not need."""

from __future__ import annotations

from typing import Any

from rich.markup import escape

from windfall.controller.cost.bill import BorrowedValue
from windfall.run.views.tables import Labeled

SHOWN = 6
"""Number of lenders with a line of their own: those with the most free slots."""


def of_snapshot(workers: list[dict[str, Any]]) -> list[str]:
    """For `windfall top`: a line for all lenders, and one for each of the first.

    >>> lender = {"in_use": True, "slots": 4, "state": "normal", "use": 0.3, "lent": 0.55, "slack_s": 0.08}
    >>> for line in of_snapshot([{"worker": "a", "state": "ready", "running": 3, "slots": 8, "lender": lender}]):
    ...     print(line)
    lenders: 1 of 1 in use, 4 of 8 slots open, 55% of their time lent
      a: normal, 3 running, 4 of 8 slots open, slack 80 ms, 30% of its memory serves, 55% lent
    """
    rows = [(w, w["lender"]) for w in workers if w["state"] != "gone" and w.get("lender")]
    if not rows:
        return []
    used, lent = sum(x["in_use"] for _, x in rows), sum(x["lent"] for _, x in rows) / len(rows)
    open_slots, slots = sum(x["slots"] for _, x in rows), sum(w["slots"] for w, _ in rows)
    out = [f"lenders: {used} of {len(rows)} in use, {open_slots} of {slots} slots open, {lent:.0%} of their time lent"]
    for w, x in sorted(rows, key=lambda row: -row[1]["slots"])[:SHOWN]:
        state = x["state"] if x["in_use"] else f"{x['state']}, not in use"
        slack = "no requests" if x["slack_s"] is None else f"slack {1000 * x['slack_s']:,.0f} ms"
        out.append(
            f"  {w['worker']}: {state}, {w['running']} running, {x['slots']} of {w['slots']} slots open, {slack}, "
            f"{x['use']:.0%} of its memory serves, {x['lent']:.0%} lent"
        )
    if len(rows) > SHOWN:
        out.append(f"  and {len(rows) - SHOWN} more")
    return out


def of_run(value: BorrowedValue | None) -> list[Labeled]:
    """For the summary of a run: what borrowed capacity gave and saved.

    >>> of_run(BorrowedValue(tokens=1_000_000, share=0.25, hours=2.0, saved_usd=3.5, priced_as="spot workers"))
    [('borrowed', '1,000,000 tokens (25%) in 2.0 machine hours; saved $3.50 at the price of spot workers')]
    """
    if value is None:
        return []
    saved = ""
    if value.saved_usd is not None:
        saved = f"; saved ${value.saved_usd:,.2f} at the price of {escape(value.priced_as)}"
    gave = f"{value.tokens:,} tokens ({value.share:.0%}) in {value.hours:,.1f} machine hours"
    return [("borrowed", f"{gave}{saved}")]
