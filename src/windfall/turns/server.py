"""The turn server of a machine: it decides which process has each device, and records for how long. Client: client.py.

    take ──▶ waiting ── Sharing chooses ──▶ turn ── slice over, another waits: "wanted" ──▶ give
                                              └── process or connection ends, or it hangs: killed ──▶ the turn ends

Rules:
- A device has one holder; two of different jobs, if `co_running` is on and the table of measurements allows the pair.
- Whatever a peer sends, it can harm only its own connection: a bad line closes it. The job is known by its key alone.
  Only the free memory that trainers measure is believed, because this process has no access to the devices.
- A process that keeps a turn for `limit_s` while others wait, or after it was asked to give it, is killed (SIGKILL). If
  it cannot be killed, its connection and its turn end all the same.
- Every nanosecond of every device is charged (accounts.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from windfall.errors import WindfallError
from windfall.turns.accounts import IDLE, DeviceAccounts
from windfall.turns.client import MAX_LINE_BYTES
from windfall.turns.co_running import CoRunning, Side
from windfall.turns.residence import Residence
from windfall.turns.sharing import SLICE_S, Claim, Kind, Sharing

LIMIT_S = 300.0
HELLO_S = 10.0
"""Seconds that a peer has to say which job it belongs to."""
MAX_STRANGERS, MAX_OF_JOB = 256, 512
"""Connections that have not said hello yet, and those of one job."""
MAX_UNREAD_BYTES = 65536
"""Upper limit for messages that a peer does not read; beyond it, its connection ends."""
MAX_PATH_BYTES = 100
MEASURABLE = 0.9
"""A turn is a measurement if at least this part of it was in one company."""


@dataclass(slots=True)
class _Terms:
    key: bytes
    share: float
    priority: int
    deadline: float | None
    left_s: float = 0.0


@dataclass(eq=False, slots=True)
class _Peer:
    """A connection: one process, one kind of work, one device."""

    job: str
    kind: Kind
    device: _Device
    writer: asyncio.StreamWriter
    pid: int
    pidfd: int
    """-1: the process is in another container, or its end cannot be watched."""
    number: int = 0
    side: Side | None = None
    """What it does in the turn that it waits for or has; None if it does neither."""
    has_turn: bool = False
    since_ns: int = 0
    """When it began to wait, or when its turn began."""
    began_s: float = 0.0
    """When its turn began (Unix time)."""
    asked_ns: int = 0
    """When it was asked to give the turn; 0: it was not."""
    company_ns: dict[Side | None, int] = field(default_factory=dict)
    """How long the turn was alone (None), and beside which sides."""
    state_bytes: int = 0
    """What its state needs on the device; 0: it has none that can sleep."""
    others: bool = False
    """What it was told last: whether another job waits for the device or has it."""
    woke_s: float = 0.0
    """How long its state took to come back to the device for its last turn; 0: it was there."""
    sleeps_since_ns: int = 0
    """When its state was asked to sleep; 0: it was not, or has answered."""

    @property
    def turn(self) -> Claim:
        return Claim(self.job, self.kind, self.since_ns / 1e9)


@dataclass(eq=False, slots=True)
class _Device:
    name: str
    sharing: Sharing
    residence: Residence
    settled_ns: int
    peers: list[_Peer] = field(default_factory=list)
    """Those that wait for a turn or have it."""
    timer: asyncio.TimerHandle | None = None

    @property
    def holders(self) -> list[_Peer]:
        return [peer for peer in self.peers if peer.has_turn]

    @property
    def waiting(self) -> list[_Peer]:
        return [peer for peer in self.peers if not peer.has_turn]


class TurnServer:
    def __init__(
        self,
        devices: Sequence[str],
        *,
        on_event: Callable[[str, Mapping[str, Any]], None] = lambda event, fields: None,
        log: Callable[[dict[str, Any]], None] = lambda turn: None,
        accounts: DeviceAccounts | None = None,
        co_running: bool = False,
        slice_s: float = SLICE_S,
        limit_s: float = LIMIT_S,
        state_bytes: int | None = 0,
    ) -> None:
        """`on_event` gets "hung" when a process was killed, with its device, job, kind, pid and held_s. `log` gets
        every turn that has ended. `accounts`: those of an earlier server, to go on with. `state_bytes`: upper limit for
        the states of trainers on one device (residence.py); 0: they all fit; None: by the memory that is free."""
        now_ns = time.monotonic_ns()
        self.accounts = accounts or DeviceAccounts(devices, now_ns)
        self.table = CoRunning()
        self._devices = {name: _Device(name, Sharing(slice_s), Residence(state_bytes), now_ns) for name in devices}
        self._jobs: dict[str, _Terms] = {}
        self._peers: set[_Peer] = set()
        self._strangers = 0
        self._closing = False
        self._on_event, self._log = on_event, log
        self._co_running, self._slice_s, self._limit_s = co_running, slice_s, limit_s
        self._server: asyncio.Server | None = None
        self._path: Path | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, path: Path) -> None:
        """Listen on this Unix socket, which only this user can open."""
        if len(os.fsencode(path)) > MAX_PATH_BYTES:
            fix = "Use a folder with a shorter path."
            raise WindfallError(f"a socket's path has at most {MAX_PATH_BYTES} bytes", where=str(path), fix=fix)
        path.unlink(missing_ok=True)
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(path))
        path.chmod(0o600)
        self._server = await asyncio.start_unix_server(self._serve, sock=listening, limit=MAX_LINE_BYTES, backlog=1024)
        self._path = path

    async def close(self) -> None:
        """End all turns and connections. No other turn begins."""
        self._closing = True
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for device in self._devices.values():
            if device.timer is not None:
                device.timer.cancel()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    # Jobs

    def register(
        self, key: str, job: str, *, share: float = 1.0, priority: int = 0, deadline: float | None = None
    ) -> None:
        """Let processes with this key take turns for the job. `deadline`: Unix time."""
        assert job != IDLE and key, "a job has a name and a key"
        self._jobs[job] = _Terms(_digest(key), share, priority, deadline)
        self._apply_terms(job)

    def update(
        self,
        job: str,
        *,
        share: float | None = None,
        priority: int | None = None,
        deadline: float | None = None,
        left_s: float | None = None,
    ) -> None:
        """Change what is given. `left_s`: seconds that the job would still need if it had its devices alone."""
        terms = self._jobs[job]
        terms.share = terms.share if share is None else share
        terms.priority = terms.priority if priority is None else priority
        terms.deadline = terms.deadline if deadline is None else deadline
        terms.left_s = terms.left_s if left_s is None else left_s
        self._apply_terms(job)

    def forget(self, job: str) -> None:
        """End all turns and connections of the job. Its time stays in the accounts."""
        for peer in [peer for peer in self._peers if peer.job == job]:
            self._leave(peer)
        self._jobs.pop(job, None)
        for device in self._devices.values():
            device.sharing.forget(job)
        self.table.forget(job)

    def _apply_terms(self, job: str) -> None:
        terms = self._jobs[job]
        deadline_s = math.inf if terms.deadline is None else terms.deadline - time.time() + time.monotonic()
        for device in self._devices.values():
            device.sharing.set_terms(
                job, share=terms.share, priority=terms.priority, deadline_s=deadline_s, left_s=terms.left_s
            )
            self._schedule(device)

    # Views

    def charged(self) -> dict[str, dict[str, int]]:
        """Nanoseconds of every device by job; idle time by ""."""
        return self.accounts.charged(time.monotonic_ns())

    def snapshot(self) -> dict[str, Any]:
        now_ns, charged = time.monotonic_ns(), self.charged()
        devices = {}
        for name, device in self._devices.items():
            holders, used_s = device.holders, {job: ns / 1e9 for job, ns in charged[name].items()}
            idle_s = used_s.pop(IDLE)
            devices[name] = {
                "job": holders[0].job if holders else "",
                "kind": holders[0].kind if holders else "",
                "beside": holders[1].job if len(holders) > 1 else "",
                "idle_s": idle_s,
                "used_s": used_s,
                "asleep": [peer.job for peer in self._peers_of(device) if not device.residence.is_awake(id(peer))],
                "waiting": [
                    {"job": peer.job, "kind": peer.kind, "for_s": (now_ns - peer.since_ns) / 1e9}
                    for peer in device.waiting
                ],
            }
        jobs = {
            job: {
                "share": terms.share,
                "priority": terms.priority,
                "late": any(device.sharing.late(job, now_ns / 1e9) for device in self._devices.values()),
                "processes": len({peer.pid for peer in self._peers if peer.job == job}),
            }
            for job, terms in self._jobs.items()
        }
        return {"devices": devices, "jobs": jobs, "co_running": self.table.table()}

    # Connections

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task, peer = asyncio.current_task(), None
        assert task is not None
        if self._closing:  # it connected at the last moment
            writer.transport.abort()
            return
        self._tasks.add(task)
        try:
            peer = await self._greet(reader, writer)
            while peer is not None and (line := await reader.readline()):
                self._hear(peer, json.loads(line))
        except Exception:  # fault boundary: a bad line and a connection that has ended have the same end
            pass
        except asyncio.CancelledError:
            pass  # the server closes
        finally:
            if peer is not None:
                self._leave(peer)
            writer.transport.abort()
            self._tasks.discard(task)

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> _Peer | None:
        if self._strangers >= MAX_STRANGERS:
            return None
        self._strangers += 1
        try:
            async with asyncio.timeout(HELLO_S):
                hello = json.loads(await reader.readline())
        finally:
            self._strangers -= 1
        digest = _digest(str(hello["hello"]))
        job = next((job for job, terms in self._jobs.items() if terms.key == digest), None)
        device = self._devices.get(str(hello["device"]))
        why = ""
        if job is None:
            why = "no job has this key now"
        elif device is None:
            why = f"this machine has no device {hello['device']!r}; it has {', '.join(self._devices)}"
        elif hello["kind"] not in get_args(Kind):
            why = f"unknown kind; expected one of: {', '.join(get_args(Kind))}"
        elif sum(peer.job == job for peer in self._peers) >= MAX_OF_JOB:
            why = f"the job has {MAX_OF_JOB} connections"
        if why or job is None or device is None:
            _send(writer, {"refused": why})
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(HELLO_S):
                    await writer.drain()
            return None
        pid, pidfd = _process(writer)
        peer = _Peer(job, hello["kind"], device, writer, pid, pidfd)
        if pidfd >= 0:  # a child of it may hold the connection open after its end
            asyncio.get_running_loop().add_reader(pidfd, self._leave, peer)
        self._peers.add(peer)
        self._tell_of_others(device)
        return peer

    def _hear(self, peer: _Peer, message: Mapping[str, Any]) -> None:
        if "take" in message:
            if peer.side is not None:
                raise ValueError("it asks for a second turn")
            number, rows, state_bytes = map(_whole, (message["take"], message["rows"], message.get("bytes", 0)))
            peer.number, peer.side, peer.state_bytes = number, Side.of(peer.job, peer.kind, rows), state_bytes
            peer.since_ns = time.monotonic_ns()
            if peer.state_bytes:
                awake = message.get("awake", True) is True
                peer.device.residence.join(id(peer), peer.state_bytes, peer.since_ns / 1e9, awake=awake)
            peer.device.peers.append(peer)
            peer.device.sharing.begin(peer.job, peer.since_ns / 1e9)
            self._schedule(peer.device)
        elif "slept" in message:
            if not peer.sleeps_since_ns:
                raise ValueError("it was not asked to sleep")
            peer.sleeps_since_ns = 0
            peer.device.residence.slept(id(peer), _amount(message["slept"]))
            self._schedule(peer.device)
        elif "stays" in message:  # nobody waits for its memory any more, and it is asked again after its next turn
            peer.sleeps_since_ns = 0
            peer.device.residence.leave(id(peer))
            self._schedule(peer.device)
        elif _whole(message["give"]) == peer.number and peer.side is not None:
            work, free, lent = _amount(message["work"]), *(_whole(message.get(key, 0)) for key in ("free", "lent"))
            peer.woke_s = _amount(message.get("woke", 0.0))
            if peer.woke_s:
                peer.device.residence.fetched(id(peer), peer.woke_s)
            peer.device.residence.lends(id(peer), lent)
            if peer.has_turn and not self._moving(peer):
                peer.device.residence.measured(free)
            self._end(peer, work)

    def _leave(self, peer: _Peer) -> None:
        """The connection ends, and with it the turn."""
        if peer not in self._peers:
            return
        self._peers.discard(peer)
        if peer.pidfd >= 0:
            asyncio.get_running_loop().remove_reader(peer.pidfd)
            os.close(peer.pidfd)
        peer.writer.transport.abort()
        peer.device.residence.leave(id(peer))
        if peer.side is not None:
            self._end(peer, 0.0)
        else:
            self._schedule(peer.device)  # there may be room now for the state of another

    # Turns

    def _schedule(self, device: _Device) -> None:
        """Begin and ask for turns as it should be now, and look again when the next limit is reached."""
        now_ns = self._settle(device)
        if self._closing:
            return
        while (chosen := self._choose(device, now_ns / 1e9)) is not None:
            self._begin(chosen, now_ns)
        self._tell_of_others(device)
        waiting, next_s = device.waiting, math.inf
        ready = self._ready(device, now_ns / 1e9)
        if len(ready) < len(waiting):
            next_s = device.residence.next_change_s(now_ns / 1e9)
        for peer in self._peers_of(device):
            limit_ns = self._kill_at_ns(peer, waiting, now_ns)
            if limit_ns <= now_ns:
                self._kill(peer, (now_ns - (peer.sleeps_since_ns or peer.since_ns)) / 1e9)  # this also schedules
                return
            next_s = min(next_s, (limit_ns - now_ns) / 1e9)
            if not peer.has_turn or peer.asked_ns:
                continue
            in_s = self._ask_in_s(peer, ready, now_ns / 1e9)
            if in_s <= 0:
                peer.asked_ns = now_ns
                self._tell(peer, {"wanted": peer.number})
                in_s = self._limit_s
            next_s = min(next_s, in_s)
        if device.timer is not None:
            device.timer.cancel()
        device.timer = None
        if math.isfinite(next_s):
            device.timer = asyncio.get_running_loop().call_later(max(0.001, next_s), self._schedule, device)

    def _tell_of_others(self, device: _Device) -> None:
        """Tell those that generate whether another job, with no lower priority than theirs, wants the device."""
        priorities = {peer.job: self._jobs[peer.job].priority for peer in device.peers}
        for peer in self._peers_of(device):
            own = self._jobs[peer.job].priority
            others = any(job != peer.job and priority >= own for job, priority in priorities.items())
            if peer.kind == "rollout" and peer.others != others:
                peer.others = others
                self._tell(peer, {"others": others})

    def _choose(self, device: _Device, now_s: float) -> _Peer | None:
        """The process that gets a turn now. A trainer whose state needs room first gets it when the others sleep."""
        holders, ready = device.holders, self._ready(device, now_s)
        if holders:
            (holder, *others) = holders
            if others or not self._co_running:
                return None
            ready = [peer for peer in ready if self._may_co_run(holder, peer, now_s)]
        turns = {peer.turn: peer for peer in ready}
        while (turn := device.sharing.next(turns, now_s)) is not None:
            peer = turns.pop(turn)
            if not peer.sleeps_since_ns and self._has_room(peer):
                return peer
        return None

    def _ready(self, device: _Device, now_s: float) -> list[_Peer]:
        """The processes that wait, without those that must first sleep or whose state had to replace another too
        soon."""
        waiting = device.waiting
        trainers = {id(peer) for peer in waiting if peer.state_bytes}
        return [
            peer
            for peer in waiting
            if not peer.sleeps_since_ns
            and (not peer.state_bytes or device.residence.may_work(id(peer), trainers, now_s))
        ]

    def _has_room(self, peer: _Peer) -> bool:
        """Whether the state of this trainer, if it has one, fits on the device now. If not, others are asked to sleep;
        those that work now are asked later."""
        sleepers = set(peer.device.residence.sleepers(id(peer)))
        for other in self._peers_of(peer.device):
            if id(other) in sleepers and not other.has_turn and not other.sleeps_since_ns:
                other.sleeps_since_ns = time.monotonic_ns()
                self._tell(other, {"sleep": True})
        return not sleepers

    def _moving(self, peer: _Peer) -> bool:
        """Whether states of other trainers may be on their way to or from the device."""
        others = (other for other in self._peers_of(peer.device) if other is not peer and other.state_bytes)
        return any(other.has_turn or other.sleeps_since_ns for other in others)

    def _peers_of(self, device: _Device) -> list[_Peer]:
        return [peer for peer in self._peers if peer.device is device]

    def _may_co_run(self, holder: _Peer, peer: _Peer, now_s: float) -> bool:
        assert holder.side is not None
        assert peer.side is not None
        own, other = self._jobs[holder.job].share, self._jobs[peer.job].share
        return self.table.may_co_run(holder.side, peer.side, own / (own + other), now_s)

    def _ask_in_s(self, peer: _Peer, waiting: list[_Peer], now_s: float) -> float:
        """In how many seconds the process should give its turn."""
        in_s = peer.device.sharing.yields_in_s(peer.turn, [other.turn for other in waiting], now_s)
        if self._co_running and peer.kind == "rollout":  # short turns are measurements
            in_s = min(in_s, max(0.0, peer.since_ns / 1e9 + self._slice_s - now_s))
        return in_s

    def _kill_at_ns(self, peer: _Peer, waiting: list[_Peer], now_ns: int) -> float:
        """When the process counts as hung if it still has the turn, or still does not sleep."""
        if peer.sleeps_since_ns:
            return peer.sleeps_since_ns + self._limit_s * 1e9
        others = any(other.job != peer.job for other in waiting)
        if not peer.has_turn or not others or (peer.kind == "rollout" and not peer.asked_ns):
            return math.inf
        start_ns, limit_ns = peer.asked_ns or peer.since_ns, self._limit_s * 1e9
        same = [p for p in self._peers if (p.pid, p.job, p.kind) == (peer.pid, peer.job, peer.kind) and p.side]
        others_of_it = [p for p in same if p.device is not peer.device]
        if any(not p.has_turn for p in others_of_it):  # it waits for another device, whose holder may hang, too
            return start_ns + 2 * limit_ns
        return max([start_ns, *(p.since_ns for p in others_of_it)]) + limit_ns  # it works since it has all of them

    def _begin(self, peer: _Peer, now_ns: int) -> None:
        peer.has_turn, peer.since_ns, peer.began_s = True, now_ns, time.time()
        peer.asked_ns, peer.company_ns, peer.woke_s = 0, {}, 0.0
        peer.device.residence.woke(id(peer))
        if peer.kind == "rollout":
            for other in self._peers_of(peer.device):
                if other.pid == peer.pid:
                    peer.device.residence.lends(id(other), 0)
        self._account(peer.device, now_ns)
        self._tell(peer, {"turn": peer.number})

    def _end(self, peer: _Peer, work: float) -> None:
        """End the turn of the process, or remove it from the queue."""
        device, side = peer.device, peer.side
        if side is None:
            return
        now_ns = self._settle(device)
        device.peers.remove(peer)
        peer.side = None
        if all(other.job != peer.job for other in device.peers):
            device.sharing.end(peer.job, now_ns / 1e9)
        if peer.has_turn:
            peer.has_turn = False
            self._account(device, now_ns)
            company = max(peer.company_ns, key=lambda which: peer.company_ns[which], default=None)
            took_ns = now_ns - peer.since_ns
            device.residence.worked(id(peer), took_ns / 1e9, now_ns / 1e9)
            if peer.company_ns.get(company, 0) >= MEASURABLE * took_ns:
                self.table.observe(side, took_ns / 1e9, work, company)
            self._log(
                {
                    "device": device.name,
                    "job": peer.job,
                    "kind": peer.kind,
                    "start_s": peer.began_s,
                    "end_s": peer.began_s + took_ns / 1e9,
                    "work": work,
                    "beside": company.job if company else "",
                    "woke_s": peer.woke_s,
                }
            )
        self._schedule(device)

    def _kill(self, peer: _Peer, held_s: float) -> None:
        fields = {"device": peer.device.name, "job": peer.job, "kind": peer.kind, "pid": peer.pid, "held_s": held_s}
        if peer.pidfd >= 0 and peer.pid != os.getpid():
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(peer.pidfd, signal.SIGKILL)
        self._leave(peer)
        self._on_event("hung", fields)

    def _settle(self, device: _Device) -> int:
        """Charge the jobs of the holders for the time until now, in ns."""
        now_ns, holders = time.monotonic_ns(), device.holders
        passed_ns, device.settled_ns = now_ns - device.settled_ns, now_ns
        for peer in holders:
            others = [other for other in holders if other is not peer]
            company = others[0].side if others else None
            peer.company_ns[company] = peer.company_ns.get(company, 0) + passed_ns
            device.sharing.use(peer.job, passed_ns / len(holders) / 1e9)
        return now_ns

    def _account(self, device: _Device, now_ns: int) -> None:
        """Charge the holders from now on; two by their progress, as far as it was measured."""
        weights = dict.fromkeys((peer.job for peer in device.holders), 1.0)
        if len(weights) > 1:
            a, b = device.holders
            assert a.side is not None and b.side is not None
            speeds = self.table.relative_speed(a.side, b.side), self.table.relative_speed(b.side, a.side)
            if speeds[0] and speeds[1]:
                weights = {a.job: speeds[0], b.job: speeds[1]}
        self.accounts.hold(device.name, weights, now_ns)

    def _tell(self, peer: _Peer, message: Mapping[str, Any]) -> None:
        _send(peer.writer, message)
        if peer.writer.transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            asyncio.get_running_loop().call_soon(self._leave, peer)


def _digest(key: str) -> bytes:
    """Digests are compared, so the time of a comparison says nothing about a key."""
    return hashlib.sha256(key.encode()).digest()


def _send(writer: asyncio.StreamWriter, message: Mapping[str, Any]) -> None:
    if not writer.transport.is_closing():
        writer.write(json.dumps(message).encode() + b"\n")


def _whole(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**53:
        raise ValueError("no whole number")
    return value


def _amount(value: Any) -> float:
    amount = float(value)
    if not 0 <= amount < 1e15:
        raise ValueError("no amount")
    return amount


def _process(writer: asyncio.StreamWriter) -> tuple[int, int]:
    """The pid of the process at the other end, and a file descriptor of it that stays true if the pid is used again."""
    credentials = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid = struct.unpack("3i", credentials)[0]
    try:
        return pid, os.pidfd_open(pid)
    except OSError:  # an old kernel, or another container
        return pid, -1
