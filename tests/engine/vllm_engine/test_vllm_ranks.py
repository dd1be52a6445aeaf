"""A tensor-parallel engine on the CPU: two ranks in processes of their own, which read one buffer and end with the
worker. Not covered: GPUs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]
SCRIPT = """
import sys
sys.path.insert(0, {root!r})
import torch
if __name__ == "__main__":
    torch.set_num_threads(1)
    from tests.support.engines import vllm_case
    from tests.support.engines.small_models import drain, logprobs, requests, tokens
    from windfall.weights.shared import BufferTensors, TensorFile
    from windfall.engine.vllm import factory as vllm_factory
    models = vllm_case.versions("llama", 2)
    spec = vllm_case.spec_of(models[0])
    e = vllm_factory.build(spec, vllm_case.DEVICE, tensor_parallel=2, eager=True)[0]
    assert e.capabilities.tensor_parallel == 2
    e.swap(0, models[0].state_dict())  # these are in no buffer yet
    file = TensorFile(models[1].state_dict())
    e.swap(1, BufferTensors(models[1].state_dict(), file.shared))
    worst = 0.0
    asked = requests(6, longest=12)
    made = drain(e, asked)
    for r in asked:
        said = tokens(made[r.id])
        with torch.no_grad():
            logits = models[1](torch.tensor([[*r.prompt, *said]])).logits[0, len(r.prompt) - 1 : -1]
        oracle = torch.log_softmax(logits, -1)[torch.arange(len(said)), said]
        worst = max(worst, (torch.tensor(logprobs(made[r.id])) - oracle).abs().max().item())
    print("worst", worst, *e.rank_pids, flush=True)
    sys.stdin.read()
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.timeout(280)
@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_ranks_read_one_buffer_and_end_with_the_worker(tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(SCRIPT.format(root=str(ROOT)))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (tmp_path / "errors").open("w") as errors:
        worker = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
            env=environment,
        )  # fmt: skip
        assert worker.stdout is not None
        line = next((line for line in worker.stdout if line.startswith("worst")), "")
        assert line, (tmp_path / "errors").read_text()[-3000:]
        _, worst, *pids = line.split()
        assert float(worst) < 1e-4
        ranks = [int(pid) for pid in pids]
        assert len(set(ranks) - {worker.pid}) == 2
        assert all(map(alive, ranks))
        worker.send_signal(signal.SIGKILL)
        worker.wait()
        deadline = time.monotonic() + 20
        while any(map(alive, ranks)):
            assert time.monotonic() < deadline, "a rank outlived its worker"
            time.sleep(0.1)
