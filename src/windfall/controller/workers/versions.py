"""Which versions of a policy may generate tokens at the moment. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """The version that work is assigned with."""

    version: int
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionWindow:
    """The versions of the weights that may generate tokens at the moment: with the staleness bound eta, the newest one
    and those of the eta versions before it whose digests are known. A digest belongs to a version for good, except
    after the trainer has fallen back to an older checkpoint: the versions that it trains again have new digests.

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


@dataclass(slots=True)
class PolicyVersions:
    """A policy, as the fleet knows it. Each policy has its own bound and its own window.

    >>> solver, verifier = PolicyVersions("solver", staleness=1), PolicyVersions("verifier")
    >>> solver.advance(Offer(version=3, digest="c"))
    >>> solver.window.oldest, verifier.window.oldest
    (2, -1)
    """

    name: str = ""
    base: str = ""
    """The base that it is on: a worker has one base, and all policies on it."""
    staleness: int = 0
    offer: Offer | None = None
    """Its newest version, which workers load; None until its trainer has connected."""
    window: VersionWindow = field(default_factory=VersionWindow)

    def advance(self, offer: Offer) -> None:
        """This version was published, or was found to be the trainer's."""
        self.offer = offer
        self.window = self.window.advance(offer.version, offer.digest, staleness=self.staleness)


def policy_fields(policy: str) -> dict[str, str]:
    """Fields of an event about this policy. A policy without a name is not mentioned."""
    return {"policy": policy} if policy else {}
