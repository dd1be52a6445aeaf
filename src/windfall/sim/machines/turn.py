"""The turn of a simulated device: what a simulated worker or trainer asks before it computes. With one job, every turn
is free and takes no time; with several (sim/jobs/), one job at a time has the turn of a device."""

from __future__ import annotations

from typing import Protocol


class TurnTaker(Protocol):
    """A worker or a trainer that computes on a device."""

    def turn_granted(self) -> None:
        """It has the turn that it could not take at once."""
        ...

    def turn_wanted(self) -> None:
        """Another job should have the turn: give it after the current step."""
        ...


class SimTurn(Protocol):
    def take(self) -> bool:
        """True: it has the turn. False: `turn_granted` follows."""
        ...

    def give(self) -> None:
        """End the turn, or stop waiting for it. Does nothing if it is neither held nor awaited."""
        ...

    @property
    def contended_s(self) -> float:
        """Seconds in which another job waited for the device or had it."""
        ...


class FreeTurn:
    """The turn of a device that only one job has."""

    contended_s = 0.0

    def take(self) -> bool:
        return True

    def give(self) -> None: ...


FREE = FreeTurn()
