"""What a trainer uploads while its bucket is slow or gone. Buckets that work: test_bucket.py."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import pairwise
from typing import Any

import pytest

from tests.support.weights.held_bytes import held
from windfall.link import messages as m
from windfall.weights.bucket import BucketFailed
from windfall.weights.held_files import HeldFile
from windfall.weights.publishing.uploads import BucketUploads


class Store:
    """In place of a BucketStore: refuses files while it is `gone`, and takes no bytes while it is `slow`."""

    def __init__(self) -> None:
        self.gone, self.slow = False, False
        self.files: list[str] = []

    def check(self) -> None: ...

    def expire(self, keep: set[str]) -> None:
        self.files = [file for file in self.files if file in keep]

    def upload(self, file: HeldFile, *, again: bool, stopped: Callable[[], bool]) -> int:
        while self.slow and not stopped():
            time.sleep(0.005)
        if self.gone or stopped():
            raise BucketFailed("no bucket")
        self.files.append(file.manifest.digest)
        return file.manifest.nbytes


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr("windfall.weights.publishing.uploads.FIRST_WAIT_S", 0.05)
    monkeypatch.setattr("windfall.weights.publishing.uploads.LONGEST_WAIT_S", 0.2)
    return Store()


@pytest.fixture
def uploads(store: Any) -> Iterator[BucketUploads]:
    with closing(BucketUploads(store, lambda done: None)) as made:
        yield made


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def digests(*files: HeldFile) -> list[str]:
    return [file.manifest.digest for file in files]


def pinned(files: list[HeldFile]) -> list[int]:
    return [i for i, file in enumerate(files) if file.pinned]


COPIES = [held(100, seed=i) for i in range(7)]
DELTAS = [
    held(20, seed=90 + i, change=(before.manifest.digest, after.manifest.digest))
    for i, (before, after) in enumerate(pairwise(COPIES))
]


@pytest.mark.parametrize("deltas", [False, True])
def test_a_bucket_that_is_gone_costs_one_copy(store: Store, uploads: BucketUploads, deltas: bool) -> None:
    store.gone = True
    for i in range(6):
        before = digests(COPIES[i - 1]) if i else []  # the controller keeps the newest version that it knows
        uploads.publish(COPIES[i], DELTAS[i - 1] if i and deltas else None, keep=before)
        first = 3 * (i // 3) if deltas else i  # three deltas are more than half of a copy
        with_delta = range(min(first, i - 1), i) if i and deltas else ()
        until(lambda: (pinned(COPIES), pinned(DELTAS)) == ([first], list(with_delta)))  # noqa: B023
        time.sleep(0.1)  # it fails
    store.gone = False
    until(lambda: not pinned(COPIES + DELTAS))
    assert set(store.files) == set(digests(COPIES[3], *DELTAS[3:5]) if deltas else digests(COPIES[5]))


def test_a_slow_bucket_finishes_a_copy_that_workers_read(store: Store, uploads: BucketUploads) -> None:
    store.slow = True
    for copy in COPIES[:3]:
        uploads.publish(copy, None, keep=digests(COPIES[0]))
    time.sleep(0.05)
    assert pinned(COPIES) == [0]
    assert [each.file.digest for each in uploads.holds()] == digests(COPIES[0])
    uploads.publish(COPIES[3], None, keep=digests(COPIES[2]))  # no worker reads it any more
    until(lambda: pinned(COPIES) == [3])
    store.slow = False
    until(lambda: not pinned(COPIES))
    assert store.files == digests(COPIES[3])


def test_machines_upload_the_same_files(store: Store) -> None:
    slow: Any = Store()
    slow.slow = True
    first: Any = store
    with (
        closing(BucketUploads(first, lambda done: None)) as one,
        closing(BucketUploads(slow, lambda done: None, first=False)) as two,
    ):
        for i in range(3):
            until(lambda: not one.unfinished())
            machines = [one.unfinished(), two.unfinished()]
            for uploads in (one, two):
                file = HeldFile(COPIES[i].manifest, COPIES[i].buffer, filled=True)
                uploads.publish(file, None, keep=digests(COPIES[0]), machines=machines)
            assert one.holds() == two.holds()
            assert [each.file.digest for each in two.holds()] == digests(COPIES[0])  # one copy at a time


@pytest.mark.parametrize(
    ("damaged", "sent"), [(COPIES[0], [COPIES[2]]), (DELTAS[0], [COPIES[2]]), (DELTAS[1], [COPIES[2], DELTAS[1]])]
)
def test_damaged_files_are_replaced_at_once(
    store: Store, uploads: BucketUploads, damaged: HeldFile, sent: list[HeldFile]
) -> None:
    for copy, delta in zip(COPIES[:3], (None, *DELTAS), strict=False):
        uploads.publish(copy, delta)
        until(lambda: not uploads.unfinished())
    before, store.files = set(store.files), []
    uploads.publish(COPIES[2], DELTAS[1], keep=before, wrong=["another"])
    assert not uploads.unfinished()
    uploads.publish(COPIES[2], DELTAS[1], keep=before, wrong=digests(damaged))
    until(lambda: not uploads.unfinished())
    assert sorted(store.files) == sorted(digests(*sent))


def test_what_the_bucket_refuses_is_not_announced(store: Store, uploads: BucketUploads) -> None:
    store.gone = True
    uploads.publish(COPIES[0], None)
    assert [each.file.digest for each in uploads.holds()] == digests(COPIES[0])  # soon
    until(lambda: uploads.unfinished() == {COPIES[0].manifest.digest: True})
    uploads.publish(COPIES[1], DELTAS[0], keep=digests(COPIES[0]))
    assert [each.file.digest for each in uploads.holds()] == digests(DELTAS[0])
    store.gone = False
    until(lambda: not uploads.unfinished())
    uploads.publish(COPIES[2], DELTAS[1], keep=digests(COPIES[0]))
    assert {each.file.digest for each in uploads.holds()} == {*digests(COPIES[0], *DELTAS[:2])}


def test_a_damaged_file_that_is_not_uploaded_again_is_reported(store: Any) -> None:
    reports: list[m.Uploaded] = []
    with closing(BucketUploads(store, reports.append)) as uploads:
        for copy, delta in zip(COPIES[:3], (None, *DELTAS), strict=False):
            uploads.publish(copy, delta)
            until(lambda: not uploads.unfinished())
        assert {each.file: each.ranges for each in reports} == {
            each.manifest.digest: each.ranges for each in (COPIES[0], *DELTAS[:2])
        }
        uploads.publish(COPIES[2], DELTAS[1], keep=store.files, wrong=digests(DELTAS[0], DELTAS[1]))
        until(lambda: not uploads.unfinished())
        assert {each.file for each in reports if each.error} == {*digests(DELTAS[0])}
