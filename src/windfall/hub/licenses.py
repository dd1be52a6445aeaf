"""The license of a base model, as far as its own model card is on this machine."""

from __future__ import annotations

from pathlib import Path

import yaml

from windfall.models import load


def license_of(model: str) -> str:
    """The identifier in the card of this model: in its folder, or in the hub's cache. Empty: not known."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    where = load.resolve(model)
    try:
        card = where / "README.md" if isinstance(where, Path) else try_to_load_from_cache(where, "README.md")
        return _license(Path(card).read_text(encoding="utf-8")) if isinstance(card, str | Path) else ""
    except (OSError, UnicodeDecodeError, HFValidationError):
        return ""


def _license(card: str) -> str:
    """
    >>> _license("---\\nlicense: mit\\n---\\n# A model")
    'mit'
    """
    if not card.startswith("---\n"):
        return ""
    try:
        fields = yaml.safe_load(card[4:].partition("\n---")[0])
    except yaml.YAMLError:
        return ""
    found = fields.get("license") if isinstance(fields, dict) else None
    return found if isinstance(found, str) else ""
