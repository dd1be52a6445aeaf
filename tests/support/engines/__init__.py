"""Engines for tests: small models, what an engine must return, and engines whose tokens a test decides."""
