"""Files of weights in an object store or a folder, through obstore (S3, GCS, Azure, file://).

    {url}/{run}/{digest}/manifest                  first
    {url}/{run}/{digest}/{first byte of the part}  parts of PART_BYTES, cut also where one machine's bytes end

- An object is written in one request, so it is there whole or not at all, and an upload that was killed leaves nothing
  unfinished behind, which a store would bill. Who uploads the file again sends only what is missing.
- A file may be read while it is uploaded: what is missing is not there *yet* (SourceWaits).
- No object is trusted: a reader checks every chunk by its seal.
- Credentials come from the environment. An error is cut to its first line, without the query of a URL.
"""

from __future__ import annotations

import asyncio
import math
import re
import shutil
import threading
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from concurrent.futures import wait
from datetime import timedelta
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from windfall.backoff import delay_s
from windfall.errors import WindfallError, install_command
from windfall.link import auth
from windfall.link import messages as m
from windfall.weights.held_files import HeldFile
from windfall.weights.manifest import MAX_MANIFEST_BYTES, Manifest, chunk_bounds, decode
from windfall.weights.pulling.source import SourceBroken, SourceStalled, SourceWaits, SourceWrong
from windfall.weights.ranges import covers

PART_BYTES = 64 << 20
MAX_PUTS = 8  # at once
READ_BYTES, FOLDER_READ_BYTES = 1 << 20, 4 << 20
FIRST_MISS_S, LONGEST_MISS_S = 0.1, 1.0
POLL_S = 0.25
MANIFEST = "manifest"
FIX = "Use a URL like s3://bucket/path, gs://bucket/path, az://container/path or file:///folder."
T = TypeVar("T")


class BucketFailed(Exception):
    """The store refused a request or cannot be reached; the text says which and why."""


class BucketStore:
    """The files of one run. Any thread may call it."""

    def __init__(self, url: str, run: str) -> None:
        self.url, self.run = url.rstrip("/"), run
        self.location = f"{self.url}/{run}"
        """With this, a reader gets the same store (`bucket_at`)."""
        self._store: Any = None
        self._bounds: dict[str, list[int]] = {}

    def check(self) -> None:
        """Raise WindfallError if nothing can be uploaded here, as far as that is known without a request."""
        try:
            self._open(create=True)
        except WindfallError:
            raise
        except Exception as e:  # obstore raises many kinds
            raise WindfallError(f"not a bucket: {_line(e)}", where=f"weights.bucket = {self.url!r}", fix=FIX) from None

    def upload(self, file: HeldFile, *, again: bool = False, stopped: Callable[[], bool] = lambda: False) -> int:
        """Upload what is missing of the file, or of the part of it that is held; all of it, if `again`. Returns the
        bytes sent. The file must be pinned."""
        return self._call(f"upload {file.manifest.digest[:12]}", self._upload(file, again), stopped)

    def expire(self, keep: Collection[str]) -> int:
        """Delete all files but these. Returns the number of deleted objects."""
        return self._call("delete files", self._expire(keep))

    def clear(self) -> None:
        """Delete all files of the run."""
        self.expire(())
        parts = urlsplit(self.url)
        if parts.scheme == "file":  # folders are left, and what a killed upload has begun
            shutil.rmtree(Path(unquote(parts.path)) / self.run, ignore_errors=True)

    async def manifest(self, file: str) -> bytes:
        found = await self._open().get_async(f"{self.run}/{file}/{MANIFEST}")
        if found.meta["size"] > MAX_MANIFEST_BYTES:
            raise SourceWrong(f"the manifest of {file} has {found.meta['size']} bytes")
        data = bytes(await found.bytes_async())
        try:
            self._bounds[file] = part_bounds(decode(data, file))
        except WindfallError as e:
            raise SourceWrong(f"{self.location}: {e}") from None
        return data

    async def read(self, file: str, start: int, stop: int) -> tuple[int, AsyncIterator[Any]]:
        """The bytes from `start` on of the part that has them: their number, and the bytes in pieces."""
        if file not in self._bounds:
            await self.manifest(file)
        bounds = self._bounds[file]
        at = bisect_right(bounds, start)
        first, end = bounds[at - 1], bounds[at]
        path, stop, store = self._path(file, first), min(stop, end), self._open()
        if self.url.startswith("file:"):  # a stream of a local file comes in pieces of 8 kB
            size = (await store.head_async(path))["size"]
            pieces = self._read_folder(path, start - first, stop - first)
        else:
            found = await store.get_async(path, options={"range": (start - first, stop - first)})
            size, pieces = found.meta["size"], aiter(found.stream(min_chunk_size=READ_BYTES))
        if size != end - first:
            raise SourceWrong(f"{path} has {size} bytes, expected {end - first}")
        return stop - start, pieces

    async def _read_folder(self, path: str, start: int, stop: int) -> AsyncIterator[Any]:
        for at in range(start, stop, FOLDER_READ_BYTES):
            yield await self._open().get_range_async(path, start=at, end=min(stop, at + FOLDER_READ_BYTES))

    async def _upload(self, file: HeldFile, again: bool) -> int:
        name, store, turns, sent = file.manifest.digest, self._open(create=True), asyncio.Semaphore(MAX_PUTS), 0

        async def put(path: str, start: int, stop: int) -> None:
            nonlocal sent
            async with turns:
                await store.put_async(path, file.buffer.data[start:stop].data, use_multipart=False)
                sent += stop - start

        present = {} if again else dict(await self._list(name))
        if (path := f"{self.run}/{name}/{MANIFEST}") not in present:
            await store.put_async(path, file.manifest.encode(), use_multipart=False)
        parts = {self._path(name, part[0]): part for part in pairwise(part_bounds(file.manifest))}
        puts = [
            asyncio.ensure_future(put(path, *part))
            for path, part in parts.items()
            if present.get(path) != part[1] - part[0] and covers(file.ranges, (part,))
        ]
        try:
            await asyncio.gather(*puts)
        finally:
            for task in puts:
                task.cancel()
        return sent

    async def _expire(self, keep: Collection[str]) -> int:
        gone = [path for path, _ in await self._list() if path.split("/")[1] not in keep]
        if gone:
            await self._open().delete_async(gone)
        return len(gone)

    async def _list(self, file: str = "") -> list[tuple[str, int]]:
        """The path and the size of every object."""
        pages = self._open().list(f"{self.run}/{file}")
        return [(found["path"], found["size"]) async for page in pages for found in page]

    def _path(self, file: str, first: int) -> str:
        return f"{self.run}/{file}/{first:015d}"

    def _open(self, *, create: bool = False) -> Any:
        if self._store is None:
            self._store = _open(self.url, create=create)
        return self._store

    def _call(self, what: str, request: Coroutine[Any, Any, T], stopped: Callable[[], bool] = lambda: False) -> T:
        try:
            return run_request(request, stopped)
        except WindfallError:
            raise
        except Exception as e:  # obstore raises many kinds
            raise BucketFailed(f"cannot {what} at {self.location}: {_line(e)}") from None


class BucketSource:
    """See source.py."""

    trusted = False

    def __init__(self, ref: m.SourceRef, *, timeout_s: float, stopped: Callable[[], bool]) -> None:
        self.ref = ref
        self._timeout_s, self._stopped = timeout_s, stopped
        self._bucket = bucket_at(ref.location)
        self._pieces: AsyncIterator[Any] | None = None
        self._piece = memoryview(b"")
        self._misses = 0

    def manifest(self, file: str) -> bytes:
        return self._wait(self._bucket.manifest(file))

    def open(self, file: str, start: int, stop: int) -> int:
        length, self._pieces = self._wait(self._bucket.read(file, start, stop))
        self._piece = memoryview(b"")
        return length

    def read_into(self, view: memoryview) -> int:
        if not self._piece:
            self._piece = memoryview(self._wait(self._next()))
        n = min(len(view), len(self._piece))
        view[:n], self._piece = self._piece[:n], self._piece[n:]
        return n

    def close(self) -> None:
        self._pieces = None

    async def _next(self) -> Any:
        assert self._pieces is not None
        if piece := await anext(self._pieces, b""):
            return piece
        raise SourceBroken("the answer ended early")

    def _wait(self, request: Coroutine[Any, Any, T]) -> T:
        try:
            result, self._misses = run_request(request, self._stopped, self._timeout_s), 0
            return result
        except SourceBroken:
            raise
        except TimeoutError as e:
            raise SourceStalled(f"{self.ref.location}: {e}") from None
        except Exception as e:  # obstore raises many kinds
            error = f"{self.ref.location}: {_line(e)}"
            if not isinstance(e, FileNotFoundError) or "NoSuchBucket" in str(e):
                short = "Range Not Satisfiable" in str(e)  # the object ends before the range
                raise (SourceWrong if short else SourceBroken)(error) from None
            time.sleep(delay_s(self._misses, first_s=FIRST_MISS_S, limit_s=LONGEST_MISS_S))  # a request has a price
            self._misses += 1
            raise SourceWaits(error) from None


def part_bounds(manifest: Manifest) -> list[int]:
    """Part `i` has the bytes from `bounds[i]` to `bounds[i + 1]`."""
    return chunk_bounds(manifest.nbytes, PART_BYTES, manifest.cuts)


def bucket_of_run(url: str, run: str, token: str) -> BucketStore:
    """Runs with the same name have different tokens, and do not delete each other's files."""
    return BucketStore(url, f"{run}-{auth.proof(token, 'bucket', run).hex()[:8]}")


def bucket_of_policy(store: BucketStore, policy: str) -> BucketStore:
    """Policies of a run have stores of their own: each deletes the files that it no longer needs."""
    return BucketStore(store.url, f"{store.run}-{policy}") if policy else store


@cache
def bucket_at(location: str) -> BucketStore:
    """The store of a location. All connections of a process share it."""
    url, _, run = location.rpartition("/")
    return BucketStore(url, run)


def run_request(request: Coroutine[Any, Any, T], stopped: Callable[[], bool], limit_s: float = math.inf) -> T:
    """The result of a request, which runs in an event loop of its own, so that this thread notices `stopped`."""
    future = asyncio.run_coroutine_threadsafe(request, _loop())
    end_s = time.monotonic() + limit_s
    while not stopped() and time.monotonic() < end_s:
        if wait([future], POLL_S).done:
            return future.result()
    future.cancel()
    raise BucketFailed("stopped") if stopped() else TimeoutError(f"no byte for {limit_s:g} s")


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="bucket", daemon=True).start()
    return loop


def _open(url: str, *, create: bool) -> Any:
    try:
        from obstore.store import from_url
    except ImportError as e:
        fix = f"Install it: {install_command('bucket')}"
        raise WindfallError("weights in a bucket need the package obstore", where=url, fix=fix) from e
    if url.startswith("file:"):
        return from_url(url, mkdir=create, automatic_cleanup=True)
    return from_url(
        url,
        # Plain HTTP is used only for an endpoint that the environment names so. `timeout`: of one object.
        client_options={"allow_http": True, "connect_timeout": "10s", "timeout": "600s"},
        retry_config={"max_retries": 3, "retry_timeout": timedelta(seconds=10)},
    )


def _line(error: Exception) -> str:
    """What failed, in one line, without anything that could be a credential.

    >>> _line(ValueError("GET https://me:pass@host/a/b?sig=secret&x=1 failed - 403: <?xml version=1?>\\nDebug ..."))
    'GET https://host/a/b failed - 403:'
    """
    first = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r"//[^/@\s]*@", "//", re.sub(r"\s*<.*|\?\S*", "", first))
