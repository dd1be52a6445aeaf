"""Minutes and commands from nothing to the first reward: windfall and TRL, on the same machine.

    python benchmarks/beside_trl/first_reward.py                 ten minutes on two cores
    python benchmarks/beside_trl/first_reward.py --ways TRL --out figures.json

Every way starts in an empty folder, without this repository on its path. Its commands are run as a newcomer types them,
the first of which makes a virtual environment. The clock stops at the first line with the reward of a training step;
then the run goes on to its end. `windfall, own task` and TRL are the two forms of one run that recipes/from-trl has:
the same model, data, reward functions and settings.

No package index has windfall, so its wheel is built before the clock starts. For TRL, the script, its data and the
model that ships with windfall are put into the folder, so neither way downloads a model. pip keeps no cache, and takes
the versions of constraints/cpu.txt. How long it takes depends on the index that pip is configured with. The CPU seconds
depend less on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TRL_FILES = ROOT / "recipes" / "from-trl"
MODEL = ROOT / "src" / "windfall" / "models" / "base_models" / "tiny"
WAYS: Mapping[str, Sequence[str]] = {
    "windfall demo": ("python -m venv venv", "venv/bin/pip install {wheel}", "venv/bin/windfall demo"),
    "windfall, own task": (
        "python -m venv venv",
        "venv/bin/pip install {wheel}",
        "venv/bin/windfall examples .",
        "venv/bin/windfall train recipes/from-trl/recipe.toml",
    ),
    "TRL": ("python -m venv venv", "venv/bin/pip install trl", "venv/bin/python train_trl.py"),
}
OWN_FILES = {"windfall, own task": ("recipe.toml", "rewards.py"), "TRL": ("train_trl.py", "rewards.py")}
"""What a user writes, in recipes/from-trl."""
REWARD = re.compile(r"^step +1/\d+ .*reward|'reward': ")


def environment() -> dict[str, str]:
    """That of this process, without Python's paths. Output that is not a terminal is not kept back."""
    own = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    constraints = str(ROOT / "constraints" / "cpu.txt")
    return {**own, "PYTHONUNBUFFERED": "1", "PIP_CONSTRAINT": constraints, "PIP_NO_CACHE_DIR": "1", "PIP_QUIET": "1"}


def script(steps: int) -> str:
    """train_trl.py with the model of the recipe, which prints the reward of every step and does not need a GPU."""
    text = (TRL_FILES / "train_trl.py").read_text()
    text = re.sub(r"^MODEL = .*", 'MODEL = "model"', text, flags=re.MULTILINE)
    return re.sub(r"max_steps=\d+,", f"max_steps={steps}, logging_steps=1, use_cpu=True, bf16=False,", text)


def children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(way: str, wheel: Path, steps: int) -> dict[str, Any]:
    """Seconds until the environment is installed, until the first reward, and until the end; CPU seconds of all."""
    with tempfile.TemporaryDirectory() as name:
        folder, began_s, used_s = Path(name), time.monotonic(), children_cpu_s()
        first_s, installed_s = None, 0.0
        if way == "TRL":
            shutil.copytree(TRL_FILES, folder, dirs_exist_ok=True)
            shutil.copytree(MODEL, folder / "model")
            (folder / "train_trl.py").write_text(script(steps))
        for command in WAYS[way]:
            words = command.format(wheel=wheel).split()
            words[0] = sys.executable if words[0] == "python" else words[0]
            if words[1] in ("demo", "train"):
                words += ["--set", f"run.steps={steps}"]
            process = subprocess.Popen(
                words, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            assert process.stdout is not None
            lines = list[str]()
            for line in process.stdout:
                lines.append(line)
                if first_s is None and REWARD.search(line):
                    first_s = time.monotonic() - began_s
            if process.wait():
                raise SystemExit(f"{way}: {command} ended with status {process.returncode}:\n{''.join(lines[-30:])}")
            if " install " in command:
                installed_s = time.monotonic() - began_s
        assert first_s is not None, "".join(lines[-30:])
        size = sum(f.stat().st_size for f in (folder / "venv").rglob("*") if f.is_file() and not f.is_symlink())
        own = [line for file in OWN_FILES.get(way, ()) for line in (TRL_FILES / file).read_text().splitlines()]
        return {
            "commands": len(WAYS[way]), "lines": sum(map(bool, own)), "installed_s": installed_s,
            "installed_gb": size / 1e9, "first_reward_s": first_s, "all_s": time.monotonic() - began_s,
            "cpu_s": children_cpu_s() - used_s,
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", default=";".join(WAYS), help="Ways, separated by semicolons.")
    parser.add_argument("--steps", type=int, default=12, help="Training steps.")
    parser.add_argument("--out", type=Path, help="File to write the figures to, as JSON.")
    options = parser.parse_args()
    figures = dict[str, dict[str, Any]]()
    with tempfile.TemporaryDirectory() as place:
        build = [sys.executable, "-m", "build", "--wheel", "--outdir", place, str(ROOT)]
        subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
        (wheel,) = Path(place).glob("*.whl")
        heads = f"{'':20}{'commands':>9}{'own lines':>10}{'installed':>11}{'':8}{'first reward':>13}"
        print(f"{heads}{'all steps':>10}{'CPU':>9}", flush=True)
        for way in options.ways.split(";"):
            f = figures[way] = run(way, wheel, options.steps)
            print(
                f"{way:20}{f['commands']:>9}{f['lines']:>10}{f['installed_s']:>9.0f} s{f['installed_gb']:>5.1f} GB"
                f"{f['first_reward_s']:>11.0f} s{f['all_s']:>8.0f} s{f['cpu_s']:>7.0f} s",
                flush=True,
            )
    if options.out:
        options.out.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
