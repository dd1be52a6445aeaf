"""The versions of the weights that may generate tokens at the moment. Pure.

With the staleness bound eta, these are the newest version and those of the eta versions before it whose digests are
known. A digest belongs to a version for good, except after the trainer has fallen back to an older checkpoint: the
versions that it trains again have new digests, and the old ones are forgotten. Which responses are too old to be
trained on is decided in admission.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionWindow:
    """
    >>> window = VersionWindow().advance(3, "c", staleness=1).advance(4, "d", staleness=1)
    >>> window.allows(3, "c"), window.allows(3, "x"), window.advance(5, "e", staleness=1).allows(3, "c")
    (True, False, False)
    """

    digests: Mapping[int, str] = field(default_factory=dict)
    """Digests of the versions in the window."""
    oldest: int = -1
    """The oldest version that the bound allows, whether or not its digest is known."""
    newest: int = -1

    def advance(self, version: int, digest: str, *, staleness: int) -> VersionWindow:
        """The window after this version was published, or was found to be the trainer's."""
        oldest = version - staleness
        kept = {v: d for v, d in self.digests.items() if oldest <= v < version}
        return VersionWindow(digests={**kept, version: digest}, oldest=oldest, newest=version)

    def allows(self, version: int, digest: str) -> bool:
        return self.digests.get(version) == digest

    def is_newest(self, version: int, digest: str) -> bool:
        return version == self.newest and self.allows(version, digest)
