"""Between the directory and everyone else: tells it what workers and the trainer report, and sends what it decides."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable

from windfall.controller.cost.accounts import Accounts
from windfall.controller.directory.directory import Directory
from windfall.controller.directory.holders import WeightHolder
from windfall.controller.ledger.episode import Malformed
from windfall.controller.workers.members import Member
from windfall.controller.workers.versions import policy_fields
from windfall.events.log import EventLog
from windfall.link import messages as m
from windfall.link.base import clip
from windfall.link.network import host_of, is_loopback, plain_address

LEAST_APPLY_S, MOST_APPLY_S = 1e-6, 1e6
"""Applying deltas takes a time between these, if there are any. Others would spoil the mean of all workers."""


class WeightRoutes:
    def __init__(
        self, directories: dict[str, Directory], accounts: Accounts, events: EventLog,
        send: Callable[[str, object], None],
    ) -> None:  # fmt: skip
        """`directories`: by policy."""
        self.directories = directories
        self._accounts, self._events, self._send = accounts, events, send
        self.upload_again: dict[str, Callable[[tuple[str, ...]], None]] = {}
        """By policy: tells its trainer that these files are damaged in the bucket."""

    # The trainers

    def publish(self, files: m.PublishedFiles, policy: str = "") -> None:
        self.directories[policy].publish(files, asyncio.get_running_loop().time())
        self._pass_on(policy)

    def uploaded(self, message: m.Uploaded, policy: str = "") -> None:
        failed = bool(message.error)
        self.directories[policy].uploaded(message.file, message.bytes, message.ranges, failed=failed)
        about = {"file": message.file, "bytes": message.bytes, "s": message.s, "error": clip(message.error)}
        self._events.instant("bucket_upload", **about, **policy_fields(policy))
        self._pass_on(policy)

    def end_run(self) -> None:
        for policy, directory in self.directories.items():
            directory.end_version()
            self._pass_on(policy)

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
        for policy in member.held:
            self.directories[policy].join(holder, hello.holds)
            self._pass_on(policy)

    def leave(self, member: Member, *policies: str) -> None:
        """The worker is gone, or no longer holds these policies."""
        for policy in policies or member.held:
            self.directories[policy].leave(member.id)
            self._pass_on(policy)

    def stopped(self, members: Iterable[Member], policy: str = "") -> None:
        """They will get other loads of this policy."""
        self.directories[policy].stopped(*(member.id for member in members))
        self._pass_on(policy)

    def load(self, member: Member, digest: str, policy: str = "") -> tuple[m.FileRoute, ...]:
        """What the worker is to read for these weights."""
        directory = self.directories[policy]
        if not directory.knows(member.id):
            return ()
        if policy == member.pulls:  # otherwise another load is in progress, and its bytes are counted
            member.pulled_before = member.stats.pulled_bytes if member.stats is not None else 0
        files = directory.load(member.id, digest)
        self._pass_on(policy)
        return files

    def ask(self, member: Member, message: m.AskRoute) -> None:
        policy = message.policy
        self._check(member, message.used, policy)
        if message.received < 0:
            raise Malformed(f"has received {message.received} bytes of a file")
        route = self.directories[policy].ask(member.id, message.file, message.used, message.received)
        self._send(member.id, m.Routed(file=message.file, route=route, policy=policy))
        self._pass_on(policy)

    def progress(self, member: Member, stats: m.Stats) -> None:
        if stats.policy not in member.held:
            return
        if stats.policy != member.pulls:  # the load of another policy has begun
            member.pulls, member.pulled_before = stats.policy, stats.pulled_bytes
        self.directories[stats.policy].progress(member.id, stats.pulled_bytes - member.pulled_before)

    def loaded(self, member: Member, message: m.Loaded) -> None:
        policy, directory = message.policy, self.directories[message.policy]
        self._check(member, message.used, policy)
        if message.apply_s and not LEAST_APPLY_S <= message.apply_s <= MOST_APPLY_S:
            raise Malformed(f"took {message.apply_s} s to apply deltas")
        if directory.knows(member.id):
            now_s = asyncio.get_running_loop().time()
            directory.loaded(member.id, message.digest, message.used, now_s, message.apply_s)
            if base := directory.base_of(message.digest):
                for other in member.held.keys() - {policy}:
                    self.directories[other].hold(member.id, base)
            self._pass_on(policy)

    def failed(self, member: Member, message: m.LoadFailed) -> None:
        """The worker cannot load this version."""
        if message.version == member.held[message.policy].requested[0]:  # otherwise it was asked for a newer one since
            self.stopped([member], message.policy)

    def _check(self, member: Member, used: Iterable[m.SourceUse], policy: str) -> None:
        if policy not in member.held:
            raise Malformed(f"reads weights of policy {policy!r}, which it was not asked for")
        known = self.directories[policy].knows(member.id)
        if not all(known and use.bytes >= 0 and 0 <= use.s < math.inf for use in used):
            raise Malformed("reports impossible reads of weights")

    def _pass_on(self, policy: str) -> None:
        """Send and log what the last call has changed."""
        directory = self.directories[policy]
        for reader, changed in directory.routed():
            self._send(reader, m.Routed(file=changed.file.digest, route=changed.route, policy=policy))
        for name, fields in directory.events():
            if name == "weights":
                self._events.scalar(name, step=fields["version"], **fields, **policy_fields(policy))
            else:
                self._events.instant(name, **fields, **policy_fields(policy))
        if (damaged := directory.damaged()) and policy in self.upload_again:
            self.upload_again[policy](damaged)
        self._accounts.traffic_usd = sum(each.usd for each in self.directories.values())
