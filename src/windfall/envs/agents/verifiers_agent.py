"""Environments of the verifiers package as agents: [env] name = "verifiers".

The environment is built once, in the process that starts agents, and its rows are read there. Every response is one
rollout of it, in a process of its own: it talks to the gateway with the client of verifiers, and its rubric gives the
reward. Written for verifiers 0.1: `load_environment`, `get_dataset` and `run_rollout`.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from windfall.envs import user_code
from windfall.errors import WindfallError

FAULTS_OF_THE_POLICY = (
    "EmptyModelResponseError", "InvalidModelResponseError", "OverlongPromptError", "ToolParseError", "ToolCallError",
)  # fmt: skip
"""Errors of verifiers that say something about what the policy wrote: the rollout keeps the reward of its rubric."""
_built: dict[str, Any] = {}


def prepare(id: str, args: dict[str, Any]) -> None:
    """Build the environment. `id`: a name that verifiers knows, or a class of it as "package.module:Class"."""
    try:
        import verifiers as vf  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as e:
        fix = "pip install 'windfall[verifiers]'"
        raise WindfallError("verifiers is not installed", where="env.name", fix=fix) from e
    if not hasattr(vf, "load_environment"):
        what = f"verifiers {getattr(vf, '__version__', '')} has no load_environment"
        raise WindfallError(what, where="env.name", fix="pip install 'verifiers<0.2'")
    if ":" in id:
        env = user_code.load(id, where="env.id")(**args)
    else:
        try:
            env = vf.load_environment(id, **args)
        except (ValueError, RuntimeError, AttributeError) as e:
            fix = "Install the package of the environment, or name a class as package.module:Class."
            raise WindfallError(str(e), where=f"env.id = {id}", fix=fix) from e
    # Plain rows: the library behind datasets has threads, which a fork would lose.
    _built.update(env=env, train=env.get_dataset().to_list(), held_out=env.get_eval_dataset().to_list())


def run(task: dict[str, Any], id: str, args: dict[str, Any]) -> float:
    """One rollout. Returns its reward."""
    from verifiers.types import ClientConfig  # pyright: ignore[reportMissingImports]

    rows = _built["held_out" if task["held_out"] else "train"]
    client = ClientConfig(
        api_key_var="OPENAI_API_KEY", api_base_url=os.environ["OPENAI_BASE_URL"], timeout=24 * 3600.0, max_retries=2
    )
    given = {"input": rows[task["index"] % len(rows)], "model": os.environ["OPENAI_MODEL"], "sampling_args": {}}
    output = asyncio.run(_built["env"].run_rollout(client=client, **given))
    error = (output.get("error") or {}).get("error", "")
    if error and error not in FAULTS_OF_THE_POLICY:
        raise RuntimeError(f"the environment failed: {output['error']}")
    return float(output["reward"])


run.prepare = prepare  # type: ignore[attr-defined]
