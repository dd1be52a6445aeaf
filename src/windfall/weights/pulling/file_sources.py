"""The sources of one file that is being read: which one to use next, how they failed, and what came from each.

Rules:

- The route names one source of every part. Each failure is reported with `ask`, and a new route (`reroute`, at any
  time, also unasked) replaces the old one. The reader waits for it for ASK_S, then tries the same source again: the
  controller may be gone. A break behind a verified chunk is not reported before the second one.
- A source that has no more of the file yet has not failed: the reader follows it. After WAIT_S without a verified
  chunk it has.
- A source that sends too slowly (PACE_BYTES in PACE_S) has stalled.
- If a source is named that has failed `tries` times in a row without a verified chunk, or sent wrong bytes, the read
  fails. After NO_BYTE_S without a byte of any file of the pull, it fails, too.
- Every wait ends within POLL_S after `stop` is set.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

from windfall.backoff import delay_s
from windfall.link.messages import AskRoute, ReadRoute, SourceRef, SourceUse
from windfall.weights.pulling.source import (
    PACE_BYTES,
    PACE_S,
    Pace,
    Source,
    SourceBroken,
    SourceStalled,
    SourceWaits,
    SourceWrong,
)

POLL_S = 0.25
ASK_S, ASK_AGAIN_S = 2.0, 1.0
WAIT_S, WAIT_POLL_S = 15.0, 0.02
NO_SOURCE_S = 30.0
"""How long to ask for sources if none is known."""
NO_BYTE_S = 100.0
"""A pull without a byte for this long (seconds) fails. worker_link.py ends a worker whose pull takes longer to fail."""
FIRST_DELAY_S, LONGEST_DELAY_S = 0.1, 5.0

Ask = Callable[[AskRoute], None]
"""Report to the controller, and ask it for another route. The answer comes by `reroute`."""


class PullFailed(Exception):
    """The weights could not be pulled; the text says what failed."""


class FileSources:
    """Any thread may call it."""

    def __init__(
        self,
        file: str,
        route: ReadRoute,
        *,
        connect: Callable[..., Source],
        ask: Ask | None,
        stop: threading.Event,
        tries: int,
        on_bytes: Callable[[int], None],
        received_s: float | None = None,
    ) -> None:
        """`file`: its digest. `connect`: as in source.py, from a reference and `stopped`. `received_s`: when the last
        byte of another file of the same pull came, or the pull began (monotonic clock, seconds)."""
        self.file = file
        self.route = route
        self.verified: Callable[[], int] = lambda: 0
        """Bytes from the start of the file that the reader has."""
        self.connecting_s = 0.0
        """What the last connection took (seconds): at least one round trip."""
        self.retries = 0
        self.received_s = time.monotonic() if received_s is None else received_s
        """When the last byte came, or the pull began (monotonic clock, seconds)."""
        self._connect = connect
        self._ask = ask
        self._stop = stop
        self._tries = tries
        self._on_bytes = on_bytes
        self._changed = threading.Condition()
        self._given_up = False
        self._idle: Source | None = None  # a connection for whoever needs one next
        self._failures: Counter[str] = Counter()  # by source: in a row without a verified chunk; -1: it has sent one
        self._failed_s: dict[str, float] = {}  # by source: when that was counted last
        self._paces: defaultdict[str, Pace] = defaultdict(Pace)  # by source
        self._errors: dict[str, str] = {}  # by source: how it failed
        self._waits_s: dict[str, float] = {}  # by source: since when it has no more of the file
        self._uses: dict[str, tuple[int, float, float]] = {}  # by source: bytes, first and last second

    def reroute(self, route: ReadRoute) -> None:
        """From now on, use these sources."""
        with self._changed:
            self.route = route
            self._changed.notify_all()

    def uses(self, why: Any = "", *ids: str) -> tuple[SourceUse, ...]:
        """What came from each source since the last call. `why`: what is wrong with the sources `ids`."""
        uses, self._uses = self._uses, {}
        for id in ids:
            uses.setdefault(id, (0, 0.0, 0.0))
        return tuple(
            SourceUse(source=id, bytes=n, s=last - first, why=why if id in ids else "")
            for id, (n, first, last) in uses.items()
        )

    def of(self, stop: int) -> SourceRef | None:
        """The source of the byte before `stop`."""
        route = self.route
        at = min(bisect_left(route.parts, stop, key=lambda part: part.stop), len(route.parts) - 1)
        return route.sources[route.parts[at].source] if route.parts else None

    def attempt(self, stop: int, source: Source | None, use: Callable[[Source], None]) -> Source | None:
        """Use the source of the byte before `stop`, once. `source`: the one used before. Returns the one to pass next
        time. A failure is only counted, but PullFailed is raised if the source has failed too often."""
        ref, began_s = self._choose(stop), time.monotonic()
        if source is None:
            with self._changed:
                source, self._idle = self._idle, None
        try:
            if source is None or source.ref != ref:
                if source is not None:
                    source.close()
                    source = None
                source = self._connect(ref, stopped=self.stopped)
                self.connecting_s = time.monotonic() - began_s
            use(source)
            return source
        except PullFailed:
            raise
        except Exception as e:  # fault boundary: whatever a source causes, another one may do better
            if isinstance(e, SourceWaits) and self._may_wait(ref.id):
                return source
            if source is not None:
                source.close()
            if not isinstance(e, SourceBroken):
                e = SourceBroken(f"{ref.kind} {ref.location}: {type(e).__name__}: {e}")
            self._fail(ref.id, e, began_s)
            return None

    def leave(self, source: Source | None) -> None:
        """The caller needs this connection no more; the next one may use it."""
        self._idle = source

    def close(self) -> None:
        if self._idle is not None:
            self._idle.close()

    def count(self, id: str, nbytes: int) -> None:
        """These bytes have come from a source."""
        with self._changed:
            now_s = self.received_s = time.monotonic()
            n, first_s, _ = self._uses.get(id, (0, now_s, now_s))
            self._uses[id] = n + nbytes, first_s, now_s
            self._on_bytes(nbytes)

    def check_pace(self, id: str, nbytes: int, began_s: float) -> None:
        """The reader has waited for these bytes since `began_s`. Raises SourceStalled if the source is too slow."""
        with self._changed:
            if not self._paces[id].add(nbytes, began_s):
                raise SourceStalled(f"{id} sent less than {PACE_BYTES >> 20} MiB in {PACE_S:g} s")

    def verify(self, id: str) -> None:
        """The last bytes of a chunk have come from this source, and the chunk is verified."""
        with self._changed:
            self._waits_s.pop(id, None)
            if self._failures[id] < self._tries:
                self._failures[id] = -1

    def report_slow(self) -> None:
        """Report all sources that send, but slowly."""
        with self._changed:
            self._report("slow", *(self._uses.keys() - self._waits_s.keys()))

    def give_up(self) -> None:
        """End all waits."""
        self._given_up = True

    def stopped(self) -> bool:
        return self._given_up or self._stop.is_set()

    def _choose(self, stop: int) -> SourceRef:
        with self._changed:
            asking_s = time.monotonic()
            while (ref := self.of(stop)) is None or self._failures[ref.id] >= self._tries:
                if ref is not None:  # the connection that noticed has asked for another source
                    left_s = self._failed_s[ref.id] + ASK_S - time.monotonic()
                    if self._ask is None or left_s <= 0:
                        raise PullFailed(f"{self.file}: {self._why()}")
                    self._pause(left_s)
                    continue
                if self._ask is None or time.monotonic() - asking_s > NO_SOURCE_S:
                    raise PullFailed(f"no source of {self.file} is known")
                self._report_and_wait("")
                self._pause(0.0 if self.of(stop) else ASK_AGAIN_S)
            failures = self._failures[ref.id]
            self._pause(delay_s(failures - 1, first_s=FIRST_DELAY_S, limit_s=LONGEST_DELAY_S) if failures > 0 else 0.0)
            now_s = time.monotonic()
            self._uses.setdefault(ref.id, (0, now_s, now_s))
            return ref

    def _fail(self, id: str, error: SourceBroken, began_s: float) -> None:
        with self._changed:
            self._check()
            if began_s < self._failed_s.get(id, 0.0):
                return  # it broke for all connections at once, which counts once
            self.retries += 1
            self._failures[id] = self._tries if isinstance(error, SourceWrong) else self._failures[id] + 1
            if type(error) is not SourceBroken:  # no second chance
                self._failures[id] = max(1, self._failures[id])
            self._errors[id] = str(error)
            self._waits_s.pop(id, None)
            self._failed_s[id] = time.monotonic()
            if self._failures[id] > 0:
                self._report_and_wait(error.why, id)

    def _may_wait(self, id: str) -> bool:
        with self._changed:
            waited_s = time.monotonic() - self._waits_s.setdefault(id, time.monotonic())
            self._pause(WAIT_POLL_S)
            return waited_s < WAIT_S

    def _report(self, why: str, *ids: str) -> None:
        if self._ask is not None:
            self._ask(AskRoute(file=self.file, used=self.uses(why, *ids), received=self.verified()))

    def _report_and_wait(self, why: str, *ids: str) -> None:
        route = self.route
        self._report(why, *ids)
        self._pause(0.0 if self._ask is None else ASK_S, route)

    def _pause(self, seconds: float, route: ReadRoute | None = None) -> None:
        """Wait until there is another route than this one, or the present one, but at most this long."""
        route, ends_s = route or self.route, time.monotonic() + seconds
        self._check()
        while self.route is route and (left_s := ends_s - time.monotonic()) > 0:
            self._changed.wait(min(left_s, POLL_S))
            self._check()

    def _check(self) -> None:
        if self.stopped():
            raise PullFailed(f"{self.file}: stopped")
        if time.monotonic() - self.received_s > NO_BYTE_S:
            raise PullFailed(f"{self.file}: no byte for {NO_BYTE_S:g} s: {self._why()}")

    def _why(self) -> str:
        """How each source failed."""
        return "; ".join(self._errors.values())
