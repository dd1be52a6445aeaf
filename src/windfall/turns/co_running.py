"""Which two jobs may have a device at the same time: only pairs for which it was measured that both together do more
than they do in turns. Pure; the caller gives the time.

- Every turn that ends is a measurement of a rate: work (tokens) per second of its kind, alone or beside another side. A
  side is a job, the kind of its work and, for rollout, the bucket of its rows.
- A pair is tried once both sides were measured alone, until each side has ended TRIAL_TURNS turns. It co-runs on if the
  relative speeds of the two add up to at least GAIN, and neither side is slower than SLOWEST times what its fair share
  would give it.
- A pair that was refused is tried again after RETRY_S. One that co-runs is still measured.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from windfall.turns.sharing import Kind

GAIN = 1.05
SLOWEST = 1.5
ALONE_TURNS, TRIAL_TURNS = 3, 4
RETRY_S = 300.0
NEWEST = 0.2
"""Weight of the newest measurement in the mean, once there are some."""


@dataclass(frozen=True, slots=True, order=True)
class Side:
    """What a process does in a turn.

    >>> Side.of("a", "rollout", 60) == Side.of("a", "rollout", 50), Side.of("a", "train", 7)
    (True, Side(job='a', kind='train', bucket=0))
    """

    job: str
    kind: Kind
    bucket: int

    @staticmethod
    def of(job: str, kind: Kind, rows: int) -> Side:
        """Rows are put into buckets that grow by a factor of four."""
        return Side(job, kind, (max(0, rows).bit_length() + 1) // 2 if kind == "rollout" else 0)


@dataclass(slots=True)
class _Rate:
    per_s: float = 0.0
    turns: int = 0

    def observe(self, per_s: float) -> None:
        self.turns += 1
        self.per_s += (per_s - self.per_s) * max(NEWEST, 1 / self.turns)


class CoRunning:
    def __init__(self) -> None:
        self._alone: dict[Side, _Rate] = {}
        self._beside: dict[tuple[Side, Side], _Rate] = {}
        """By the side whose rate it is, and the other side."""
        self._refused_s: dict[tuple[Side, Side], float] = {}

    def observe(self, side: Side, seconds: float, work: float, beside: Side | None = None) -> None:
        """A turn of this side has ended. All of it was alone, or all of it beside the other side."""
        if seconds <= 0 or work <= 0:
            return
        if beside is None:
            rate = self._alone.setdefault(side, _Rate())
        else:
            rate = self._beside.setdefault((side, beside), _Rate())
        rate.observe(work / seconds)

    def relative_speed(self, side: Side, beside: Side) -> float | None:
        """The rate of a side beside another one, as a part of its rate alone. None: not measured yet."""
        alone, together = self._alone.get(side), self._beside.get((side, beside))
        return together.per_s / alone.per_s if together and alone and alone.per_s else None

    def may_co_run(self, a: Side, b: Side, fair: float, now_s: float) -> bool:
        """Whether these two may have the device at the same time now. `fair`: the part of the device's time that `a`
        gets in turns; `b` gets the rest."""
        if a.job == b.job or any(self._turns_alone(side) < ALONE_TURNS for side in (a, b)):
            return False
        pair = (min(a, b), max(a, b))
        refused_s = self._refused_s.get(pair)
        if refused_s is not None:
            if now_s - refused_s < RETRY_S:
                return False
            del self._refused_s[pair]
            self._beside.pop((a, b), None)  # measure anew
            self._beside.pop((b, a), None)
        tried = [self._beside.get(key, _Rate()).turns for key in ((a, b), (b, a))]
        if min(tried) < TRIAL_TURNS and max(tried) < 10 * TRIAL_TURNS:  # a side may give no measurement for long
            return True
        speeds = self.relative_speed(a, b) or 0.0, self.relative_speed(b, a) or 0.0
        if speeds[0] >= fair / SLOWEST and speeds[1] >= (1 - fair) / SLOWEST and sum(speeds) >= GAIN:
            return True
        self._refused_s[pair] = now_s
        return False

    def table(self) -> list[dict[str, object]]:
        """What was measured beside other sides, for views."""
        return [
            {
                "side": asdict(side),
                "beside": asdict(other),
                "turns": rate.turns,
                "relative_speed": self.relative_speed(side, other),
            }
            for (side, other), rate in self._beside.items()
        ]

    def forget(self, job: str) -> None:
        self._alone = {side: rate for side, rate in self._alone.items() if side.job != job}
        self._beside = {key: rate for key, rate in self._beside.items() if job not in (key[0].job, key[1].job)}
        self._refused_s = {key: at for key, at in self._refused_s.items() if job not in (key[0].job, key[1].job)}

    def _turns_alone(self, side: Side) -> int:
        return self._alone[side].turns if side in self._alone else 0
