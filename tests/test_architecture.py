"""The rules of the source that no single module can keep: read from the files themselves."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from windfall import parts
from windfall.recipe.file import load_recipe

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src" / "windfall"


class Files(Mapping[str, list[ast.AST]]):
    """The files of windfall by their names, each with all nodes of its syntax tree. A file is parsed when a test first
    reads it: every test process imports this module, but only one runs its tests."""

    def __init__(self) -> None:
        self._nodes: dict[str, list[ast.AST] | None] = {
            str(p.relative_to(SRC)): None for p in sorted(SRC.rglob("*.py"))
        }

    def __getitem__(self, name: str) -> list[ast.AST]:
        nodes = self._nodes[name]
        if nodes is None:
            nodes = self._nodes[name] = list(ast.walk(ast.parse((SRC / name).read_text())))
        return nodes

    def __contains__(self, name: object) -> bool:
        return name in self._nodes

    def __iter__(self) -> Iterator[str]:
        return iter(self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)


FILES = Files()

# A part of windfall may import itself and the layers above its own line in this table; never its own line or below.
LAYERS = [
    {
        "__init__",
        "types",
        "errors",
        "backoff",
        "chosen_experts",
        "defaults",
        "free_memory",
        "html_page",
        "parts",
        "step_time",
    },
    {"algorithms", "events", "processes", "devices", "turns"},
    {"training"},
    {"verbs"},
    {"recipe"},
    {"run_folder", "link"},
    {"weights"},
    {"models"},
    {"engine", "envs"},
    {"controller", "trainer", "worker", "providers"},
    {"run"},
    {"__main__", "page", "serve", "sft", "jobs", "tinker", "hub", "on_ray"},
    {"sim"},
    {"plan"},
    {"client"},
]
BESIDE = tuple(name.replace(".", "/") + "/" for name in parts.OWN)
"""Folders of parts: the program works without each of them. A part may import only the parts that it says it needs."""
CLIENTS = {"client.py": "tinker/"}
"""Files for programs of users, which the program does not import, and the part that each needs."""
# State in, actions out: no clock, no I/O, no asyncio, no torch. This is all that such a file may import.
PURE_FOLDERS = ("algorithms", "controller/directory", "controller/scheduling", "controller/tasks", "controller/workers")
PURE = [f for f in FILES if f.rpartition("/")[0] in PURE_FOLDERS] + [
    "backoff.py",
    "chosen_experts.py",
    "defaults.py",
    "engine/base.py",
    "engine/blocks.py",
    "engine/pages.py",
    "engine/saved_kv.py",
    "events/steady_time.py",
    "engine/cuda/splits.py",
    "engine/cuda/host_state.py",
    "engine/cuda/texts.py",
    "engine/draft_length.py",
    "engine/drafts.py",
    "engine/scheduler.py",
    "models/tool_calls.py",
    "controller/ledger/episode.py",
    "controller/ledger/ledger.py",
    "controller/rollout/stop_strings.py",
    "serve/capacity.py",
    "serve/memory_policy.py",
    "serve/slo.py",
    "sim/core/draws.py",
    "step_time.py",
    "training.py",
    "sim/machines/acceptance.py",
    "sim/machines/prefix_cache.py",
    "sim/machines/decode.py",
    "sim/core/token_schedule.py",
    "controller/rollout/assignment.py",
    "run/autoscale.py",
    "run/liveness.py",
    "run/gpu_assignment.py",
    "run/views/long_responses.py",
    "run/views/moved_weights.py",
    "run/views/policy_costs.py",
    "run/views/trainer_memory.py",
    "controller/cost/prices.py",
    "controller/cost/bill.py",
    "controller/cost/accounts.py",
    "controller/cost/activity.py",
    "jobs/views/device_history.py",
    "page/history.py",
    "page/policy_series.py",
    "page/timeline.py",
    "link/env_messages.py",
    "link/message_base.py",
    "link/messages.py",
    "weights/manifest.py",
    "weights/delta.py",
    "weights/publishing/plan.py",
    "weights/ranges.py",
    "trainer/model/activation_memory.py",
    "trainer/ranks/context_check.py",
    "trainer/ranks/rank_budget.py",
    "trainer/ranks/state_layout.py",
    "turns/accounts.py",
    "turns/co_running.py",
    "turns/residence.py",
    "turns/sharing.py",
    "plan/__init__.py",
    "plan/model/__init__.py",
    "plan/search/__init__.py",
    "plan/run/__init__.py",
    "plan/model/devices.py",
    "plan/model/cluster.py",
    "plan/model/workload.py",
    "plan/model/cost_model.py",
    "plan/search/partition.py",
    "plan/search/frontier.py",
    "plan/search/plan.py",
    "plan/search/planner.py",
]
PURE_MAY_IMPORT = {
    "__future__", "abc", "array", "ast", "base64", "bisect", "collections", "contextlib", "dataclasses", "datetime",
    "enum", "functools", "heapq", "itertools", "json", "math", "msgspec", "numpy", "re", "signal", "statistics",
    "typing", "blake3", "pydantic", "xxhash", "zlib",
}  # fmt: skip
LIGHT = [
    "run.cli",
    "recipe",
    "controller.loop",
    "controller.process",
    "run.supervisor",
    "run.commands.offline",
    "run.views.top",
    "sim.report.compare",
    "sim.calibrate.event_log",
    "plan.command",
]
HEAVY = {"torch", "transformers", "ray", "vllm", "reasoning_gym", "tensorboard"}
LIGHTEST = ["run.cli", "envs.process_pool.child_main"]
"""What starts most often: every command, and every process of an environment."""
NOT_LIGHTEST = HEAVY | {"numpy", "pydantic", "aiohttp"}


def part(file: str) -> str:
    """envs/gym.py belongs to envs, cli.py to cli."""
    return file.partition("/")[0].removesuffix(".py")


def imports(file: str) -> Iterator[str]:
    """Every module a file imports, at its top or in a function, as far as files of windfall are concerned."""
    for node in FILES[file]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} line {node.lineno}: import by the full name"
            for alias in node.names:
                yield f"{node.module}.{alias.name}" if _module(f"{node.module}.{alias.name}") else str(node.module)


def _module(name: str) -> str | None:
    """The file of a module of windfall."""
    path = "/".join(name.split(".")[1:])
    return next((f for f in (f"{path}.py", f"{path}/__init__.py".lstrip("/")) if f in FILES), None)


def test_every_part_has_a_layer() -> None:
    assert {part(f) for f in FILES} <= set().union(*LAYERS)


def test_imports_point_one_way() -> None:
    layer, wrong = {name: n for n, names in enumerate(LAYERS) for name in names}, list[str]()
    for file in FILES:
        for name in imports(file):
            if name.partition(".")[0] != "windfall":
                continue
            own, target = part(file), _module(name)
            if not target:
                wrong.append(f"{file} imports {name}, which is not there")
            elif own != part(target) and layer[part(target)] >= layer[own]:
                wrong.append(f"{own} is not above {part(target)}, and {file} imports {name}")
    assert not wrong


def test_nothing_in_the_program_imports_a_part() -> None:
    folder = {name: f"{name.replace('.', '/')}/" for name in parts.OWN}
    needs = {folder[part.name]: {folder[name] for name in part.needs} for part in parts.found() if part.name in folder}
    wrong = list[str]()
    for file in FILES:
        own = next((beside for beside in BESIDE if file.startswith(beside)), CLIENTS.get(file, ""))
        for name in imports(file):
            target = _module(name) or ""
            beside = next((beside for beside in BESIDE if target.startswith(beside)), "")
            if beside and beside != own and beside not in needs.get(own, ()):
                wrong.append(f"{file} imports {name}")
    assert not wrong


def test_imported_names_exist() -> None:
    for file, nodes in FILES.items():
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "windfall":
                source = (SRC / str(_module(str(node.module)))).read_text()
                for alias in node.names:
                    there = _module(f"{node.module}.{alias.name}") or alias.name in source
                    assert there, f"{file} line {node.lineno}: no {alias.name} in {node.module}"


def test_policies_are_pure() -> None:
    wrong = list[str]()
    for file in PURE:
        for name in imports(file):
            pure = name in ("windfall.types", "windfall.errors") or _module(name) in PURE
            if not pure and name.partition(".")[0] not in PURE_MAY_IMPORT:
                wrong.append(f"{file} imports {name}")
        called = {n.func.id for n in FILES[file] if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
        wrong += [f"{file} calls {name}" for name in called & {"open", "print", "input", "__import__"}]
    assert not wrong


@pytest.mark.parametrize(("light", "heavy"), [(LIGHT, HEAVY), (LIGHTEST, NOT_LIGHTEST)], ids=["light", "lightest"])
def test_light_core_is_light(light: list[str], heavy: set[str]) -> None:
    code = f"import json, sys, {', '.join(f'windfall.{m}' for m in light)}; print(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(json.loads(done.stdout))
    assert f"windfall.{light[-1]}" in loaded
    assert not loaded & heavy


def test_help_imports_no_server() -> None:
    """Every command and process of windfall begins with these imports."""
    code = "import json, sys, windfall.run.cli; print(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(json.loads(done.stdout)) & {*HEAVY, "aiohttp", "numpy", "windfall.recipe.sections"}


def test_modules_are_named_by_what_they_hold() -> None:
    words = {word.removesuffix(".py") for f in FILES for word in f.split("/")}
    assert not words & {"utils", "util", "common", "helpers", "helper", "misc", "v2"}


def _broad(node: ast.AST) -> bool:
    """Catches everything: `except:`, `except Exception`, `suppress(Exception)`, alone or among others."""
    if isinstance(node, ast.ExceptHandler):
        return node.type is None or any(_names_all(n) for n in ast.walk(node.type))
    return (
        isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress") and any(map(_names_all, node.args))
    )


def _names_all(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("Exception", "BaseException")


def test_whoever_catches_everything_says_why() -> None:
    for file, nodes in FILES.items():
        text = (SRC / file).read_text().splitlines()
        for node in nodes:
            if _broad(node):
                why = text[node.lineno - 1].partition("#")[2].strip()  # pyright: ignore
                assert len(why.split()) >= 3, f"{file} line {node.lineno}: say on this line why"  # pyright: ignore


def test_nothing_is_unpickled() -> None:
    for file, nodes in FILES.items():
        roots = {name.partition(".")[0] for name in imports(file)}
        assert not roots & {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}, file
        calls = {ast.unparse(n) for n in nodes if isinstance(n, ast.Attribute)}
        assert not calls & {"torch.load", "numpy.load", "np.load"}, file


def test_every_recipe_parses() -> None:
    recipes = sorted((ROOT / "recipes").rglob("*.toml"))
    assert "demo" in [p.stem for p in recipes]
    for path in recipes:
        load_recipe(path)
