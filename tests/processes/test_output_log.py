"""The logs for what programs of the user print: limited in size, the newest output is kept, and it says what is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from windfall.processes.output_log import OutputFile, ShownOutput


def test_newest_output_is_kept_within_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "env.log"
    log = OutputFile(str(path), limit=1000)
    for number in range(100):
        log.write(f"line {number:<94}\n".encode())
    new, old = path.read_text(), (tmp_path / "env.log.1").read_text()
    assert len(new) <= 1000
    assert len(old) <= 1000
    shown = [line for line in (old + new).splitlines() if line.startswith("line")]
    assert [int(line.split()[1]) for line in shown] == list(range(100 - len(shown), 100))
    assert len(shown) > 9
    log.write(b"x" * 5000)  # more than the limit at once
    assert path.stat().st_size <= 1000
    assert path.read_text().endswith("x" * 500)


def test_processes_write_to_the_same_log(tmp_path: Path) -> None:
    path = tmp_path / "env.log"
    program = (
        "import sys; from windfall.processes.output_log import OutputFile\n"
        "log = OutputFile(sys.argv[1], limit=20_000)\n"
        "for n in range(300): log.write(f'{sys.argv[2]} {n:<97}\\n'.encode())"
    )
    writers = [subprocess.Popen([sys.executable, "-c", program, str(path), name]) for name in "abc"]
    assert [writer.wait(240) for writer in writers] == [0, 0, 0]
    for file in (path, tmp_path / "env.log.1"):
        assert file.stat().st_size <= 20_000 + 3 * 100
        assert {len(line) for line in file.read_text().splitlines() if line[0] in "abc"} == {99}


def test_log_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    OutputFile(str(tmp_path / "no folder" / "env.log")).write(b"lost")
    (tmp_path / "env.log.1").mkdir()
    full = OutputFile(str(tmp_path / "env.log"), limit=10)
    full.write(b"123")
    full.write(b"4567890123")


def test_beginning_is_shown_without_a_log(capfd: pytest.CaptureFixture[str]) -> None:
    log = ShownOutput(limit=10)
    for part in (b"12345\n", b"6789\n", b"more", b"more"):
        log.write(part)
    assert capfd.readouterr().err == "12345\n6789\n(more was printed, which is not shown)\n"
