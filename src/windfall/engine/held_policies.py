"""Which policies of one base an engine holds, for engines with adapters. Pure: no tensors are touched.

Each policy has a number, from its first swap on. One without an adapter has a number, too: it may get an adapter later.
If all numbers are taken, a swap that copies a base gives them away, unless responses are running: the worker
is for another base now.
"""

from __future__ import annotations

from windfall.errors import WindfallError
from windfall.weights.merged import MergedWeights


class HeldPolicies:
    def __init__(self, count: int, rank: int) -> None:
        """`count` policies, whose adapters have at most this rank."""
        self.count = count
        self.numbers: dict[str, int] = {}
        self._rank = rank

    def with_policy(self, policy: str, version: int, weights: MergedWeights | None, *, busy: bool) -> dict[str, int]:
        """The numbers if this policy is swapped in, after a check that there is room for it and its adapter. Changes
        nothing. `busy`: responses are running."""
        where, held = f"version {version} of policy {policy!r}", self.numbers
        if policy not in held and len(held) >= self.count:
            if weights is None or weights.base_is_loaded or busy:
                names = ", ".join(map(repr, held))
                raise WindfallError(f"the engine was built for {self.count} policies, and holds {names}", where=where)
            held = {}
        if weights is not None and weights.rank > self._rank:
            what = f"the adapter has rank {weights.rank}, and the engine was built for at most {self._rank}"
            raise WindfallError(what, where=where)
        return {policy: len(held), **held}
