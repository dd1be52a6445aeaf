"""Which GPU a process sees, and its matrix library on a CPU: measured at the start, fixed in a deterministic run."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from windfall import devices
from windfall.engine import factory
from windfall.errors import WindfallError
from windfall.link.messages import EngineSpec

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


@pytest.fixture(autouse=True)
def restore_setting() -> Iterator[None]:
    before = torch.backends.mkldnn.enabled
    yield
    torch.backends.mkldnn.enabled = before  # pyright: ignore[reportAttributeAccessIssue]


@needs_onednn
@pytest.mark.parametrize("before", [True, False])
def test_library_depends_on_the_architecture_only(before: bool) -> None:
    torch.backends.mkldnn.enabled = before  # pyright: ignore[reportAttributeAccessIssue]
    used = devices.choose_matmul_library()
    assert used is torch.backends.mkldnn.enabled is (platform.machine() not in ("aarch64", "arm64"))


@needs_onednn
def test_building_an_engine_sets_the_library() -> None:
    fixed = platform.machine() not in ("aarch64", "arm64")
    torch.backends.mkldnn.enabled = not fixed  # pyright: ignore[reportAttributeAccessIssue]
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    spec = EngineSpec(
        model_config=json.dumps({"model_type": "llama", "vocab_size": 50, **shape}), dtype="float32", kv_tokens=64,
        page_size=16, max_running=2, max_rows=64, deterministic=True, longest=32, wanted=2,
    )  # fmt: skip
    factory.build_engine(spec, "cpu")
    assert torch.backends.mkldnn.enabled is fixed


def python(code: str, **environment: str) -> str:
    env = {**os.environ, **environment}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_process_is_restricted_to_one_gpu_before_torch_looks() -> None:
    """Not covered: that CUDA then uses it."""
    code = (
        "import os; from windfall import devices; devices.count_gpus = lambda: 8; "
        "print([devices.restrict('cuda:1') for _ in range(2)], os.environ['CUDA_VISIBLE_DEVICES'], "
        "devices.restrict('cpu'), devices.gpu_places('cuda'))"
    )
    place = devices.Place(device="cuda", gpu="3")
    assert python(code, CUDA_VISIBLE_DEVICES="5,3") == f"['cuda', 'cuda'] 3 cpu [{place}]"


def test_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "count_gpus", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for call in (devices.restrict, devices.gpu_places):
        with pytest.raises(WindfallError, match="no cuda:2: this process sees 2 GPUs") as e:
            call("cuda:2")
        assert e.value.fix == "Use cuda:0 to cuda:1."


def test_places_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.count_gpus("no-such-library.so") == 0
    assert devices.gpu_places("auto", {"CUDA_VISIBLE_DEVICES": "GPU-a"}, installed=0) == []
    assert devices.gpu_places("cpu", {}, installed=4) == []
    assert devices.visible_gpus({"CUDA_VISIBLE_DEVICES": "GPU-a,MIG-b,-1,2"}, installed=4) == ["GPU-a", "MIG-b"]
    assert devices.visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, installed=4) == []
    place = devices.Place(device="cuda", gpu="2")
    assert place.environment({"A": "1", "CUDA_VISIBLE_DEVICES": "0,2"}) == {"A": "1", "CUDA_VISIBLE_DEVICES": "2"}
    assert devices.Place().environment({"A": "1"}) == {"A": "1"}


def test_device_is_named_without_its_memory() -> None:
    assert devices.cuda_device_name("no-such-driver.so") is None
    assert (devices.cuda_device_name() is None) == (not torch.cuda.is_available())
