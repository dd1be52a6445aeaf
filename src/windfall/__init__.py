"""windfall: reinforcement learning of language models on whatever GPUs are cheap right now."""

__version__ = "0.4.0"
