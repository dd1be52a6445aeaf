"""Publish, serve and pull over real sockets on loopback: the pulled bytes equal the published ones, bit for bit."""

from __future__ import annotations

import gc
import os
import select
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.weights.weight_shelves import load_of
from windfall.errors import WindfallError
from windfall.link.messages import FileRef, SourceRef
from windfall.weights import buffers, manifest
from windfall.weights.held_files import HeldFile
from windfall.weights.publishing.publish import Publisher
from windfall.weights.pulling.pull import Puller, PullFailed

Tensors = dict[str, torch.Tensor]


def weights(seed: int = 0, count: int = 200_000) -> Tensors:
    g = torch.Generator().manual_seed(seed)
    tied = torch.randn(100, 300, generator=g)
    return {
        "embed": tied,
        "big": torch.randn(count // 100, 100, generator=g),
        "half": torch.randn(333, generator=g).bfloat16(),
        "transposed": torch.randn(30, 50, generator=g).T,
        "steps": torch.tensor(7),
        "none": torch.empty(0, 3),
        "head": tied,
    }


def moved(old: Tensors, share: float) -> Tensors:
    """The same tensors with a share of `big` changed."""
    big = old["big"].clone()
    big.view(-1)[torch.rand(big.numel(), generator=torch.Generator().manual_seed(1)) < share] += 1.0
    return {**old, "big": big}


def equal(a: Tensors, b: Tensors) -> bool:
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


def test_full_copy(serving: Callable[..., Any]) -> None:
    s, w = serving(), weights()
    m = s.publisher.publish(4, w)
    p = s.puller()
    assert s.pull(p, m) == m == p.held == s.publisher.current
    assert equal(p.tensors(), w)
    assert p.bytes_received == m.nbytes + len(m.encode())
    assert (p.retries, p.delta_used) == (0, 0)


def test_tied_tensors_are_sent_once_and_arrive_tied(serving: Callable[..., Any]) -> None:
    s, w = serving(), weights()
    m = s.publisher.publish(0, w)
    assert m.nbytes < sum(t.nbytes for t in w.values()) - w["head"].nbytes + 64 * len(w)
    p = s.puller()
    s.pull(p, m)
    got = p.tensors()
    assert got["embed"].data_ptr() == got["head"].data_ptr()


def test_tensors_are_views_of_the_buffer(serving: Callable[..., Any]) -> None:
    s, w = serving(), weights()
    p = s.puller()
    s.pull(p, s.publisher.publish(0, w))
    p.tensors()["steps"].fill_(9)
    assert int(p.tensors()["steps"]) == 9


def test_publisher_casts_to_its_dtype(serving: Callable[..., Any]) -> None:
    s, w = serving(dtype="bfloat16"), weights()
    p = s.puller()
    m = s.pull(p, s.publisher.publish(0, w))
    got = p.tensors()
    assert m.nbytes < 0.51 * sum(t.nbytes for k, t in w.items() if k != "head")
    assert equal(got, {k: t.bfloat16() if t.is_floating_point() else t for k, t in w.items()})


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_delta_is_pulled_if_small(serving: Callable[..., Any], dtype: str | None) -> None:
    s, w = serving(dtype=dtype), weights()
    p = s.puller()
    first = s.pull(p, s.publisher.publish(0, w))
    before, new = p.bytes_received, moved(w, 0.02)
    second = s.publisher.publish(1, new)
    assert s.pull(p, second) == second
    assert p.delta_used == 1
    assert p.bytes_received - before < 0.1 * first.nbytes
    late = s.puller()
    s.pull(late, second)
    assert late.delta_used == 0
    assert equal(late.tensors(), p.tensors())
    assert torch.equal(p.tensors()["big"], new["big"].bfloat16() if dtype else new["big"])


def test_no_delta_when_everything_changed(serving: Callable[..., Any]) -> None:
    s, w = serving(), weights()
    p = s.puller()
    s.pull(p, s.publisher.publish(0, w))
    new = {k: t + 1 for k, t in w.items()}
    s.pull(p, s.publisher.publish(1, new))
    assert p.delta_used == 0
    assert all(torch.equal(t, new[k]) for k, t in p.tensors().items())


def test_unchanged_chunks_are_not_downloaded(serving: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windfall.weights.publishing.publish.MAX_RATIO", 0.0)  # no deltas
    s, w = serving(), weights()
    p = s.puller()
    m = s.pull(p, s.publisher.publish(0, w))
    before, new = p.bytes_received, {**w, "steps": torch.tensor(8)}
    m = s.publisher.publish(1, new)
    s.pull(p, m)
    assert p.bytes_received - before == len(m.encode()) + m.nbytes % m.chunk_bytes
    assert equal(p.tensors(), new)


def test_same_bytes_are_not_downloaded(serving: Callable[..., Any]) -> None:
    s, w = serving(), weights()
    p = s.puller()
    m = s.pull(p, s.publisher.publish(0, w))
    again = s.publisher.publish(1, w)
    assert again.digest == m.digest
    s.close()
    assert s.pull(p, again).version == 1
    assert p.held is not None
    assert p.held.version == 1


def test_delta_with_a_wrong_result_is_corrected(serving: Callable[..., Any]) -> None:
    """The blob matches its own checksums but changes a wrong value: only the result reveals that."""
    s, w = serving(), weights()
    p = s.puller()
    s.pull(p, s.publisher.publish(0, w))
    new = moved(w, 0.02)
    m = s.publisher.publish(1, new)
    found, names = s.publisher.delta, {"before": p.held.digest, "after": m.digest}
    found.buffer.data[found.manifest.nbytes - 1] ^= 1  # a part of the last value
    both = [manifest.hash_chunk(found.buffer.data[a:b].data) for a, b in pairwise(found.manifest.bounds())]
    hashes = {"chunks": b"".join(c for c, _ in both), "seals": b"".join(s for _, s in both)}
    sizes = {"nbytes": found.manifest.nbytes, "chunk_bytes": found.manifest.chunk_bytes, "result": m.encode()}
    s.publisher.files.remove(found)
    s.publisher.files.add(HeldFile(manifest.make(**sizes, **names, **hashes), found.buffer, filled=True))
    before = p.bytes_received
    s.pull(p, m)
    assert p.delta_used == 0
    assert equal(p.tensors(), new)
    assert p.bytes_received - before < 0.5 * m.nbytes  # correct chunks are kept


def test_eight_concurrent_readers(serving: Callable[..., Any]) -> None:
    s, w = serving(), weights(count=500_000)
    m = s.publisher.publish(0, w)
    pullers = [s.puller() for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert {x.digest for x in pool.map(lambda p: s.pull(p, m), pullers)} == {m.digest}
    assert all(equal(p.tensors(), w) for p in pullers)


def _hanging(s: Any, path: str) -> socket.socket:
    c = socket.socket()
    c.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    c.connect(("127.0.0.1", s.port))
    c.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nRange: bytes=0-\r\nAuthorization: Bearer {s.key}\r\n\r\n".encode())
    assert c.recv(1000).startswith(b"HTTP/1.1 206")
    return c


def _read_all(c: socket.socket) -> None:
    c.settimeout(30)
    while c.recv(1 << 20):
        pass


def test_dead_or_stalled_readers_disturb_no_other(serving: Callable[..., Any]) -> None:
    s, w = serving(server={"write_timeout_s": 0.3}), weights(count=4_000_000)
    m = s.publisher.publish(0, w)
    for _ in range(5):
        _hanging(s, f"/weights/{m.digest}").close()
    slow = _hanging(s, f"/weights/{m.digest}")
    p = s.puller()
    s.pull(p, m)
    assert equal(p.tensors(), w)
    disconnected = select.poll()
    disconnected.register(slow, 0)
    assert disconnected.poll(30_000), "the server still waits for it"
    with pytest.raises(ConnectionResetError):  # disconnected before the end
        _read_all(slow)
    for version in (1, 2, 3):
        s.publisher.publish(version, w)
    slow.close()


def test_many_stalled_readers_delay_no_other(serving: Callable[..., Any]) -> None:
    s, w = serving(), {"big": torch.randn(3_000_000)}
    m = s.publisher.publish(0, w)
    stalled = [_hanging(s, f"/weights/{m.digest}") for _ in range(60)]
    p, started = s.puller(), time.monotonic()
    s.pull(p, m)
    assert time.monotonic() - started < 15, "less than the time limit of a stalled reader"
    assert equal(p.tensors(), w)
    for c in stalled:
        c.close()


def test_wrong_key_is_refused_at_once(serving: Callable[..., Any]) -> None:
    s = serving()
    m = s.publisher.publish(0, weights())
    p = s.puller(key="another", tries=1)
    with pytest.raises(PullFailed, match="401 wrong key"):
        s.pull(p, m)
    assert not p.bytes_received
    for path in ("", "/manifest"):
        assert s.ask(f"/weights/{m.digest}{path}", key="").startswith(b"HTTP/1.1 401")
    assert s.ask("/elsewhere", key="x").startswith(b"HTTP/1.1 401")


def test_invalid_requests_are_refused(serving: Callable[..., Any]) -> None:
    s = serving()
    m = s.publisher.publish(0, weights())
    n, path = m.nbytes, f"/weights/{m.digest}"
    assert s.ask(path).startswith(b"HTTP/1.1 416")
    for bad in ("bytes=5-4", f"bytes={n}-", f"bytes=0-{n}", "bytes=-5", "bytes=0-1,3-4", "lines=0-1", "bytes=a-b"):
        assert s.ask(path, f"Range: {bad}").startswith(b"HTTP/1.1 416"), bad
    assert s.ask(path, f"Range: bytes={n - 3}-").endswith(b"\r\n\r\n" + bytes(s.publisher.readable[0].buffer.data[-3:]))
    assert s.ask(path, "Range: bytes=0-0").startswith(b"HTTP/1.1 206")
    assert s.ask(f"{path}/manifest", "Content-Length: 5", body=b"hello").startswith(b"HTTP/1.1 413")
    assert s.ask(path, method="POST").startswith(b"HTTP/1.1 405")
    assert s.ask("/weights/x").startswith(b"HTTP/1.1 404")
    assert s.ask(f"/weights/{'0' * 64}", "Range: bytes=0-").startswith(b"HTTP/1.1 404")


def test_withdrawn_and_unknown_versions(serving: Callable[..., Any]) -> None:
    s, w = serving(), weights()
    made = [s.publisher.publish(v, moved(w, 0.01 * v)) for v in range(3)]
    p = s.puller(tries=1)
    for digest in (made[0].digest, "0" * 64):
        with pytest.raises(PullFailed, match=r"404 .* is not held here"):
            p.pull(load_of(0, digest, [FileRef(digest=digest, nbytes=1)], s.ref))
    for v in (1, 2):
        p = s.puller()
        s.pull(p, made[v])
        assert equal(p.tensors(), moved(w, 0.01 * v))


def test_failed_pull_leaves_nothing_held(serving: Callable[..., Any]) -> None:
    s = serving()
    p = s.puller(tries=1)
    with pytest.raises(PullFailed):
        p.pull(load_of(0, "0" * 64, [FileRef(digest="0" * 64, nbytes=1)], s.ref))
    assert p.held is None
    with pytest.raises(WindfallError, match="no complete version"):
        p.tensors()


def test_publishing_while_readers_read(serving: Callable[..., Any]) -> None:
    """A reader of an old version succeeds or gets an error; it never holds a mixture."""
    s, done = serving(), threading.Event()
    published: dict[int, str] = {}
    tensors = {v: {"big": torch.full((1_000_000,), float(v))} for v in range(12)}

    def publish() -> None:
        for v, t in tensors.items():
            published[v] = s.publisher.publish(v, t).digest
            time.sleep(0.02)
        done.set()

    def read(_: int) -> tuple[int, int]:
        p, succeeded, gone = s.puller(parallel=2), 0, 0
        last = False
        while not last:
            last = done.is_set()  # no more versions follow: the next pull must succeed
            current = s.publisher.current
            if current is None or current.version not in published:
                continue
            try:
                got = s.pull(p, current)
            except PullFailed:
                assert not last
                gone += 1
                continue
            assert torch.equal(p.tensors()["big"], tensors[got.version]["big"])
            succeeded += 1
        return succeeded, gone

    with ThreadPoolExecutor(4) as pool:
        readers = [pool.submit(read, i) for i in range(3)]
        pool.submit(publish).result(30)
        outcomes = [r.result(30) for r in readers]
    assert all(succeeded for succeeded, _ in outcomes)


def test_reader_of_a_withdrawn_version_is_disconnected(serving: Callable[..., Any]) -> None:
    s, w = serving(), {"big": torch.zeros(8_000_000)}
    m = s.publisher.publish(0, w)
    c = _hanging(s, f"/weights/{m.digest}")
    for v in (1, 2):
        s.publisher.publish(v, {"big": torch.full((8_000_000,), float(v))})
    with pytest.raises(ConnectionResetError):
        _read_all(c)
    c.close()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -keyout key.pem"
    command += " -out cert.pem -subj /CN=test -addext subjectAltName=IP:127.0.0.1"
    try:
        subprocess.run(command.split(), cwd=folder, check=True, capture_output=True, timeout=30)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    return folder


def test_pull_over_tls(serving: Callable[..., Any], certificate: Path) -> None:
    inside = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    inside.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    s, w = serving(server={"ssl": inside}), weights(count=500_000)
    m = s.publisher.publish(0, w)
    trusted = ssl.create_default_context(cafile=str(certificate / "cert.pem"))
    p = s.puller(ssl=trusted)
    s.pull(p, m)
    assert equal(p.tensors(), w)
    m = s.publisher.publish(1, moved(w, 0.01))
    s.pull(p, m)
    assert p.delta_used == 1
    with pytest.raises(PullFailed, match="not trusted"):
        s.pull(s.puller(), m)
    with pytest.raises(PullFailed, match="TLS is configured"):
        s.pull(p, s.publisher.publish(2, w), url=f"http://127.0.0.1:{s.port}")


def test_publisher_requires_rising_versions_and_leaves_no_file_or_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.collect()  # what earlier tests have left
    fds = len(os.listdir("/proc/self/fd"))
    for free in (1e12, 0.0):  # in memory, then in files of the folder
        monkeypatch.setattr(buffers, "free_bytes", lambda free=free: free)
        p, w = Publisher(tmp_path), weights()
        for v in range(6):
            p.publish(v, moved(w, 0.01 * v))
            assert os.listdir(tmp_path) == []
        assert [x.manifest.version for x in p.readable] == [5, 4]
        assert ("memfd" in os.readlink(f"/proc/self/fd/{p.readable[0].buffer.fd}")) == (free > 0)
        with pytest.raises(WindfallError, match="not newer"):
            p.publish(5, w)
        with pytest.raises(WindfallError, match="no tensors"):
            p.publish(6, {})
        with pytest.raises(WindfallError, match="no values"):
            p.publish(6, {"x": torch.empty(3, device="meta")})
        with pytest.raises(WindfallError, match="complex64"):
            p.publish(6, {"x": torch.zeros(3, dtype=torch.complex64)})
        p.publish(6, {"x": torch.ones(5)})  # another layout
        p.publish(7, {"y": torch.ones(5, dtype=torch.int32)})
        p.publish(8, {"x": torch.ones(3), "y": torch.ones(2)})
        p.close()
        p.close()
        assert p.current is None
        with pytest.raises(WindfallError, match="closed"):
            p.publish(9, w)
    assert len(os.listdir("/proc/self/fd")) <= fds


def test_tensors_may_change_once_copied() -> None:
    p, w = Publisher(), {"a": torch.zeros(1000)}

    def overwrite() -> None:
        w["a"].fill_(1.0)

    m = p.publish(0, w, copied=overwrite)
    assert not np.frombuffer(p.readable[0].buffer.data, np.float32).any()
    assert m.digest != p.publish(1, w).digest
    p.close()


def test_old_version_is_withdrawn_before_its_buffer_is_overwritten() -> None:
    p, seen = Publisher(), []
    for v in range(3):
        p.publish(v, {"a": torch.full((1000,), float(v))}, copied=lambda: seen.append(p.readable))
    assert [[x.manifest.version for x in at] for at in seen] == [[], [0], [1]]
    assert [x.manifest.version for x in p.readable] == [2, 1]
    p.close()


def test_reused_buffer_does_not_change_the_digest() -> None:
    """Bytes between tensors are zero, even where another layout had a tensor."""
    p, w = Publisher(), {"a": torch.ones(3), "b": torch.ones(13)}
    for v in range(2):
        p.publish(v, {"a": torch.ones(29)})
    used, fresh = p.publish(2, w), Publisher()
    assert used.nbytes == 29 * 4
    assert used.digest == fresh.publish(0, w).digest
    p.close()
    fresh.close()


def test_invalid_puller_options_are_refused() -> None:
    for options in ({"key": ""}, {"key": "a\r\nb"}, {"key": "k", "parallel": 0}, {"key": "k", "timeout_s": 0}):
        with pytest.raises(WindfallError):
            Puller(**options)
    for url in ("ftp://a:1", "http://", "127.0.0.1:9", "http://a:99999", "http://a:1/path"):
        load = load_of(
            0, "0" * 64, [FileRef(digest="0" * 64, nbytes=1)], SourceRef(id="x", kind="trainer", location=url)
        )
        with pytest.raises(PullFailed, match="address"):
            Puller(key="k", tries=1).pull(load)


def test_import_does_not_need_torch() -> None:
    parts = "publishing.publish", "pulling.pull", "serve"
    imports = "".join(f"import windfall.weights.{part}; " for part in parts)
    code = f"import sys; {imports}print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
