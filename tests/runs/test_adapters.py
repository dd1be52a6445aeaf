"""A run that trains adapters, from end to end, on one rank and on two: workers pull the base once, checkpoints hold
adapters, and the exported model is the base with the adapter merged into it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from windfall.errors import WindfallError
from windfall.events.log import read
from windfall.models import load
from windfall.recipe.lora import Lora
from windfall.run.commands import export
from windfall.trainer.model import lora
from windfall.types import is_local

Windfall = Callable[..., tuple[int, str, str]]
CHANGES = ["rollout.groups=4", "rollout.group_size=4", "rollout.max_tokens=60", "eval.tasks=0", "train.lr=3e-3",
           "checkpoint.every=1", "checkpoint.keep=9", "run.deterministic=true", "fleet.workers=1",
           "train.lora.rank=4"]  # fmt: skip


def adapter(run: Path, step: int) -> bytes:
    return (run / "checkpoints" / f"step-{step:06d}" / "adapter_model.safetensors").read_bytes()


def steps(run: Path) -> list[Any]:
    return [e for e in read(run / "events.jsonl") if e["kind"] == "scalar" and e["name"] == "step"]


@pytest.mark.timeout(400)
@pytest.mark.slow
def test_train_resume_and_export(windfall: Windfall, here: Path) -> None:
    base, run = here / "base", Path("runs/small")
    shutil.copytree(load.TINY, base)
    code, out, err = windfall("train", "small.toml", *(f"--set={c}" for c in [*CHANGES, f"model.path={base}"]))
    assert (code, err) == (0, "")
    assert "0.8 M parameters, 0.04 M in adapters of rank 4" in out
    assert all(e["weights_bytes"] for e in steps(run))
    check_bytes(run)

    # Without its last step, the run is continued to the same bits.
    cut = Path("runs/cut")
    shutil.copytree(run, cut)
    shutil.rmtree(cut / "checkpoints" / "step-000002")
    shutil.rmtree(cut / "journal")
    assert windfall("resume", str(cut))[0] == 0
    assert adapter(cut, 2) == adapter(run, 2) != adapter(run, 1)
    assert steps(cut)[-1]["grad_norm"] == steps(run)[-1]["grad_norm"] > 0

    for change, expected in (("train.lora.rank=8", "train.lora.rank: 4 -> 8. The checkpoints of the run hold adapters"),
                             ("train.lora.alpha=1.0", "train.lora.alpha: None -> 1.0")):  # fmt: skip
        code, _, err = windfall("resume", str(run), "--set", change, "--set", "run.steps=3")
        assert code == 2
        assert expected in err
    check_export(windfall, run, base)

    damage(base / "model.safetensors")
    with pytest.raises(WindfallError, match="are not those that this adapter was trained with"):
        export.export(run, here / "other")
    assert not (here / "other").exists()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_train_on_two_ranks_and_continue_on_one(windfall: Windfall, here: Path) -> None:
    """Also of head and embeddings, which are one matrix in the base."""
    targets = "train.lora.targets=['q_proj', 'down_proj', 'lm_head', 'embed_tokens']"
    run, changes = Path("runs/small"), [*CHANGES, "train.lora.rank=8", "train.ranks=2", targets]
    code, out, err = windfall("train", "small.toml", *(f"--set={c}" for c in changes))
    assert (code, err) == (0, "")
    assert "adapters of rank 8" in out
    check_bytes(run)
    assert all(e["grad_norm"] > 0 for e in steps(run))
    assert adapter(run, 2) != adapter(run, 1)
    code, _, err = windfall("resume", str(run), "--set=train.ranks=1", "--set=run.steps=3")
    assert (code, err) == (0, "")
    assert [e["step"] for e in steps(run)] == [1, 2, 3]
    assert steps(run)[-1]["grad_norm"] > 0
    assert adapter(run, 3) != adapter(run, 2)
    assert windfall("export", str(run))[0] == 0


def check_bytes(run: Path) -> None:
    """The base is pulled once; an update is only the adapter. Engine and trainer agree."""
    base = sum(t.numel() * 4 for t in load_file(str(load.TINY / "model.safetensors")).values())
    size = sum(
        t.numel() * 4 for t in load_file(str(run / "checkpoints/step-000001/adapter_model.safetensors")).values()
    )
    assert all(0 < e["weights_bytes"] <= size + 4096 for e in steps(run))
    assert all(e["engine_gap"] < 1e-5 for e in steps(run))
    ready = [e for e in read(run / "events.jsonl") if e["name"] == "worker_ready"]
    pulled = [e["bytes"] for e in ready if not is_local(e["worker"])]
    assert pulled[0] > base
    assert all(n < size + 32_768 for n in pulled[1:])
    assert len(pulled) > 1
    assert {p.name for p in (run / "checkpoints" / "step-000002").iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "tokenizer_config.json", "windfall",
    }  # fmt: skip


def check_export(windfall: Windfall, run: Path, base: Path) -> None:
    """The exported model has the logits of base and adapter, and the same answers as the checkpoint."""
    code, out, _ = windfall("export", str(run))
    assert code == 0
    folder = run / "exports" / "step-000002"
    assert f"wrote {folder.absolute()}: {base} with the adapter" in out
    code, _, err = windfall("export", str(run))
    assert code == 2
    assert "this already exists" in err
    ids = torch.tensor([[1, 5, 9, 14, 22, 31]])
    merged = AutoModelForCausalLM.from_pretrained(folder)
    model = load.load(str(base), dtype="float32", device="cpu")
    lora.attach(model, Lora(path=run / "checkpoints" / "step-000002"), base="", seed=0)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        assert torch.allclose(merged(ids).logits, model(ids).logits, atol=1e-4)
        plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        assert not torch.allclose(merged(ids).logits, plain(ids).logits, atol=1e-2)
    said = [windfall("generate", str(m), "--prompt", "12+34-5+8=", "--max-tokens", "20")[1] for m in (run, folder)]
    assert said[0] == said[1] != ""


def damage(path: Path) -> None:
    tensors = load_file(str(path))
    tensors["model.norm.weight"] += 1.0
    save_file(tensors, str(path), metadata={"format": "pt"})


def test_export_copies_a_checkpoint_of_all_weights(tmp_path: Path) -> None:
    """Newest intact checkpoint; the state of the run is left out; a failure leaves nothing behind."""
    from windfall.recipe.sections import Train
    from windfall.trainer import checkpoint
    from windfall.trainer.model.gradients import trained
    from windfall.trainer.optimizer import Optimizer
    from windfall.trainer.ranks import sharded_file
    from windfall.trainer.ranks.ranks import TrainerRanks
    from windfall.training import CheckpointState

    model = load.load("tiny", dtype="float32", device="cpu")
    optimizer = Optimizer(trained(model), Train(), 1)
    how: dict[str, Any] = {
        "write_model": model.save_pretrained, "tokenizer": load.load_tokenizer("tiny"), "keep": 9,
        "write_optimizer": lambda path: sharded_file.write(path, optimizer.state(), TrainerRanks.alone()),
    }  # fmt: skip
    for step in (1, 2):
        checkpoint.save(tmp_path / "run" / "checkpoints", CheckpointState(step=step, next_task=0), **how)
    (tmp_path / "run" / "recipe.toml").write_text("")
    newest = tmp_path / "run" / "checkpoints" / "step-000002" / "model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    with pytest.raises(WindfallError, match=r"step-000002/model.safetensors: damaged: it has"):
        export.export(tmp_path / "run", tmp_path / "out")
    shutil.rmtree(newest.parent)
    made = export.export(tmp_path / "run", tmp_path / "out")
    assert made.source.name == "step-000001"
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(t, back.state_dict()[n]) for n, t in model.state_dict().items())
    assert not (tmp_path / "out" / "windfall").exists()
    with pytest.raises(WindfallError, match="this already exists"):
        export.export(tmp_path / "run", tmp_path / "out")
    with pytest.raises(WindfallError, match="nothing to export here"):
        export.export(tmp_path / "out", tmp_path / "more")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "run"]


def test_export_of_an_adapter_that_peft_wrote_is_in_the_dtype_of_its_base(tmp_path: Path) -> None:
    model = load.load("tiny", dtype="float32", device="cpu")
    lora.attach(model, Lora(rank=2), base="tiny", seed=0).save_pretrained(tmp_path / "mine")
    made = export.export(tmp_path / "mine", None)
    assert made.folder == tmp_path / "mine-merged"
    stored = json.loads((load.TINY / "config.json").read_text())["dtype"]
    assert json.loads((made.folder / "config.json").read_text())["dtype"] == stored
