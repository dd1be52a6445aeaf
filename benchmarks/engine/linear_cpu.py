"""CPU time of linear layers with a module's own weights and with the engine's copies of them, by number of rows.

    python benchmarks/engine/linear_cpu.py      one thread, float32, the layers of 16 blocks of SmolLM2-135M's shape

The weights are random and do not fit into a cache, as in a decode step. The two kinds alternate; the best of 4 counts.
"""

from __future__ import annotations

import time

import torch
from torch import nn

from windfall.engine.torch.prepacked import prepacked

BLOCKS = 16
SHAPES = ((576, 576), (576, 192), (576, 192), (576, 576), (576, 1536), (576, 1536), (1536, 576))


def cpu_ms(layers: nn.ModuleList, rows: int) -> float:
    inputs = [torch.randn(rows, size) for size, _ in SHAPES] * BLOCKS
    began_s = time.thread_time()
    for layer, x in zip(layers, inputs, strict=True):
        layer(x)
    return (time.thread_time() - began_s) * 1e3


@torch.inference_mode()
def main() -> None:
    torch.set_num_threads(1)
    layers = nn.ModuleList([nn.Linear(*shape, bias=False) for _ in range(BLOCKS) for shape in SHAPES])
    copies = prepacked(layers)
    print(f"{'rows':>5}{'own weights':>14}{'copies':>9}   CPU ms")
    for rows in (2, 4, 8, 16, 32, 64, 96, 128):
        own_ms, copied_ms = [], []
        for _ in range(4):
            own_ms.append(cpu_ms(layers, rows))
            copied_ms.append(cpu_ms(copies, rows))
        print(f"{rows:5}{min(own_ms):14.1f}{min(copied_ms):9.1f}", flush=True)


if __name__ == "__main__":
    main()
