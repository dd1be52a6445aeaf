"""The cost of the GPU engine's host side: planning, uploads and chunks, with a simulated device that takes no time.

    python benchmarks/engine/host.py

Prints the host's microseconds per decode step and per token. A decode step of a small model takes some milliseconds on
a GPU; the host should need less than half of that. It needs no GPU, and does not measure kernel launches.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from windfall.engine.cuda.device import prefill_arrays
from windfall.engine.cuda.engine import GraphEngine
from windfall.engine.cuda.graphs import PrefillKey, prefill_rows
from windfall.engine.cuda.host_state import HostState
from windfall.engine.scheduler import Launch
from windfall.types import Request


@dataclass
class FinishedLaunch:
    work: Launch
    versions: Mapping[str, int]
    tokens: np.ndarray

    def wait(self) -> tuple[np.ndarray, np.ndarray]:
        return self.tokens, np.zeros(self.tokens.shape, np.float32)

    def device_s(self) -> float:
        return 0.0


TILE = 64  # rows of a tile


class InstantDevice:
    """Replaces the engine's `DeviceRunner`: every response consists of token 7."""

    def __init__(self, host_state: HostState) -> None:
        self.host_state, self.left = host_state, np.zeros(host_state.slots, np.int64)
        self.pool = SimpleNamespace(data=True)
        self.sent_words = 0

    def launch(self, work: Launch, versions: Mapping[str, int]) -> FinishedLaunch:
        rows = sum(p.stop - p.start for p in work.prefill)
        key = PrefillKey(prefill_rows(rows), TILE, prefill_rows(rows) // TILE + len(work.prefill))
        prefill = prefill_arrays(work.prefill, key, TILE, self.host_state.slots) if rows else []
        arrays = [*self.host_state.take_changes(), *prefill]
        self.sent_words += sum(len(a) for a in arrays)
        np.concatenate(arrays)
        tokens = np.full((1 + work.steps, self.host_state.slots), 7)
        for p in work.prefill:
            self.left[p.sequence.slot] = p.sequence.request.max_tokens - p.samples
        if work.steps:
            self.host_state.set_rows(work.slots, len(work.slots))
            going = np.arange(work.steps)[:, None] < self.left[work.slots]
            tokens[1:, : len(work.slots)] = np.where(going, 7, -1)
            self.left[work.slots] -= going.sum(0)
        return FinishedLaunch(work, versions, tokens)


def measure(model: Any, rows: int, prompt: int, most: int, siblings: int) -> None:
    longest = prompt + 2 * most
    engine = GraphEngine(
        model, kv_tokens=rows * longest, max_running=rows, max_rows=8192, longest=longest, ops=SimpleNamespace()
    )
    host_state = engine._scheduler.host_state
    assert host_state is not None
    device: Any = InstantDevice(host_state)
    engine._device = device
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(3, 100, prompt).tolist()) for _ in range(rows // siblings)]
    started = time.perf_counter()
    for n in range(rows):
        most_here = int(most * (0.5 + n / rows))
        engine.add(Request(id=str(n), prompt=prompts[n // siblings], seed=n, max_tokens=most_here))
    added, made, begun = time.perf_counter() - started, 0, 0.0
    while len(engine):
        made += sum(len(c.tokens) for c in engine.step())
        begun = begun or time.perf_counter() - started
    took = time.perf_counter() - started
    steps = engine.counters.steps
    print(
        f"{rows:5d} rows, {siblings} siblings: {1e6 * took / made:6.2f} us/token  {1e6 * took / steps:7.1f} us/step  "
        f"first launch {1e3 * begun:5.1f} ms (adding requests: {1e3 * added:.1f})  "
        f"{device.sent_words / made:.2f} words/token"
    )


def main() -> None:
    torch.set_num_threads(1)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=128, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    )
    for rows in (16, 64, 256, 512):
        measure(model, rows, 128, 256, 1)
    measure(model, 512, 512, 600, 8)


if __name__ == "__main__":
    main()
