"""Environments of the verifiers package as agents: windfall train recipes/verifiers.toml

The environment is built once, in the process that starts agents, and its rows are read there. Every response is one
rollout of it, in a process of its own: it talks to the gateway with the client of verifiers, and its rubric gives the
reward. Written for verifiers 0.1: `load_environment`, `get_dataset` and `run_rollout`. Later versions have none of
them: there, an environment is a task set with a harness (`verifiers.v1`).
"""

from __future__ import annotations

import asyncio
import copy
import importlib.metadata
import os
import re
from typing import Any

from windfall.envs import user_code
from windfall.errors import WindfallError

SUPPORTED = "0.1.5 to 0.1.x"
"""Versions of verifiers, in words; pyproject.toml has the same range."""
FAULTS_OF_THE_POLICY = (
    "EmptyModelResponseError", "InvalidModelResponseError", "OverlongPromptError", "ToolParseError", "ToolCallError",
)  # fmt: skip
"""Errors of verifiers that say something about what the policy wrote: the rollout keeps the reward of its rubric."""
_built: dict[str, Any] = {}


def supported(version: str) -> bool:
    """Whether this version of verifiers can be used.

    >>> [supported(version) for version in ("0.1.4", "0.1.5", "0.1.14.dev2", "0.2.0", "0.4.0")]
    [False, True, True, False, False]
    """
    found = re.match(r"0\.1\.(\d+)", version)
    return found is not None and int(found[1]) >= 5


def check_version() -> None:
    """Raise WindfallError if verifiers is not installed, or in a version that cannot be used."""
    fix = "Install a version that can be used: pip install 'verifiers>=0.1.5,<0.2'"
    try:
        version = importlib.metadata.version("verifiers")
    except importlib.metadata.PackageNotFoundError as e:
        raise WindfallError("verifiers is not installed", where="verifiers", fix=fix) from e
    if not supported(version):
        what = f"verifiers {version} is installed, but windfall runs environments of verifiers {SUPPORTED} only"
        raise WindfallError(what, where="verifiers", fix=fix)


def prepare(id: str, args: dict[str, Any] | None = None, sampling_args: dict[str, Any] | None = None) -> None:
    """Build the environment. `id`: a name that verifiers knows, or a class or function as "package.module:name"."""
    check_version()
    import verifiers as vf  # pyright: ignore[reportMissingImports]

    if ":" in id:
        env = user_code.load(id, where="env.options.id")(**(args or {}))
    else:
        try:
            env = vf.load_environment(id, **(args or {}))
        except (ValueError, RuntimeError, AttributeError) as e:
            fix = "Install the package of the environment, or name a class as package.module:Class."
            raise WindfallError(str(e), where=f"env.options.id = {id}", fix=fix) from e
    # Plain rows: the library behind datasets has threads, which a fork would lose.
    _built.update(env=env, train=env.get_dataset().to_list(), held_out=env.get_eval_dataset().to_list())
    _built["sampling_args"] = {**(getattr(env, "sampling_args", None) or {}), **(sampling_args or {})}


def run(task: dict[str, Any], **_: Any) -> float:
    """One rollout. Returns its reward."""
    from verifiers.types import ClientConfig  # pyright: ignore[reportMissingImports]

    rows = _built["held_out" if task["held_out"] else "train"]
    client = ClientConfig(
        api_key_var="OPENAI_API_KEY", api_base_url=os.environ["OPENAI_BASE_URL"], timeout=24 * 3600.0, max_retries=2
    )
    given = {
        "input": rows[task["index"] % len(rows)],
        "model": os.environ["OPENAI_MODEL"],
        "sampling_args": copy.deepcopy(_built["sampling_args"]),
    }
    output = asyncio.run(_built["env"].run_rollout(client=client, **given))
    error = (output.get("error") or {}).get("error", "")
    if error and error not in FAULTS_OF_THE_POLICY:
        raise RuntimeError(f"the environment failed: {output['error']}")
    return float(output["reward"])


run.prepare = prepare  # type: ignore[attr-defined]
