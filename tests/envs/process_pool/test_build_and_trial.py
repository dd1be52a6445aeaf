"""Environments that cannot be built, and the trial calls before a run."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests.support.hostile import environments as hostile
from tests.support.hostile.pool_calls import ask, failure, hosting, section
from windfall.envs.grade import trial
from windfall.envs.process_pool import pool as pools
from windfall.envs.process_pool.pool import EnvPool
from windfall.errors import WindfallError


def refused(env: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *, build_s: float = 60.0) -> str:
    monkeypatch.chdir(folder)

    async def main() -> None:
        async with hosting(env, build_s=build_s):
            pass

    with pytest.raises(WindfallError) as caught:
        asyncio.run(main())
    return str(caught.value)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def task(:\n", "broken_env.py:1: importing broken_env found a syntax error"),
        ("\n\n1 / 0\n", "broken_env.py:3: importing broken_env raised ZeroDivisionError"),
        (
            "import no_such_thing\n",
            "broken_env.py:1: importing broken_env needs the module 'no_such_thing', which is not installed",
        ),
        ("import json.decode\n", "broken_env.py:1: importing broken_env raised ModuleNotFoundError"),
        ("import sys\nsys.exit(4)\n", "broken_env.py:2: importing broken_env raised SystemExit: 4"),
        ("x = 1\n", "env.factory: there is no 'Env' in broken_env"),
        ("class Env:\n    def __init__(self):\n        pass\n", "env.factory: broken_env:Env does not accept seed: "),
        ("class Env:\n    def __init__(self, seed):\n        self.f()\n", "broken_env.py:3: building broken_env:Env"),
        ("class Env:\n    def __init__(self, seed):\n        pass\n", "returned a Env without task and feedback"),
        ("raise KeyboardInterrupt\n", "broken_env.py:1: importing broken_env raised KeyboardInterrupt"),
        (
            "class Own(BaseException):\n    def __str__(self):\n        1 / 0\nclass Env:\n"
            "    def __init__(self, seed):\n        raise Own\n",
            "broken_env.py:6: building broken_env:Env raised Own: (its text cannot be read",
        ),
        (
            "class Env:\n    def __init__(self, seed): pass\n    def task(self, index): pass\n    feedback = task\n"
            "    def __getattr__(self, name):\n        raise LookupError(name)\n",
            "broken_env.py:6: building",
        ),
        ("import os\nos._exit(7)\n", "the process that builds it ended with status 7"),
    ],
)
def test_broken_module_is_refused_with_file_and_line(
    source: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_env.py").write_text(source)
    assert says in refused("broken_env:Env", tmp_path, monkeypatch)


def test_package_that_an_environment_lacks_is_named_without_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_env.py").write_text("import broken_part\n")
    (tmp_path / "broken_part.py").write_text("import no_such_thing\n")
    said = refused("broken_env:Env", tmp_path, monkeypatch)
    assert f"{tmp_path / 'broken_part.py'}:1: " in said
    assert f"(pip install no_such_thing), or put it into {tmp_path}." in said
    (tmp_path / "broken_part.py").write_text("1 / 0\n")
    assert "<frozen" not in refused("broken_env:Env", tmp_path, monkeypatch)


@pytest.mark.parametrize("inside", ["", "class Env:\n    def __init__(self, seed):\n        "])
@pytest.mark.parametrize("spec", ["broken_env:Env", "broken_env.py:Env"])
def test_refusal_of_an_environment_is_passed_on(
    inside: str, spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = "raise WindfallError('no game is installed', where='env.options.game', fix='Install it.')\n"
    (tmp_path / "broken_env.py").write_text(f"from windfall.errors import WindfallError\n{inside}{refusal}")
    assert refused(spec, tmp_path, monkeypatch) == "env.options.game: no game is installed\nInstall it."


def test_missing_module_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = refused("no_such_env:Env", tmp_path, monkeypatch)
    assert "env.factory: cannot import 'no_such_env': there is no module 'no_such_env'" in said
    assert str(tmp_path) in said


def test_module_that_hangs_during_import_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pools, "QUIET_S", 0.3)
    (tmp_path / "slow_env.py").write_text("import time\ntime.sleep(1e6)\n")
    said = refused("slow_env:Env", tmp_path, monkeypatch, build_s=5.0)  # a busy machine needs seconds to import it
    assert "waited 5 s for it to be imported and built" in said
    assert 'slow_env.py", line 2' in said
    assert "building environment slow_env:Env; waiting up to 5 s" in capfd.readouterr().err


STUCK = """
import os, pathlib, time
from tests.support.hostile.environments import Sound as Env
with open("starts", "a") as file: file.write(f"{os.getpid()}\\n")
while not pathlib.Path("go").exists(): time.sleep(0.01)
"""


@pytest.mark.parametrize("kills", [1, 3])
def test_process_that_is_killed_while_it_builds_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: int
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pools, "MAX_KILLED_BUILDS", 2)
    (tmp_path / "stuck.py").write_text(STUCK)
    starts = tmp_path / "starts"

    async def main() -> None:
        async with EnvPool(section("stuck:Env"), 0) as pool:
            answer = asyncio.create_task(ask(pool, 1, limit_s=60.0))
            for number in range(kills):
                while len(pids := starts.read_text().split() if starts.exists() else []) <= number:
                    await asyncio.sleep(0.01)
                os.kill(int(pids[-1]), signal.SIGKILL)
            if kills == 3:
                with pytest.raises(WindfallError, match=r"was killed \(SIGKILL\) after .* s \(3 times in a row\)"):
                    await pool.ready()
                with pytest.raises(WindfallError, match="3 times in a row"):
                    await answer
                return
            (tmp_path / "go").touch()
            await pool.ready()
            assert (await answer).reward == 3.0

    asyncio.run(main())


def test_environment_that_can_be_built_only_once_fails_later_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "once.py").write_text(
        "import os\nfrom tests.support.hostile.environments import Leaves\n"
        "class Env(Leaves):\n    def __init__(self, seed):\n        super().__init__(seed)\n        os.mkdir('was')\n"
    )

    async def main() -> None:
        async with hosting("once:Env") as pool:
            await failure(ask(pool, 1))
            with pytest.raises(WindfallError, match="FileExistsError"):
                await ask(pool, 1)

    asyncio.run(main())


def test_trial_describes_the_result() -> None:
    task, said = asyncio.run(trial(EnvPool(section(hostile.NeverDone), 0), 5.0))
    assert task.prompt == "0+1="
    assert said.startswith("environment NeverDone: built task 'hostile/0'; an empty response to it got an obs")


@pytest.mark.parametrize(
    ("env", "says"),
    [
        (hostile.Sleeps, "waited 0.5 s for Sleeps.feedback of task 'hostile/0'"),
        (hostile.Raises, "raised KeyError"),
        (hostile.SlowTasks, "waited 0.5 s for SlowTasks.task(0)"),
    ],
)
def test_trial_refuses_failing_environments(env: type, says: str) -> None:
    with pytest.raises(WindfallError) as caught:
        asyncio.run(trial(EnvPool(section(env), 0), 0.5))
    assert f"environment {env.__name__}: " in str(caught.value)
    assert says in str(caught.value)


def test_trial_is_retried_after_a_temporary_failure(tmp_path: Path) -> None:
    env = section(hostile.FailsAtFirst, file=str(tmp_path / "calls"), failures=2)
    with pytest.raises(WindfallError, match=r"raised ConnectionError.*\(2 trial calls"):
        asyncio.run(trial(EnvPool(env, 0), 5.0, tries=2))
    (tmp_path / "calls").unlink()
    _, said = asyncio.run(trial(EnvPool(env, 0), 5.0, tries=3))
    assert said.endswith("got reward 0")
