"""A reaper on a system without subreapers. Its tests on Linux are those of its users: environments and agents."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

from windfall.processes import output_log, reaper

ELSEWHERE = """
import types
from windfall.processes import reaper
reaper.sys = types.SimpleNamespace(**{**vars(reaper.sys), "platform": "darwin"})
reaper.main()
"""
PROGRAM = """
import os, time
def main():
    os.write(int(__import__("sys").argv[1]), b"up")
    time.sleep(1e6)
"""


def test_program_ends_with_its_reaper_on_other_systems(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text(PROGRAM)
    reading, writing = os.pipe()
    arguments = (os.getpid(), output_log.STANDARD_ERROR, "endless:main", writing)
    process = subprocess.Popen(
        [sys.executable, "-c", ELSEWHERE, *map(str, arguments)], pass_fds=[writing], cwd=tmp_path,
        stdin=subprocess.DEVNULL, start_new_session=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        assert pipe.read(2) == b"up"
        reaper.end(process)
        assert process.wait(30) == -9
        assert select.select([pipe], [], [], 30)[0], "the program has ended, which had this pipe open"
