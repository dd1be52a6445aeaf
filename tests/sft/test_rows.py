"""Rows of supervised data: which tokens are targets, and which rows are refused, by their lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.models.test_text import CHATML, tokenizer
from windfall.errors import WindfallError
from windfall.models.load import TINY
from windfall.models.text import Text
from windfall.models.tokenizer import load
from windfall.recipe.file import parse_recipe
from windfall.recipe.sections import Recipe
from windfall.run import start
from windfall.sft import command, files, rows
from windfall.sft.rows import Row

USER = {"role": "user", "content": "say a number"}
ASSISTANT = {"role": "assistant", "content": "12"}


def written(folder: Path, *data: Any) -> Path:
    path = folder / "data.jsonl"
    path.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in data))
    return path


def trained(text: Text, row: Row) -> tuple[str, list[str]]:
    """The text of all tokens, and that of each completion."""
    stretches = text.turns(row.prompt, row.completion, row.tools)
    decode = text._tokenizer.decode
    return decode([i for ids, _ in stretches for i in ids]), [decode(list(ids)) for ids, ok in stretches if ok]


def chat(template: str = CHATML) -> Text:
    made = tokenizer(template, "<|im_end|>")
    return Text(made)


def test_completion_of_plain_text_ends_with_the_end_of_the_text(tmp_path: Path) -> None:
    (row,) = rows.read(written(tmp_path, {"prompt": "1+2=", "completion": "3"}))
    text = Text(load(TINY))
    (example,) = rows.tokenize([row], text, None, tmp_path)
    assert example.ids.tolist() == [*text.prompt("1+2="), 6, 2]
    assert [example.ids[n] for n in example.targets] == [6, 2]
    sample = example.sample(0.5)
    assert sample.advantages is not None
    assert sample.advantages.tolist() == [0.5, 0.5]


def test_prompt_is_rendered_as_for_reinforcement_learning(tmp_path: Path) -> None:
    text = chat()
    for prompt in ("say a number", [USER], [{"role": "system", "content": "hi"}, USER, ASSISTANT, USER]):
        for completion in ("12", [ASSISTANT]):
            (row,) = rows.read(written(tmp_path, {"prompt": prompt, "completion": completion}))
            (context, first), *more = text.turns(row.prompt, row.completion)
            whole = [i for ids, _ in ((context, first), *more) for i in ids]
            assert tuple(whole[: len(text.prompt(prompt))]) == text.prompt(prompt)
            assert trained(text, row)[1] == ["12<|im_end|>"], "earlier turns belong to the prompt"


def test_every_turn_of_the_assistant_in_a_conversation_is_trained(tmp_path: Path) -> None:
    (row,) = rows.read(written(tmp_path, {"messages": [USER, ASSISTANT, USER, {**ASSISTANT, "content": "7"}, USER]}))
    whole, completions = trained(chat(), row)
    assert completions == ["12<|im_end|>", "7<|im_end|>"]
    turn = "<|im_start|>user\nsay a number<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>"
    assert whole == turn.format("12") + "\n" + turn.format("7"), "nothing after the last turn is needed"


def test_template_that_changes_earlier_turns_is_refused(tmp_path: Path) -> None:
    changing = CHATML.replace("{{ m.content }}", "{{ m.content if loop.last else m.content[:1] }}")
    found = rows.read(
        written(tmp_path, {"messages": [USER, ASSISTANT]}, {"messages": [USER, ASSISTANT, USER, ASSISTANT]})
    )
    with pytest.raises(WindfallError, match=r"2 of 2 rows .*\n.*data.jsonl:1: the chat template changes"):
        rows.tokenize(found, chat(changing), None, tmp_path)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"prompt": "a"}, "there is no column 'completion'"),
        ({"text": "a"}, "there is no column 'prompt'"),
        ({"prompt": "a", "completion": ""}, "'completion' is not a text"),
        ({"prompt": "", "completion": "a"}, "'prompt' is neither"),
        ({"prompt": 3, "completion": "a"}, "'prompt' is neither"),
        ({"prompt": "a", "completion": [USER]}, "'completion' must be one message of the assistant"),
        ({"messages": [USER]}, "no message is from the assistant"),
        ({"messages": []}, "'messages' is not a list"),
        ({"messages": [USER, {"role": "assistant"}]}, r"'messages\[1\]' is not an object"),
        ({"messages": [USER, ASSISTANT], "tools": "x"}, "'tools' is not a list"),
        ({"prompt": "a", "completion": "\ud800"}, "'.ud800' is half of a surrogate pair"),
        ({"messages": [USER, {"role": "assistant", "content": "a\udfff"}]}, "'.udfff' is half of a surrogate pair"),
    ],
)
def test_unusable_rows_are_named_by_their_lines(tmp_path: Path, row: Any, why: str) -> None:
    good = {"prompt": "a", "completion": "b"}
    path = written(tmp_path, good, row, good, "", row)
    with pytest.raises(WindfallError, match=rf"2 of 4 rows cannot be used:\n  .*data.jsonl:2: {why}") as e:
        rows.read(path)
    assert f"{path}:5: " in e.value.what
    assert e.value.fix


def test_only_some_of_many_unusable_rows_are_shown(tmp_path: Path) -> None:
    with pytest.raises(WindfallError, match=r"data.jsonl:10: (.|\n)*and 15 more") as e:
        rows.read(written(tmp_path, *[{"prompt": "a"}] * 25))
    assert "data.jsonl:11:" not in e.value.what


def test_line_that_is_not_json_and_empty_file(tmp_path: Path) -> None:
    with pytest.raises(WindfallError, match="not JSON") as e:
        rows.read(written(tmp_path, {"prompt": "a", "completion": "b"}, "{"))
    assert e.value.where == f"{tmp_path / 'data.jsonl'}:2"
    with pytest.raises(WindfallError, match="the data set is empty"):
        rows.read(written(tmp_path))


def test_long_rows_and_messages_without_a_template_are_refused(tmp_path: Path) -> None:
    text = Text(load(TINY))
    found = rows.read(written(tmp_path, {"prompt": "1", "completion": "2"}, {"prompt": "1", "completion": "2" * 30}))
    with pytest.raises(WindfallError, match=r"1 of 2 rows .*\n.*data.jsonl:2: \d+ tokens, but 20 is the limit"):
        rows.tokenize(found, text, 20, tmp_path)
    found = rows.read(written(tmp_path, {"messages": [USER, ASSISTANT]}))
    with pytest.raises(WindfallError, match=r"data.jsonl:1: .*has no chat template"):
        rows.tokenize(found, text, None, tmp_path)


def test_every_row_is_in_every_epoch_once_in_another_order() -> None:
    size, count = 4, 10
    epochs = [[rows.batch(3 * e + n, count, size, seed=7) for n in (1, 2, 3)] for e in range(3)]
    orders = [[row for part in epoch for row in part] for epoch in epochs]
    assert all(sorted(order) == list(range(count)) for order in orders)
    assert orders[0] != orders[1] != orders[2]
    assert rows.batch(1, count, size, seed=8) != rows.batch(1, count, size, seed=7)
    assert rows.steps_per_epoch(count, size) == 3


@pytest.mark.parametrize(
    ("given", "steps"), [((), 3), (("train.lr=1e-3",), 3), (("run.steps=2",), 2), (("run.steps = 7",), 7)]
)
def test_steps_on_the_command_line_replace_those_of_the_epochs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...], steps: int
) -> None:
    began: list[int] = []

    def train(recipe: Recipe, _: Path) -> int:
        began.append(recipe.run.steps)
        return 0

    monkeypatch.setattr(start, "train", train)
    path = written(tmp_path, *[{"prompt": "a", "completion": "b"}] * 3)
    file = tmp_path / "recipe.toml"
    file.write_text("[run]\nsteps = 1000\n[sft]\nbatch = 1\n")
    with pytest.raises(typer.Exit):
        command.sft(path, file, [*given, f"run.folder={tmp_path}/runs"])
    assert began == [steps]


def test_recipe_of_a_supervised_run(tmp_path: Path) -> None:
    path = written(tmp_path, *[{"prompt": "a", "completion": "b"}] * 11)
    sections: dict[str, Any] = {"sft": {"batch": 4, "epochs": 3, "held_out": 2}, "fleet": {"workers": 2}}
    made = command.supervised(parse_recipe(sections, where="test"), path)
    assert (made.run.steps, made.fleet.workers, made.fleet.local, made.sft.path) == (9, 0, False, path)
    assert command.supervised(parse_recipe(sections, where="test"), path, steps=2).run.steps == 2
    (_, train), (_, held_out) = files.read(made)
    assert (len(train), len(held_out)) == (9, 2)
    assert held_out[-1].where.endswith("data.jsonl:11")
    with pytest.raises(WindfallError, match="leaves none of the 11 rows"):
        command.supervised(parse_recipe({"sft": {"held_out": 11}}, where="test"), path)
    with pytest.raises(WindfallError, match="no data") as e:
        command.supervised(parse_recipe({}, where="test"), None)
    assert e.value.where == "sft.path"
    with pytest.raises(WindfallError, match="one policy"):
        command.supervised(
            parse_recipe({"policies": {"a": {"lora": {"rank": 2}}}, "fleet": {"local": False}}, where="t"), path
        )
