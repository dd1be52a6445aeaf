"""A worker: connects to the controller, authenticates, builds the engine, serves, and reconnects when the link ends.

    dial ──▶ Challenge ──▶ Hello ──▶ Welcome ──▶ pull the weights ──▶ Loaded, serve ──▶ dial again, or exit
                              │          └─ once ─▶ build the engine ──▶┘
                              └───▶ Refused: exit (or retry later)

If a Welcome describes another engine than the last one, the worker builds its engine anew: the run wants another KV
cache, or this worker for another base. A lender does not: its engine is that of its service.

A worker has all policies on its base. Each has a puller of its own; they share the base of adapters.

A worker exits when the controller drains or refuses it, when its machine is about to be preempted (Notice), or when no
controller has answered for `patience_s`. Weights and engine outlive a link, so after a short outage the worker is ready
immediately. That also holds after a preemption notice: the worker runs until its last seconds, and reports to every
controller how many seconds are left.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import math
import random
import ssl as tls
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import msgspec

from windfall import backoff
from windfall.engine.engine_thread import EngineThread, Make
from windfall.errors import WindfallError
from windfall.link import auth, handshake
from windfall.link import messages as m
from windfall.link.base import LinkClosed
from windfall.link.handshake import JoinRefused
from windfall.link.network import address_toward, in_url
from windfall.link.socket import Dialer, SocketLink
from windfall.processes import process
from windfall.processes.process import EXIT_NO_CONTROLLER
from windfall.types import Capabilities, Lease
from windfall.weights.buffers import machine
from windfall.weights.held_files import HeldFiles, UploadLimit
from windfall.weights.merged import MergedWeights
from windfall.weights.pulling.pull import PulledWeights, WeightPuller
from windfall.weights.serve import RunningServer, serve_in_thread
from windfall.worker import preemption
from windfall.worker.worker_link import BUILD_S, Stalled, WorkerLink

REFUSAL_REPORT_S = 0.5
"""Seconds in which to report to the controller that this worker cannot run the model."""
LEAVE_S = 10.0
"""Seconds that the controller has to drain this worker after a preemption notice."""
REFUSED_FAILURES = 2
"""A temporary refusal counts as at most this many failures, so that the next attempt comes after about 0.5 s."""


LOOPBACK = "127.0.0.1"
MOST_FILES, MOST_RANGES = 32, 64
"""Files in a Hello, and ranges of each: it must fit into what a peer may send before it has authenticated."""


@dataclass(eq=False)
class ControllerClient:
    url: str
    token: str
    name: str
    lease: Lease
    puller: WeightPuller
    """That of the first policy."""
    build: Callable[[m.EngineSpec], tuple[Any, int]]
    """Returns (engine, slots). Runs in the engine's thread while the weights are pulled."""
    files: HeldFiles | None = None
    """What other workers may read from this one; None: it only reads."""
    weights_port: int = 0
    """Where they read it; 0: any free port."""
    weights_address: str = ""
    """Where they reach this machine; empty: at the address from which it reaches the controller."""
    boot: Callable[[], m.LoadTimes] = m.LoadTimes
    """How long imports and building took."""
    ssl: tls.SSLContext | None = None
    patience_s: float = 300.0
    model: str = ""
    """Name of the model that the engine was built for."""
    address: Callable[[], str] | None = None
    """The controller's present URL."""
    lends: bool = False
    """As in Hello."""
    host: Callable[[Make], EngineThread] = lambda make: EngineThread(None, make=make)
    """Makes the thread, or whatever stands for it, in which the engine runs."""
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True)

    def __post_init__(self) -> None:
        self._dialer = Dialer(self.url, "/worker", m.ToWorker, ssl=self.ssl)
        self._host: EngineThread | None = None
        self._spec: m.EngineSpec | None = None
        """The spec for which the engine was built."""
        self._boot_reported = False
        self._held: dict[str, tuple[int, str]] = {}
        self._pullers: dict[str, WeightPuller] = {"": self.puller}
        """By policy of the last Welcome, and of Loads since then."""
        self._received = 0
        """Bytes that pullers received which are closed."""
        self._upload = UploadLimit()
        self._server: RunningServer | None = None
        self._location = self._own_address = ""
        self._bases: dict[str, str] = {}
        """The base of adapters, by the digest of the adapter: of those in the engine, and of the one pulled last."""
        self._worker_link: WorkerLink | None = None
        self._refused = False
        """True if this worker cannot run the model. It reports that to the controller and exits."""
        self._notice: m.Notice | None = None
        """The preemption notice with the least time left."""
        self._preempted_at_s = math.inf
        """When the machine will be preempted according to that notice (monotonic clock, seconds)."""
        self._end: asyncio.Future[int]

    async def run(self, clouds: Any = ()) -> int:
        """Run the worker. Returns its exit status: 0 drained, 1 broken engine, 3 refused, 5 no controller. `clouds` are
        the metadata services to watch for preemption notices."""
        self._end = asyncio.get_running_loop().create_future()
        watching = asyncio.create_task(preemption.watch(self.warned, clouds=clouds)) if clouds else None
        serving = asyncio.create_task(self._serve_links())
        if watching is not None:
            watching.add_done_callback(self._watch_ended)
        try:
            await asyncio.wait([serving, self._end], return_when=asyncio.FIRST_COMPLETED)
            return self._end.result() if self._end.done() else serving.result()
        finally:
            tasks: list[asyncio.Task[Any]] = [task for task in (serving, watching) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # one that failed has raised its error above
            if self._host is not None:  # another client may use the same engine after this one
                self._host.close(0.0)
            if self._server is not None:
                await asyncio.to_thread(self._server.close)
            await self._dialer.close()

    def _watch_ended(self, watching: asyncio.Task[None]) -> None:
        """The watch ended without an error if this machine is on no cloud, and with one if a cloud name is unknown."""
        if not watching.cancelled() and (error := watching.exception()) is not None and not self._end.done():
            self._end.set_exception(error)

    def warned(self, notice: preemption.PreemptionNotice) -> None:
        """The machine will be preempted: report it to the controller, which drains this worker in time."""
        self.say(f"warned by {notice.source}: {notice.detail}")
        loop, left_s = asyncio.get_running_loop(), notice.left_s or 0.0
        message = m.Notice(source=notice.source, left_s=notice.left_s, detail=notice.detail)
        built = self._host is not None and self._host.built
        if not built or (self._worker_link is None and left_s < LEAVE_S):
            self._finish(0)  # there is nothing to hand over, or no link on which to report the notice in time
            return
        if time.monotonic() + left_s < self._preempted_at_s:
            self._notice = message
            self._preempted_at_s = time.monotonic() + left_s
        if self._worker_link is not None:  # otherwise the next link sends it
            self._worker_link.say(message)
        loop.call_later(left_s + LEAVE_S, self._finish, 0)

    def _finish(self, code: int) -> None:
        if not self._end.done():
            self._end.set_result(code)

    async def _serve_links(self) -> int:
        alone_s, failures, last_line = time.monotonic(), 0, ""
        while True:
            if self.address is not None:
                self._dialer.url = self.address()
            try:
                link = await self._dialer.dial(handshake.TIMEOUT_S)
                try:
                    welcome = await self._handshake(link)
                    failures = 0
                    why = await self._serve_link(link, welcome)
                    self.say(f"drained: {why}")
                    return 0
                finally:
                    alone_s = time.monotonic()
                    await link.close()
            except JoinRefused as e:
                if not e.again:
                    self.say(f"refused: {e}")
                    return 3
                if (line := f"refused for now: {e}") != last_line:  # print repeats once
                    last_line = line
                    self.say(line)
                failures = min(failures, REFUSED_FAILURES)
            except Stalled as e:
                self.say(str(e))
                return 1
            except LinkClosed as e:
                if self._refused or time.monotonic() + LEAVE_S > self._preempted_at_s:
                    self.say(f"no link: {e}; leaving")
                    return 3 if self._refused else 0
                if str(e) != last_line:
                    last_line = str(e)
                    limit = "" if math.isinf(self.patience_s) else f" for up to {self.patience_s:g} s"
                    self.say(f"no link: {e}; reconnecting{limit}")  # the error begins with the address
            if time.monotonic() - alone_s > self.patience_s:
                self.say(
                    f"waited {self.patience_s:g} s for a controller at {self._dialer.url}; leaving. Check that the "
                    "run is in progress (`windfall top RUN`), that --join is the address it showed at its start, and "
                    "that no firewall is in between; then start this worker again, or give a longer --patience"
                )
                return EXIT_NO_CONTROLLER
            wait_s = backoff.delay_s(failures, first_s=0.2, factor=1.6, limit_s=5.0)
            await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))  # spread the retries of a fleet over time
            failures += 1

    async def _handshake(self, link: SocketLink) -> m.Welcome:
        if self.files is not None and self._server is None:
            await asyncio.to_thread(self._serve_weights, self.files)
        hello = functools.partial(
            m.Hello,
            name=self.name,
            lease=self.lease,
            model=self.model,
            held=self._held,
            age_s=process.age_s(),
            engine=self._host.capabilities if self._host else Capabilities(),
            lends=self.lends,
            location=self._location,
            own_address=self.weights_address or self._own_address,
            machine=machine() if self.puller.reads else "",
            holds=() if self.files is None else self.files.describe(MOST_FILES, MOST_RANGES),
        )
        try:
            return await handshake.join(link, handshake.WORKER, self.token, hello)
        except handshake.ControllerUnverified as e:
            raise JoinRefused(str(e), again=False) from e

    def _serve_weights(self, files: HeldFiles) -> None:
        """Let other workers read what this one holds. Nothing is encrypted, so with TLS only within the machine."""
        controller = urlsplit(self._dialer.url)
        self._own_address = address_toward(controller.hostname or LOOPBACK, controller.port or 80)
        host = LOOPBACK if self.ssl is not None else self._own_address
        self._server = serve_in_thread(
            files, host=host, port=self.weights_port, key=auth.weights_key(self.token), limit=self._upload
        )
        self._location = f"http://{in_url(self.weights_address or host)}:{self._server.port}"

    async def _serve_link(self, link: SocketLink, welcome: m.Welcome) -> str:
        """Serve one link until it ends. Returns why the controller drained this worker."""
        spec = msgspec.structs.replace(welcome.engine, checked=())
        if self._host is not None and not self.lends and spec != self._spec:
            await self._drop_engine()
        await asyncio.to_thread(self._set_policies, welcome.policies)
        host = self._host or self._make_host(welcome)
        worker_link = self._worker_link = WorkerLink(
            link,
            host,
            self._pull,
            heartbeat_s=welcome.heartbeat_s,
            stalled_s=welcome.stalled_s,
            boot=self._report_boot,
            pulled_bytes=self._pulled_bytes,
            sent_bytes=lambda: self._upload.sent_bytes,
            reroute=self._reroute,
        )
        self._upload.bytes_per_s = welcome.upload_bytes_per_s
        worker_link.held = self._held
        if self._notice is not None:
            left_s = max(0.0, self._preempted_at_s - time.monotonic())
            worker_link.say(msgspec.structs.replace(self._notice, left_s=left_s))
        self.say(f"joined as {welcome.worker}")
        try:
            return await worker_link.serve()
        finally:
            self._held = worker_link.held
            self._worker_link = None

    async def _drop_engine(self) -> None:
        """The run wants another engine: free the memory of this one."""
        assert self._host is not None
        self.say("the run wants another engine")
        await asyncio.to_thread(self._host.close, BUILD_S)  # it may still be building this one
        if self._host.built:
            self._host.engine.close()
        self._host, self._held = None, {}
        gc.collect()  # engines have cycles of references

    def _make_host(self, welcome: m.Welcome) -> EngineThread:
        """Start building the engine. This continues if the link ends; meanwhile the link pulls the weights."""
        self.model, self._spec = welcome.model, msgspec.structs.replace(welcome.engine, checked=())
        host = self._host = self.host(lambda: self.build(welcome.engine))
        loop = asyncio.get_running_loop()
        host.start(lambda: loop.call_soon_threadsafe(self._engine_failed) and None)
        return host

    def _report_boot(self) -> m.LoadTimes:
        """How long the start of this process took. Only the first call reports it."""
        if self._boot_reported:
            return m.LoadTimes()
        self._boot_reported = True
        return msgspec.structs.replace(self.boot(), age_s=process.age_s())

    def _engine_failed(self) -> None:
        assert self._host is not None
        error = self._host.failed
        if self._host.built:
            self.say(f"the engine failed: {type(error).__name__}: {error}")
            self._finish(1)
        elif isinstance(error, WindfallError):
            self.say(f"refused: {error}")
            self._refused = True
            if self._worker_link is not None:  # report it to the run, because the log of a lost worker is rarely read
                self._worker_link.say(m.Left(why=str(error), refused=True))
            asyncio.get_running_loop().call_later(REFUSAL_REPORT_S, self._finish, 3)
        elif error is not None and not self._end.done():
            self._end.set_exception(error)  # an unexpected error

    def _set_policies(self, policies: tuple[str, ...]) -> None:
        """This worker has these policies from now on. A puller of a former one is used for a new one, because its
        buffer has the right size if both are full copies of the same model."""
        free = [self._pullers.pop(policy) for policy in list(self._pullers) if policy not in policies]
        for policy in policies:
            if policy not in self._pullers:
                self._pullers[policy] = free.pop(0) if free else self.puller.beside()
        for puller in free:
            self._received += puller.bytes_received
            puller.close()
        self._held = {policy: held for policy, held in self._held.items() if policy in policies}

    def _pulled_bytes(self) -> int:
        return self._received + sum(puller.bytes_received for puller in self._pullers.values())

    def _reroute(self, routed: m.Routed) -> None:
        if (puller := self._pullers.get(routed.policy)) is not None:
            puller.reroute(msgspec.structs.replace(routed, route=self._resolved(routed.route)))

    def _pull(self, load: m.Load, give_up: threading.Event) -> PulledWeights:
        """Runs in a thread."""
        if load.policy not in self._pullers:  # the run has it since this worker joined
            self._pullers = {**self._pullers, load.policy: self.puller.beside()}
        puller = self._pullers[load.policy]
        held = {} if self._worker_link is None else self._worker_link.held
        in_engine = {policy: digest for policy, (_, digest) in held.items()}  # not only in a puller
        self._bases = {digest: base for digest, base in self._bases.items() if digest in in_engine.values()}
        files = tuple(m.FileRoute(file=each.file, route=self._resolved(each.route)) for each in load.files)
        load = msgspec.structs.replace(load, files=files)
        pulled = puller.pull(load, lambda question: self._ask(question, load.policy), stop=give_up)
        tensors, base = None if in_engine.get(load.policy) == load.digest else pulled.tensors, pulled.base
        if not base and self._spec is not None and self._spec.adapters:  # not trained, beside adapters of the same base
            base = pulled.digest
            tensors = None if tensors is None else MergedWeights.of(tensors)
        if isinstance(tensors, MergedWeights):
            tensors.base_is_loaded = base in self._bases.values()
        self._bases[pulled.digest] = base
        return replace(pulled, tensors=tensors)

    def _ask(self, question: m.AskRoute, policy: str) -> None:
        """Runs in a thread of the pull."""
        if (link := self._worker_link) is not None:
            link.say_from_thread(msgspec.structs.replace(question, policy=policy))

    def _resolved(self, route: m.ReadRoute) -> m.ReadRoute:
        """Replace the host `_` by the host at which this worker reached the controller."""
        host = in_url(urlsplit(self._dialer.url).hostname or LOOPBACK)
        at = lambda location: location.replace("://_:", f"://{host}:")  # noqa: E731
        sources = (msgspec.structs.replace(source, location=at(source.location)) for source in route.sources)
        return msgspec.structs.replace(route, sources=tuple(sources))
