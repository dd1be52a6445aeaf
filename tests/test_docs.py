"""Docs describe what is: generated pages are up to date, and what pages name, link and command exists."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import recipe_plans
import typer.main
import yaml

from windfall.recipe.file import parse_recipe
from windfall.run import worker_sources
from windfall.run.cli import app

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "recipes").rglob("*.md")])
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))


@pytest.mark.parametrize("name", ["recipe", "command"])
def test_a_generated_page_is_up_to_date(name: str) -> None:
    spec = importlib.util.spec_from_file_location(f"{name}_reference", ROOT / "scripts" / f"{name}_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / f"{name}s.md").read_text() == module.page(), (
        f"python scripts/{name}_reference.py > docs/{name}s.md"
    )


@pytest.mark.slow
@pytest.mark.parametrize("folder", recipe_plans.FOLDERS, ids=lambda folder: folder.name)
def test_pages_of_recipes_have_what_is_planned_and_simulated(folder: Path) -> None:
    made = recipe_plans.table([folder])
    assert recipe_plans.between((folder / "README.md").read_text()) == made, "python scripts/recipe_plans.py"


@pytest.mark.parametrize("folder", recipe_plans.FOLDERS, ids=lambda folder: folder.name)
def test_the_page_of_recipes_has_the_rows_of_every_folder(folder: Path) -> None:
    rows = recipe_plans.between((folder / "README.md").read_text()).split("\n", 2)[2]
    assert len(rows.splitlines()) == len(recipe_plans.recipes(folder))
    assert rows in recipe_plans.between(recipe_plans.PAGE.read_text()), "python scripts/recipe_plans.py"


def test_a_recipe_is_planned_and_simulated_on_one_gpu() -> None:
    file = ROOT / "recipes" / "gsm8k" / "qwen3-0.6b.toml"
    plan = recipe_plans.best_plan(file, "1xH100")
    assert plan is not None
    assert plan["simulated"]
    assert plan["tok_per_s"] == pytest.approx(plan["predicted_tok_per_s"], rel=0.15)
    rows = recipe_plans.between(recipe_plans.PAGE.read_text()).splitlines()
    cells = next(row for row in rows if "gsm8k/qwen3-0.6b.toml" in row).split(" | ")
    assert cells[4] == recipe_plans.times_and_price(plan), "python scripts/recipe_plans.py"


def test_the_site_lists_every_page_once() -> None:
    def pages(entry: Any) -> Iterator[str]:
        for item in entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ():
            yield from [item] if isinstance(item, str) else pages(item)

    config = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]
    docs = ROOT / config["docs_dir"]
    assert sorted(pages(config["nav"])) == sorted(p.relative_to(docs).as_posix() for p in docs.rglob("*.md"))


def test_the_table_of_models_is_the_one_that_its_command_prints() -> None:
    """Every family has its row, none is accepted and wrong, and what the text says of it is counted in it."""
    from model_families import families

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


def test_links_and_named_files_exist() -> None:
    missing = list[str]()
    for page in (*PAGES, ROOT / "llms.txt"):
        text = page.read_text()
        links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
        named = re.findall(r"`((?:src|tests|docs|recipes|benchmarks|scripts|constraints)/[\w./-]+)`", text)
        missing += [f"{page.name}: {x}" for x in links if not (page.parent / x).exists()]
        missing += [f"{page.name}: {x}" for x in named if not (ROOT / x).exists()]
    assert not missing


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_anchors_of_links_exist() -> None:
    missing = list[str]()
    for page in PAGES:
        for file, anchor in re.findall(r"\]\(([\w./-]*)#([^)]+)\)", page.read_text()):
            if anchor not in anchors(page.parent / file if file else page):
                missing.append(f"{page.name}: {file}#{anchor}")
    assert not missing


def test_links_of_the_docs_stay_on_the_site() -> None:
    """The site has the pages and pictures of docs/; a file of the source is named in code, without a link."""
    docs = ROOT / "docs"
    for page in docs.rglob("*.md"):
        for link in re.findall(r"\]\(([^)#]+)", page.read_text()):
            assert "://" in link or (page.parent / link).resolve().is_relative_to(docs), f"{page.name}: {link}"


def test_nested_lists_look_alike_on_github_and_on_the_site() -> None:
    """The site's Markdown nests a list by four spaces, and starts one only after an empty line."""
    for page in (ROOT / "docs").rglob("*.md"):
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        assert not re.findall(r"^ {1,3}(?:[-*]|\d+\.) .*", text, re.MULTILINE), f"{page.name}: indent by four spaces"
        for block in re.split(r"\n\s*\n", text):
            assert re.match(r"[-*#< ]|\d+\. ", block) or "\n- " not in block, (
                f"{page.name}: no empty line: {block[:80]}"
            )


def test_every_name_in_the_architecture_page_exists() -> None:
    """`file:name` stands for a function, a class or a constant at the top level of the file."""
    missing = list[str]()
    for file, name in re.findall(r"`(src/[\w./]+\.py):(\w+)`", (ROOT / "docs" / "architecture.md").read_text()):
        text = (ROOT / file).read_text() if (ROOT / file).is_file() else ""
        if not re.search(rf"^(class |def |async def )?{name}\b", text, re.MULTILINE):
            missing.append(f"{file}:{name}")
    assert not missing


def test_number_of_files_that_a_token_passes() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = text.split("### The files that a token passes")[1].split("\n## ")[0]
    (count,) = re.findall(r"the id passes (\d+) files", section)
    assert int(count) == len(set(re.findall(r"`(src/[\w./]+\.py):\w+`", section)))


def test_every_package_has_its_line_in_the_architecture_page() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    top = [p.parent.name for p in (ROOT / "src" / "windfall").glob("*/__init__.py")]
    assert not [name for name in top if f"`{name}/" not in text]


def test_every_make_target_exists() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        assert set(re.findall(r"(?:`|^ *)make ([a-z0-9-]+)", page.read_text(), re.MULTILINE)) <= targets, page


def test_the_workflow_runs_what_ci_runs() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    called = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert ".ci/run" in called
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {name for run in called if run.startswith("make ") for name in run.split()[1:]} <= targets


@pytest.mark.parametrize("form", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda p: p.stem)
def test_forms_for_issues_are_valid(form: Path) -> None:
    fields = yaml.safe_load(form.read_text())
    assert form.stem == "config" or all(part["id"] and part["attributes"]["label"] for part in fields["body"])


def commands(text: str) -> Iterator[list[str]]:
    """Every `windfall ...` command line of a page: lines of code blocks, and code within a sentence."""
    fenced, prose = False, list[str]()
    for line in text.splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith("    "):
            prose.append(line)
        elif found := re.match(r"\s*(?:\w+=\S+ )*(windfall \S.*)", line):
            yield shlex.split(re.split(r"\s{3,}", found[1])[0], comments=True)
    for code in re.findall(r"`((?:\w+=\S+ )?windfall [^`]*)`", " ".join(prose)):
        yield shlex.split(code[code.index("windfall ") :])


@functools.cache
def command_line() -> Any:
    return typer.main.get_command(app)  # takes 40 ms


def test_commands_of_the_docs_are_understood() -> None:
    """Every command line is parsed as the program parses it. Prose may leave out what a command needs."""
    wrong = list[str]()
    for page, words in ((p.name, words) for p in PAGES for words in commands(p.read_text())):
        command, rest = command_line(), list(itertools.takewhile(lambda word: word not in "|&&>", words[1:]))
        while rest and rest[0] in getattr(command, "commands", {}):
            command, rest = command.commands[rest[0]], rest[1:]
        leave_out = ("[OPTIONS]", "MODEL]", "...", "--help", "--install-completion")
        rest = ["1" if word == "N" else word.strip("[]") for word in rest if word not in leave_out]
        if getattr(command, "commands", {}) and (not rest or rest[0].isupper()):
            continue  # a group of commands
        try:
            command.make_context(command.name, rest)
        except Exception as e:  # typer's own copy of click, which it does not export
            if type(e).__name__ not in ("MissingParameter", "BadOptionUsage"):
                wrong.append(f"{page}: {' '.join(words)}: {e}")
    assert not wrong


def test_programs_of_the_docs_exist() -> None:
    """`python FILE ...` in the text and in blocks; how long it takes and what it needs is said beside it."""
    named = [(page, file) for page in PAGES for file in re.findall(r"\bpython ([\w/]+/[\w/]+\.py)\b", page.read_text())]
    assert not [f"{page.name}: {file}" for page, file in named if not (ROOT / file).is_file()]


def test_every_extra_is_installed_from_a_clone_and_exists() -> None:
    """No package index has windfall, so `pip install 'windfall[gguf]'` would fail, or install something else."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    files = [*PAGES, *(ROOT / "recipes").rglob("*.toml"), *(ROOT / "src").rglob("*.py")]
    for path in (p for p in files if p.name != "CHANGELOG.md"):
        text = path.read_text()
        if path.name != "errors.py":  # beside an installed wheel, pip needs no index for it (tests/test_wheel.py)
            assert not re.search(r"pip install [^`\n]*\bwindfall(\[|==)", text), path
        assert not re.search(r"\bwindfall\[[a-z]", text), f"{path}: name the extra without 'windfall'"
        named = re.findall(
            r"pip install [^`\n]*\.\[([a-z-]+)\]|install_command\(['\"]([a-z-]+)|the extra `([a-z-]+)`", text
        )
        extras = {next(filter(None, found)) for found in named}
        assert extras <= project["optional-dependencies"].keys(), path


@pytest.mark.parametrize("page", GUIDES, ids=lambda p: p.name)
def test_recipes_of_the_guides_are_valid(page: Path) -> None:
    for block in re.findall(r"```toml\n(.*?)```", page.read_text(), re.DOTALL):
        data = tomllib.loads(block)
        recipe = parse_recipe(data, where=page.name)
        if "fleet" in data and recipe.fleet.tls_cert is None:  # a certificate would be read
            assert worker_sources.preview(recipe)


def test_own_task_of_the_start_page_runs(
    here: Path, windfall: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files exactly as the page prints them, checked by --dry-run; a task is created and graded."""
    page = (ROOT / "docs" / "start.md").read_text()
    for name, kind in (("my_task.py", "python"), ("my_task.toml", "toml")):
        block = re.search(rf"`{re.escape(name)}`:\n\n```{kind}\n(.*?)```", page, re.DOTALL)
        assert block, name
        (here / name).write_text(block[1])
    monkeypatch.syspath_prepend(here)
    code, out, err = windfall("train", "my_task.toml", "--dry-run")
    assert (code, "Sums: built task 'sums/0'" in out + err) == (0, True), err
