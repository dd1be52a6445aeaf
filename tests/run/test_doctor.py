"""`windfall doctor`: each lack of a machine is named, with what to do; a machine without one is ready."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from windfall.run.commands import machine
from windfall.run.commands.doctor import GIB, Check, examine
from windfall.run.commands.machine import GpuFacts, MachineFacts, TorchFacts

H200 = GpuFacts(name="NVIDIA H200", memory_bytes=140 * GIB, free_bytes=139 * GIB, capability=(9, 0))
GOOD = MachineFacts(
    python=(3, 11, 7), system="Linux x86_64", cores=8, torch=TorchFacts(version="2.13.0", cuda="13.0", gpus=(H200,),
    nccl="2.27.5"), driver_gpus=1, triton=True, vllm="vllm 0.33.0", vllm_problem="", missing=(), extras=("gym",),
    memory_bytes=64 * GIB, shared_memory_bytes=32 * GIB, disk_bytes=500 * GIB, folder=Path("/work"), writable=True,
    port_error="", address="192.0.2.2", open_files=65536,
)  # fmt: skip
CPU = TorchFacts(version="2.13.0+cpu")


def states(facts: MachineFacts) -> dict[str, Check]:
    return {check.name: check for check in examine(facts)}


def test_machine_without_a_lack() -> None:
    assert {check.state for check in examine(GOOD)} == {"ok"}
    assert states(GOOD)["GPU 0"].found == "NVIDIA H200, 139.0 GiB of 140.0 GiB free, compute capability 9.0"


@pytest.mark.parametrize(
    ("changes", "name", "state", "expected"),
    [
        ({"python": (3, 10, 2)}, "Python", "problem", "3.11 or newer"),
        ({"system": "Darwin arm64"}, "Python", "problem", "Linux"),
        ({"missing": ("aiohttp",)}, "packages", "problem", "missing: aiohttp"),
        ({"torch": TorchFacts(error="No module named 'torch'")}, "torch", "problem", "No module named"),
        ({"torch": CPU, "driver_gpus": 0}, "GPU", "optional", "tiny models"),
        ({"torch": CPU, "driver_gpus": 2}, "GPU", "problem", "built for CPUs"),
        ({"torch": TorchFacts(version="2.13.0", cuda="13.0")}, "GPU", "problem", "the driver is new enough"),
        ({"torch": replace(GOOD.torch, gpus=(replace(H200, capability=(7, 5)),))}, "GPU 0", "problem", "bfloat16"),
        ({"torch": replace(GOOD.torch, gpus=(replace(H200, free_bytes=9 * GIB),))}, "GPU 0", "problem", "nvidia-smi"),
        ({"torch": replace(GOOD.torch, nccl="")}, "NCCL", "optional", "several GPUs"),
        ({"torch": replace(GOOD.torch, gpus=(H200, H200), nccl="")}, "NCCL", "problem", "several GPUs"),
        ({"triton": False}, "triton", "problem", "pip install triton"),
        ({"vllm_problem": "vLLM is not installed"}, "vLLM", "optional", "pip install"),
        ({"memory_bytes": GIB}, "memory", "problem", "needs 3.0 GiB"),
        ({"shared_memory_bytes": 64 << 20}, "shared memory", "problem", "--shm-size"),
        ({"shared_memory_bytes": None}, "shared memory", "problem", "there is no /dev/shm"),
        ({"disk_bytes": GIB}, "disk", "problem", "run.folder"),
        ({"writable": False}, "disk", "problem", "not writable"),
        ({"port_error": "Operation not permitted"}, "ports", "problem", "127.0.0.1"),
        ({"open_files": 1024}, "open files", "problem", "ulimit"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_lack_is_named_with_what_to_do(changes: dict[str, Any], name: str, state: str, expected: str) -> None:
    check = states(replace(GOOD, **changes))[name]
    assert check.state == state
    assert expected in f"{check.found}\n{check.fix}"
    assert check.fix or state == "optional"


def test_command_says_the_same_to_people_and_scripts(
    windfall: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "read", lambda folder: GOOD)
    code, out, _ = windfall("doctor")
    assert (code, "ready" in out) == (0, True)
    monkeypatch.setattr(machine, "read", lambda folder: replace(GOOD, disk_bytes=GIB))
    code, out, _ = windfall("doctor")
    assert (code, "1 problem; see the lines with !!" in out) == (1, True)
    code, out, _ = windfall("doctor", "--json")
    found = json.loads(out)
    assert (code, found["problems"]) == (1, 1)
    assert [check["name"] for check in found["checks"] if check["state"] == "problem"] == ["disk"]


def test_this_machine_is_read(tmp_path: Path) -> None:
    found = machine.read(tmp_path)
    assert found.torch.version
    assert not found.torch.error
    assert found.python == sys.version_info[:3]
    assert not found.missing
    assert not found.port_error


def test_torch_that_hangs_or_fails_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for source, expected in (
        ("import time; time.sleep(60)", "within 1 s"),
        ("raise ImportError('no libcuda')", "no libcuda"),
    ):
        (tmp_path / "torch.py").write_text(source)
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(machine.__file__).parents[3]}")
        timeout_s = 1.0 if "sleep" in source else 60.0
        assert expected in machine.ask_torch(timeout_s).error
