"""The command line of a worker on another machine.

- Secrets are not on it: the token and the certificate to trust travel in environment variables, by the means that each
  system has for secrets.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Mapping

from windfall.recipe.worker_source import WorkerSource

TOKEN = "WINDFALL_TOKEN"
TLS_PIN = "WINDFALL_TLS_PIN"
"""Certificate (PEM text, or the path of a file) that a worker trusts, whatever host name it was issued for."""


def arguments(source: WorkerSource, url: str, name: str) -> list[str]:
    """The arguments of `windfall` for a worker from this source."""
    region = ["--region", source.region] if source.region else []
    engine = ["--engine", source.engine] if source.engine != "auto" else []
    if source.tensor_parallel > 1:
        engine += ["--tensor-parallel", str(source.tensor_parallel)]
    return [
        "worker", "--join", url, "--name", name, "--lease", source.kind, "--price", f"{source.price_usd_per_h:g}",
        *region, "--device", source.device, "--threads", str(source.worker_threads), "--memory",
        f"{source.worker_memory:g}", *engine,
    ]  # fmt: skip


def shell(source: WorkerSource, url: str, name: str) -> str:
    """The command for a shell. `name` may contain variables, which the shell replaces."""
    words = ["windfall", *arguments(source, url, "NAME")]
    return " ".join(f'"{name}"' if word == "NAME" else shlex.quote(word) for word in words)


def plain_name(name: str, length: int) -> str:
    """The name with only lower-case letters, digits and hyphens, cut to `length`: other systems accept no more."""
    return "".join(c if c.isalnum() and c.isascii() else "-" for c in name.lower()).strip("-")[:length].strip("-")


def run_label(run: str, token: str) -> str:
    """A name for what a run starts in other systems. Two runs with the same name have different tokens, so neither
    touches the workers of the other. A resumed run keeps its label.

    >>> run_label("Demo_1", "0123456789abcdef")
    'windfall-demo-1-9f9f5111'
    """
    return f"windfall-{plain_name(run, 30)}-{hashlib.sha256(token.encode()).hexdigest()[:8]}"


def secrets(token: str, certificate: str = "") -> Mapping[str, str]:
    """The environment variables that a worker needs. `certificate`: PEM text."""
    return {TOKEN: token, **({TLS_PIN: certificate} if certificate else {})}
