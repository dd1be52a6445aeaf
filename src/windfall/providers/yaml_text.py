"""YAML as people read it."""

from __future__ import annotations

from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):
    """Writes text with several lines as a block."""


def _block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _block)


def to_yaml(value: dict[str, Any]) -> str:
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=10_000)
