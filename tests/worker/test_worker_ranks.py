"""Workers whose engine spans several GPUs: what is refused before the start, what they cost, which memory they need."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from windfall.controller.cost import prices
from windfall.engine.vllm import factory as vllm_factory
from windfall.errors import WindfallError
from windfall.providers.kubernetes.section import Kubernetes
from windfall.providers.ray.section import Ray
from windfall.providers.skypilot.section import SkyPilot
from windfall.providers.slurm.section import Slurm
from windfall.types import Lease
from windfall.worker import process as worker


@pytest.mark.parametrize(
    ("device", "engine", "seen", "why"),
    [
        ("cuda:1", "vllm", 8, "cuda:1 is one GPU"),
        ("cuda", "auto", 1, "sees 1 GPUs"),
        ("auto", "windfall", 8, "runs on one device"),
        ("auto", "auto", 2, None),
        ("auto", "vllm", 0, None),
        ("cpu", "vllm", 0, None),
    ],
)
def test_ranks_need_as_many_gpus(
    monkeypatch: pytest.MonkeyPatch, device: str, engine: Any, seen: int, why: str | None
) -> None:
    monkeypatch.setattr(worker, "visible_gpus", lambda environment: [str(n) for n in range(seen)])
    if why is None:
        worker.check_ranks(device, engine, 2)
    else:
        with pytest.raises(WindfallError, match=why):
            worker.check_ranks(device, engine, 2)


@pytest.mark.parametrize(("engine", "ranks", "vllm"), [("auto", 4, True), ("vllm", 1, True), ("auto", 1, False)])
def test_several_ranks_need_vllm(monkeypatch: pytest.MonkeyPatch, engine: Any, ranks: int, vllm: bool) -> None:
    class Started(Exception):
        pass

    def start(*_: object, **__: object) -> None:
        raise Started

    checked: list[str] = []
    monkeypatch.setattr(worker, "ControllerClient", start)
    monkeypatch.setattr(worker.installed, "check", checked.append)
    with pytest.raises(Started):
        worker.main(
            "http://localhost:1", "0" * 64, name="w", kind="spot", device="cpu", region="", price_usd_per_h=0.0,
            threads=0, share=0.4, clouds="none", ca=None, patience_s=1.0, engine=engine, tensor_parallel=ranks,
        )  # fmt: skip
    assert checked == (["cpu"] if vllm else [])


def test_worker_is_billed_for_all_its_gpus() -> None:
    one, four = (prices.of(Lease(device=worker.devices_held("NVIDIA H200", n))).usd_per_h for n in (1, 4))
    assert four == pytest.approx(4 * one)


@pytest.mark.parametrize(("ranks", "heads"), [(1, 2), (2, 1), (8, 1)])
def test_a_rank_holds_at_least_one_head(ranks: int, heads: int) -> None:
    config = SimpleNamespace(num_key_value_heads=2, num_attention_heads=8, head_dim=64, num_hidden_layers=3)
    assert vllm_factory.cache_bytes(config, "bfloat16", ranks) == 2 * 3 * heads * 64 * 2


@pytest.mark.parametrize(
    ("section", "values", "enough"),
    [
        (Ray, {"gpus": 1}, {"gpus": 2}),
        (Kubernetes, {"image": "x", "gpus": 1}, {"image": "x", "gpus": 4}),
        (SkyPilot, {"accelerators": ["H100:2", "H200"]}, {"accelerators": "H100:2"}),
        (SkyPilot, {}, {"device": "cpu"}),
        (Slurm, {"gpus": "h100:1"}, {"gpus": "h100:2"}),
    ],
)
def test_source_gives_each_worker_enough_gpus(section: Any, values: dict[str, Any], enough: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="needs as many GPUs"):
        section(**values, tensor_parallel=2)
    assert section(**enough, tensor_parallel=2).tensor_parallel == 2
