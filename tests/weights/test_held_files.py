"""Files that a process holds: what is verified is sent, also while the file is being filled, until it is withdrawn."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from windfall.link import messages as m
from windfall.weights import held_files, manifest
from windfall.weights.buffers import HANDLE_TYPE, Buffer, BufferHandle
from windfall.weights.held_files import HeldFile, HeldFiles, UploadLimit, Withdrawn
from windfall.weights.serve import RunningServer, serve_in_thread

KEY, CHUNK = "a-key-for-tests", 1 << 16


def file(chunks: int = 5, *, filled: bool = False, **options: Any) -> HeldFile:
    """A file of some chunks and a half, with its bytes in the buffer."""
    buffer = Buffer(chunks * CHUNK + CHUNK // 2)
    buffer.data[:] = np.random.default_rng(0).integers(0, 256, buffer.nbytes, np.uint8)
    bounds = manifest.chunk_bounds(buffer.nbytes, CHUNK)
    both = [manifest.hash_chunk(buffer.data[a : a + CHUNK].data) for a in bounds[:-1]]
    made = manifest.make(
        nbytes=buffer.nbytes, chunk_bytes=CHUNK, before="a" * 64, after="b" * 64,
        chunks=b"".join(c for c, _ in both), seals=b"".join(s for _, s in both),
    )  # fmt: skip
    return HeldFile(made, buffer, filled=filled, **options)


def test_only_verified_chunks_are_ready() -> None:
    f, end = file(), 5 * CHUNK + CHUNK // 2
    assert f.ready(0, end) == 0
    for chunk in (0, 1, 3, 5):
        f.add(chunk)
    assert f.held == ((0, 2 * CHUNK), (3 * CHUNK, 4 * CHUNK), (5 * CHUNK, end))
    assert f.ready(0, end) == 2 * CHUNK
    assert f.ready(0, 7) == 7
    assert f.ready(2 * CHUNK - 1, end) == 2 * CHUNK
    assert f.ready(2 * CHUNK, end) == 2 * CHUNK
    assert f.ready(5 * CHUNK + 3, end) == end
    f.add(2)
    f.add(4)
    assert f.held == ((0, end),)
    assert file(filled=True).ready(1, end) == end


def test_ready_waits_for_the_next_chunk() -> None:
    f = file()
    threading.Timer(0.1, f.add, [0]).start()
    assert f.ready(10, 20, wait_s=30) == 20
    started = time.monotonic()
    assert f.ready(CHUNK, 2 * CHUNK, wait_s=0.05) == CHUNK
    assert time.monotonic() - started >= 0.05


def test_part_of_a_file() -> None:
    f = file(ranges=((CHUNK, 3 * CHUNK),), filled=True)
    assert f.held == ((CHUNK, 3 * CHUNK),)
    assert f.ready(CHUNK + 1, 5 * CHUNK) == 3 * CHUNK
    for outside in (0, 3 * CHUNK, 5 * CHUNK):
        with pytest.raises(Withdrawn, match="not held here"):
            f.ready(outside, 5 * CHUNK, wait_s=30)


def test_withdraw_refuses_new_reads_and_waits_for_the_current_one() -> None:
    f = file(filled=True)
    reading, end = threading.Event(), threading.Event()

    def read() -> None:
        with f.reading() as fd:
            assert os.pread(fd, 9, 100) == f.buffer.data[100:109].tobytes()
            reading.set()
            end.wait(30)

    thread = threading.Thread(target=read)
    thread.start()
    assert reading.wait(30)
    assert not f.withdraw()
    assert f.revoked
    with pytest.raises(Withdrawn):
        f.ready(0, 1)
    with pytest.raises(Withdrawn), f.reading():
        pass
    threading.Timer(0.1, end.set).start()
    assert f.withdraw(wait_s=30)
    thread.join()


def test_withdraw_ends_a_wait() -> None:
    f = file()
    threading.Timer(0.1, f.withdraw).start()
    with pytest.raises(Withdrawn):
        f.ready(0, 1, wait_s=30)


def test_files_by_digest() -> None:
    files, first, again, part = HeldFiles(), file(filled=True), file(filled=True), file(7)
    for f in (first, again, part):
        files.add(f)
    assert files.find(first.manifest.digest) is again
    part.add(2)
    halves = m.Holding(file=part.manifest.ref, ranges=((2 * CHUNK, 3 * CHUNK),))
    assert files.describe() == (halves, m.Holding(file=again.manifest.ref))  # the largest first
    assert files.remove(first)
    assert files.find(first.manifest.digest) is again, "the same bytes in another buffer"
    assert files.remove(again)
    assert files.find(again.manifest.digest) is None
    assert files.describe() == (halves,)


# over HTTP


@pytest.fixture
def serving() -> Iterator[Callable[..., RunningServer]]:
    servers: list[RunningServer] = []

    def make(files: HeldFiles, **options: Any) -> RunningServer:
        servers.append(serve_in_thread(files, host="127.0.0.1", port=0, key=KEY, **options))
        return servers[-1]

    yield make
    for s in servers:
        s.close()


def ask(port: int, f: HeldFile, start: int, stop: int, *lines: str, path: str = "") -> tuple[int, bytes]:
    """Status and body of the answer."""
    head = [f"GET /weights/{f.manifest.digest}{path} HTTP/1.1", "Host: x", "Connection: close"]
    head += [f"Authorization: Bearer {KEY}", f"Range: bytes={start}-{stop - 1}", *lines]
    with socket.create_connection(("127.0.0.1", port), timeout=30) as s:
        s.sendall("\r\n".join([*head, "", ""]).encode())
        out = b""
        while piece := s.recv(1 << 20):
            out += piece
    first, _, body = out.partition(b"\r\n\r\n")
    return int(first.split()[1]), body


def holding(*held: HeldFile) -> HeldFiles:
    files = HeldFiles()
    for f in held:
        files.add(f)
    return files


def test_half_filled_file_serves_its_finished_part(serving: Callable[..., RunningServer]) -> None:
    f = file()
    data, end = f.buffer.data.tobytes(), f.manifest.nbytes
    port = serving(holding(f)).port
    assert ask(port, f, 0, 1, path="/manifest") == (200, f.manifest.encode())
    f.add(0)
    f.add(1)
    assert ask(port, f, 100, end) == (206, data[100 : 2 * CHUNK])
    threading.Timer(0.2, f.add, [2]).start()
    assert ask(port, f, 2 * CHUNK, end) == (206, data[2 * CHUNK : 3 * CHUNK])
    assert ask(port, f, 3 * CHUNK, end)[0] == 503, "none of it within the time to wait"


def test_reader_of_this_machine_reads_through_the_handle(serving: Callable[..., RunningServer]) -> None:
    f = file()
    f.add(0)
    status, body = ask(serving(holding(f)).port, f, 7, f.manifest.nbytes, f"Accept: {HANDLE_TYPE}")
    handle, start, stop = msgspec.msgpack.decode(body, type=tuple[BufferHandle, int, int])
    assert (status, start, stop) == (206, 7, CHUNK)
    mapped = Buffer.map(handle)
    assert (mapped.data == f.buffer.data).all()
    mapped.close()


def test_withdrawn_file_is_gone_and_its_readers_are_disconnected(serving: Callable[..., RunningServer]) -> None:
    f, other = file(500, filled=True), file(3, filled=True)
    files = holding(f, other)
    port = serving(files).port
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", port))
        head = f"GET /weights/{f.manifest.digest} HTTP/1.1\r\nHost: x\r\nRange: bytes=0-\r\n"
        slow.sendall(f"{head}Authorization: Bearer {KEY}\r\n\r\n".encode())
        got = 0
        while got < 2000:  # so the body has begun
            got += len(slow.recv(2000))
        assert not f.withdraw()
        slow.settimeout(30)
        with pytest.raises(ConnectionResetError):
            all(iter(lambda: slow.recv(1 << 20), b""))
    assert f.withdraw(wait_s=30), "no thread reads it any more"
    assert ask(port, f, 0, 1)[0] == 410
    files.remove(f)
    assert ask(port, f, 0, 1)[0] == 404
    assert ask(port, other, 0, 9) == (206, other.buffer.data[:9].tobytes())


@pytest.mark.parametrize("readers", [1, 4])
def test_limit_holds_for_all_readers_together(
    serving: Callable[..., RunningServer], monkeypatch: pytest.MonkeyPatch, readers: int
) -> None:
    f, limit, waits = file(31, filled=True), UploadLimit(4e6), list[float]()

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        time.sleep(seconds)

    monkeypatch.setattr(held_files, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    port, data = serving(holding(f), limit=limit).port, f.buffer.data.tobytes()

    def read() -> None:
        assert ask(port, f, 0, len(data)) == (206, data)

    threads = [threading.Thread(target=read) for _ in range(readers)]
    began = time.monotonic()
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert time.monotonic() - began > 0.9 * readers * len(data) / 4e6
    assert max(waits) < readers * limit.piece_bytes / 4e6 + 1e-6, "nobody waits for more than one piece of every reader"
    assert limit.sent_bytes == readers * len(data)


def test_a_file_with_many_holes_is_described_by_its_longest_ranges() -> None:
    partial, files = file(9), HeldFiles()
    for chunk in (0, 2, 3, 5, 7, 8):
        partial.add(chunk)
    files.add(partial)
    (holding,) = files.describe(most_ranges=2)
    assert holding.ranges == ((2 * CHUNK, 4 * CHUNK), (7 * CHUNK, 9 * CHUNK))
