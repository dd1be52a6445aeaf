"""Docs describe what is: the recipe page is the recipe's definition, and what the README names exists."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def test_the_recipe_page_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("recipe_reference", ROOT / "scripts" / "recipe_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / "recipes.md").read_text() == module.page(), (
        "python scripts/recipe_reference.py > docs/recipes.md"
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_and_named_files_exist(page: Path) -> None:
    text = page.read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    named = re.findall(r"`((?:src|tests|docs|recipes|benchmarks|scripts|constraints)/[\w./-]+)`", text)
    missing = [x for x in links if not (page.parent / x).exists()] + [x for x in named if not (ROOT / x).exists()]
    assert not missing


def test_every_make_target_in_the_readme_exists() -> None:
    targets = set(re.findall(r"^([a-z0-9]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z0-9]+)", (ROOT / "README.md").read_text())) <= targets
