"""The network that weights move over. Flows share links: the uplink of their sender, the link between two regions, the
downlink of their reader.

All flows get the same rate, except where a link is full: its flows share it equally. A flow that *follows* another
reads from the reader of that one. It stays a chunk behind its leader, and is then at most as fast.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

F = TypeVar("F")
CLOSE = 0.001
"""A flow that could be closer to its leader by less than this share of a chunk has caught up: times are rounded."""
MOMENT_S = 1e-6
"""Shortest time after which rates are computed again."""


def shares(flows: Mapping[F, Collection[str]], links: Mapping[str, float], leaders: Mapping[F, F]) -> dict[F, float]:
    """Max-min fair rate of each flow, by the links that it uses, their bandwidths, and the flow that limits it.

    >>> shares({1: ["up", "down"], 2: ["up"], 3: ["up"]}, {"up": 10.0, "down": 1.0}, {})
    {1: 1.0, 3: 4.5, 2: 4.5}
    >>> shares({1: ["up"], 2: ["up 1"], 3: ["up 1"]}, {"up": 2.0, "up 1": 9.0}, {2: 1})
    {1: 2.0, 2: 2.0, 3: 7.0}
    """
    rates: dict[F, float] = {}
    left, users, followers = dict(links), {link: list[F]() for link in links}, dict[F, list[F]]()
    for flow, used in flows.items():
        for link in used:
            users[link].append(flow)
    for flow, leader in leaders.items():
        followers.setdefault(leader, []).append(flow)
    waiting = {link: len(users[link]) for link in links}
    queue = [(left[link] / count, link) for link, count in waiting.items() if count]
    heapq.heapify(queue)
    while queue:
        rate, link = heapq.heappop(queue)
        if waiting[link] and (share := left[link] / waiting[link]) > rate:
            heapq.heappush(queue, (share, link))  # other links limit some of its flows
            continue
        limited = users[link]
        while limited:
            flow = limited.pop()
            if flow not in rates:
                rates[flow] = rate
                limited += followers.get(flow, ())
                for used in flows[flow]:
                    left[used] -= rate
                    waiting[used] -= 1
    return rates


@dataclass(slots=True, kw_only=True, eq=False)
class Flow:
    """All bytes of a file for one reader, whichever way they take."""

    count_bytes: float
    done: Callable[[], None]
    """Called `late_s` after the last byte was sent."""
    chunk_bytes: float = 0.0
    links: Mapping[str, float] = field(default_factory=dict)
    """Bandwidths by link. None: it pauses, or has ended."""
    late_s: float = 0.0
    leader: Flow | None = None
    """The flow that it follows, until that one ends."""
    followers: dict[Flow, None] = field(default_factory=dict)
    per_s: float = 0.0
    timer: asyncio.TimerHandle | None = None
    waits_bytes: float = field(init=False)
    """What it waits for: the missing bytes, and the first chunk of its leader as if that had to be read, too."""
    updated_s: float = 0.0

    def __post_init__(self) -> None:
        self.waits_bytes = self.count_bytes

    def advance(self) -> float:
        now_s = asyncio.get_running_loop().time()
        self.waits_bytes -= self.per_s * (now_s - self.updated_s)
        self.updated_s = now_s
        return self.waits_bytes

    @property
    def left_bytes(self) -> float:
        """Missing bytes."""
        return min(max(0.0, self.advance()), self.count_bytes)

    @property
    def gap_bytes(self) -> float:
        """What it has to catch up with its leader."""
        gap = math.inf if self.leader is None else self.advance() - self.leader.advance() - self.chunk_bytes
        return gap if gap > CLOSE * self.chunk_bytes else 0.0


class Network:
    def __init__(self) -> None:
        self._users: dict[str, dict[Flow, None]] = {}
        """Flows by link."""
        self._changed: list[Flow] = []
        """Flows that need a new rate, or one of those that share a link with them."""

    def send(self, flow: Flow, links: Mapping[str, float], *, leader: Flow | None = None, late_s: float = 0.0) -> None:
        """Send the rest of a flow over these links, by name and bandwidth. Without links it pauses."""
        self._take_off(flow)
        flow.waits_bytes, flow.late_s, flow.links = flow.left_bytes, late_s, links
        if leader is not None and leader.advance() > 0:
            flow.waits_bytes = max(flow.waits_bytes, leader.waits_bytes + flow.chunk_bytes)
            flow.late_s += leader.late_s
            flow.leader = leader
            leader.followers[flow] = None
        for link in links:
            self._users.setdefault(link, {})[flow] = None
        self._share_soon([flow, *flow.followers])

    def _take_off(self, flow: Flow) -> None:
        flow.advance()
        if flow.timer is not None:
            flow.timer.cancel()
        if flow.leader is not None:
            del flow.leader.followers[flow]
        for link in flow.links:
            del self._users[link][flow]
        self._share_soon([user for link in flow.links for user in islice(self._users[link], 1)])
        flow.links, flow.per_s, flow.leader = {}, 0.0, None

    def _share_soon(self, flows: Collection[Flow]) -> None:
        """Compute the rates once for all flows that start at the same moment, for example with a new version."""
        if flows and not self._changed:
            asyncio.get_running_loop().call_soon(self._share)
        self._changed += flows

    def _share(self) -> None:
        changed, self._changed = self._changed, []
        rates = self._rates(changed, deep=False)
        if any(flow.followers and not math.isclose(flow.per_s, rate) for flow, rate in rates.items()):
            rates = self._rates(changed, deep=True)
        for flow, rate in rates.items():
            flow.advance()
            flow.per_s = rate
        call_later = asyncio.get_running_loop().call_later
        for flow in rates:
            if flow.timer is not None:
                flow.timer.cancel()
            left_s = max(0.0, flow.waits_bytes / flow.per_s) if flow.per_s else math.inf
            faster = flow.per_s - flow.leader.per_s if flow.leader is not None else 0.0
            if 0 < flow.gap_bytes < faster * left_s:
                flow.timer = call_later(max(MOMENT_S, flow.gap_bytes / faster), self._share_soon, [flow])
            elif flow.per_s:
                flow.timer = call_later(left_s, self._sent, flow)

    def _rates(self, changed: list[Flow], *, deep: bool) -> dict[Flow, float]:
        """New rates of all flows that a change can reach: over links and, if `deep`, from leaders to followers."""
        used, links, leaders, reached = dict[Flow, list[str]](), dict[str, float](), dict[Flow, Flow](), [*changed]
        for flow in reached:  # which grows meanwhile
            if flow.links and flow not in used:
                used[flow] = [*flow.links]
                reached += flow.followers if deep else ()
                for link in flow.links:
                    reached += self._users[link] if link not in links else ()
                links |= flow.links
        for flow in used:
            if flow.leader in used and not flow.gap_bytes:
                leaders[flow] = flow.leader
            elif flow.leader is not None and not flow.gap_bytes:  # as good as a link: its rate stays
                used[flow].append(link := f"behind {len(links)}")
                links[link] = flow.leader.per_s
        rates = shares(used, links, leaders)
        return {flow: rates[flow] for flow in used}

    def _sent(self, flow: Flow) -> None:
        self._take_off(flow)
        flow.waits_bytes = 0.0
        for follower in flow.followers:
            follower.leader = None
        self._share_soon(flow.followers)
        if flow.late_s:
            flow.timer = asyncio.get_running_loop().call_later(flow.late_s, flow.done)
        else:
            flow.done()
