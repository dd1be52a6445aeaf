"""A kind of machine in a simulated trace: [[sim.kinds]]."""

from __future__ import annotations

from pydantic import Field

from windfall.config.base import Count, Section


class SimKind(Section):
    """One kind of machine of a simulated trace, where there are several."""

    name: str = Field(min_length=1)
    """Its device, as leases, bills and advice have it."""
    share: Count = 1
    """How many of it, beside the shares of the others: machines are given kinds in turn."""
    worker: dict[str, float]
    """Its formula, as sim.worker."""
    slots: Count = 256
    """Responses that it runs at once."""
    kv_tokens: int = Field(default=0, ge=0)
    """Tokens that it has room for; 0: for all it is given."""
    price_usd_per_h: float = Field(default=0.0, ge=0)
    """0: that of the trace."""
