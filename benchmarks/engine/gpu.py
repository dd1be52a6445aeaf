"""windfall's engine and trainer on a GPU: one table for shapes of Qwen3, random bf16 weights.

    python benchmarks/engine/gpu.py                                 windfall alone: 0.6B and 8B
    python benchmarks/engine/gpu.py --vllm FOLDER                   also vLLM, in FOLDER: about six minutes more,
                                                                    and vLLM as a windfall engine: as much again
    python benchmarks/engine/gpu.py --vllm FOLDER --models 30b-a3b  experts: vLLM, and vLLM as a windfall engine
    python benchmarks/engine/gpu.py --vllm FILE.json                vLLM's figures from an earlier run's --json
    python benchmarks/engine/gpu.py --device cpu --tiny             check that the benchmark itself works

- ready: from the start of a process to its first token; cold: without cached kernels. Weights are random, not pulled
- decode: ms per step through the engine's interface; share: of the time to read weights and KV at 4.3 TB/s
- prefill, rollout, group: tokens/s, all requests at once, temperature 1, no stop tokens; share: of 990 TFLOP/s
- memory: the KV pool freed and allocated again (windfall alone)
- vLLM: its public API, without log-probs and seeds unless the case says so. vLLM engine: VllmEngine, with
  log-probs and seeds; in the column beside it, its speed relative to vLLM
- train, publish: the output of benchmarks/train/gpu.py

gpu_job.py defines the workloads and gpu_measure.py the timing, both the same for every engine. Each model of each
engine has its own process, one after the other, and each figure is printed as soon as it is known.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `benchmarks` is found

from benchmarks.support.gpu_job import MAX_ROWS, MEMORY, SECTIONS, SHAPES, Job
from benchmarks.support.gpu_measure import STARTED, Figure

HERE = Path(__file__).parent
SUPPORT = HERE.parent / "support"
TRAINING = ("train", "publish")


class Report:
    """All figures so far: printed as they arrive, written to a file if there is one, and shown as a table at the
    end."""

    def __init__(self, out: Path | None) -> None:
        self._out, self._began = out, time.perf_counter()
        self._rows: list[tuple[str, str, Figure]] = []
        self._lines: list[str] = []
        self.failed = False

    def add(self, model: str, engine: str, f: Figure) -> None:
        self._rows.append((model, engine, f))
        other = [r for m, e, r in self._rows if m == model and e != engine and (r.what, r.case) == (f.what, f.case)]
        beside = f"   (beside {shown(other[0])})" if other else ""
        self.say(f"{model:<8}{engine:<12}{f.what:<8}{f.case:<48}{shown(f):>20}{beside}   {f.note}".rstrip())

    def say(self, line: str) -> None:
        print(f"{time.perf_counter() - self._began:5.0f} s  {line}", flush=True)
        self._write()

    def line(self, line: str) -> None:
        """Record a line of another benchmark."""
        self._lines.append(line)
        print(f"{'':9}{line}", flush=True)
        self._write()

    def _write(self) -> None:
        if self._out is not None:
            rows = [{"model": m, "engine": e, **asdict(f)} for m, e, f in self._rows]
            self._out.write_text(json.dumps({"figures": rows, "training": self._lines}, indent=1))

    def table(self) -> str:
        """One row per figure: windfall's value and how it compares with vLLM's, vLLM's value, and that of
        VllmEngine and how it compares with vLLM's own."""
        found = {(m, f.what, f.case): {} for m, _, f in self._rows}
        for model, engine, f in self._rows:
            found[model, f.what, f.case][engine] = f
        heads = f"{'windfall':>20}{'':>8}{'vLLM':>20}{'vLLM engine':>20}{'':>8}"
        lines = [f"{'model':<8}{'what':<9}{'case':<48}{heads}", "-" * 141]
        for (model, what, case), by in found.items():
            own, raw, behind = (by.get(name) for name in ("windfall", "vLLM", "vLLM engine"))
            cells = f"{_cell(own)}{_times(own, raw)}{_cell(raw)}{_cell(behind)}{_times(behind, raw)}"
            lines.append(f"{model:<8}{what:<9}{case:<48}{cells}")
        return "\n".join(lines)


def _cell(f: Figure | None) -> str:
    return f"{shown(f) if f else '-':>20}"


def _times(one: Figure | None, other: Figure | None) -> str:
    """How many times as fast `one` is.

    >>> figure = Figure(what="decode", case="batch 1", value=2.0, unit="ms")
    >>> _times(figure, Figure(what="decode", case="batch 1", value=3.0, unit="ms")).strip()
    '1.50 x'
    """
    if one is None or other is None:
        return " " * 8
    times = other.value / one.value if one.unit in ("s", "ms") else one.value / other.value
    return f"{times:.2f} x".rjust(8)


def shown(f: Figure) -> str:
    """
    >>> shown(Figure(what="decode", case="batch 1", value=0.5, unit="ms", share=0.56))
    '0.50 ms (56 %)'
    """
    digits = {"ms": 2, "s": 1}.get(f.unit, 0)
    return f"{f.value:,.{digits}f} {f.unit}" + (f" ({f.share:.0%})".replace("%", " %") if f.share else "")


def run(script: Path, arguments: list[str], env: dict[str, str], timeout_s: float) -> Iterator[str]:
    """The lines of the script's standard output as they arrive. RuntimeError with the end of its log if it fails."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, str(script), *arguments], stdout=subprocess.PIPE, stderr=log, text=True,
            env={**os.environ, **env, STARTED: str(time.time())}, start_new_session=True,
        )  # fmt: skip
        assert process.stdout is not None
        # Also kill the processes that it started: otherwise GPU memory would stay allocated.
        late = threading.Timer(timeout_s, lambda: os.killpg(process.pid, signal.SIGKILL))
        late.start()
        last: list[str] = []
        try:
            for line in process.stdout:
                last = [*last[-8:], line.rstrip()]
                yield line.rstrip()
            process.wait()
        finally:
            late.cancel()
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if process.returncode:
            log.seek(0)
            said = [line for line in last if Figure.parse(line) is None]
            tail = [line[:200] for line in (*said, *re.split(r"[\r\n]+", log.read().strip())[-15:])]
            why = f"stopped after {timeout_s:.0f} s" if process.returncode == -signal.SIGKILL else "failed"
            raise RuntimeError("\n".join([f"{script.name} {why}", *tail]))


def engine(
    report: Report, job: Job, name: str, script: Path, env: dict[str, str], label: str, timeout_s: float
) -> None:
    try:
        for line in run(script, [job.text()], env, timeout_s):
            f = Figure.parse(line)
            if f is not None:
                f = Figure(**{**asdict(f), "case": label}) if f.what == "ready" else f
                report.add(job.model, name, f)
    except RuntimeError as e:
        report.failed = True
        report.say(f"{job.model:<5}{name}: {e}")


def model(report: Report, job: Job, own: bool, vllm: Path | None, timeout_s: float) -> None:
    """All figures of one model. The first process has no kernel cache; a second one, which only gets ready, has it."""
    with tempfile.TemporaryDirectory() as caches:
        ours = {"TRITON_CACHE_DIR": f"{caches}/triton"}
        again = Job(**{**asdict(job), "only": ("ready",)})
        if own and job.config.get("num_experts"):
            report.say(f"{job.model}: windfall's GPU engine does not run experts")
            own = False
        for some, label in ((job, "cold"), (again, "warm")) if own else ():
            if label == "cold" or "ready" in job.only:
                engine(report, some, "windfall", SUPPORT / "gpu_windfall.py", ours, label, timeout_s)
        if vllm is not None:
            names = {
                "VLLM_CACHE_ROOT": "vllm",
                "TORCHINDUCTOR_CACHE_DIR": "inductor",
                "TRITON_CACHE_DIR": "vllm_triton",
            }
            theirs = {name: f"{caches}/{folder}" for name, folder in names.items()}
            theirs["PYTHONPATH"] = str(vllm)
            engine(report, job, "vLLM", HERE / "peers" / "vllm_gpu.py", theirs, "cold", timeout_s)
            engine(report, job, "vLLM engine", SUPPORT / "gpu_vllm_engine.py", theirs, "warm", timeout_s)


def earlier(report: Report, path: Path, models: list[str], only: list[str]) -> None:
    for row in json.loads(path.read_text())["figures"]:
        name, peer = row.pop("model"), row.pop("engine")
        if peer.startswith("vLLM") and name in models and row["what"] in only:
            report.add(name, peer, Figure(**row))


def training(report: Report, only: list[str], timeout_s: float) -> None:
    some = ["--only", only[0]] if len(only) == 1 else []
    try:
        for line in run(HERE.parent / "train" / "gpu.py", some, {}, timeout_s):
            report.line(line)
            for f in trained(line):
                report.add("", "windfall", f)
    except RuntimeError as e:
        report.failed = True
        report.say(str(e))


def trained(line: str) -> list[Figure]:
    """The figures in a line of train_gpu.py.

    >>> [shown(f) for f in trained("0.6B, 8 x 1024: windfall    90.0 ms    91,022 tok/s  42.1%     12 GB")]
    ['91,022 tok/s (42 %)']
    >>> [(f.case, shown(f)) for f in trained("0.6B      115 ms   10.4 GB/s       40 ms     0.9 s  delta 3.1%")]
    [('0.6B', '115.00 ms')]
    """
    found = re.match(r"(.*?)\s+([\d.,]+) ms\s+([\d,]+) tok/s\s+([\d.]+)%", line)
    if found:
        rate, share = float(found[3].replace(",", "")), float(found[4]) / 100
        return [Figure(what="train", case=found[1], value=rate, unit="tok/s", share=share)]
    found = re.match(r"(.*?)\s+([\d.,]+) ms\s+([\d.]+) GB/s(.*)", line)
    if found:
        took_ms = float(found[2].replace(",", ""))
        return [Figure(what="publish", case=found[1], value=took_ms, unit="ms", note=found[4].strip())]
    return []


def options() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--models", default="0.6b,8b", help=f"comma-separated, from {', '.join(SHAPES)}")
    p.add_argument("--only", default=",".join([*SECTIONS, *TRAINING]), help="comma-separated sections; default: all")
    p.add_argument("--quick", action="store_true", help="fewer and smaller cases")
    p.add_argument("--tiny", action="store_true", help="a tiny model and tiny workloads")
    p.add_argument("--device", default="cuda")
    p.add_argument("--vllm", type=Path, help="folder where vLLM is installed, or the JSON file of an earlier run")
    p.add_argument("--vllm-alone", action="store_true", help="skip windfall, to write a JSON file for later runs")
    p.add_argument("--json", type=Path, help="also write the figures to this file, after every one")
    p.add_argument("--max-rows", type=int, default=MAX_ROWS, help="upper limit for windfall's rows per step")
    p.add_argument("--memory", type=float, default=MEMORY, help="share of the GPU's memory for an engine")
    p.add_argument("--timeout-s", type=float, default=300, help="timeout of each process in seconds")
    args = p.parse_args()
    known: tuple[Any, ...] = (*SECTIONS, *TRAINING)
    for what, given, right in (("--only", args.only, known), ("--models", args.models, SHAPES)):
        wrong = sorted(set(given.split(",")) - set(right))
        if wrong:
            p.error(f"{what}: unknown value {', '.join(wrong)}; expected one of: {', '.join(right)}")
    return args


def main() -> None:
    args = options()
    only, models = args.only.split(","), ["tiny"] if args.tiny else args.models.split(",")
    report = Report(args.json)
    folder = args.vllm if args.vllm is not None and args.vllm.is_dir() else None
    if args.vllm is not None and folder is None:
        earlier(report, args.vllm, models, only)
    sections = tuple(s for s in SECTIONS if s in only)
    for name in models if sections else []:
        job = Job(
            model=name, device=args.device, only=sections, quick=args.quick, max_rows=args.max_rows, memory=args.memory
        )
        model(report, job, not args.vllm_alone, folder, args.timeout_s)
    wanted = [s for s in TRAINING if s in only]
    if wanted and args.device == "cuda" and not args.vllm_alone:
        training(report, wanted, args.timeout_s)
    print(f"\n{report.table()}", flush=True)
    report.say("done" + (", with failures" if report.failed else ""))
    sys.exit(report.failed)


if __name__ == "__main__":
    main()
