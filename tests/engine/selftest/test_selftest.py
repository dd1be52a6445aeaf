"""No architecture may be silently wrong: hostile ones are computed like in transformers, or refused with a figure, by
every command that loads a model. Not covered here: a GPU (test_gpu_selftest.py), all families (marker slow)."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_families import families

from tests.support.hostile import models as hostile
from windfall.engine import factory
from windfall.engine.selftest import judge, shrink, verdict
from windfall.engine.torch.adapters import TorchAdapters
from windfall.engine.torch.engine import TorchEngine
from windfall.errors import WindfallError
from windfall.models import load
from windfall.models.attention import Paged
from windfall.recipe.file import load_recipe, parse_recipe
from windfall.run import local_worker
from windfall.trainer import derived, selftest
from windfall.trainer import process as trainer
from windfall.trainer.model.lora import Adapters
from windfall.trainer.ranks.rank_place import RankPlace

ROOT = Path(__file__).parents[3]
ON_CPU: dict[str, Any] = {"device": "cpu"}


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is remembered from other tests."""
    torch.set_num_threads(1)
    monkeypatch.setenv("WINDFALL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(verdict, "_passed", set())


def test_adapters_are_compared_with_merged_models(monkeypatch: pytest.MonkeyPatch) -> None:
    config, how = hostile.ARCHITECTURES["llama"].config(), {"longest": 100, "adapters": True, **ON_CPU}
    make = functools.partial(TorchEngine, adapters=verdict.ADAPTERS, adapter_rank=verdict.ADAPTER_RANK)
    assert judge.judge_engine(config, make, **how).nats < 5e-4
    right = TorchAdapters.hold
    monkeypatch.setattr(TorchAdapters, "hold", lambda self, n, pairs, scale: right(self, n, pairs, 0.8 * scale))
    with pytest.raises(WindfallError, match=r"log-probs differ by .* \(adapter one 0, beside others\)"):
        judge.judge_engine(config, make, **how)


def test_trainer_with_several_adapters_is_compared_with_merged_models(monkeypatch: pytest.MonkeyPatch) -> None:
    config, how = hostile.ARCHITECTURES["llama"].config(), {"longest": 100, "adapters": True, **ON_CPU}
    assert selftest.judge_trainer(config, **how).nats < 5e-4
    monkeypatch.setattr(Adapters, "use", lambda self: setattr(self.active, "name", "one"))
    with pytest.raises(WindfallError, match=r"log-probs differ by .* \(adapter two, beside another\)"):
        selftest.judge_trainer(config, **how)


@pytest.mark.parametrize("name", hostile.ARCHITECTURES)
def test_architecture_is_computed_exactly_or_refused(name: str) -> None:
    a = hostile.ARCHITECTURES[name]
    for judged, refusal, most in (
        (lambda: judge.judge_engine(a.config(), TorchEngine, longest=a.longest, **ON_CPU), a.engine, 5e-4),
        (lambda: selftest.judge_trainer(a.config(), longest=a.longest, **ON_CPU), a.trainer, 5e-4),
    ):
        if refusal is None:
            found = judged()
            assert max(found.nats, found.gradient) < most
        else:
            with pytest.raises(WindfallError, match=refusal) as e:
                judged()
            assert (e.value.where, e.value.fix) == ("model.path", judge.FIX)


def test_missing_cap_and_missing_scale_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-test can fail: with a plain linear head, as in an earlier version, these models would be accepted."""
    from windfall.trainer.model import head

    monkeypatch.setattr(head, "custom_head", lambda model: None)
    for name in ("a final cap", "a logit scale near 1"):
        a = hostile.ARCHITECTURES[name]
        with pytest.raises(WindfallError, match=r"log-probs differ by [\d.]+ nats"):
            selftest.judge_trainer(a.config(), longest=100, **ON_CPU)


def test_router_in_training_mode_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the gradients of some weights are wrong, as in an earlier trainer; each weight is compared separately."""
    from windfall.trainer.model.logprobs import PolicyModule

    monkeypatch.setattr(PolicyModule, "set_training", lambda self, yes: self.model.train(yes))
    a = hostile.ARCHITECTURES["a router that draws numbers in training"]
    torch.manual_seed(2)  # the router draws from torch's own generator, and not every draw changes its choice
    with pytest.raises(WindfallError, match="gradient differs"):
        selftest.judge_trainer(a.config(), longest=100, **ON_CPU)


def test_missing_window_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = Paged.attend
    monkeypatch.setattr(Paged, "attend", lambda self, q, k, v, scale, window: attend(self, q, k, v, scale, None))
    windowed = hostile.Architecture(kind="mixtral", fields={"sliding_window": 4096})
    with pytest.raises(WindfallError, match="nats"):
        judge.judge_engine(windowed.config(), TorchEngine, longest=100, **ON_CPU)


def test_deterministic_experts_are_refused() -> None:
    def make(model: Any, **how: Any) -> Any:
        return TorchEngine(model, **how, deterministic=True)

    how = {"longest": 100, "deterministic": True, **ON_CPU}
    judge.judge_engine(hostile.ARCHITECTURES["llama"].config(), make, **how)
    with pytest.raises(WindfallError, match=r"run.deterministic cannot hold .* experts"):
        judge.judge_engine(hostile.Architecture(kind="mixtral").config(), make, **how)


def test_kv_pool_of_wrong_shape_is_rejected() -> None:
    pool = (torch.zeros(2, 16, 2, 24), torch.zeros(2, 16, 2, 24))
    k = torch.zeros(1, 3, 16)
    with pytest.raises(WindfallError, match="KV cache has"):
        Paged(iter([pool]), torch.zeros(1, dtype=torch.long), []).attend(k, k, k, 1.0, None)
    with pytest.raises(WindfallError, match="KV cache has nothing"):
        Paged(iter([]), torch.zeros(1, dtype=torch.long), []).attend(k, k, k, 1.0, None)


def test_small_models_keep_every_kind_of_layer() -> None:
    from transformers import Gemma3TextConfig

    config_ = Gemma3TextConfig()
    fields = next(shrink.small_configs(config_, longest=100))
    assert set(fields["layer_types"]) == set(config_.layer_types or ())
    assert fields["num_hidden_layers"] == 6
    assert fields["sliding_window"] == shrink.WINDOW
    assert fields["head_dim"] == 256
    assert shrink.same_weight_kinds(["h.0.q", "h.1.moe.w"], ["h.3.q", "h.0.moe.w"])
    assert not shrink.same_weight_kinds(["h.0.q", "h.1.moe.w"], ["h.0.q"])


# every command that loads a model


@pytest.fixture
def bloom(tmp_path: Path) -> Path:
    return hostile.folder("bloom", tmp_path / "bloom")


@pytest.mark.parametrize("command", ["generate", "eval"])
def test_commands_refuse(bloom: Path, here: Path, windfall: Callable[..., tuple[int, str, str]], command: str) -> None:
    rest = {"generate": ["--prompt", "1+1="], "eval": ["--recipe", "small.toml", "--tasks", "2"]}[command]
    code, out, err = windfall(command, str(bloom), *rest)
    assert code == 2
    assert "does not compute bloomforcausallm as transformers does: log-probs differ by" in err.lower()
    assert "docs/models.md" in err
    assert "Traceback" not in err
    assert not out


def test_model_with_only_its_own_attention_is_refused(tmp_path: Path, windfall: Any) -> None:
    code, _, err = windfall("generate", str(hostile.folder("gptj", tmp_path / "gptj")), "--prompt", "1+1=")
    assert code == 2
    assert "cannot build this model with windfall's attention" in err
    assert "Traceback" not in err


def test_trainer_refuses_before_anything_is_started(bloom: Path, here: Path) -> None:
    from windfall import run_folder as folders

    (here / "run").mkdir()
    recipe = load_recipe(here / "small.toml", [f"model.path={json.dumps(str(bloom))}"])
    folders.write_recipe(recipe, here / "run")
    assert trainer.main(here / "run", RankPlace(), local_worker.LocalWorker) == 2
    said = next((here / "run").glob(".*.failure")).read_text()
    assert "does not compute" in said
    assert "nats" in said


@pytest.mark.parametrize(("kind", "said"), [("bloom", "log-probs differ by"), ("mixtral", "run.deterministic cannot")])
def test_worker_refuses_a_model_that_its_engine_computes_wrongly(kind: str, said: str) -> None:
    """The worker measures itself: it was sent no passed checks of the trainer."""
    recipe = parse_recipe({"engine": {"kv_tokens": 512}, "run": {"deterministic": kind == "mixtral"}}, where="here")
    spec = derived.spec(recipe, hostile.Architecture(kind=kind).config(), "float32", 100)
    assert not spec.checked
    with pytest.raises(WindfallError, match=said):
        factory.build_engine(spec, "cpu")


@pytest.mark.slow
def test_the_self_test_takes_two_seconds_and_is_bounded_for_large_models() -> None:
    """CPU time on one core. The large one is Llama 3's 70B, which fits nowhere here."""
    large = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
             "num_key_value_heads": 8, "vocab_size": 128256}  # fmt: skip

    def test_s(tested: Any) -> float:
        began = time.process_time()
        selftest.judge_trainer(tested, longest=100, **ON_CPU)
        judge.judge_engine(tested, TorchEngine, longest=100, **ON_CPU)
        return time.process_time() - began

    demo = load.load("tiny", dtype="float32", device="cpu").config
    assert min(test_s(demo) for _ in range(2)) < 2.0, "the first run includes imports"
    assert test_s(hostile.Architecture(kind="llama", fields=large).config()) < 10.0


def test_damaged_weights_are_refused() -> None:
    model = load.load("tiny", dtype="float32", device="cpu")
    verdict.check_weights(model)
    model.get_output_embeddings().weight.data[5, 7] = float("nan")
    with pytest.raises(WindfallError, match="loaded weights"):
        verdict.check_weights(model)


def test_passed_check_is_remembered_and_sent_to_workers(tmp_path: Path) -> None:
    model = load.load("tiny", dtype="float32", device="cpu")
    recipe = parse_recipe({}, where="here")
    engine = derived.checked(derived.spec(recipe, model.config, "float32", 100), "cpu", model)
    assert derived.fingerprint(engine) == derived.fingerprint(derived.spec(recipe, model.config, "float32", 100))
    assert recipe.rollout.sampling() in engine.samplings  # which an engine may refuse

    def never(*_: object, **__: object) -> Any:
        raise AssertionError("the test was repeated")

    fields = json.loads(engine.model_config)
    how: dict[str, Any] = {"longest": 100, **ON_CPU}
    verdict.check_engine(fields, never, **how)  # by this process
    verdict._passed.clear()
    verdict.check_engine(fields, never, **how)  # by another on this machine
    verdict._passed.clear()
    for file in (tmp_path / "cache" / "checked").iterdir():
        file.unlink()
    verdict.check_engine(fields, never, checked=engine.checked, **how)  # by a worker elsewhere
    verdict._passed.clear()
    with pytest.raises(WindfallError, match="AssertionError: the test was repeated"):
        verdict.check_engine({**fields, "rms_norm_eps": 0.5}, never, checked=engine.checked, **how)


def test_longrope_engine_is_limited_to_the_tested_length() -> None:
    a = hostile.Architecture(kind="phi3", fields=hostile.LONG)
    recipe = parse_recipe({"engine": {"kv_tokens": 8192}}, where="here")
    engine, _ = factory.build_engine(derived.spec(recipe, a.config(), "float32", 100), "cpu")
    assert engine.limit == 4096


@pytest.mark.slow
def test_no_family_is_accepted_and_wrong() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "families.py"), "--verify"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert f"{len(list(families()))} families" in done.stdout
