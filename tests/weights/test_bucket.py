"""Weights through a bucket: a folder and a real S3 server pass the same tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.weights.held_bytes import CHUNK, PART, held
from tests.support.weights.s3_server import BUCKET, SECRET, request, s3_server
from windfall.controller.directory.directory import Directory
from windfall.controller.directory.holders import NO_WORKER, WeightHolder
from windfall.controller.directory.traffic import TrafficPrices
from windfall.errors import WindfallError
from windfall.link import messages as m
from windfall.weights import bucket as buckets
from windfall.weights.bucket import BucketFailed, BucketSource, BucketStore, bucket_at, part_bounds
from windfall.weights.buffers import Buffer, views
from windfall.weights.held_files import HeldFile
from windfall.weights.publishing.publish import Publisher
from windfall.weights.publishing.uploads import BucketUploads
from windfall.weights.pulling.pull import Puller, PullFailed
from windfall.weights.pulling.source import SourceBroken, SourceWaits, SourceWrong
from windfall.weights.serve import serve_in_thread

RUN, KEY = "run", "a-key-for-tests"


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    with s3_server() as environment:
        yield environment


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BucketStore]:
    monkeypatch.setattr(buckets, "PART_BYTES", PART)
    if request.param == "folder":
        url = f"file://{tmp_path}/a bucket"
    else:
        for name, value in request.getfixturevalue("server").items():
            monkeypatch.setenv(name, value)
        url = f"s3://{BUCKET}/{tmp_path.name}"
    bucket_at.cache_clear()
    yield BucketStore(url, RUN)
    bucket_at.cache_clear()


def source(store: BucketStore, stopped: Callable[[], bool] = lambda: False) -> BucketSource:
    ref = m.SourceRef(id="bucket", kind="bucket", location=store.location)
    return BucketSource(ref, timeout_s=5.0, stopped=stopped)


def read(store: BucketStore, file: HeldFile) -> bytes:
    name, nbytes = file.manifest.digest, file.manifest.nbytes
    with closing(source(store)) as reader:
        assert reader.manifest(name) == file.manifest.encode()
        out, at = bytearray(nbytes), 0
        while at < nbytes:
            end = at + reader.open(name, at, nbytes)
            while at < end:
                at += reader.read_into(memoryview(out)[at:end])
    return bytes(out)


def objects(store: BucketStore) -> dict[str, int]:
    return dict(buckets.run_request(store._list(), lambda: False))


def overwrite(store: BucketStore, path: str, data: bytes | None) -> None:
    raw = buckets._open(store.url, create=True)
    raw.put(path, data, use_multipart=False) if data is not None else raw.delete(path)


def path_of(file: HeldFile, part: int) -> str:
    return f"{RUN}/{file.manifest.digest}/{part_bounds(file.manifest)[part]:015d}"


def test_an_uploaded_file_is_read_back(store: BucketStore) -> None:
    file = held(cuts=(100, 2 * PART + 5))
    assert store.upload(file) == file.manifest.nbytes
    assert read(store, file) == file.buffer.data.tobytes()
    bounds = sorted({0, 100, 2 * PART + 5, *range(0, file.manifest.nbytes, PART), file.manifest.nbytes})
    parts = {f"{RUN}/{file.manifest.digest}/{a:015d}": b - a for a, b in pairwise(bounds)}
    found = objects(store)
    assert found.pop(f"{RUN}/{file.manifest.digest}/manifest") == len(file.manifest.encode())
    assert found == parts


def test_machines_upload_their_own_ranges(store: BucketStore) -> None:
    whole = held(cuts=(PART + 9,))
    halves = ((0, PART + 9),), ((PART + 9, whole.manifest.nbytes),)
    sent = [store.upload(HeldFile(whole.manifest, whole.buffer, ranges=half, filled=True)) for half in halves]
    assert sent == [PART + 9, whole.manifest.nbytes - PART - 9]
    assert read(store, whole) == whole.buffer.data.tobytes()


def test_only_what_is_missing_is_sent(store: BucketStore) -> None:
    file = held()
    store.upload(file)
    assert store.upload(file) == 0
    overwrite(store, path_of(file, 1), None)
    overwrite(store, path_of(file, 3), b"too short")
    assert store.upload(file) == 2 * PART
    assert read(store, file) == file.buffer.data.tobytes()


SLOW_UPLOAD = """
import sys, time
from tests.support.weights import held_bytes
from windfall.weights import bucket
class Slow(bucket.HeldFile):
    buffer = property(lambda self: time.sleep(0.01) or self.real, lambda self, buffer: setattr(self, "real", buffer))
bucket.PART_BYTES = held_bytes.PART
bucket.BucketStore(sys.argv[1], "run").upload(held_bytes.held(60 * held_bytes.PART, kind=Slow))
"""


def test_a_killed_upload_is_continued(store: BucketStore) -> None:
    file = held(60 * PART)
    store.check()
    child = subprocess.Popen([sys.executable, "-c", SLOW_UPLOAD, store.url])
    deadline = time.monotonic() + 30
    while len(objects(store)) < 6 and time.monotonic() < deadline:
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    found = objects(store)
    assert 5 < len(found) < 61
    assert all(size == PART for path, size in found.items() if not path.endswith("manifest"))
    assert 0 < store.upload(file) <= (61 - len(found)) * PART  # a server may finish what it has received
    assert read(store, file) == file.buffer.data.tobytes()


def test_an_upload_stops(store: BucketStore) -> None:
    stop, reads = threading.Event(), list[float]()

    class Slow(HeldFile):
        real: Buffer

        def read(self) -> Buffer:
            reads.append(time.monotonic())
            if len(reads) > buckets.MAX_PUTS + 1:  # so some parts have arrived
                stop.set()
                time.sleep(0.5)
            return self.real

        buffer = property(read, lambda self, it: setattr(self, "real", it))

    file = held(60 * PART, kind=Slow)
    with pytest.raises(BucketFailed, match="stopped"):
        store.upload(file, stopped=stop.is_set)
    objects(store)  # the loop has ended what it was in the midst of
    count = len(reads)
    assert 1 < len(objects(store)) <= count + 1  # the manifest
    time.sleep(1.0)
    assert len(reads) == count < 60


def test_what_is_missing_is_not_there_yet(store: BucketStore) -> None:
    file = held()
    name = file.manifest.digest
    store.check()
    reader = source(store)
    with pytest.raises(SourceWaits):
        reader.manifest(name)
    with pytest.raises(SourceWaits):
        reader.open(name, 0, 10)
    store.upload(file)
    overwrite(store, path_of(file, 1), None)
    assert reader.open(name, 10, 3 * PART) == PART - 10
    with pytest.raises(SourceWaits):
        reader.open(name, PART, 3 * PART)
    store.upload(file)
    assert reader.open(name, PART, 3 * PART) == PART


def test_wrong_bytes_are_found_out(store: BucketStore) -> None:
    file = held()
    store.upload(file)
    overwrite(store, path_of(file, 2), b"\0" * PART)
    got = np.frombuffer(read(store, file), np.uint8)
    bounds = file.manifest.bounds()
    good = [
        file.manifest.is_chunk(i, got[a:b], trusted=source(store).trusted) for i, (a, b) in enumerate(pairwise(bounds))
    ]
    assert [a // PART == 2 for a in bounds[:-1]] == [not ok for ok in good]
    overwrite(store, path_of(file, 2), b"too short")
    with pytest.raises(SourceWrong, match="9 bytes"):
        source(store).open(file.manifest.digest, 2 * PART, 3 * PART)
    overwrite(store, f"{RUN}/{file.manifest.digest}/manifest", b"no manifest")
    bucket_at.cache_clear()
    with pytest.raises(SourceBroken, match="manifest"):
        source(store).open(file.manifest.digest, 0, 10)


def test_a_bucket_that_is_gone(store: BucketStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file, errors = held(), []
    if store.url.startswith("s3:"):
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    else:
        store = BucketStore(f"file://{tmp_path}/file/x", RUN)
        (tmp_path / "file").write_text("no folder")
    began = time.monotonic()
    for call in (lambda: store.upload(file), lambda: store.expire(()), lambda: source(store).open("a" * 64, 0, 9)):
        with pytest.raises((BucketFailed, SourceBroken)) as caught:
            call()
        errors.append("".join(traceback.format_exception(caught.value)))
        assert store.location in str(caught.value)
        assert "\n" not in str(caught.value)
    assert time.monotonic() - began < 8
    assert not any(SECRET in text or "tester" in text for text in errors)


def test_a_bucket_that_was_deleted(server: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    request(f"{server['AWS_ENDPOINT_URL']}/short", "PUT")
    request(f"{server['AWS_ENDPOINT_URL']}/short", "DELETE")
    store = BucketStore("s3://short/x", RUN)
    with pytest.raises(BucketFailed, match="404") as caught:
        store.upload(held())
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    with pytest.raises(SourceBroken, match="404") as broken:
        source(store).manifest("a" * 64)
    assert not isinstance(broken.value, SourceWaits)


def test_expiry_keeps_what_it_is_told_to(store: BucketStore) -> None:
    files = [held(seed=seed) for seed in range(3)]
    for file in files:
        store.upload(file)
    other = BucketStore(store.url, "another")
    other.upload(files[0])
    assert store.expire({files[1].manifest.digest}) == 2 * 7
    assert {path.split("/")[1] for path in objects(store)} == {files[1].manifest.digest}
    store.clear()
    assert objects(store) == {}
    assert len(objects(other)) == 7
    assert store.expire(()) == 0
    if store.url.startswith("file:"):
        assert [path.name for path in Path(store.url.removeprefix("file://")).iterdir()] == ["another"]


def test_without_obstore(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(WindfallError, match=r"pip install .*\[bucket\]"):
        BucketStore("s3://somewhere/x", RUN).upload(held())
    with pytest.raises(SourceBroken, match="obstore"):
        source(BucketStore("s3://somewhere/y", RUN)).manifest("a" * 64)


@pytest.mark.parametrize("url", ["nonsense", "ftp://host/x", "file:///dev/null/x"])
def test_a_url_that_is_no_bucket(url: str) -> None:
    with pytest.raises(WindfallError, match="not a bucket") as caught:
        BucketStore(url, RUN).check()
    assert url in caught.value.where
    assert "s3://" in caught.value.fix


def version(number: int, *, nbytes: int = 4 * PART, delta: int = 0) -> tuple[HeldFile, HeldFile | None]:
    """The copy of a version and its delta from the one before."""
    copy = held(nbytes, seed=number + 1)
    changes = (held(nbytes, seed=number).manifest.digest, copy.manifest.digest)
    return copy, held(delta, seed=100 + number, change=changes) if delta else None


def uploaded(uploads: BucketUploads, *files: HeldFile | None) -> None:
    """Wait until these files are in the bucket, and no others."""
    wanted = {file.manifest.digest for file in files if file is not None}
    deadline, parts = time.monotonic() + 20, set()
    while time.monotonic() < deadline:
        with suppress(OSError):  # no bucket yet
            parts = {path.split("/")[1] for path in objects(uploads.store) if not path.endswith("manifest")}
        if parts == wanted and not uploads._busy:
            return
        time.sleep(0.02)
    raise AssertionError(f"{parts} are in the bucket, expected {wanted}")


@pytest.fixture
def reports() -> list[m.Uploaded]:
    return []


@pytest.fixture
def uploads(store: BucketStore, reports: list[m.Uploaded], monkeypatch: pytest.MonkeyPatch) -> Iterator[BucketUploads]:
    monkeypatch.setattr("windfall.weights.publishing.uploads.FIRST_WAIT_S", 0.05)
    made = BucketUploads(store, reports.append)
    yield made
    made.close()


def names(uploads: BucketUploads) -> set[str]:
    return {holding.file.digest for holding in uploads.holds()}


def test_a_joiner_always_has_a_way(uploads: BucketUploads, reports: list[m.Uploaded]) -> None:
    copies, deltas = zip(*[version(i, delta=PART if i else 0) for i in range(4)], strict=True)
    for i in range(3):
        uploads.publish(copies[i], deltas[i])
        uploaded(uploads, copies[0], *deltas[1 : i + 1])
    uploads.publish(copies[3], deltas[3], keep=[deltas[2].manifest.digest])  # deltas are more than half of the copy
    assert names(uploads) == {f.manifest.digest for f in (*deltas[2:], copies[3])}
    uploaded(uploads, *deltas[2:], copies[3])
    assert not any(file.pinned for file in (*copies, *deltas[1:]))
    assert [report.error for report in reports] == [""] * 5


def test_an_upload_is_tried_again_until_the_bucket_is_back(uploads: BucketUploads, reports: list[m.Uploaded]) -> None:
    copy, _ = version(0)
    path = Path(uploads.store.url.removeprefix("file://"))
    if path.is_absolute():
        path.rmdir()
        path.write_text("no folder")
    else:
        uploads.store = BucketStore("s3://late/path", RUN)
    uploads.publish(copy, None)
    while not any(report.error for report in reports):
        time.sleep(0.01)
    assert copy.pinned
    if path.is_absolute():
        path.unlink()
    else:
        request(f"{os.environ['AWS_ENDPOINT_URL']}/late", "PUT")
    uploaded(uploads, copy)
    assert reports[-1].bytes == copy.manifest.nbytes


def test_the_base_of_adapters_stays(uploads: BucketUploads) -> None:
    base, adapters = held(seed=50), [held(PART, seed=60 + i) for i in range(3)]
    for adapter in adapters:
        uploads.publish(adapter, None, keep=[], base=base)
        uploaded(uploads, base, adapter)


class BucketReader:
    """A reader and a directory, which knows the bucket, and the trainer if it has a location."""

    def __init__(self, publisher: Publisher, uploads: BucketUploads, trainer: str = "") -> None:
        self.publisher, self.uploads, self.trainer = publisher, uploads, trainer
        self.directory = Directory(TrafficPrices())
        self.directory.join(WeightHolder(id="reader", kind="peer"))
        self.puller = Puller(key=KEY, timeout_s=10.0, tries=2)
        self.asked: list[m.AskRoute] = []

    def read(self) -> None:
        """Bring the reader to the newest version, and compare its bytes with the trainer's."""
        self.publish()
        made = self.publisher.readable[0].manifest
        files = self.directory.load("reader", made.digest)
        got = self.puller.pull(m.Load(version=made.version, digest=made.digest, files=files), self._ask)
        self.directory.loaded("reader", made.digest, got.used, 0.0)
        for name, tensor in views(self.publisher.readable[0].buffer.data, made.entries).items():
            assert torch.equal(self.puller.tensors()[name], tensor)

    def publish(self) -> None:
        made, bucket = self.publisher.readable[0].manifest, self.uploads.store.location
        holders = [m.HolderFiles(location=bucket, holds=self.uploads.holds())]
        if self.trainer:
            holders.append(m.HolderFiles(location=self.trainer, holds=self.publisher.files.describe()))
        files = {holding.file.digest: holding.file for each in holders for holding in each.holds}
        told = {"files": tuple(files.values()), "holders": tuple(holders), "bucket": bucket}
        self.directory.publish(m.PublishedFiles(version=made.version, digest=made.digest, **told), 0.0)

    def _ask(self, question: m.AskRoute) -> None:
        self.asked.append(question)
        route = self.directory.ask("reader", question.file, question.used, question.received)
        self.puller.reroute(m.Routed(file=question.file, route=route))

    def complaints(self) -> set[tuple[str, str]]:
        uses = [use for question in self.asked for use in question.used if use.why]
        bucket = NO_WORKER + self.uploads.store.location
        return {("bucket" if use.source == bucket else "trainer", use.why) for use in uses}


@pytest.fixture
def published(uploads: BucketUploads) -> Iterator[Callable[..., BucketReader]]:
    """Publishes versions that differ in some elements, uploads them, and makes a reader."""
    publisher = Publisher(chunk_bytes=CHUNK)
    tensors = {"a": torch.randn(3 * PART), "b": torch.randn(PART // 2)}
    server = serve_in_thread(publisher.files, host="127.0.0.1", port=0, key=KEY)

    def publish(versions: int = 1, *, trainer: bool = False) -> BucketReader:
        for _ in range(versions):
            tensors["a"][:: 100 + 7 * len(publisher.readable)] += 1
            publisher.publish((publisher.current.version if publisher.current else -1) + 1, tensors)
            copy = publisher.readable[0].held
            assert copy is not None
            uploads.publish(copy, publisher.delta)
        deadline = time.monotonic() + 20
        while uploads._busy and time.monotonic() < deadline:
            time.sleep(0.01)
        return BucketReader(publisher, uploads, f"http://127.0.0.1:{server.port}" if trainer else "")

    yield publish
    server.close()
    uploads.close()
    publisher.close()


def test_a_worker_reads_everything_from_the_bucket(published: Callable[..., BucketReader]) -> None:
    early = published()
    early.read()
    late = published(3)  # reads the copy of the first version, and three deltas
    for reader in (early, late):
        reader.read()
        assert reader.puller.delta_used == 1
        assert reader.complaints() == set()
    assert early.puller.bytes_received == late.puller.bytes_received < 1.5 * late.publisher.readable[0].manifest.nbytes


def test_a_file_can_be_read_while_it_is_uploaded(
    published: Callable[..., BucketReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("windfall.weights.pulling.file_sources.WAIT_S", 60.0)
    reader = published()
    file = reader.publisher.readable[0].held
    assert file is not None
    overwrite(reader.uploads.store, path_of(file, 5), None)
    threading.Timer(0.5, lambda: reader.uploads.store.upload(file)).start()
    reader.read()
    assert reader.complaints() == set()


@pytest.mark.parametrize("fault", ["wrong bytes", "wrong size", "wrong manifest", "missing"])
def test_a_reader_leaves_a_broken_bucket(
    published: Callable[..., BucketReader], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    for limit in ("WAIT_S", "ASK_S", "ASK_AGAIN_S", "NO_SOURCE_S") if fault == "missing" else ("NO_SOURCE_S",):
        monkeypatch.setattr(f"windfall.weights.pulling.file_sources.{limit}", 0.2)
    reader = published()
    file = reader.publisher.readable[0].held
    assert file is not None
    name = f"{RUN}/{file.manifest.digest}/manifest"
    path, data = {
        "wrong bytes": (path_of(file, 5), b"\0" * PART),
        "wrong size": (path_of(file, 5), b"short"),
        "wrong manifest": (name, b"damaged"),
        "missing": (path_of(file, 5), None),
    }[fault]
    overwrite(reader.uploads.store, path, data)
    bucket_at.cache_clear()
    with pytest.raises(PullFailed) as caught:
        reader.read()
    why = "stalled" if fault == "missing" else "wrong"
    assert reader.complaints() == {("bucket", why)}
    assert SECRET not in str(caught.value)
    reader.trainer = published(0, trainer=True).trainer
    reader.read()
    assert reader.complaints() == {("bucket", why)}
    if fault == "missing":
        return
    assert reader.directory.wrong == (file.manifest.digest,)  # the next version is uploaded whole
    after = published(0)
    copy = after.publisher.readable[0].held
    assert copy is not None
    after.uploads.publish(copy, None, wrong=reader.directory.wrong)
    uploaded(after.uploads, copy)
    after.directory.uploaded(copy.manifest.digest, 0, failed=False)
    bucket_at.cache_clear()
    after.read()
