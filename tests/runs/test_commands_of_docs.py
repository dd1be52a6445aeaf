"""Commands of the docs are run as the pages print them, where they need no GPU, cloud, hub or other machine, and only
minutes. tests/test_docs.py parses all of them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SHORT = ("--set", "run.steps=2", "--set", "rollout.groups=4", "--set", "rollout.group_size=4", "--set", "eval.tasks=4")


def block(page: str, containing: str) -> list[list[str]]:
    """The commands of the one code block of a page that has this text in it."""
    (found,) = [b for b in re.findall(r"```\w*\n(.*?)```", (DOCS / page).read_text(), re.DOTALL) if containing in b]
    return [shlex.split(line, comments=True) for line in found.splitlines() if line.startswith("windfall ")]


def call(folder: Path, words: list[str]) -> str:
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "windfall.run.cli", *words[1:]]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{shlex.join(words)}:\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_start_page(tmp_path: Path) -> None:
    page = (DOCS / "start.md").read_text()
    for name, kind in (("my_task.py", "python"), ("my_task.toml", "toml")):
        written = re.search(rf"`{re.escape(name)}`:\n\n```{kind}\n(.*?)```", page, re.DOTALL)
        assert written
        (tmp_path / name).write_text(written[1])
    demo, doctor, examples = block("start.md", "windfall demo")
    call(tmp_path, examples)
    call(tmp_path, [*demo, *SHORT])
    call(tmp_path, doctor)
    for words in block("start.md", "--dry-run"):
        call(tmp_path, words)
    assert (tmp_path / "runs" / "my-task" / "page.html").is_file()
    call(tmp_path, block("start.md", "windfall token")[0])
    for words in block("start.md", "windfall plan"):
        assert "placement" in call(tmp_path, words)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_pages_about_a_run(tmp_path: Path) -> None:
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    for words in block("sft.md", "windfall sft"):
        call(tmp_path, [*words, *(SHORT if words[1] == "train" else ())])  # the second one makes runs/demo
    for words in block("adapters.md", "windfall export"):
        call(tmp_path, words)
    call(tmp_path, block("page.md", "windfall page runs/demo")[0])
    push, export, _ = block("share.md", "windfall push")
    call(tmp_path, [*export[:3], "models/again"])
    call(tmp_path, [*push, "--dry-run"])
