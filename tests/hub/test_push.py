"""`windfall push` with the hub's own client, against a stand-in of the hub's HTTP interface."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.runs.page_run import event, small_log, step
from tests.support.servers import writable_hub
from tests.support.servers.writable_hub import WritableHub
from windfall.models import load
from windfall.recipe.lora import Lora
from windfall.trainer import checkpoint
from windfall.trainer.model import lora
from windfall.training import CheckpointState
from windfall.weights.adapter_folder import AdapterBase, base_digest

Windfall = Callable[..., tuple[int, str, str]]
RECIPE = """
[run]
name = "case"
steps = 9
folder = "/home/someone/runs"
[env]
name = "dataset"
path = "/home/someone/data/train.jsonl"
rewards = ["/home/someone/grade.py:score"]
servers = ["10.1.2.3:9000"]
servers_token = "/home/someone/token"
"""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WritableHub]:
    """The hub that the client finds, with a token of "me" that it uses."""
    import huggingface_hub
    from huggingface_hub import constants

    with writable_hub.serve(tmp_path / "hub", {"mine": "me", "theirs": "them"}) as hub:
        resolve = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        for name, value in (
            ("ENDPOINT", hub.url), ("HUGGINGFACE_CO_URL_TEMPLATE", resolve), ("HF_HUB_DISABLE_XET", True),
            ("HF_HUB_OFFLINE", False),
        ):  # fmt: skip
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setenv("HF_TOKEN", "mine")
        yield hub
        huggingface_hub.close_session()


def save(run: Path, at: int, *, adapter: bool = False) -> Path:
    """A checkpoint of the tiny model, with weights that depend on the step."""
    model = load.load("tiny", dtype="float32", device="cpu")
    how: dict[str, Any] = {"write_model": model.save_pretrained}
    if adapter:
        digest = base_digest(model.state_dict())
        pairs = lora.attach(model, Lora(rank=2), base="tiny", seed=at)
        for layer in pairs.layers.values():
            torch.nn.init.normal_(layer.pair("").b, 0.0, 0.1)
        how = {
            "write_model": pairs.save_pretrained,
            "base": AdapterBase(path="tiny", dtype="float32", digest=digest),
        }
    else:
        with torch.no_grad():
            model.model.norm.weight.add_(at)
    return checkpoint.save(
        run / "checkpoints", CheckpointState(step=at, next_task=0), write_optimizer=checkpoint.no_optimizer, keep=9,
        tokenizer=load.load_tokenizer("tiny"), **how,
    )  # fmt: skip


def write(run: Path, steps: int = 5) -> Path:
    run.mkdir()
    (run / "recipe.toml").write_text(RECIPE)
    before, after = (
        event(t, "scalar", "eval", step=at, reward=reward, graded=8, responses=8, on="8 tasks")
        for t, at, reward in ((3, 0, 0.25), (10 * steps + 4, steps, 0.75))
    )
    log = [{"missing": 0, "lost_tokens": 0, "repeated": 0, "late": 0, **e} for e in small_log(steps)]
    log[0]["versions"] = {"torch": "2.11"}
    late = [step(10 * n + 3, n, reward=0.999) for n in (steps + 1, steps + 2)]
    (run / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in [*log[:1], before, *log[1:], after, *late]))
    return run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = write(tmp_path / "case")
    save(folder, 3)
    save(folder, 5)
    return folder


def card(hub: WritableHub, repo: str = "me/model") -> str:
    return (hub.folder / "models" / repo / "README.md").read_text()


def test_model_and_card_are_pushed_and_can_be_loaded(run: Path, hub: WritableHub, windfall: Windfall) -> None:
    code, out, err = windfall("push", str(run), "me/model")
    assert (code, hub.url in out) == (0, True), err
    assert hub.private == {"me/model": True}
    assert hub.messages == ["Step 5 of case"]
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md", "reward.png"} <= hub.files("me/model")
    folder = hub.folder / "models" / "me" / "model"
    assert (folder / "reward.png").read_bytes().startswith(b"\x89PNG")
    pushed, own = (AutoModelForCausalLM.from_pretrained(p) for p in (folder, run / "checkpoints" / "step-000005"))
    assert all(torch.equal(t, own.state_dict()[name]) for name, t in pushed.state_dict().items())
    text = card(hub)
    for said in (
        "This is step 5 of 9", "0.250 before, 0.750 after, on 8 tasks", "| workers | 3 joined, 1 lost, 0 left |",
        "| cost | $0.06", '"me/model"', "`dataset` with `train.jsonl`", "Trained with torch 2.11.", "grade.py:score",
    ):  # fmt: skip
        assert said in text, text
    for hidden in ("someone", "10.1.2.3", "0.999"):
        assert hidden not in text, text


def test_a_later_step_of_the_same_run_replaces_what_was_pushed(run: Path, hub: WritableHub, windfall: Windfall) -> None:
    assert windfall("push", str(run), "me/model", "--step", "3", "--public")[0] == 0
    assert hub.private == {"me/model": False}
    first = (hub.folder / "models" / "me" / "model" / "model.safetensors").read_bytes()
    (hub.folder / "models" / "me" / "model" / "old.bin").write_text("of an older windfall")
    assert windfall("push", str(run), "me/model")[0] == 0
    assert hub.messages == ["Step 3 of case", "Step 5 of case"]
    assert (hub.folder / "models" / "me" / "model" / "model.safetensors").read_bytes() != first
    assert "old.bin" not in hub.files("me/model")
    code, _, err = windfall("push", str(run), "me/model", "--step", "4")
    assert (code, "There are checkpoints of step 3, 5." in err) == (2, True)


def test_repository_with_other_content_is_refused(
    run: Path, tmp_path: Path, hub: WritableHub, windfall: Windfall
) -> None:
    """What no push wrote, and what a push of another run with the same name wrote."""
    theirs = hub.folder / "models" / "me" / "model"
    theirs.mkdir(parents=True)
    (theirs / "weights.bin").write_text("important")
    code, _, err = windfall("push", str(run), "me/model")
    assert (code, "1 files that windfall did not push, such as weights.bin" in err) == (2, True)
    assert windfall("push", str(run), "me/model", "--overwrite")[0] == 0
    assert "weights.bin" not in hub.files("me/model")
    other = tmp_path / "other"
    shutil.copytree(run, other)
    log = (run / "events.jsonl").read_text()
    (other / "events.jsonl").write_text(log.replace('"t": 1790000000.0', '"t": 1790000001.0', 1))
    code, _, err = windfall("push", str(other), "me/model")
    assert (code, "files of the run case" in err) == (2, True)
    assert len(hub.messages) == 1


def test_interrupted_upload_shows_nothing_and_continues(run: Path, hub: WritableHub, windfall: Windfall) -> None:
    """One connection that is cut is tried again by the client; an upload that is refused ends the push. The next push
    sends only what is missing."""
    cut = list[str]()

    def fail(method: str, path: str) -> int:
        if method != "PUT":
            return 0
        if not cut:
            cut.append(path)
            return -1
        return 410 if path != cut[0] else 0

    hub.fail = fail
    code, _, err = windfall("push", str(run), "me/model")
    assert code == 2
    assert "Give the same command again" in err
    assert hub.files("me/model") == {".gitattributes"}
    sent = {p.name for p in (hub.folder / "lfs").iterdir()}
    assert len(sent) == 1
    hub.fail = lambda method, path: 0
    hub.seen.clear()
    assert windfall("push", str(run), "me/model")[0] == 0
    again = {path.rpartition("/")[2] for method, path in hub.seen if method == "PUT"}
    assert again
    assert not again & sent
    assert "model.safetensors" in hub.files("me/model")


@pytest.mark.parametrize(
    ("token", "repo", "said"),
    [
        ("", "me/model", "there is no token"),
        ("wrong", "me/model", "the hub does not accept the token"),
        ("theirs", "me/model", "the token has no right to write to this repository"),
        ("mine", "model", "Name it as OWNER/NAME"),
        ("mine", "me/mo..del", "Name the repository as OWNER/NAME"),
    ],
)
def test_errors_say_what_to_do(
    run: Path, hub: WritableHub, windfall: Windfall, monkeypatch: pytest.MonkeyPatch, token: str, repo: str, said: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    if not token:
        monkeypatch.delenv("HF_TOKEN")
        monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(run / "no-token"))
    code, _, err = windfall("push", str(run), repo)
    assert (code, said in err) == (2, True), err
    assert not hub.messages
    assert not hub.files("me/model")


def test_folder_that_cannot_be_written_is_named(run: Path, windfall: Windfall) -> None:
    (run / "exports").touch()
    code, _, err = windfall("push", str(run), "me/model", "--dry-run")
    assert code == 2
    assert f"{run}/exports/push-step-000005: cannot write what would be pushed: " in err
    assert "Name another folder with --out." in err


def test_hub_that_cannot_be_reached(
    run: Path, hub: WritableHub, windfall: Windfall, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.fail = lambda method, path: -1
    code, _, err = windfall("push", str(run), "me/model")
    assert (code, "the push did not reach its end" in err, "Is the network there?" in err) == (2, True, True), err
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    code, _, err = windfall("push", str(run), "me/model")
    assert (code, "HF_HUB_OFFLINE" in err) == (2, True)


def test_adapter_is_pushed_with_the_hub_id_of_its_base_or_merged(
    tmp_path: Path, hub: WritableHub, windfall: Windfall, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write(tmp_path / "lora")
    save(run, 5, adapter=True)
    code, _, err = windfall("push", str(run), "me/model")
    assert (code, "the base of this adapter is tiny, which is not on the hub" in err) == (2, True)
    assert windfall("push", str(run), "me/model", "--base", "them/base")[0] == 0
    config = json.loads((hub.folder / "models" / "me" / "model" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "them/base"
    assert "model.safetensors" not in hub.files("me/model")
    assert 'PeftModel.from_pretrained(base, "me/model")' in card(hub)
    assert 'base_model_relation: "adapter"' in card(hub)

    monkeypatch.setattr("windfall.hub.picture.draw", lambda curve, title: None)  # as without matplotlib
    hub.seen.clear()
    code, out, _ = windfall("push", str(run), "me/whole", "--merged", "--dry-run", "--out", str(tmp_path / "out"))
    assert (code, hub.seen, str(tmp_path / "out") in out) == (0, [], True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    expected = load.load(str(run / "checkpoints" / "step-000005"), dtype="float32", device="cpu").state_dict()
    assert all(torch.equal(t, expected[name]) for name, t in merged.items())
    assert "| 5 | 0.0500 |" in (tmp_path / "out" / "README.md").read_text()
    assert not list(run.glob(".push-*"))
