"""A disk of 40 MB for a script, in a mount namespace of its own. Tests are skipped where mounting is not allowed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILL = """
import os, subprocess, sys, time
from pathlib import Path

disk = Path(sys.argv[1])

def fill():
    with open(disk / "fill", "ab", buffering=0) as file:
        size = 1 << 20
        while size:
            try:
                file.write(bytes(size))
            except OSError:
                size //= 2
    assert os.statvfs(disk).f_bavail == 0
"""


def on_a_small_disk(
    here: Path, script: str, *arguments: str, name: str = "disk", timeout_s: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run a script whose first argument is the folder of the disk, `here`/`name`."""
    disk = here / name
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=40m tmpfs '{disk}'"
    namespace = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    try:
        allowed = subprocess.run([*namespace, mount], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        allowed = False
    if not allowed:
        pytest.skip("mounting a disk is not allowed here")
    (here / "script.py").write_text(script)
    return subprocess.run(
        [*namespace, f'{mount} && exec "$@"', "sh", sys.executable, "script.py", str(disk), *arguments],
        cwd=here, capture_output=True, text=True, timeout=timeout_s, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
