"""Recipes for Qwen3 are checked, planned and run, with a small model and rows of the form of their data.

Rewards say nothing here: the model has random weights.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pyarrow
import pytest
import torch
from pyarrow import parquet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from windfall.events.log import read
from windfall.recipe.file import load_recipe

Windfall = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*/qwen3-*.toml"))
TEMPLATE = """{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content or '' }}
{%- for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to run in: the examples, a model, and data sets as the hub has them."""
    folder = tmp_path_factory.mktemp("known")
    for name in ("examples", "recipes"):
        (folder / name).symlink_to(ROOT / name)
    save_model(folder / "model")
    sums = [(f"What is {n} + {n % 7}?", n + n % 7) for n in range(60)]
    for split in ("train", "test"):
        rows = [{"question": asked, "answer": f"Add them.\n#### {answer}"} for asked, answer in sums]
        save(folder / "data/gsm8k/main" / f"{split}-00000-of-00001.parquet", rows)
    for subset in ("all", "en"):
        rows = [{"prompt": asked, "solution": str(answer)} for asked, answer in sums]
        save(folder / "data/dapo-math" / subset / "train-00000-of-00001.parquet", rows)
    context = {"title": ["Paris", "Berlin"], "sentences": [["The capital of France.", " It is large."], ["A city."]]}
    rows = [{"id": str(n), "question": "Which capital?", "answer": "Paris", "context": context} for n in range(9)]
    for split in ("train", "validation"):
        save(folder / "data/hotpot-qa/distractor" / f"{split}-00000-of-00001.parquet", rows)
    return folder


def save(file: Path, rows: Sequence[Mapping[str, object]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), file)


def save_model(folder: Path) -> None:
    """Qwen3 with random weights. Its tokens are bytes."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *special]
    tokenizer = Tokenizer(models.BPE(vocab={token: n for n, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    end = alphabet.index("<|im_end|>")
    config = Qwen3Config(
        vocab_size=len(alphabet), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=4096, eos_token_id=end, bos_token_id=None,
        pad_token_id=alphabet.index("<|endoftext|>"), tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)


def call(folder: Path, command: str, file: Path, changes: Mapping[str, object], *options: str) -> str:
    words = [sys.executable, "-m", "windfall.run.cli", command, str(file), *options]
    words += [f"--set={key}={value}" for key, value in changes.items()]
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_names_of_runs_are_their_own() -> None:
    assert len({load_recipe(file).run.name for file in RECIPES}) == len(RECIPES) >= 18


STAND_IN = {"model.path": "model", "run.device": "cpu", "run.threads": 1}
DIFFERENT = [file for file in RECIPES if not re.search("8b|1.7b(?!-lora)|(tools|search|verifier)/qwen3-4b", str(file))]
"""The others differ from one of these in the size of the model alone, which the small model replaces."""


def name_of(file: Path) -> str:
    return f"{file.parent.name}-{file.stem}"


@pytest.mark.slow
@pytest.mark.parametrize("file", RECIPES, ids=name_of)
def test_recipe_is_checked(folder: Path, file: Path, windfall: Windfall, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(ROOT)
    changes = [f"--set={key}={value}" for key, value in STAND_IN.items()]
    code, out, err = windfall("train", str(file), "--dry-run", *changes)
    assert (code, "checked" in out) == (0, True), err


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("file", DIFFERENT, ids=name_of)
def test_recipe_runs(folder: Path, file: Path) -> None:
    recipe = load_recipe(file)
    fewer: dict[str, object] = {"run.steps": 2, "rollout.groups": 2, "rollout.group_size": 2, "rollout.max_tokens": 24}
    if recipe.policies:
        fewer["policies.verifier.rollout.max_tokens"] = 600
    call(folder, "train", file, STAND_IN | fewer | {"eval.tasks": 2, "checkpoint.every": 1})
    events = read(folder / "runs" / recipe.run.name / "events.jsonl")
    steps = [e for e in events if (e["kind"], e["name"]) == ("scalar", "step")]
    assert {e["step"] for e in steps} == {1, 2}
    assert sum(e.get("missing", 0) for e in steps) == 0
