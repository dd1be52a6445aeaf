"""A server of the Tinker API: your own training loop on windfall's fleet (docs/tinker.md)."""
