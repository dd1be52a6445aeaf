"""Supervised fine-tuning: `windfall sft` (docs/sft.md)."""
