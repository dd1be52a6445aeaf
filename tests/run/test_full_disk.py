"""A disk without a free byte: the error names it, although no process can write a log or record its error."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.runs.small_disk import FILL, on_a_small_disk
from windfall import run_folder as folders
from windfall.processes import process

CONTROLLER = """
from windfall import run_folder as folders
from windfall.recipe.file import parse_recipe
from windfall.run import start
from windfall.link import auth

recipe = parse_recipe({"run": {"folder": str(disk)}}, where="here")
folder = start.new_folder(recipe)
auth.make_token(folder / "token")
auth.make_token(folder / "trainer.secret")
with open(folder / "controller.log", "ab") as log:
    fill()
    command = [sys.executable, "-m", "windfall.run.cli", "_controller", str(folder)]
    code = subprocess.call(command, stdout=log, stderr=log)
assert (folder / "controller.log").stat().st_size == 0
(disk / "fill").unlink()
print(code, folders.failure(folder, "controller", code))
"""
RUN = """
when, *options = sys.argv[2:]
command = [sys.executable, "-m", "windfall.run.cli", "train", "small.toml", "--set", f"run.folder={disk}"]
for option in (*options, "run.steps=100000", "checkpoint.every=2"):
    command += ["--set", option]
run = subprocess.Popen(command)
try:
    deadline = time.monotonic() + 120
    while run.poll() is None and time.monotonic() < deadline:
        path, _, text = when.partition(" ")
        if (disk / "small" / path).exists() and text in (disk / "small" / path).read_text():
            fill()
            break
        time.sleep(0.005)
    sys.exit(run.wait(120))
finally:
    run.kill()
"""


def test_controller_that_cannot_write_anything_names_the_full_disk(here: Path) -> None:
    """The disk has room again when the supervisor looks, so only the exit status can say what happened."""
    done = on_a_small_disk(here, FILL + CONTROLLER)
    assert done.returncode == 0, done.stderr
    code, error = done.stdout.split(" ", 1)
    assert int(code) == folders.UNRECORDED + errno.ENOSPC
    assert error.startswith(f"{here}/disk/run: the controller ended because nothing can be written here: No space")
    assert "bytes are free there" in error


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "when", ["recipe.toml", "controller.log", "tokenizer/tokenizer.json", 'events.jsonl "name":"step","step":1,']
)
def test_run_on_a_full_disk_ends_and_names_it(here: Path, when: str, ranks: int) -> None:
    done = on_a_small_disk(here, FILL + RUN, when, f"train.ranks={ranks}")
    said = done.stdout + done.stderr
    assert done.returncode == 2, said
    assert re.search(r"No space left on device \([0-9,]+ bytes are free there\)", said), said  # temporary files may go
    assert f"{here}/disk/small" in said
    assert "Traceback" not in said


def test_output_that_does_not_fit_onto_the_disk_is_dropped(tmp_path: Path) -> None:
    """Without this, the process ends at the first line, or with status 120 when Python flushes what is left."""
    script = "from windfall.processes import process; process.tolerate_full_log(); import sys"
    script += "; print('lost'); print('lost', file=sys.stderr); sys.exit(7)"
    with open("/dev/full", "w") as full:
        code = subprocess.call([sys.executable, "-c", script], stdout=full, stderr=full)
    assert code == 7


def test_error_without_a_record_names_what_prevents_it(tmp_path: Path) -> None:
    error = folders.failure(tmp_path / "gone", "controller", 1)
    assert error.what == "the controller ended because nothing can be written here: No such file or directory"
    assert folders.failure(tmp_path, "controller", 1).what == "the controller ended with status 1"
    assert list(tmp_path.iterdir()) == []
    assert "Read-only" in folders.failure(tmp_path, "controller", folders.UNRECORDED + errno.EROFS).what


def test_log_that_cannot_be_opened_names_the_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "open", full)
    with pytest.raises(Exception, match=r"cannot open the log: No space left on device \([\d,]+ bytes are free there"):
        process.open_log(tmp_path / "w1.log")
