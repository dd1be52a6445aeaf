"""Fixtures for tests with real processes."""

from tests.support.process_fixtures import alive, gone, read_when, toy_env, toy_import_server

__all__ = ["alive", "gone", "read_when", "toy_env", "toy_import_server"]
