"""Sentences about the trainer's memory, for the console and the summary: what was predicted, what was used, and what an
update moved. Pure: fields in, text out. A sentence is empty if there is nothing to say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SHOWN = 0.1
"""Share of the training time of a step from which the time of its update is shown."""


def update(step: Mapping[str, Any]) -> str:
    """From a step's event.

    >>> update({"update_s": 1.94, "state_moved_bytes": 94.2e9, "train_s": 30.0})
    'update 1.9 s, 94 GB moved'
    >>> update({"update_s": 0.5, "train_s": 4.0}), update({"update_s": 0.1, "train_s": 4.0}), update({})
    ('update 0.5 s', '', '')
    """
    moved, took_s = step.get("state_moved_bytes") or 0, step.get("update_s") or 0.0
    if not moved and took_s <= SHOWN * (step.get("train_s") or 0.0):
        return ""
    return f"update {took_s:.1f} s" + (f", {_size(moved)} moved" if moved else "")


def summary(ready: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> str:
    """From the event of the last trainer, which has the prediction if it has a GPU, and from those of the steps.

    >>> steps = [{"peak_bytes": 96e9, "update_s": 2.0, "state_moved_bytes": 94e9, "train_s": 8.0}] * 2
    >>> summary({"predicted_bytes": 98.3e9}, steps)
    '98.3 GB predicted, 96.0 GB used at most; updates took 25% of training and moved 94 GB each'
    >>> summary({"predicted_bytes": 0}, steps), summary({}, [])
    ('', '')
    """
    predicted, used = ready.get("predicted_bytes") or 0, max((e.get("peak_bytes") or 0 for e in steps), default=0)
    if not predicted or not used:
        return ""
    moved = sum(e.get("state_moved_bytes") or 0 for e in steps)
    seconds, trained_s = sum(e.get("update_s") or 0.0 for e in steps), sum(e.get("train_s") or 0.0 for e in steps)
    updates = (
        f"; updates took {seconds / max(trained_s, 1e-9):.0%} of training and moved {_size(moved / len(steps))} each"
    )
    return f"{predicted / 1e9:.1f} GB predicted, {used / 1e9:.1f} GB used at most{updates if moved else ''}"


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e9:.0f} GB" if nbytes >= 1e10 else f"{nbytes / 1e6:,.0f} MB"
