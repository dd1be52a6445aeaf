"""The journal on disk: its files and its records.

journal/000010.wal     everything since the checkpoint of step 10
a record               its length, a checksum, and a msgpack array whose first item is the tag of its kind
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec
import xxhash

from windfall.link.messages import Tokens

FILE_NAME = re.compile(r"[0-9]{6,}\.wal")
HEAD = struct.Struct("<II")
"""Before every record: its length in bytes and its checksum."""
MAX_RECORD_BYTES = 64 << 20


class Started(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=1):
    """The first record of every controller process. Responses from other settings do not belong to the run."""

    settings: str


class Assigned(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=2):
    """Responses were assigned to a worker."""

    handles: dict[int, str]
    """From handle to response id."""


class Accepted(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=3):
    """Tokens were accepted from a worker."""

    frame: Tokens


class TurnGraded(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=4):
    """The environment answered a turn with a reward or an observation, or it failed (`error`)."""

    id: str
    reward: float | None
    observation: str | None
    error: str
    segments: tuple[tuple[int, int], ...] = ()
    """For the response of an agent, whose session has ended: the numbers of its segments, and how many tokens each has
    after its prompt. Segments of the journal that are not named here are not part of the response."""


class Trained(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=5):
    """A step is about to be trained on the groups of these tasks, in this order. If it must be trained again, it gets
    the same groups. Written only if the staleness bound is above 0; otherwise the tasks of a step follow from its
    number."""

    step: int
    tasks: tuple[int, ...]


class Prompted(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=6):
    """A call of an agent: the ids that stand before the turn that is sampled next."""

    id: str
    """The id of the segment."""
    position: int
    """Where the first id stands in the tokens of the segment. -1: it begins the prompt of a new segment."""
    tokens: bytes
    """As in link.messages.Tokens: little-endian, four bytes each."""


class TurnCut(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=7):
    """The turn was ended after the first `length` tokens of the response. Accepted tokens after them are void."""

    id: str
    length: int


JournalRecord = Started | Assigned | Accepted | TurnGraded | Trained | Prompted | TurnCut


def encode_record(payload: bytes) -> bytes:
    """The payload with its head."""
    return HEAD.pack(len(payload), xxhash.xxh32_intdigest(payload)) + payload


def read_records(path: Path) -> Iterator[tuple[int, JournalRecord]]:
    """The intact records up to the first torn or damaged one, each with the offset at which it ends."""
    decode = msgspec.msgpack.Decoder(JournalRecord).decode
    with path.open("rb") as file:
        end = 0
        while len(head := file.read(HEAD.size)) == HEAD.size:
            length, checksum = HEAD.unpack(head)
            payload = file.read(length) if length <= MAX_RECORD_BYTES else b""
            if len(payload) != length or xxhash.xxh32_intdigest(payload) != checksum:
                return
            end += HEAD.size + length
            yield end, decode(payload)


def file_path(folder: Path, step: int) -> Path:
    return folder / f"{step:06d}.wal"


def list_files(folder: Path) -> list[int]:
    """The steps of the journal's files, oldest first. Other files in the folder are left alone."""
    return sorted(int(path.stem) for path in folder.iterdir() if FILE_NAME.fullmatch(path.name) and path.is_file())


def oldest_file(step: int, staleness: int) -> int:
    """Step of the oldest file that a run at `step` needs. If no file begins at that step, it needs the last one before
    it. See journal.py."""
    return step - staleness - (1 if staleness else 0)
