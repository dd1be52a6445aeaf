"""Checkpoints and journals damaged by bad disks, full disks and people.

Add a kind of damage here and every test that goes through the table has it.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

MODEL, OPTIMIZER = "model.safetensors", "windfall/optimizer.safetensors"
STATE, CHECKSUMS = "windfall/state.json", "windfall/checksums.json"


def flip(path: Path, share: float = 0.5, bit: int = 1) -> None:
    """Change one bit of the byte at `share` of the file."""
    data = bytearray(path.read_bytes())
    data[min(int(len(data) * share), len(data) - 1)] ^= bit
    path.write_bytes(data)


def cut(path: Path, share: float = 0.5) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


def _edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


CHECKPOINTS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a flipped bit in the weights": (MODEL, flip),
    "a flipped bit in the header of the weights": (MODEL, lambda path: flip(path, 0.0002)),
    "a flipped bit in the optimizer's state": (OPTIMIZER, lambda path: flip(path, 0.9)),
    "weights that are cut": (MODEL, cut),
    "weights that are empty": (MODEL, lambda path: path.write_bytes(b"")),
    "weights that are a folder": (MODEL, _directory),
    "an optimizer's state that is cut": (OPTIMIZER, lambda path: cut(path, 0.99)),
    "no optimizer's state": (OPTIMIZER, Path.unlink),
    "no configuration": ("config.json", Path.unlink),
    "a configuration with another number": ("config.json", lambda path: _edit(path, rms_norm_eps=1e-3)),
    "a state of another step": (STATE, lambda path: _edit(path, step=3)),
    "a state without a data position": (STATE, lambda path: path.write_text('{"step": 4}')),
    "a state that is not JSON": (STATE, lambda path: path.write_text("step 4")),
    "a state without an end": (STATE, lambda path: path.write_text("[" * 100_000)),
    "no checksums": (CHECKSUMS, Path.unlink),
    "checksums that are empty": (CHECKSUMS, lambda path: path.write_text("")),
    "checksums of nothing": (CHECKSUMS, lambda path: path.write_text('{"algorithm": "xxh3_128", "files": {}}')),
    "checksums without an end": (CHECKSUMS, lambda path: path.write_text("[" * 100_000)),
}
"""Damages to a checkpoint: the damaged file, and how it is damaged."""


def rename_step(checkpoint: Path, step: int) -> Path:
    """A manual copy of the checkpoint of another step."""
    return Path(shutil.copytree(checkpoint, checkpoint.with_name(f"step-{step:06d}")))


JOURNALS: dict[str, Callable[[Path], object]] = {
    "damaged at its head": lambda path: flip(path, 0.0),
    "damaged in its middle": lambda path: flip(path, 0.5),
    "emptied": lambda path: path.write_bytes(b""),
    "deleted": Path.unlink,
    "overwritten": lambda path: path.write_bytes(random.Random(1).randbytes(500)),
    "cut": lambda path: cut(path, 0.5),
    "replaced by a folder": _directory,
}
"""Damages to the only file of a journal."""


def add_strays(folder: Path) -> set[str]:
    """Foreign files in the folder of a journal."""
    (folder / "notes.wal").write_text("mine")
    (folder / "000001.wal.orig").write_bytes(b"\x00" * 9)
    (folder / "old").mkdir()
    return {"notes.wal", "000001.wal.orig", "old"}
