"""The Source interface: an object that can serve the bytes of a version of the weights.

A trainer's Publisher is one. serve.py offers the bytes of a source over HTTP. A reader trusts no source: it checks
every byte against the manifest whose digest it received over its link.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from windfall.weights.buffers import Buffer
from windfall.weights.manifest import DeltaManifest, Manifest
from windfall.weights.plan import PublishPlan


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Published:
    """One readable version."""

    manifest: Manifest
    buffer: Buffer
    plan: PublishPlan
    update_bytes: int
    """What a worker with the previous version must pull: from every machine its delta, or its rows if it has none."""
    delta: DeltaManifest | None = None
    delta_buffer: Buffer | None = None


class Source(Protocol):
    """Any thread may call it."""

    @property
    def current(self) -> Manifest | None:
        """The newest version."""
        ...

    @property
    def base(self) -> Published | None:
        """The weights that adapters apply to."""
        ...

    def find(self, version: int) -> Published | None: ...

    def is_readable(self, published: Published) -> bool:
        """Whether no byte of this version has been overwritten yet."""
        ...
