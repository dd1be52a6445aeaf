"""Time to publish one version of the weights from several writer processes that each hold a part of the rows.

    python benchmarks/train/publish_ranks.py                     1, 2 and 4 writers, 1 GiB of bfloat16, about a minute
    python benchmarks/train/publish_ranks.py --device cuda       the rows are on GPUs, with one or more writers on each

The writers are processes of one machine that exchange objects with gloo, as the ranks of a trainer do. All of them
write into the buffers of the first one. Two cases: every element changed since the previous version, so that there is
no delta, and 3 % of the elements changed. It fails if the digest depends on the number of writers. Times are medians
over the versions after the third, when both buffers and the copies on the GPUs exist:

    published   from the call until the version can be pulled, on the slowest rank
    free        until the tensors of a rank may change again, on the slowest rank
    first       the first version, for which memory is allocated and locked
    exchange    the part of `published` that rank 0 spends in exchanges, including the wait for slower ranks
    CPU         seconds of all cores and all ranks together
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from windfall.errors import WindfallError
from windfall.weights.publishing.publish import Publisher, RankRows

ROWS, COLUMNS = 4096, 1024
TIMEOUT_S = 300.0


class GlooRanks:
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.waited_s = rank, size, 0.0

    def all_gather(self, value: Any) -> list[Any]:
        began, values = time.perf_counter(), [None] * self.size
        dist.all_gather_object(values, value)
        self.waited_s += time.perf_counter() - began
        return values


@dataclass(frozen=True, kw_only=True)
class Times:
    """Of one version, in seconds."""

    published: float
    free: float
    exchange: float
    cpu: float
    delta: float  # size, as a share of the full copy; 0 if there is none
    digest: str


def change(tensors: list[torch.Tensor], rows: slice, share: float, version: int) -> None:
    """Change the sign of a share of the elements. The result does not depend on the number of writers."""
    for i, t in enumerate(tensors):
        g = torch.Generator(t.device).manual_seed(version * 100_000 + i)
        if share == 1.0:
            t.neg_()
        else:
            t.mul_(1 - 2 * (torch.rand(ROWS, COLUMNS, generator=g, device=t.device)[rows] < share))


def write(rank: int, size: int, rendezvous: str, mib: int, share: float, versions: int, device: str) -> list[Times]:
    """One writer. Every tensor is made whole, then this rank keeps its rows."""
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    if size > 1:
        limit = timedelta(seconds=TIMEOUT_S)
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=size, timeout=limit)
    ranks = GlooRanks(rank, size)
    rows, out = slice(ROWS * rank // size, ROWS * (rank + 1) // size), []
    count = mib * (1 << 20) // (2 * ROWS * COLUMNS)
    g = torch.Generator(device).manual_seed(0)
    whole = (torch.randn(ROWS, COLUMNS, generator=g, device=device) for _ in range(count))
    local = [t[rows].bfloat16() for t in whole]
    shards = {
        f"layer{i}.weight": RankRows(local=t, shape=(ROWS, COLUMNS), first_row=rows.start) for i, t in enumerate(local)
    }
    publisher = Publisher(ranks=ranks if size > 1 else None)
    for version in range(versions):
        change(local, rows, share, version)
        if device == "cuda":
            torch.cuda.synchronize()
        if size > 1:
            dist.barrier()
        ranks.waited_s, free = 0.0, []
        began, cpu = time.perf_counter(), time.process_time()
        made = publisher.publish(version, shards, copied=lambda s=began, f=free: f.append(time.perf_counter() - s))
        took, cpu = time.perf_counter() - began, time.process_time() - cpu
        blob = publisher.delta and publisher.delta.manifest
        delta = blob.nbytes / made.nbytes if blob else 0.0
        times = {"published": took, "free": free[0], "exchange": ranks.waited_s, "cpu": cpu}
        out.append(Times(**times, delta=delta, digest=made.digest))
    publisher.close()
    if size > 1:
        dist.destroy_process_group()
    return out


def _send(results: Any, rank: int, *args: Any) -> None:
    results.put((rank, write(rank, *args)))


def measure(size: int, mib: int, share: float, versions: int, device: str) -> list[list[Times]]:
    """The times of all ranks, by rank."""
    context = mp.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        args = (size, f"file://{folder}/rendezvous", mib, share, versions, device)
        processes = [context.Process(target=_send, args=(results, rank, *args), daemon=True) for rank in range(size)]
        for p in processes:
            p.start()
        found = dict(results.get(timeout=2 * TIMEOUT_S) for _ in processes)
        for p in processes:
            p.join(30)
    return [found[rank] for rank in range(size)]


def row(times: list[list[Times]], mib: int, size: int, share: float) -> list[str]:
    per_version = list(zip(*times, strict=True))
    published = [max(t.published for t in version) for version in per_version]
    free = [max(t.free for t in version) for version in per_version]
    steady = statistics.median(published[3:])
    exchange = statistics.median(version[0].exchange for version in per_version[3:])
    cpu = statistics.median(sum(t.cpu for t in version) for version in per_version[3:])
    delta = per_version[-1][0].delta
    return [
        f"{share:.0%}", str(size), f"{steady:.3f}", f"{mib * (1 << 20) / steady / 1e9:.1f}",
        f"{statistics.median(free[3:]):.3f}", f"{exchange:.3f}", f"{cpu:.3f}", f"{published[0]:.2f}",
        f"{delta:.1%}" if delta else "none",
    ]  # fmt: skip


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--mib", type=int, default=1024, help="size of the weights, in MiB (a multiple of 8)")
    p.add_argument("--writers", default="1,2,4")
    p.add_argument("--versions", type=int, default=8, help="versions to publish; the first three are not counted")
    p.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    args = p.parse_args()
    out = Console()
    if not out.is_terminal:
        out.width = 130  # do not wrap tables in a log file
    gpus = f", {torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if args.device == "cuda" else ""
    columns = ["changed", "writers", "published, s", "GB/s", "free, s", "exchange, s", "CPU, s", "first, s", "delta"]
    table = Table(*columns, title=f"publish {args.mib} MiB of bfloat16, {os.cpu_count()} cores{gpus}")
    for share in (1.0, 0.03):
        digests = set()
        for size in (int(n) for n in args.writers.split(",")):
            times = measure(size, args.mib, share, max(4, args.versions), args.device)
            digests |= {tuple(t.digest for t in rank) for rank in times}
            table.add_row(*row(times, args.mib, size, share))
        if len(digests) > 1:
            raise WindfallError(f"the digest depends on the number of writers: {digests}", where="benchmark")
    out.print(table)


if __name__ == "__main__":
    main()
