"""Every command in a code block of the docs is run here as the page prints it, or says in a comment what it needs.

A comment such as `# needs a GPU`, `# needs a Slurm cluster` or `# takes 20 minutes` marks its line; on a line of its
own, it marks the paragraph that it begins. What has no mark is in `BLOCKS`, which run on the CPU and on addresses of
this machine, with less work where `more` says so. Two kinds of commands are checked without being run: a program of
benchmarks/ reads its arguments, and make prints the steps of a target. tests/test_docs.py parses all commands of
windfall, also those within sentences.
"""

from __future__ import annotations

import argparse
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

import pytest

from tests.support.servers.certificates import self_signed
from tests.support.servers.ports import free_port

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted({*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"} - {DOCS / "commands.md"})
"""Without the page that is made from the help of the program: it has the forms of commands, and examples (below)."""
MARK = re.compile(r"# .*\b(needs|takes) (?!no)\w")
FIRST = re.compile(r"(?:\w+=\S+ )*(windfall|make|python|srun|torchrun|ray|vllm|guidellm|kubectl|openssl|uv|uvx)\b")
RUN_ELSEWHERE = {
    "windfall plan recipe.toml --cluster cluster.toml --measured": "tests/plan/test_planned_runs.py",
    "windfall plan --check": "tests/plan/test_planned_runs.py",
    "uv tool install dist/windfall": "tests/test_wheel.py",
    "python scripts/families.py --verify": "tests/engine/selftest/test_selftest.py",
}
SHORT = "--set run.steps=2 --set rollout.groups=4 --set rollout.group_size=4 --set eval.tasks=4"
SMALL = """
[run]
steps = 2
device = "cpu"
threads = 1
[rollout]
groups = 2
group_size = 2
max_tokens = 24
[eval]
tasks = 4
"""
SERVICE = 'host = "127.0.0.1"\nport = 8765\ndevices = "cpu"\n'
HERE = {"0.0.0.0": "127.0.0.1", "TRAINER": "127.0.0.1", "10.0.0.5": "127.0.0.1", "203.0.113.5": "127.0.0.1"}
PORTS = "8000", "8700", "8701", "8765", "8766", "8900", "9000"
READY = {
    "windfall serve": "serving ", "windfall tinker": "serving ", "windfall up": "listening on ",
    "windfall worker": "joined as", "windfall join": "logs of the workers", "windfall env-server": "is served at ",
}  # fmt: skip
"""Commands that go on until Ctrl-C, with what they print when they are ready."""


Prepare = Callable[[Path], object]


@dataclass(frozen=True, kw_only=True)
class Line:
    page: str
    number: int
    text: str
    command: bool
    marked: bool

    def __str__(self) -> str:
        return f"{self.page}:{self.number}: {self.text}"


def paragraphs(page: Path) -> Iterator[list[Line]]:
    """The paragraphs of a page's code blocks, fenced without a language or as sh, bash, or indented by four spaces.

    >>> import tempfile
    >>> page = Path(tempfile.mkdtemp(), "a.md")
    >>> _ = page.write_text("    # needs a GPU\\n    windfall train a.toml \\\\\\n        --on fleet   # now\\n")
    >>> for line in next(paragraphs(page)):
    ...     print(line.text, line.command, line.marked)
    # needs a GPU False True
    windfall train a.toml --on fleet True True
    """
    name = page.relative_to(ROOT).as_posix() if page.is_relative_to(ROOT) else page.name
    fence: str | None = None
    found: list[Line] = []
    joined = ""
    whole = False
    for number, line in enumerate([*page.read_text().splitlines(), ""], 1):
        if line.startswith("```"):
            fence = line[3:].strip() if fence is None else None
            code = None
        elif fence is None:
            code = line.strip() if line.startswith("    ") else None
        else:
            code = line.strip() if fence in ("", "sh", "bash") else None
        if not code:
            if found:
                yield found
            found, joined, whole = [], "", False
            continue
        if code.endswith("\\"):
            joined += code.removesuffix("\\").strip() + " "
            continue
        code, joined = joined + code, ""
        marked = MARK.search(code) is not None
        whole = whole or (marked and not found and code.startswith("#"))
        text = code if code.startswith("#") else re.split(r"\s+# ", code)[0]
        command = FIRST.match(text) is not None
        found.append(Line(page=name, number=number, text=text, command=command, marked=marked or whole))


def to_run(lines: list[Line]) -> list[Line]:
    elsewhere = tuple(RUN_ELSEWHERE)
    return [line for line in lines if line.command and not line.marked and not line.text.startswith(elsewhere)]


def commands() -> list[Line]:
    """Those of all pages that have no mark and are run by no other test."""
    return [line for page in PAGES for found in paragraphs(page) for line in to_run(found)]


@dataclass(frozen=True)
class Block:
    """Commands of a page: the paragraphs that have a command that begins with one of `starts`."""

    page: str
    starts: tuple[str, ...]
    _: KW_ONLY
    runs: tuple[str, ...] = ()  # copies of a run that `windfall demo` has made
    before: tuple[str, ...] = ()  # commands of another block that come first
    files: dict[str, str] = field(default_factory=dict[str, str])
    prepare: Prepare = lambda _: None
    more: dict[str, str] = field(default_factory=dict[str, str])  # added to commands that begin with the key
    instead: dict[str, str] = field(default_factory=dict[str, str])
    behind: tuple[str, ...] = ()  # commands besides those of `READY` that go on while the next ones run
    quick: bool = False

    def lines(self) -> list[Line]:
        every = [to_run(found) for found in paragraphs((DOCS / self.page).resolve())]
        found = list[Line]()
        for start in self.starts:
            having = (lines for lines in every if any(line.text.startswith(start) for line in lines))
            found += next(having, [])
            assert found, f"{self.page} has no {start!r} without a mark"
        return found


def from_page(page: str, file: str = "my_task.toml", kind: str = "toml", containing: str = "") -> Prepare:
    """Write the first block of this kind that contains this text to a file."""

    def write(folder: Path) -> None:
        found = re.findall(rf"```{kind}\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
        (folder / file).write_text(next(block for block in found if containing in block))

    return write


def own_task(folder: Path) -> None:
    from_page("start.md", "my_task.py", "python", "class Sums")(folder)
    from_page("start.md", containing='name = "my-task"')(folder)


def with_certificate(folder: Path) -> None:
    from_page("guides/skypilot.md")(folder)
    self_signed(folder)


def recipes(*names: str, of: str = "recipes/sim-harvest.toml", **changes: str) -> Prepare:
    def write(folder: Path) -> None:
        text = (ROOT / of).read_text()
        for key, value in changes.items():
            text = re.sub(rf"^{key} = .*", f"{key} = {value}", text, flags=re.MULTILINE)
        for name in names:
            (folder / name).write_text(text)

    return write


SMALL_DEMO = {"windfall demo": SHORT, "windfall train recipes/demo.toml": SHORT}
BLOCKS = (
    Block("start.md", ("windfall plan",), more={"windfall plan": "--no-simulate"}, quick=True),
    Block("guides/ray.md", ("windfall fleet",), prepare=from_page("guides/ray.md"), quick=True),
    Block("guides/slurm.md", ("windfall fleet",), prepare=from_page("guides/slurm.md"), quick=True),
    Block("guides/skypilot.md", ("windfall fleet",), prepare=with_certificate, quick=True),
    Block(
        "environments.md", ("windfall env-server",),
        prepare=recipes("recipe.toml", of="recipes/from-trl/recipe.toml"), quick=True,
    ),
    Block("start.md", ("windfall demo",), more=SMALL_DEMO),
    Block("start.md", ("windfall resume",), prepare=own_task),
    Block("../README.md", ("windfall train my_task.toml",), prepare=own_task),
    Block(
        "start.md", ("windfall token", "windfall worker"), prepare=own_task,
        more={"windfall train": "--set run.steps=30"}, behind=("windfall train",),
    ),
    Block(
        "guides/by-hand.md", ("windfall token", "windfall train", "windfall worker"), prepare=own_task,
        more={"windfall train": "--set run.steps=30"}, instead={"--gpus all": ""}, behind=("windfall train",),
    ),
    Block("guides/from-trl.md", ("windfall train",)),
    Block("sft.md", ("windfall sft",), more=SMALL_DEMO),
    Block("adapters.md", ("windfall export",), runs=("demo",), more={"windfall eval": "--tasks 8"}),
    Block("page.md", ("windfall page",), runs=("demo", "other"), prepare=recipes("recipe.toml", steps="4")),
    Block("share.md", ("windfall push",), runs=("demo",), more={"windfall push": "--dry-run"}),
    Block(
        "policies.md", ("python examples/solver_verifier.py", "windfall eval runs/solver-verifier"),
        more={"python": "run.steps=10 rollout.groups=4 eval.tasks=8", "windfall eval": "--tasks 8"},
    ),
    Block(
        "plan.md", ("windfall plan 8B",), files={"recipe.toml": SMALL}, prepare=from_page("plan.md", "cluster.toml"),
        more={"windfall plan": "--no-simulate"},
    ),
    Block(
        "sim.md", ("windfall sim calibrate",), runs=("demo",), prepare=recipes("a.toml", "b.toml", "c.toml", steps="4"),
        more={"windfall sim recipes": "--set run.steps=4"},
    ),
    Block("sim.md", ("windfall sim recipes/sim-harvest.toml recipes",)),
    Block("sim.md", ("python -m tests.chaos",), instead={"--seeds 40": "--seeds 1"}),
    Block(
        "sim.md", ("windfall sim recipes/sim-spot64.toml",),
        more={"windfall sim": "--set run.steps=2 --set rollout.groups=64"},
    ),
    Block("serve.md", ("windfall serve tiny",)),
    Block(
        "serve.md", ("windfall token", "windfall serve tiny --port 8000 --lend"), more=SMALL_DEMO,
        behind=("windfall train",),
    ),
    Block(
        "jobs.md", ("windfall jobs",), files={"fleet.toml": SERVICE, "recipe.toml": SMALL.replace("= 2", "= 500", 1)},
        more={"windfall resume": "--set run.steps=510"},
        instead={"windfall jobs mine --remove": "windfall stop mine && windfall jobs mine --remove"},
    ),
    Block("jobs.md", ("windfall join",), files={"fleet.toml": SERVICE}),
    Block(
        "tinker.md", ("windfall tinker --model tiny",),
        more={"windfall tinker": "--port 8900", "python": "--steps 2 --groups 4"},
    ),
    Block(
        "tinker.md", ("windfall jobs ours",), before=("windfall up fleet.toml",), files={"fleet.toml": SERVICE},
        prepare=from_page("tinker.md", "accounts.toml", containing="[alice]"),
    ),
)  # fmt: skip


class Shell:
    """Runs commands in a folder, with `windfall` and `python` of this environment, on free ports of this machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ends = ExitStack()
        self._instead = {**HERE, **{port: str(free_port()) for port in PORTS}}
        bin_folder = folder / "bin"
        bin_folder.mkdir()
        for name, words in (("windfall", "-m windfall.run.cli"), ("python", "")):
            (bin_folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
            (bin_folder / name).chmod(0o755)
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
        search = f"{bin_folder}{os.pathsep}{os.environ['PATH']}"
        self._env = {**os.environ, "PYTHONPATH": path, "PATH": search, "BROWSER": "true"}

    def local(self, text: str) -> str:
        for old, new in self._instead.items():
            text = re.sub(rf"\b{re.escape(old)}\b", new, text)
        return text

    def run(self, text: str) -> str:
        done = subprocess.run(
            ["bash", "-c", self.local(text)],
            cwd=self._folder,
            env=self._env,
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert done.returncode == 0, f"{text}:\n{done.stdout}{done.stderr}"
        return done.stdout

    @contextmanager
    def behind(self, text: str, ready: str) -> Iterator[None]:
        """Start it, wait until it has printed `ready`, and end it by Ctrl-C."""
        log = self._folder / f"{time.monotonic_ns()}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {self.local(text)}"],
                cwd=self._folder, env=self._env, stdout=out, stderr=out, start_new_session=True,
            )  # fmt: skip
        try:
            until = time.monotonic() + 300
            while not re.search(ready, log.read_text()):
                assert process.poll() is None, f"{text}:\n{log.read_text()}"
                assert time.monotonic() < until, f"{text} does not print {ready!r}:\n{log.read_text()}"
                time.sleep(0.1)
            yield
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
            assert process.wait(timeout=300) in (0, 128 + signal.SIGINT), f"{text}:\n{log.read_text()}"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that commands of several pages take, made once: `windfall demo`, in a short form."""
    folder = tmp_path_factory.mktemp("made")
    Shell(folder).run(f"windfall demo {SHORT}")
    return folder / "runs" / "demo"


def names(block: Block) -> str:
    return f"{block.page}: {block.starts[0]}"


SLOW = pytest.mark.slow, pytest.mark.timeout(1200)


@pytest.mark.parametrize("block", [pytest.param(b, id=names(b), marks=() if b.quick else SLOW) for b in BLOCKS])
def test_commands_of_a_block(block: Block, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    for name in ("recipes", "examples", "tests"):
        if not any(line.text.startswith("windfall examples") for line in block.lines()):
            (tmp_path / name).symlink_to(ROOT / name)
    shell = Shell(tmp_path)
    for name, text in block.files.items():
        (tmp_path / name).write_text(shell.local(text))
    block.prepare(tmp_path)
    for name in block.runs:
        shutil.copytree(request.getfixturevalue("made"), tmp_path / "runs" / name)
    with ExitStack() as running:
        for text in (*block.before, *(line.text for line in block.lines())):
            for old, new in block.instead.items():
                text = text.replace(old, new)
            text += "".join(f" {more}" for start, more in block.more.items() if text.startswith(start))
            until = dict.fromkeys(block.behind, "watch the run") | READY
            ready = [found for start, found in until.items() if text.startswith(start) and " --on fleet" not in text]
            if ready:
                running.enter_context(shell.behind(text, ready[0]))
            else:
                shell.run(text)


def test_every_command_is_run_or_marked() -> None:
    """A new command belongs into `BLOCKS`, or it says what it needs: `# needs a GPU`, `# takes an hour`."""
    run = {(line.page, line.number) for block in BLOCKS for line in block.lines()}
    known = re.compile(r"make [\w-]+$|(\w+=\S+ )*python benchmarks/")
    neither = [line for line in commands() if (line.page, line.number) not in run and not known.match(line.text)]
    assert not neither, "neither run by a test nor marked with what it needs:\n" + "\n".join(map(str, neither))
    assert all((ROOT / test).is_file() for test in RUN_ELSEWHERE.values())


def test_targets_of_make_print_their_steps() -> None:
    for target in sorted({line.text for line in commands() if line.text.startswith("make ")}):
        subprocess.run([*target.split(), "--dry-run"], cwd=ROOT, check=True, capture_output=True, timeout=60)


OTHERS = (
    "tinker", "ray", "up", "jobs", "stop", "join", "worker", "trainer", "env-server", "serve", "fleet", "resume",
)  # fmt: skip
"""Commands whose examples in the help need another process or machine; blocks of other pages have them, too."""


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_examples_of_the_help(made: Path, tmp_path: Path) -> None:
    """The page of commands has one example of each."""
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    (tmp_path / "train.jsonl").symlink_to(ROOT / "recipes" / "from-trl" / "train.jsonl")
    shutil.copytree(made, tmp_path / "runs" / "demo")
    shell = Shell(tmp_path)
    examples = re.findall(r"^(windfall (\S+).*?) +# an example$", (DOCS / "commands.md").read_text(), re.MULTILINE)
    assert {name for _, name in examples} >= set(OTHERS)
    more = {"demo": SHORT, "train": SHORT, "plan": "--no-simulate", "sim": "--set run.steps=4"}
    for text, name in examples:
        if name not in OTHERS:
            shell.run(f"{text} {more.get(name, '')}")
    text = " ".join(line.text for page in PAGES for found in paragraphs(page) for line in found if line.command)
    assert not [name for name in OTHERS if f"windfall {name} " not in text]


class ArgumentsAreRight(Exception):
    pass


def benchmarks() -> list[str]:
    """`python benchmarks/...` in blocks, whether marked or not, and within sentences."""
    found = set[str]()
    for page in PAGES:
        blocks = (line.text for paragraph in paragraphs(page) for line in paragraph)
        prose = re.sub(r"^```.*?^```|^    .*?$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for text in (*blocks, *(" ".join(t.split()) for t in re.findall(r"`([^`]+)`", prose))):
            if call := re.match(r"(?:\w+=\S+ )*python (benchmarks/\S+\.py.*)", text):
                found.add(re.sub(r"[\[\]]|\.\.\.", "", call[1]).strip())
    return sorted(found)


@pytest.mark.parametrize("command", benchmarks())
def test_benchmarks_understand_their_arguments(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_args

    def and_end(*args: object, **named: object) -> None:
        parse(*args, **named)  # pyright: ignore[reportArgumentType, reportCallIssue]
        raise ArgumentsAreRight

    file, *words = shlex.split(command)
    if "parse_args" not in (ROOT / file).read_text():
        assert not [word for word in words if word.startswith("-")], f"{file} takes no options"
        return
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", and_end)
    monkeypatch.setattr(sys, "argv", [str(ROOT / file), *words])
    with pytest.raises(ArgumentsAreRight):
        runpy.run_path(str(ROOT / file), run_name="__main__")
