"""The engine's thread: takes orders between two engine steps, and emits one frame for every step.

    orders (a queue) ──▶ [ orders │ step │ frame ] ──▶ emit(message)

Only this thread touches the engine. It also builds the engine if needed; orders wait until that is done. It waits for
orders when there is nothing to generate, and in `emit` while too many frames are unsent.

An engine whose device is shared with other jobs steps only in its turn (turns/client.py). It keeps the turn until
another process wants it, there is nothing to generate, or `emit` must wait.

New weights are swapped in between two steps, like every order, so all tokens of one policy in a frame have the same
version. A swap that raises WindfallError has changed nothing, and the engine goes on with the weights it has. After any
other error the weights may be a mix of two versions: the engine keeps its responses, but does not step until a swap has
succeeded.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar

from windfall.engine.base import Counters, Engine
from windfall.errors import WindfallError
from windfall.link.messages import Rejected, Released, SiblingTokens, Stats, Tokens, Work
from windfall.turns import client
from windfall.turns.client import FREE, DeviceTurn
from windfall.types import Capabilities, Chunk, Request

Emit = Callable[[object], None]
Make = Callable[[], tuple[Engine, int]]
"""Returns an engine, and the number of responses that it decodes at once."""
TURN_WAIT_S = 0.05
"""How long an order may wait while the engine waits for its turn, or for the trainer without one."""
MAX_EXPERT_BYTES = 4 << 20
P = ParamSpec("P")
Host = TypeVar("Host", bound="EngineThread")


def order(method: Callable[Concatenate[Host, P], None]) -> Callable[Concatenate[Host, P], None]:
    """A call to the method returns at once; the method itself runs in the engine's thread, between two steps."""

    @functools.wraps(method)
    def put(self: Host, *args: P.args, **kwargs: P.kwargs) -> None:
        self._orders.put(functools.partial(method, self, *args, **kwargs))

    return put


class EngineThread:
    def __init__(
        self, engine: Engine | None, slots: int = 0, *, make: Make | None = None, turn: DeviceTurn | None = None
    ) -> None:
        """Takes an engine, or `make`, which builds it in the engine's thread. `turn`: that of the engine's device; by
        default, what the environment names."""
        assert (engine is None) == (make is not None), "give an engine, or a function that makes one"
        self._engine = engine
        self.slots = slots
        self._make = make
        self.failed: BaseException | None = None
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._emit: Emit = lambda message: None
        self._unsent: deque[object] = deque()
        """What `emit` gets next, in order."""
        self._emitting = False
        self._running: dict[int, str] = {}
        """The policy of every response, by its handle."""
        self._paused = False
        self._mixed: set[str] = set()
        """Policies whose last swap has failed: their weights may be a mix of two versions."""
        self._generated = 0
        self._steps = 0
        self._stepped_s = time.monotonic()
        """When the last step ended, or when the engine last got something to do."""
        self._turn = turn or client.of_environment("rollout")
        self._given = 0
        """Tokens that were generated up to the end of the last turn."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._on_failure: Callable[[], None] = lambda: None

    def start(self, on_failure: Callable[[], None] = lambda: None) -> None:
        """`on_failure` is called in the engine's thread if the engine raises. This object is useless after that."""
        self._on_failure = on_failure
        self._thread.start()

    @property
    def built(self) -> bool:
        return self._engine is not None

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "orders wait until the engine is built"
        return self._engine

    @property
    def longest(self) -> int:
        """Maximum number of tokens of one response, including its prompt, that fit into the engine; 0 if unknown."""
        return 0 if self._engine is None else self._engine.limit

    @property
    def kv_tokens(self) -> int:
        """Tokens for which the KV cache has room, over all responses; 0 if unknown."""
        return 0 if self._engine is None else self._engine.kv_tokens

    @property
    def capabilities(self) -> Capabilities:
        """What the engine can do. Nothing is known of it until it is built."""
        return Capabilities() if self._engine is None else self._engine.capabilities

    @property
    def waiting_for_trainer(self) -> bool:
        """Whether the engine waits for the trainer that shares its weights. This may take any length of time."""
        return self._engine is not None and self._engine.waiting

    # Orders

    @order
    def attach(self, emit: Emit) -> None:
        """Begin a new link: drop all running responses, and send frames to `emit` from now on."""
        self._drop_all()
        self._emit = emit
        self._paused = False

    @order
    def detach(self) -> None:
        self._drop_all()

    @order
    def add(self, work: Iterable[Work]) -> None:
        for w in work:
            self._add(w)

    @order
    def cancel(self, handles: Iterable[int]) -> None:
        self._drop(handles)

    @order
    def remember(self, siblings: SiblingTokens) -> None:
        self.engine.remember(siblings.group, siblings.id, siblings.position, array("I", siblings.tokens))

    @order
    def release(self, handles: tuple[int, ...]) -> None:
        """Give up these responses. All their tokens are emitted before the confirmation."""
        self._drop(handles)
        self._send(Released(handles=handles))

    @order
    def swap(
        self,
        version: int,
        weights: Mapping[str, Any] | None,
        done: Callable[[BaseException | None], None],
        *,
        policy: str = "",
    ) -> None:
        try:
            self.engine.swap(version, weights, policy=policy)
        except WindfallError as e:  # the weights do not match this model
            done(e)
        except RuntimeError as e:  # for example, out of memory in the middle of the copy
            self._mixed.add(policy)
            done(e)
        else:
            self._mixed = (self._mixed - {policy}) & self.engine.versions.keys()  # others may have lost their place
            done(None)

    @order
    def pause(self, paused: bool) -> None:
        self._paused = paused
        self._stepped_s = time.monotonic()

    @order
    def finish(self, done: Callable[[], None]) -> None:
        """Stop generating. `done` is called after the last frame."""
        self._drop_all()
        done()

    def close(self, timeout_s: float = 10.0) -> None:
        self._orders.put(None)
        self._thread.join(timeout_s)

    def stats(self) -> Stats:
        """Can be called from any thread. The numbers may be one step old."""
        engine = self._engine
        running = 0 if engine is None else len(engine)
        step_due = running > 0 and not self._paused and not self.waiting_for_trainer
        counters = Counters() if engine is None else engine.counters
        return Stats(
            running=running,
            made=self._generated,
            steps=self._steps,
            idle_s=time.monotonic() - self._stepped_s if step_due else 0.0,
            evictions=counters.evictions,
            kv_restored=counters.kv_restored,
            waiting=counters.waiting,
            reused_tokens=counters.reused_tokens,
            prefilled=counters.prefilled,
            lookups=counters.lookups,
            hits=counters.hits,
            drafted=counters.drafted,
            accepted=counters.accepted,
            decode_s=counters.decode_s,
            undrafted_s=counters.undrafted_s,
            contended_s=self._turn.contended_s,
        )

    # The methods below run in the thread.

    def _run(self) -> None:
        try:
            if self._make is not None:
                engine, self.slots = self._make()
                # last, because `built` is true from now on
                self._engine = engine
                self._make = None
            wait_s = 0.0
            while True:
                idle = self._idle()
                try:
                    while True:
                        order = self._next_order(idle, wait_s)
                        if order is None:
                            return
                        order()
                        idle, wait_s = self._idle(), 0.0
                except queue.Empty:
                    pass
                wait_s = self._step()
        except BaseException as e:  # fault boundary: this is the only way in which the worker learns of the error
            self.failed = e
            self._on_failure()
        finally:
            self._turn.give(self._generated - self._given)
            self._turn.close()

    def _next_order(self, idle: bool, wait_s: float) -> Callable[[], None] | None:
        if not idle:
            return self._orders.get(timeout=wait_s) if wait_s else self._orders.get_nowait()
        if self._orders.empty():
            self._give_turn()
        return self._orders.get()

    def _idle(self) -> bool:
        return self._paused or bool(self._mixed) or len(self.engine) == 0

    def _step(self) -> float:
        """Step, if it is this engine's turn. Returns how long to wait for an order before the next step."""
        if not self._turn.take(TURN_WAIT_S, len(self.engine)):
            self._stepped_s = time.monotonic()  # the time of other processes is no sign of a stall
            return 0.0
        self._stepped(self.engine.step())
        waiting = self.waiting_for_trainer and self._turn is not FREE
        if waiting or self._turn.wanted:
            self._give_turn()
        return TURN_WAIT_S if waiting else 0.0

    def emit_waits(self) -> None:
        """`emit` calls this in the engine's thread before it waits: others may have the device meanwhile."""
        self._give_turn()

    def _give_turn(self) -> None:
        """The device has computed everything when the turn ends."""
        if self._turn is not FREE:
            for chunks in self.engine.collect():
                self._record(chunks)
            self._flush()
            self._turn.give(self._generated - self._given)
            self._given = self._generated

    def _stepped(self, chunks: list[Chunk]) -> None:
        self._record(chunks)
        self._flush()

    def _record(self, chunks: list[Chunk]) -> None:
        self._stepped_s = time.monotonic()
        self._steps += bool(chunks) or not self.waiting_for_trainer
        if chunks:
            self._generated += sum(len(c.tokens) for c in chunks)
            named = any(self.engine.versions)
            for part in frame_parts(chunks):
                self._unsent.append(tokens_frame(part, self._running if named else None))
            for c in chunks:
                if c.finish:
                    self._running.pop(int(c.id), None)

    def _send(self, message: object) -> None:
        self._unsent.append(message)
        self._flush()

    def _flush(self) -> None:
        """Emit everything that is unsent. A call from `emit_waits` leaves that to the call that waits."""
        if not self._emitting:
            self._emitting = True
            while self._unsent:
                self._emit(self._unsent.popleft())
            self._emitting = False

    def _add(self, work: Work) -> None:
        if len(self.engine) == 0:
            self._stepped_s = time.monotonic()
        try:
            self.engine.add(request_of(work))
            self._running[work.handle] = work.policy
        except WindfallError as e:
            fits = len(work.prompt) // 4 + work.max_tokens <= self.longest
            self._send(Rejected(handle=work.handle, why=str(e), invalid=fits))

    def _drop(self, handles: Iterable[int]) -> None:
        for handle in handles:
            self.engine.cancel(str(handle))
            self._running.pop(handle, None)

    def _drop_all(self) -> None:
        self._drop(list(self._running))
        self._emit = lambda message: None


def request_of(work: Work) -> Request:
    """The request of an engine. Its id is the handle of the work."""
    return Request(
        id=str(work.handle),
        prompt=tuple(array("I", work.prompt)),
        seed=work.seed,
        position=work.position,
        max_tokens=work.max_tokens,
        sampling=work.sampling,
        stop=frozenset(work.stop),
        group=work.group,
        policy=work.policy,
        experts_known=work.experts_known,
    )


def frame_parts(chunks: list[Chunk]) -> list[list[Chunk]]:
    """The chunks of one engine step, divided so that no frame has many more than MAX_EXPERT_BYTES of experts: those of
    a prompt come all at once."""
    out, size = [chunks[:0]], 0
    for c in chunks:
        if size and size + len(c.experts) > MAX_EXPERT_BYTES:
            out.append([])
            size = 0
        out[-1].append(c)
        size += len(c.experts)
    return out


def tokens_frame(chunks: list[Chunk], policies: Mapping[int, str] | None = None) -> Tokens:
    """The message with the tokens of one engine step, in columns. `policies`: of every response, by its handle; by
    default, the only one. If they have names, the frame has a version for each name, and `version` is 0.

    >>> tokens_frame([Chunk(id="7", position=3, tokens=(5,), logprobs=(-0.5,), version=2, finish="stop")]).finished
    {0: 'stop'}
    """
    single = all(len(c.tokens) == 1 for c in chunks)
    expert_counts = tuple(c.expert_tokens for c in chunks)
    regular = all(c.expert_tokens == len(c.tokens) for c in chunks)
    versions = {name: c.version for c in chunks if (name := policies.get(int(c.id), ""))} if policies else {}
    return Tokens(
        version=0 if versions else chunks[0].version,
        versions=versions,
        handles=tuple(int(c.id) for c in chunks),
        positions=tuple(c.position for c in chunks),
        counts=() if single else tuple(len(c.tokens) for c in chunks),
        tokens=array("I", (t for c in chunks for t in c.tokens)).tobytes(),
        logprobs=array("f", (x for c in chunks for x in c.logprobs)).tobytes(),
        finished={i: c.finish for i, c in enumerate(chunks) if c.finish},
        experts=b"".join(c.experts for c in chunks),
        expert_counts=expert_counts if any(expert_counts) and not regular else (),
    )
