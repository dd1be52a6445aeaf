"""Which policies an engine holds, with their versions. Pure: no tensors are touched.

The number of an adapter is the place of its policy among them. A policy without an adapter has a number, too: it may
get an adapter later. If there is no room for another policy, a swap that copies a base takes the place of all, unless
responses are running: the worker is for another base now. An engine without adapters holds one policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from windfall.errors import WindfallError
from windfall.weights.merged import MergedWeights


class AdapterRoom(NamedTuple):
    """What an engine was built for."""

    policies: int = 0
    """0: it has no adapters."""
    rank: int = 0
    """Upper limit for the rank of an adapter."""

    def swapped(
        self, held: Mapping[str, int], policy: str, version: int, weights: Mapping[str, Any] | None, *, busy: bool
    ) -> dict[str, int]:
        """The policies after a swap, with their versions. Raises WindfallError if there is no room for this one.
        `busy`: responses are running."""
        where, given = (
            f"version {version} of policy {policy!r}",
            weights if isinstance(weights, MergedWeights) else None,
        )
        if policy not in held and len(held) >= max(1, self.policies):
            if busy or (self.policies and (weights is None or (given is not None and given.base_is_loaded))):
                names = ", ".join(map(repr, held))
                raise WindfallError(f"the engine has no room for another policy, and holds {names}", where=where)
            held = {}
        if self.policies and given is not None and given.rank > self.rank:
            what = f"the adapter has rank {given.rank}, and the engine was built for at most {self.rank}"
            raise WindfallError(what, where=where)
        return {**held, policy: version}
