"""What the server keeps of sessions, saved weights and samplers: objects, and their rows in the store."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from windfall.tinker import calls as c
from windfall.tinker.disk.store import Statement, TinkerStore


@dataclass(kw_only=True, eq=False)
class TinkerSession:
    id: str
    account: str
    created: float
    seen: float
    info: dict[str, Any]
    """Tags, metadata, the client's version, and the name that it is shown with."""
    ended: float | None = None

    def row(self) -> Statement:
        return TinkerStore.put("session", **vars(self))


@dataclass(kw_only=True, eq=False)
class NamedWeights:
    """Weights that a client has saved under a name."""

    path: str
    account: str
    model: str
    kind: str
    """training or sampler"""
    created: float
    folder: Path
    bytes: int = 0
    expires: float | None = None
    public: bool = False
    info: c.Metadata = field(default_factory=dict)
    """Metadata of the client."""

    def row(self) -> Statement:
        return TinkerStore.put("checkpoint", **{**vars(self), "folder": str(self.folder)})

    @classmethod
    def read(cls, row: Mapping[str, Any]) -> NamedWeights:
        return cls(**{**row, "folder": Path(row["folder"]), "public": bool(row["public"])})


@dataclass(kw_only=True, eq=False)
class Sampler:
    """What responses are sampled from: the base, saved weights, or the newest of a model's live weights."""

    id: str
    account: str
    session: str
    created: float
    key: str = ""
    """Key of its slot: equal for samplers of the same weights, "" for the base."""
    folder: Path | None = None
    path: str = ""
    """The saved weights; "" if they have no name, or for the base."""
    clones: int = 0
    used: float = field(default_factory=time.time)
    """When a call for it arrived last, as far as this server knows."""

    def newest(self) -> Path:
        """Where its weights are now."""
        assert self.folder is not None, f"{self.id} samples from the base"
        return self.folder

    def row(self) -> Statement:
        weights = {"key": self.key, "folder": str(self.folder or ""), "path": self.path}
        return TinkerStore.put(
            "sampler", id=self.id, account=self.account, session=self.session, created=self.created,
            weights=weights, clones=self.clones,
        )  # fmt: skip

    @classmethod
    def read(cls, row: Mapping[str, Any]) -> Sampler:
        fields = row["weights"] | {key: value for key, value in row.items() if key != "weights"}
        fields.pop("base", "")  # earlier versions wrote it
        return cls(**{**fields, "folder": Path(fields["folder"]) if fields["folder"] else None})
