"""Servers that tests start, and stand-ins of systems elsewhere."""
