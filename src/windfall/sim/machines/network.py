"""The network that weights are pulled over: concurrent pulls share the trainer's egress bandwidth.

Every pull gets the same rate, limited by the ingress bandwidth of its worker. The others share the bandwidth that slow
workers leave unused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

DONE_BYTES = 1e-3


def shares(egress_per_s: float, ingress_per_s: Sequence[float]) -> list[float]:
    """Bandwidth of each pull from one sender.

    >>> shares(10.0, [1.0, 8.0, 8.0]), shares(10.0, [4.0, 3.0])
    ([1.0, 4.5, 4.5], [4.0, 3.0])
    """
    out = [0.0] * len(ingress_per_s)
    left = egress_per_s
    order = sorted(range(len(ingress_per_s)), key=lambda n: ingress_per_s[n])
    for done, n in enumerate(order):
        out[n] = min(ingress_per_s[n], left / (len(order) - done))
        left -= out[n]
    return out


@dataclass(slots=True, kw_only=True)
class _Pull:
    left_bytes: float
    ingress_per_s: float
    done: Callable[[], None]
    per_s: float = 0.0


class Network:
    def __init__(self, egress_per_s: float) -> None:
        self._egress_per_s = egress_per_s
        self._pulls: dict[int, _Pull] = {}
        self._next = 0
        self._updated_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._sharing = False

    def start(self, count_bytes: float, ingress_per_s: float, done: Callable[[], None]) -> int:
        """Start a pull and return its number, for `stop`. `done` is called when it is complete."""
        self._update_progress()
        self._next += 1
        self._pulls[self._next] = _Pull(left_bytes=count_bytes, ingress_per_s=ingress_per_s, done=done)
        self._share_soon()
        return self._next

    def left_bytes(self, number: int | None) -> float:
        """Bytes of this pull that are still missing."""
        if number not in self._pulls:
            return 0.0
        self._update_progress()
        return max(0.0, self._pulls[number].left_bytes)

    def stop(self, number: int | None) -> None:
        if number in self._pulls:
            self._update_progress()
            del self._pulls[number]
            self._share_soon()

    def _share_soon(self) -> None:
        """Compute the rates once for all pulls that start at the same moment, for example with a new version."""
        if not self._sharing:
            self._sharing = True
            asyncio.get_running_loop().call_soon(self._share)

    def _update_progress(self) -> None:
        now = asyncio.get_running_loop().time()
        if now == self._updated_s:
            return
        for pull in self._pulls.values():
            pull.left_bytes -= pull.per_s * (now - self._updated_s)
        self._updated_s = now

    def _share(self) -> None:
        self._sharing = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        rates = shares(self._egress_per_s, [p.ingress_per_s for p in self._pulls.values()])
        for pull, rate in zip(self._pulls.values(), rates, strict=True):
            pull.per_s = rate
        if self._pulls:
            soonest_s = min(max(0.0, p.left_bytes) / p.per_s for p in self._pulls.values())
            self._timer = asyncio.get_running_loop().call_later(soonest_s, self._arrived)

    def _arrived(self) -> None:
        self._update_progress()
        complete: Mapping[int, _Pull] = {
            n: p for n, p in self._pulls.items() if p.left_bytes <= max(DONE_BYTES, p.per_s * 1e-9)
        }
        for number in complete:
            del self._pulls[number]
        self._share()
        for pull in complete.values():
            pull.done()
