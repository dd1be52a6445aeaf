"""Defaults that several commands and sections of the recipe share. All others stand with their key or option."""

KV_SHARE = 0.4
"""Share of the free memory of a device for the KV caches of all workers, or of the server, that use it."""
TTFT_S = 0.5
"""Objective of a server: seconds to the first token."""
TPOT_S = 0.15
"""Objective of a server: seconds per token after the first."""
MAX_SLOWDOWN = 0.15
"""Upper limit for the time per token that lending adds, as a share of the time without lending."""
