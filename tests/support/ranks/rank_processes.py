"""Runs a function on several gloo ranks, each in its own process, and returns what each of them returned.

The processes are forks of a server that has imported what they need, once: that takes longer than most of their work.
They are not forks of the process that runs the tests, because OpenMP deadlocks in a fork of a process that has used it.
"""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import traceback
from collections.abc import Callable, Collection
from typing import Any

import torch

from windfall.trainer.ranks.ranks import TrainerRanks

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.support.ranks.forked"])
TIMEOUT_S = 240.0


def run_ranks(
    size: int, work: Callable[..., Any], *args: Any, timeout_s: float = 120.0, lost: Collection[int] = ()
) -> list[Any]:
    """`work(ranks, *args)` on every rank. Returns the results in order, without those of ranks that are `lost`. An
    exception of any other rank fails the test. `timeout_s`: of collectives."""
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{folder}/ranks"
        pipes = [CONTEXT.Pipe(duplex=False) for _ in range(size)]
        started = [
            CONTEXT.Process(
                target=_rank, args=(rank, size, meeting, timeout_s, pipes[rank][1], work, args), daemon=True
            )
            for rank in range(size)
        ]
        for process in started:
            process.start()
        out: list[Any] = []
        try:
            for rank, (receiver, _) in enumerate(pipes):
                if rank in lost:
                    continue
                assert receiver.poll(TIMEOUT_S), f"waited {TIMEOUT_S:g} s for the result of rank {rank}"
                done, value = pickle.loads(receiver.recv_bytes())
                assert done, f"rank {rank}: {value}"
                out.append(value)
        finally:
            for process in started:
                process.kill()
                process.join()
        return out


def _rank(
    rank: int, size: int, meeting: str, timeout_s: float, pipe: Any, work: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    try:
        ranks = (
            TrainerRanks.alone()
            if size == 1
            else TrainerRanks.join(rank, size, meeting, device="cpu", timeout_s=timeout_s)
        )
        pipe.send_bytes(pickle.dumps((True, work(ranks, *args))))
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
