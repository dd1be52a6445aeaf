"""Who is told what happens to a response."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Listener:
    """Callbacks for a response, given by the caller that opens it. There may be any number of listeners."""

    turn_ended: Callable[[str], None]
    rejected: Callable[[str, str], None]
    """Called with the response and the reason if no worker can generate it."""
    version_gone: Callable[[str], None] = lambda id: None
    """Called with a response that must have a fixed version, if no worker holds that version any more."""
    environment: str = ""
    """Name of the environment that answers its turns. How long it takes is predicted for each environment."""
