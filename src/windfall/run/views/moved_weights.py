"""Sentences about weights that were moved, for `windfall top`, the summary and the page. Pure: fields in, text out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MOVED = {
    "trainer": "from the trainer", "peer": "from workers", "machine": "within machines", "bucket": "from the bucket",
    "upload": "to the bucket", "across": "across regions",
}  # fmt: skip
"""Kinds of `..._bytes` in an event `weights`. The last two are counted beside the others."""


def of_version(found: Mapping[str, Any]) -> str:
    """What a version has moved: from an event `weights`, or from `weights` in fleet.json. Empty if it was nothing.

    >>> of_version({"version": 7, "readers": 64, "trainer_bytes": 32e9, "peer_bytes": 992e9, "across_bytes": 16e9,
    ...             "usd": 0.32, "half_s": 17.2, "all_s": None})
    'version 7: 32.0 GB from the trainer, 992.0 GB from workers, 16.0 GB across regions ($0.32); half after 17.2 s'
    """
    times = [
        f"{who} after {found[key]:,.1f} s" for who, key in (("half", "half_s"), ("all", "all_s")) if found.get(key)
    ]
    moved = moved_bytes(found)
    return moved and f"version {found['version']}: {moved}{'; ' if times else ''}{', '.join(times)}"


def moved_bytes(found: Mapping[str, Any]) -> str:
    """Bytes of weights by source, and what they cost.

    >>> moved_bytes({"bucket_bytes": 3e6, "upload_bytes": 1e6, "usd": 0.0})
    '3.0 MB from the bucket, 1.0 MB to the bucket'
    """
    sizes = {name: found.get(f"{kind}_bytes") or 0 for kind, name in MOVED.items()}
    parts = [f"{n / 1e9:,.1f} GB {name}" if n >= 1e9 else f"{n / 1e6:,.1f} MB {name}" for name, n in sizes.items() if n]
    return ", ".join(parts) + (f" (${found['usd']:,.2f})" if found.get("usd") else "")
