"""Wrong options, cluster files and price lists are refused with what is wrong, where, and how to put it right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from windfall.errors import WindfallError
from windfall.plan import command

H100 = "[[machine]]\ngpu = 'H100'\ncount = 8\n"
X1 = "[[device]]\nname = 'X1'\nmemory_gb = 64\nbandwidth_gb_per_s = 1600\ntflops = 200\nlink_gb_per_s = 50\n"


def plan(what: str = "8B", **keys: Any) -> None:
    options: dict[str, Any] = {
        "cluster": None, "gpus": "", "budget": "", "objective": "throughput", "deadline": 0.0,
        "staleness": None, "spot": None, "measured_in": None, "top": 2, "simulate": False, "write": None,
    }  # fmt: skip
    command.main(what, **{**options, **keys})


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ({"gpus": "1xL40S"}, "can train this model"),
        ({"gpus": "8xL4", "what": "32B"}, "can train this model"),
        ({"gpus": "8xH1OO"}, "unknown GPU 'H1OO'"),
        ({"gpus": "4x8xH100:spot"}, "can be taken away"),
        ({"gpus": "many"}, "cannot parse"),
        ({"budget": "0/h"}, "not a budget"),
        ({"budget": "0.1/h"}, "buys no GPU"),
        ({"gpus": "16xH100", "budget": "7/h"}, r"is not enough: the cheapest plan costs \$7.36"),
        ({}, "nothing says which GPUs"),
        ({"gpus": "8xH100", "objective": "deadline"}, "needs a time"),
        ({"gpus": "8xH100", "objective": "deadline", "deadline": 0.001}, "not possible"),
        ({"gpus": "8xH100", "what": "9000B"}, "not known"),
        ({"cluster": Path("nowhere.toml")}, "no such cluster file"),
        ({"cluster": Path(__file__).parent}, "cannot read it: Is a directory"),
        ({"gpus": "8xH100", "deadline": 3.0}, "the objective throughput has no deadline"),
        ({"gpus": "8xH100", "write": Path("no/folder/planned.toml")}, "no such folder"),
        ({"gpus": "8xH100", "write": Path(__file__).parent}, "this is a folder"),
    ],
)
def test_bad_options_are_explained(keys: dict, what: str) -> None:
    with pytest.raises(WindfallError, match=what):
        plan(**keys)


def test_one_gpu_without_room_for_both_says_what_would_help() -> None:
    with pytest.raises(WindfallError, match="beside 140 GB of training state and weights on each H200") as raised:
        plan("32B", gpus="1xH200", overrides=["train.lora.rank=16"])
    assert (
        "the trainer's own engine needs 2.2 GB for one response of 8,448 tokens; 124 GB can be used"
        in raised.value.what
    )
    assert raised.value.fix == "Add a GPU that generates; or lower rollout.max_tokens."


@pytest.mark.parametrize(
    ("gpus", "model", "reason", "fix"),
    [
        ("2xL4", "32B", "can train this model: training on 2 L4: the trainer's state", "more memory"),
        ("8xH100:borrowed", "8B", "can be taken away, so it cannot train", "Add a reserved machine"),
        ("8x8xL40S", "32B", "can generate this model: an engine on 1 L40S needs", "vllm"),
    ],
)
def test_reason_and_fix_are_those_of_the_part_that_does_not_fit(gpus: str, model: str, reason: str, fix: str) -> None:
    with pytest.raises(WindfallError, match=reason) as raised:
        plan(model, gpus=gpus)
    assert fix in str(raised.value)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "no machines"),
        ("[[machine]]\n", "'gpu' is missing"),
        ("[[machine]]\ngpu = 5\n", "gpu is 5"),
        ("[[machine]]\ngpu = 'H1000'\n", "c.toml: unknown GPU"),
        ("[[machine]]\ngpus = 'H100'\n", "Did you mean 'gpu'"),
        (f"{X1}worker = {{ fixed = 1.0 }}\n", "device, worker, fixed: unknown key 'fixed'"),
        (f"{X1}worker = {{ each_s = 1.0 }}\n", "device, worker: 'fixed_s' is missing"),
        (f"links = 3\n{H100}", "'links' is not a table"),
        (f"{H100}address = 7\n", "address is 7"),
        (f"{H100}price_usd_per_gpu_h = -2\n", "price_usd_per_gpu_h is -2"),
        (f"{H100}machines = 1000000000\n", "8,000,000,000 GPUs"),
        ("[[machine]\n", "not valid TOML"),
    ],
)
def test_bad_cluster_files_are_explained(text: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.toml").write_text(text)
    with pytest.raises(WindfallError, match=what):
        plan(cluster=Path("c.toml"))


def test_a_recipe_is_not_overwritten_by_its_plan(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("[model]\npath = 'tiny'\n")
    with pytest.raises(WindfallError, match="the recipe itself"):
        plan(str(recipe), gpus="8xH100", write=tmp_path / "." / "recipe.toml")


def test_runs_without_their_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(WindfallError, match="no such run"):
        command.check(tmp_path / "none")
    with pytest.raises(WindfallError, match=r"has no recipe.toml"):
        command.check(tmp_path)
    (tmp_path / "recipe.toml").write_text("[plan]\nname = 'a plan'\n")
    with pytest.raises(WindfallError, match=r"has no events.jsonl"):
        command.check(tmp_path)
    (tmp_path / "events.jsonl").write_bytes(b'{"t":1,"na')
    with pytest.raises(WindfallError, match="no step of this run is complete"):
        command.check(tmp_path)
