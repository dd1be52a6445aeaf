"""A run folder that windfall 0.3 left when it was killed resumes. What a newer windfall wrote is refused in words.

run_0_3/ was written by 0.3: the tiny model with adapters of rank 1, four responses to four tasks per step, staleness 1,
killed in step 6, after the checkpoint of step 4. Its path of the base model was replaced, and its secrets were removed.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from windfall.controller.ledger import journal_format
from windfall.controller.ledger.journal_format import Started, encode_record, read_records
from windfall.errors import WindfallError
from windfall.events.log import read
from windfall.link import messages
from windfall.recipe import file as recipe_file
from windfall.recipe.file import dump_recipe, load_recipe
from windfall.tinker.disk import store
from windfall.trainer import checkpoint
from windfall.weights import delta

Windfall = Callable[..., tuple[int, str, str]]
OLD = Path(__file__).parent / "run_0_3"
STATE = Path("checkpoints/step-000004") / checkpoint.STATE


@pytest.fixture
def run(here: Path) -> Path:
    shutil.copytree(OLD, here / "run")
    return Path("run")


def edit_state(run: Path, number: object) -> None:
    state = json.loads((run / STATE).read_text())
    (run / STATE).write_text(json.dumps({**state, "format": number}))
    (run / STATE.parts[0] / STATE.parts[1] / checkpoint.CHECKSUMS).unlink()
    checkpoint.write_checksums(run / STATE.parts[0] / STATE.parts[1])


def test_run_of_0_3_resumes(windfall: Windfall, run: Path) -> None:
    code, out, err = windfall("resume", "run", "--set", "run.steps=7", "--set", "fleet.workers=0")
    assert code == 0, out + err
    last = checkpoint.newest(run / "checkpoints")
    assert last is not None
    assert last.state.step == 7
    steps = [e["step"] for e in read(run / "events.jsonl") if (e["kind"], e["name"]) == ("scalar", "step")]
    assert steps[-3:] == [5, 6, 7]
    assert json.loads((last.path / checkpoint.STATE).read_text())["format"] == checkpoint.FORMAT
    assert load_recipe(run / "recipe.toml").run.steps == 7
    assert (run / "recipe.toml").read_text().startswith(f"format = {recipe_file.FORMAT}\n")


def test_checkpoint_of_a_newer_windfall_is_refused(run: Path) -> None:
    folder = run / "checkpoints" / "step-000004"
    edit_state(run, checkpoint.FORMAT + 1)
    with pytest.raises(WindfallError, match=r"the checkpoint has format 2.*\nA newer windfall wrote it"):
        checkpoint.newest(folder.parent)
    edit_state(run, "first")
    with pytest.raises(checkpoint.DamagedCheckpoint, match="not a format: 'first'"):
        checkpoint.read_state(folder)


def journal_begins_with(run: Path, payload: bytes) -> Path:
    file = run / "journal" / "000004.wal"
    file.write_bytes(encode_record(payload) + file.read_bytes())
    return file


def test_journal_of_a_newer_windfall_is_refused(run: Path) -> None:
    started = Started(settings="", format=journal_format.FORMAT + 1)
    file = journal_begins_with(run, msgspec.msgpack.encode(started))
    with pytest.raises(WindfallError, match="the journal has format 2"):
        list(read_records(file))


@pytest.mark.slow
@pytest.mark.parametrize("part", ["journal", "checkpoint"])
def test_run_of_a_newer_windfall_is_refused(windfall: Windfall, run: Path, part: str) -> None:
    if part == "checkpoint":
        edit_state(run, checkpoint.FORMAT + 1)
    else:
        journal_begins_with(run, msgspec.msgpack.encode(Started(settings="", format=journal_format.FORMAT + 1)))
    code, _, err = windfall("resume", "run", "--set", "fleet.workers=0")
    assert code == 2
    assert f"the {part} has format 2, but this windfall knows formats up to 1" in err


def test_journal_with_a_record_of_an_unknown_kind_is_refused(run: Path) -> None:
    file = journal_begins_with(run, msgspec.msgpack.encode([99, "x"]))
    with pytest.raises(WindfallError, match="a record of another version of windfall"):
        list(read_records(file))


def test_0_3_reads_what_this_version_writes_in_format_1() -> None:
    """Fields are added at the end of a record, where older versions ignore them."""

    class OldStarted(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=1):
        settings: str
        next_task: int = -1

    assert journal_format.FORMAT == 1
    now = msgspec.msgpack.encode(Started(settings="s", next_task=3, format=1))
    assert msgspec.msgpack.decode(now, type=OldStarted) == OldStarted(settings="s", next_task=3)
    before = msgspec.msgpack.encode(OldStarted(settings="s"))
    assert msgspec.msgpack.decode(before, type=Started).format == 1


@pytest.mark.parametrize(
    ("number", "expected"),
    [(recipe_file.FORMAT + 1, "the recipe has format 2"), ("'new'", "a whole number"), ("true", "a whole number")],
)
def test_recipe_of_a_newer_windfall_is_refused(windfall: Windfall, here: Path, number: object, expected: str) -> None:
    file = here / "small.toml"
    file.write_text(f"format = {number}\n{file.read_text()}")
    code, _, err = windfall("train", "small.toml", "--dry-run")
    assert (code, expected in err) == (2, True)


def test_recipe_with_its_format_is_the_same_recipe(here: Path) -> None:
    recipe = load_recipe(here / "small.toml")
    (here / "dumped.toml").write_text(dump_recipe(recipe))
    assert load_recipe(here / "dumped.toml") == recipe


def test_every_message_that_opens_a_link_has_the_protocol() -> None:
    for message in (messages.Challenge, messages.Hello, messages.TrainerHello, messages.RankHello):
        assert "protocol" in message.__struct_fields__


def test_table_of_formats_has_their_numbers() -> None:
    page = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| ([\w `]+) \| [^|]*\| (\d+) \| .*:(?:FORMAT|PROTOCOL|MAGIC)`", page, re.MULTILINE)
    assert dict(rows) == {
        "recipe": str(recipe_file.FORMAT),
        "checkpoint": str(checkpoint.FORMAT),
        "journal": str(journal_format.FORMAT),
        "store of `windfall tinker`": str(store.FORMAT),
        "messages": str(messages.PROTOCOL),
        "deltas of weights": delta.MAGIC.decode().removeprefix("wfdelta"),
    }
