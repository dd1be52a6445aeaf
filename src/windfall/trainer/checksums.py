"""Verifies that the files of a checkpoint are unchanged, by sizes and checksums stored in the checkpoint itself.

    windfall/checksums.json    {"algorithm": "xxh3_128", "files": {"config.json": {"bytes": 698, "hash": "..."}, ...}}

Reading a file from memory and hashing it runs at several GB/s per core, and files are hashed in parallel, so the disk
is the limit.
"""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import xxhash

from windfall.errors import WindfallError

CHECKSUMS = "windfall/checksums.json"
_ALGORITHM = "xxh3_128"
_BLOCK = 8 << 20
_NEEDED = ("windfall/optimizer.safetensors", "windfall/state.json")
_MODEL, _ADAPTER = "config.json", "adapter_config.json"


class DamagedCheckpoint(WindfallError):
    """A file of a checkpoint is missing or was changed."""

    def __init__(self, checkpoint: Path, file: str, why: str) -> None:
        self.checkpoint = checkpoint
        self.file = file
        self.why = why
        fix = "Restore it from a copy, or use another checkpoint."
        super().__init__(f"damaged: {why}", where=str(checkpoint / file), fix=fix)

    @property
    def short(self) -> str:
        return f"{self.checkpoint.name}/{self.file}: {self.why}"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    bytes: int
    s: float

    def __str__(self) -> str:
        rate = self.bytes / max(self.s, 1e-9) / 1e9
        return f"verified {self.bytes / 1e6:,.1f} MB in {self.s:.2f} s ({rate:.1f} GB/s)"


def write_checksums(checkpoint: Path) -> None:
    """Write the checksums of all files. This must be the last file to be written."""
    files = sorted(p for p in checkpoint.rglob("*") if p.is_file())
    names = [p.relative_to(checkpoint).as_posix() for p in files]
    listed = {n: {"bytes": size, "hash": digest} for n, (size, digest) in zip(names, _hashes(files), strict=True)}
    content = {"algorithm": _ALGORITHM, "files": listed}
    (checkpoint / CHECKSUMS).write_text(json.dumps(content, indent=1))


def check(checkpoint: Path, *, skip: frozenset[str] = frozenset()) -> CheckResult:
    """Compare every file that is not in `skip` with its checksum. Raises `DamagedCheckpoint` at a difference."""
    started = time.monotonic()
    if not (checkpoint / CHECKSUMS).exists():
        raise DamagedCheckpoint(checkpoint, CHECKSUMS, "the file is missing")
    listed = {n: e for n, e in _listed(checkpoint).items() if n not in skip}
    for name, (size, _) in listed.items():  # sizes first: they are cheap to check
        path = checkpoint / name
        if not path.is_file():
            raise DamagedCheckpoint(checkpoint, name, "the file is missing")
        if (found := path.stat().st_size) != size:
            raise DamagedCheckpoint(checkpoint, name, f"it has {found:,} bytes, but was written with {size:,}")
    for (name, (_, digest)), (_, found) in zip(
        listed.items(), _hashes([checkpoint / n for n in listed], checkpoint), strict=True
    ):
        if found != digest:
            raise DamagedCheckpoint(checkpoint, name, f"its checksum is {found}, but was {digest} when it was written")
    total = sum(size for size, _ in listed.values())
    return CheckResult(bytes=total, s=time.monotonic() - started)


def _listed(checkpoint: Path) -> dict[str, tuple[int, str]]:
    try:
        content = json.loads((checkpoint / CHECKSUMS).read_text())
        if content["algorithm"] != _ALGORITHM:
            raise ValueError(f"unknown algorithm {content['algorithm']!r}")
        listed = {str(name): (int(e["bytes"]), str(e["hash"])) for name, e in content["files"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        raise DamagedCheckpoint(checkpoint, CHECKSUMS, f"it cannot be read: {type(e).__name__}: {e}") from e
    needed = (_ADAPTER if _ADAPTER in listed else _MODEL, *_NEEDED)
    missing = [name for name in needed if name not in listed]
    if missing:
        raise DamagedCheckpoint(checkpoint, CHECKSUMS, f"it does not list {missing[0]}")
    return listed


def _hashes(files: list[Path], checkpoint: Path | None = None) -> list[tuple[int, str]]:
    """(bytes, hash) of each file. xxhash releases the GIL, so files are hashed in parallel."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        running = [threads.submit(_hash, path) for path in files]
        out: list[tuple[int, str]] = []
        for path, future in zip(files, running, strict=True):
            try:
                out.append(future.result())
            except OSError as e:
                if checkpoint is None:
                    raise
                name = path.relative_to(checkpoint).as_posix()
                raise DamagedCheckpoint(checkpoint, name, f"it cannot be read: {e.strerror or e}") from e
        return out


def _hash(path: Path) -> tuple[int, str]:
    size, state = 0, xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        buffer = bytearray(_BLOCK)
        view = memoryview(buffer)
        while count := file.readinto(buffer):
            state.update(view[:count])
            size += count
    return size, state.hexdigest()
