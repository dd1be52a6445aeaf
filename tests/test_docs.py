"""Docs describe what is: the recipe page is the recipe's definition, and what the README names exists."""

from __future__ import annotations

import importlib.util
import re
from importlib.metadata import version
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


def test_the_table_of_models_is_the_one_that_its_command_prints() -> None:
    """Every family has its row, none is accepted and wrong, and what the text says of it is counted in it."""
    from windfall.selftest.families import families

    text = (ROOT / "docs" / "models.md").read_text()
    table = text[text.index("<!-- families: begin -->") : text.index("<!-- families: end -->")]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[3:]]
    rows = {name: (engine, trainer, verified) for name, engine, trainer, _, verified in lines}
    printed = re.search(r"transformers ([\d.]+)[^|]*?: (\d+) families, of which (\d+) can", text.replace("\n", " "))
    assert printed
    if printed[1] == version("transformers"):
        assert list(rows) == [name for name, *_ in families()]
    refused = {name: [cell.startswith("refused") for cell in cells[:2]] for name, cells in rows.items()}
    assert {rows[name][2] for name in rows if not all(refused[name])} == {"exact"}
    assert (len(rows), sum(not any(r) for r in refused.values())) == (int(printed[2]), int(printed[3]))


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
