"""Print docs/licenses.md: the licenses of all packages that windfall installs, and of those that its extras name.

    python scripts/licenses.py > docs/licenses.md

The licenses are what the packages say of themselves. Packages that are not installed here are looked up with pip 25 or
newer, which needs a package index.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHORTEST = {
    "Apache Software License": "Apache-2.0", "Apache License, Version 2.0": "Apache-2.0", "Apache 2.0": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0", "Apache 2.0 License": "Apache-2.0", "Apache": "Apache-2.0",
    "MIT License": "MIT", "BSD License": "BSD", "3-Clause BSD License": "BSD-3-Clause", "BSD 3-Clause": "BSD-3-Clause",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0", "Python Software Foundation License": "PSF-2.0",
    "ISC License": "ISC",
}  # fmt: skip
"""What packages write, and the identifier of SPDX for it."""
READ = {"smolagents": "Apache-2.0"}
"""Packages without a license in their metadata, and the one whose text they contain."""
HEAD = """# Licenses of the dependencies

windfall itself has the license Apache-2.0. `make licenses` writes this page, and a test compares it with what is
installed. Builds of torch for CUDA also install NVIDIA's libraries (nvidia-*) under NVIDIA's own license. The page
of a run contains uPlot (MIT, `src/windfall/page/static/LICENSES.txt`). windfall's wheel contains none of the packages
below.
"""


def canonical(requirement: str) -> str:
    """
    >>> canonical("Prometheus_Client>=0.21; python_version > '3'")
    'prometheus-client'
    """
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", requirement.strip())[0]).lower()


def license_of(fields: Mapping[str, object]) -> str:
    """The license in the metadata of a package: an SPDX expression, else a short text, else its classifiers.

    >>> license_of({"license": "Apache License 2.0"}), license_of({"license_expression": "MIT AND BSD-3-Clause"})
    ('Apache-2.0', 'MIT AND BSD-3-Clause')
    """
    if expression := fields.get("license_expression"):
        return str(expression)
    written = str(fields.get("license") or "").strip()
    if written and len(written) < 40 and "\n" not in written and written != "UNKNOWN":
        return SHORTEST.get(written, written)
    classified = fields.get("classifier") or ()
    assert isinstance(classified, Iterable)
    found = [str(c).split(" :: ")[-1] for c in classified if str(c).startswith("License :: ")]
    found = [SHORTEST.get(name, name) for name in found if name != "OSI Approved"]
    return " AND ".join(dict.fromkeys(found)) or "see the package"


def installed(name: str) -> str | None:
    """The license of an installed package. None: it is not installed."""
    try:
        return READ.get(name) or license_of(metadata.metadata(name).json)
    except metadata.PackageNotFoundError:
        return None


def closure(names: Iterable[str]) -> set[str]:
    """These packages and all that they require, as far as they are installed here."""
    found, left = set[str](), {canonical(name) for name in names}
    while left:
        name = left.pop()
        if installed(name) is None or name in found or name.startswith("nvidia-"):
            continue
        found.add(name)
        left |= {canonical(r) for r in metadata.requires(name) or () if "extra ==" not in r}
    return found


def required() -> list[str]:
    return _project()["dependencies"]


def extras() -> dict[str, list[str]]:
    """The packages that each extra names."""
    named = {e: [canonical(p) for p in packages] for e, packages in _project()["optional-dependencies"].items()}
    return {e: [name for name in names if name != "windfall"] for e, names in named.items() if names}


def _project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def look_up(name: str) -> str:
    """The license of a package that is not installed, from a package index."""
    if name in READ:
        return READ[name]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps",
               "--report", "-", name]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        sys.exit(f"pip cannot look up {name}:\n{done.stderr}")
    return license_of(json.loads(done.stdout)["install"][0]["metadata"])


def page() -> str:
    names = sorted(closure(required()))
    lines = [HEAD, "## What `pip install` installs\n", "| package | license |", "|---|---|"]
    lines += [f"| {name} | {installed(name)} |" for name in names]
    lines += ["\n## What the extras add\n", "| extra | package | license |", "|---|---|---|"]
    for extra, packages in extras().items():
        lines += [f"| {extra} | {name} | {installed(name) or look_up(name)} |" for name in packages]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
