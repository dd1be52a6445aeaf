"""A simulated worker: the worker's side of a link, without an engine, a thread or a socket.

    controller ── orders ──▶ [ taken between two engine steps, as worker/engine_thread.py does ] ── Tokens, Released, Left ──▶
               ── Load ────▶ [ a pull, shared with others; then a swap between two steps ] ── Loaded ──▶

One timer runs. With `quantum_s` it goes off at multiples of that, for all workers alike, and tells of all steps that
are over by then; without, after as many steps as nobody ends in. In either case when the last response ends. An order
waits for the end of the step under way. Killed, its link is cut; what was made by then has been sent, as frames of
every step would have been. Frozen, it hears and says nothing. Cut off by the controller, it dials again and keeps its
weights.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from windfall.link import messages as m
from windfall.sim.core.link import SimLink
from windfall.sim.core.service import Service
from windfall.sim.core.token_schedule import TokenSchedule
from windfall.sim.machines.decode import Decode
from windfall.sim.machines.network import Network
from windfall.types import Lease

AGAIN_S = 1.0
"""Until it dials again."""


class Attend(Protocol):
    """Dispatch.attend."""

    def __call__(self, link: Any, hello: m.Hello) -> Coroutine[Any, Any, None]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Kit:
    """What a worker is made of."""

    name: str
    lease: Lease
    service: Service
    slots: int
    network: Network | None = None
    """None: it shares its memory with the trainer, and has every version at once."""
    weights_bytes: float = 0.0
    ingress_per_s: float = float("inf")
    heartbeat_s: float = 1.0
    quantum_s: float = 0.0
    """It tells what it made at multiples of this only; the steps themselves are exact. 0: whenever somebody ends."""
    latency_s: float = 0.0
    build_s: float = 0.0
    """From its first dialling until its engine is there, with the weights it is to load then: no pull is simulated. 0:
    its engine is there at once, and it pulls."""
    kv_tokens: int = 0
    """That its engine has room for; 0: for all it is given."""
    longest: int = 0
    """The most simulated tokens of one response, its prompt included, that it takes; 0: any number."""
    wire: Callable[..., SimLink] = SimLink
    """Makes its links."""


class _Swap:
    """An order of its own: the weights have come."""

    def __init__(self, load: m.Load, began_s: float) -> None:
        self.load, self.began_s = load, began_s


class _Hold:
    """Make room for training; `done` when it has."""

    def __init__(self, done: Callable[[], None]) -> None:
        self.done = done


class SimWorker:
    def __init__(self, kit: Kit, book: TokenSchedule, attend: Attend, *, started_s: float) -> None:
        """`started_s`: since when its machine is paid for."""
        self.kit, self._book, self._attend, self._started_s = kit, book, attend, started_s
        self._loop = asyncio.get_running_loop()
        self._decode = Decode(kit.service, book.granule, kv_tokens=kit.kv_tokens, marks=book.marks)
        self._held: tuple[int, str] = (-1, "")
        self._wire: SimLink | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._began_s = 0.0
        """When the step under way began, or the first of several."""
        self._orders: list[object] = []
        self._paused = self._training = self.frozen = self.over = False
        self._unheard: list[object] = []
        self._pull: int | None = None
        self._prompts: set[int] = set()
        self._made = self._stepped = 0
        self._pulled_bytes = 0.0
        """Of all pulls, the one under way as a whole."""
        self._built_s = self._loop.time() + kit.build_s
        self._first: tuple[m.Load, float] | None = None
        """To be loaded once the engine is there."""
        self._attending: asyncio.Task[None] | None = None

    @property
    def wire(self) -> SimLink | None:
        """The link that it has."""
        return self._wire

    # its life

    def dial(self) -> None:
        if self.over or self.frozen or self._wire is not None:
            return
        now = self._loop.time()
        self._wire = self.kit.wire(self.kit.name, self._hear, self._sent_away, self.kit.latency_s)
        version, digest = self._held
        hello = m.Hello(
            protocol=m.PROTOCOL, nonce=b"", proof=b"", name=self.kit.name, lease=self.kit.lease, version=version,
            digest=digest, age_s=now - self._started_s,
        )  # fmt: skip
        self._attending = self._loop.create_task(self._attend(self._wire, hello), name=f"attend {self.kit.name}")
        self._beat(self._wire)

    def kill(self, why: str = "killed") -> None:
        """Its machine is gone, at once and for good."""
        if not self.over:
            self._catch_up()
            self.over = True
            self._end(why)

    def flap(self, down_s: float) -> None:
        """Its link breaks; it dials again."""
        if self._wire is not None:
            self._catch_up()
            self._end("the network failed")
            self._loop.call_later(down_s, self.dial)

    def freeze(self) -> None:
        if not self.frozen:
            self._catch_up()
            self.frozen = True
            self._stop_timer()

    def thaw(self) -> None:
        if self.frozen:
            self.frozen = False
            heard, self._unheard = self._unheard, []
            for message in heard:
                self._hear(message)
            if self._wire is None:
                self.dial()
            if self._timer is None:  # else what it has just heard waits for the end of the step under way
                self._obey()

    def warn(self, source: str, left_s: float) -> None:
        self._say(m.Notice(source=source, left_s=left_s))

    async def make_room(self) -> None:
        """Returns when its engine makes no step any more, until `training_over`."""
        done = self._loop.create_future()
        self._order(_Hold(lambda: None if done.done() else done.set_result(None)))
        await done

    def training_over(self) -> None:
        self._training = False
        self._go()

    def _end(self, why: str) -> None:
        wire, self._wire = self._wire, None
        self._stop_timer()
        self._forget()
        if self.kit.network is not None:
            self.kit.network.stop(self._pull)
        self._pull, self._first, self._paused, self._unheard = None, None, False, []
        self._orders = [o for o in self._orders if isinstance(o, _Hold)]
        if self._orders:  # its engine has nothing to do any more: there is room at once
            self._loop.call_soon(self._obey)
        if wire is not None:
            wire.cut(why)

    def _sent_away(self, why: str) -> None:
        """The controller has closed the link: for a reason of its own, or because we said Left."""
        if self._wire is not None:
            self._end(why)
            if not self.over:
                self._loop.call_later(AGAIN_S, self.dial)

    # messages

    def _say(self, message: object) -> None:
        if self._wire is not None and not self.frozen:
            self._wire.say(message)

    def _beat(self, wire: SimLink) -> None:
        if wire is self._wire:
            d, now = self._decode, self._loop.time()
            left = self.kit.network.left_bytes(self._pull) if self.kit.network is not None else 0.0
            building = self._first is not None and now < self._built_s
            self._say(
                m.Stats(
                    running=len(d),
                    made=self._made,
                    steps=self._stepped,
                    idle_s=0.0,
                    preemptions=d.preemptions,
                    waiting=len(d.waiting),
                    loading="build" if building else "pull" if self._pull is not None else "",
                    pulled_bytes=round(self._pulled_bytes - left),
                )
            )
            self._loop.call_at(_next(now, self.kit.heartbeat_s), self._beat, wire)

    def _hear(self, message: object) -> None:
        if self.frozen:
            self._unheard.append(message)
            return
        match message:
            case m.Load():
                self._load(message)
            case m.Assign() | m.Cancel() | m.Release() | m.Pause() | m.Resume() | m.Drain():
                self._order(message)
            case m.Refused():
                self.over = True
                self._end(message.why)
            case _:
                raise AssertionError(f"{self.kit.name}: a {type(message).__name__} was not expected")

    def _load(self, load: m.Load) -> None:
        network, began_s = self.kit.network, self._loop.time()
        if began_s < self._built_s:
            if self._first is None:
                self._loop.call_at(self._built_s, self._built, self._wire)
            self._first = (load, began_s)
            return
        if network is None:
            self._order(_Swap(load, began_s))
            return
        self._pulled_bytes += self.kit.weights_bytes - network.left_bytes(self._pull)
        network.stop(self._pull)  # a newer version is wanted
        self._pull = network.start(self.kit.weights_bytes, self.kit.ingress_per_s, lambda: self._pulled(load, began_s))

    def _built(self, wire: SimLink | None) -> None:
        if wire is self._wire and self._first is not None:
            self._pulled(*self._first)

    def _pulled(self, load: m.Load, began_s: float) -> None:
        self._pull = None
        self._order(_Swap(load, began_s))

    # orders, between two steps

    def _order(self, order: object) -> None:
        self._orders.append(order)
        if self._timer is None:
            if not self.frozen:
                self._obey()
        elif len(self._orders) == 1:  # else the end of the step under way is waited for already
            self._catch_up()
            if not len(self._decode):  # that was the last step
                self._obey()
                return
            self._timer = self._loop.call_at(self._began_s + self._decode.seconds(1), self._tick)

    def _obey(self) -> None:
        orders, self._orders = self._orders, []
        for order in orders:
            self._take(order)
        self._go()

    def _take(self, order: object) -> None:
        match order:
            case m.Assign():
                for work in order.work:
                    self._add(work)
            case m.Cancel():
                self._drop(order.handles)
            case m.Release():
                self._drop(order.handles)
                self._say(m.Released(handles=order.handles))
            case m.Pause() | m.Resume():
                self._paused = isinstance(order, m.Pause)
            case m.Drain():
                self._forget()
                self._say(m.Left(why=order.why))
                self.over = True
            case _Swap():
                self._swap(order)
            case _Hold():
                self._training = True
                order.done()

    def _add(self, work: m.Work) -> None:
        needed = len(work.prompt) // 4 + work.max_tokens
        if self.kit.longest and needed > self.kit.longest:
            self._say(m.Rejected(handle=work.handle, why=f"{needed} tokens do not fit into {self.kit.longest}"))
            return
        row, group = self._book.row(work)
        again = row.made
        if group not in self._prompts:  # siblings share the pages of their prompt
            self._prompts.add(group)
            again += row.prompt
        self._decode.add(row, again)

    def _swap(self, order: _Swap) -> None:
        load, took_s = order.load, self._loop.time() - order.began_s
        self._held = (load.version, load.digest)
        self._prompts.clear()
        self._decode.prefill = self._decode.context
        pulled = 0 if self.kit.network is None else round(self.kit.weights_bytes)
        self._say(
            m.Loaded(version=load.version, digest=load.digest, slots=self.kit.slots, s=took_s, pulled_bytes=pulled,
                     longest=self.kit.longest)
        )  # fmt: skip

    def _drop(self, handles: tuple[int, ...]) -> None:
        for row in self._decode.drop(handles):
            self._book.left(row)

    def _forget(self) -> None:
        self._drop(tuple(self._decode.rows))

    # steps

    def _go(self, fresh: bool = True) -> None:
        """Make steps, if there is something to make and nothing against it. `fresh`: from now on, not since the last
        step's end."""
        if self._timer is not None or self._paused or self._training or self.frozen or not len(self._decode):
            return
        self._began_s = max(self._began_s, self._loop.time()) if fresh else self._began_s
        self._timer = self._loop.call_at(self._next_s(), self._tick)

    def _next_s(self) -> float:
        """When to look again."""
        d, quantum_s = self._decode, self.kit.quantum_s
        if not quantum_s:
            return self._began_s + d.seconds(d.plan(self.kit.heartbeat_s))
        at_s, most = _next(self._loop.time(), quantum_s), d.horizon
        if most * self.kit.service.fixed_s < at_s - self._began_s:
            at_s = min(at_s, self._began_s + d.seconds(most))
        return max(at_s, self._began_s + d.seconds(1))

    def _tick(self) -> None:
        self._timer = None
        self._advance()
        if self._orders:
            self._obey()
        else:
            self._go(fresh=False)

    def _advance(self) -> None:
        """The steps that are over by now: made, and sent."""
        steps, took_s = self._decode.done_by(self._loop.time() - self._began_s)
        self._decode.advance(steps)
        self._began_s += took_s
        self._stepped += steps
        frame, ended = self._decode.frame(self._held[0])
        for row in ended:
            self._book.ended(row)
        if frame is not None:
            self._made += len(frame.tokens) // 4
            self._say(frame)

    def _catch_up(self) -> None:
        if self._timer is not None:
            self._stop_timer()
            self._advance()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _next(now_s: float, period_s: float) -> float:
    """The next multiple of a period.

    >>> _next(0.0, 0.5), _next(0.7, 0.5), _next(1.0, 0.5)
    (0.5, 1.0, 1.5)
    """
    at_s = (math.floor(now_s / period_s) + 1) * period_s
    return at_s if at_s > now_s + 1e-9 else at_s + period_s
