"""Between the directory and everyone else: tells it what workers and the trainer report, and sends what it decides."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable

from windfall.controller.cost.accounts import Accounts
from windfall.controller.directory.directory import Directory
from windfall.controller.directory.holders import WeightHolder
from windfall.controller.ledger.episode import Malformed
from windfall.controller.scheduling.members import Member
from windfall.events.log import EventLog
from windfall.link import messages as m
from windfall.link.base import clip
from windfall.link.network import host_of, is_loopback, plain_address

LEAST_APPLY_S, MOST_APPLY_S = 1e-6, 1e6
"""Applying deltas takes a time between these, if there are any. Others would spoil the mean of all workers."""


class WeightRoutes:
    def __init__(
        self, directory: Directory, accounts: Accounts, events: EventLog, send: Callable[[str, object], None]
    ) -> None:
        self.directory = directory
        self._accounts, self._events, self._send = accounts, events, send
        self.upload_again: Callable[[tuple[str, ...]], None] = lambda files: None
        """Tells the trainer that these files are damaged in the bucket."""

    # The trainer

    def publish(self, files: m.PublishedFiles) -> None:
        self.directory.publish(files, asyncio.get_running_loop().time())
        self._pass_on()

    def uploaded(self, message: m.Uploaded) -> None:
        self.directory.uploaded(message.file, message.bytes, message.ranges, failed=bool(message.error))
        about = {"file": message.file, "bytes": message.bytes, "s": message.s, "error": clip(message.error)}
        self._events.instant("bucket_upload", **about)
        self._pass_on()

    def end_run(self) -> None:
        self.directory.end_version()
        self._pass_on()

    # Workers

    def join(self, member: Member, hello: m.Hello, seen: str) -> None:
        """`seen`: the worker's address, as the controller sees it. An engine of the trainer that names no machine reads
        nothing: it has the trainer's weights. A location elsewhere than at the worker's own address is ignored."""
        if member.local and not hello.machine:
            return
        seen, host = plain_address(seen), host_of(hello.location)
        holder = WeightHolder(
            id=member.id, kind="peer", region=hello.lease.region, machine=hello.machine,
            location=hello.location if host and (host == hello.own_address.lower() or is_loopback(host)) else "",
            seen="localhost" if is_loopback(seen) else seen, own=plain_address(hello.own_address),
            loopback=is_loopback(host),
        )  # fmt: skip
        self.directory.join(holder, hello.holds)
        self._pass_on()

    def leave(self, id: str) -> None:
        self.directory.leave(id)
        self._pass_on()

    def stopped(self, members: Iterable[Member]) -> None:
        """They will get other loads."""
        self.directory.stopped(*(member.id for member in members))
        self._pass_on()

    def load(self, member: Member, digest: str) -> tuple[m.FileRoute, ...]:
        """What the worker is to read for these weights."""
        if not self.directory.knows(member.id):
            return ()
        member.pulled_before = member.stats.pulled_bytes if member.stats is not None else 0
        files = self.directory.load(member.id, digest)
        self._pass_on()
        return files

    def ask(self, member: Member, message: m.AskRoute) -> None:
        self._check(member, message.used)
        if message.received < 0:
            raise Malformed(f"has received {message.received} bytes of a file")
        route = self.directory.ask(member.id, message.file, message.used, message.received)
        self._send(member.id, m.Routed(file=message.file, route=route))
        self._pass_on()

    def progress(self, member: Member, stats: m.Stats) -> None:
        self.directory.progress(member.id, stats.pulled_bytes - member.pulled_before)

    def loaded(self, member: Member, message: m.Loaded) -> None:
        self._check(member, message.used)
        if message.apply_s and not LEAST_APPLY_S <= message.apply_s <= MOST_APPLY_S:
            raise Malformed(f"took {message.apply_s} s to apply deltas")
        if self.directory.knows(member.id):
            now_s = asyncio.get_running_loop().time()
            self.directory.loaded(member.id, message.digest, message.used, now_s, message.apply_s)
            self._pass_on()

    def failed(self, member: Member, version: int) -> None:
        """The worker cannot load this version."""
        if version == member.requested[0]:  # otherwise it has been asked for a newer one since
            self.stopped([member])

    def _check(self, member: Member, used: Iterable[m.SourceUse]) -> None:
        known = self.directory.knows(member.id)
        if not all(known and use.bytes >= 0 and 0 <= use.s < math.inf for use in used):
            raise Malformed("reports impossible reads of weights")

    def _pass_on(self) -> None:
        """Send and log what the last call has changed."""
        for reader, changed in self.directory.routed():
            self._send(reader, m.Routed(file=changed.file.digest, route=changed.route))
        for name, fields in self.directory.events():
            if name == "weights":
                self._events.scalar(name, step=fields["version"], **fields)
            else:
                self._events.instant(name, **fields)
        if damaged := self.directory.damaged():
            self.upload_again(damaged)
        self._accounts.traffic_usd = self.directory.usd
