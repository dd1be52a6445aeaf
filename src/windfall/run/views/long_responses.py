"""Sentences about long responses, for the console, `windfall top`, the summary and the page: what drafts gave, how well
lengths were predicted, and what gathering the last responses brought. Pure: fields in, text out. A sentence is empty if
there is nothing to say."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

SHOWN_USD, SHOWN_SAVED_S = 0.005, 0.05
"""Smaller values are left out: they would be shown as $0.00 and 0.0 s."""


def drafts(found: Mapping[str, Any]) -> str:
    """From a step's event, or from `drafts` in fleet.json. Empty if nothing was drafted.

    >>> drafts({"drafted": 1000, "drafts_accepted": 381, "tokens_per_step": 1.42, "drafts_gain": 1.21})
    'drafts: 1.42 tokens per step, 38% of 1,000 accepted, 1.21x as fast as without'
    """
    if not found.get("drafted"):
        return ""
    drafted, gain = found["drafted"], found.get("drafts_gain")
    accepted = f"{found['drafts_accepted'] / drafted:.0%} of {drafted:,} accepted"
    faster = "" if gain is None else f", {gain:.2f}x as fast as without"
    return f"drafts: {found['tokens_per_step']:.2f} tokens per step, {accepted}{faster}"


def predicted(found: Mapping[str, Any]) -> str:
    """From `predicted` of a step's event.

    >>> predicted({"alike": 0.71, "error": 0.3, "error_without": 0.55})
    'lengths: predicted within a factor of 1.35 (by the mean of the run: 1.73); correlation within groups 0.71'
    """
    if not found:
        return ""
    error, without = math.exp(found["error"]), math.exp(found["error_without"])
    factor = f"predicted within a factor of {error:.2f} (by the mean of the run: {without:.2f})"
    return f"lengths: {factor}; correlation within groups {found['alike']:.2f}"


def gathering(found: Mapping[str, Any]) -> str:
    """From `gathering` of a bill, or of fleet.json. Empty if it brought nothing.

    >>> gathering({"moves": 5, "released": 1, "freed_s": 9.0, "sooner_s": 2.2, "usd": 0.4})
    'moving the last responses of steps together saved about 2.2 s and $0.40 (5 moves), and released a worker for 9.0 s'
    >>> gathering({"moves": 2, "released": 0, "freed_s": 0.0, "sooner_s": -0.8, "usd": -0.02})
    'moving the last responses of steps together cost about 0.8 s and $0.02 (2 moves)'
    """
    if not found.get("moves") or (abs(found["sooner_s"]) < SHOWN_SAVED_S and not found["released"]):
        return ""
    sooner_s, usd = found["sooner_s"], abs(found["usd"])
    brought = "saved" if sooner_s >= 0 else "cost"
    value = f"{abs(sooner_s):,.1f} s" + (f" and ${usd:,.2f}" if usd >= SHOWN_USD else "")
    released = ""
    if count := found["released"]:
        workers = "a worker" if count == 1 else f"{count} workers"
        released = f", and released {workers} for {found['freed_s']:,.1f} s"
    what = "moving the last responses of steps together"
    return f"{what} {brought} about {value} ({found['moves']} moves){released}"
