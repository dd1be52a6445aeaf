"""An owner of responses made of functions (controller.rollout.dispatch.ResponseOwner)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(kw_only=True)
class FunctionOwner:
    turn_ended: Callable[[str], None]
    rejected: Callable[[str, str], None]
