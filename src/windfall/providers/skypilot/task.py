"""The SkyPilot task of a worker: one managed job per worker, on a spot machine with an on-demand one as fallback.

- One job per worker, not one job with many nodes: after a preemption SkyPilot replaces all machines of a job.
- SkyPilot replaces preempted machines by itself, also in other regions. It restarts a failed worker at most
  `max_restarts` times, because a worker that was refused would be refused again. A worker that finds no
  controller ends its job as if it had succeeded: SkyPilot would otherwise start machines for a run that is dead.
- The token is a SkyPilot secret, given by `sky jobs launch --secret`; it is not in the file.
"""

from __future__ import annotations

from typing import Any

from windfall.processes.process import EXIT_NO_CONTROLLER
from windfall.providers.skypilot.section import SkyPilot
from windfall.providers.worker_command import TLS_PIN, shell


def task(source: SkyPilot, *, url: str, worker: str, certificate: str = "") -> dict[str, Any]:
    """The task as SkyPilot reads it from YAML. `worker`: the name of the worker."""
    spot = source.kind == "spot"
    given = {"infra": source.infra, "cpus": source.cpus, "image_id": source.image}
    resources: dict[str, Any] = {key: value for key, value in given.items() if value}
    # SkyPilot does not take a list of accelerators beside any_of, so every combination is an alternative.
    asked = [source.accelerators] if isinstance(source.accelerators, str) else source.accelerators
    gpus = [{"accelerators": gpu} for gpu in asked if gpu] or [{}]
    terms = [True, False] if spot and source.fallback else [spot]
    resources["any_of"] = [{**gpu, "use_spot": use_spot} for use_spot in terms for gpu in gpus]
    resources["job_recovery"] = {"max_restarts_on_errors": source.max_restarts}
    name = f"{worker}-r$(date +%s)"
    return {
        "name": worker,
        "resources": resources,
        **({"envs": {TLS_PIN: certificate}} if certificate else {}),
        **({"setup": source.setup} if source.setup else {}),
        "run": f"# A recovered worker is a new worker, so its name contains the time.\n{shell(source, url, name)}\n"
        f'status=$?; if [ "$status" = {EXIT_NO_CONTROLLER} ]; then exit 0; fi; exit "$status"\n',
    }
