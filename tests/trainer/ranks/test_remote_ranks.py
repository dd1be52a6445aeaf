"""Ranks on other machines have no access to the run's folder: rank 0 reads and writes for them."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.ranks.rank_processes import CONTEXT, run_ranks
from tests.support.servers.ports import free_port
from windfall.trainer.ranks import ranks as rank_module
from windfall.trainer.ranks import sharded_file
from windfall.trainer.ranks.ranks import RankLost, TrainerRanks
from windfall.weights.publishing.publish import RankRows

MATRIX = torch.arange(5 * 40, dtype=torch.float32).reshape(40, 5)


def shards(ranks: TrainerRanks, fill: float | None = None) -> dict[str, RankRows]:
    each = -(-40 // ranks.size)
    mine = MATRIX[ranks.rank * each : (ranks.rank + 1) * each]
    mine = mine.clone() if fill is None else torch.full_like(mine, fill)
    return {
        "matrix": RankRows(local=mine, shape=(40, 5), first_row=min(ranks.rank * each, 40)),
        "number": RankRows(local=torch.tensor(4 if fill is None else 0), shape=()),
        "bytes": RankRows(local=torch.tensor([1, 2, 3] if fill is None else [0] * 3, dtype=torch.uint8), shape=(3,)),
    }


def on_machines(ranks: TrainerRanks, of: tuple[int, ...], path: Path) -> TrainerRanks:
    """The same ranks, as if they were on the machines `of`; a remote rank fails if it opens the file."""
    ranks = replace(ranks, machine=of[ranks.rank])
    if ranks.remote:
        sharded_file.os = sharded_file.safe_open = None  # type: ignore[assignment]  # pyright: ignore
    sharded_file.PIECE_BYTES = 64  # many pieces
    return ranks


def write_and_read(ranks: TrainerRanks, of: tuple[int, ...], path: Path) -> bool:
    ranks = on_machines(ranks, of, path)
    sharded_file.write(path, shards(ranks), ranks)
    found = shards(ranks, fill=7)
    sharded_file.read(path, found | {"absent": found["matrix"]}, ranks)
    assert sharded_file.names(path, ranks) == {"matrix", "number", "bytes"}
    return all(torch.equal(found[name].local, shard.local) for name, shard in shards(ranks).items())


@pytest.mark.parametrize("of", [(0, 1), (0, 0, 1, 2)])
def test_remote_ranks_write_and_read_through_rank_0(tmp_path: Path, of: tuple[int, ...]) -> None:
    path = tmp_path / "file"
    assert run_ranks(len(of), write_and_read, of, path) == [True] * len(of)
    found = load_file(path)
    assert torch.equal(found["matrix"], MATRIX)
    assert (found["number"].item(), found["bytes"].tolist()) == (4, [1, 2, 3])


def fail(ranks: TrainerRanks, path: Path, how: str) -> str:
    ranks = on_machines(ranks, (0, 1), path)
    if how == "full" and ranks.first:

        def full(*_: Any) -> int:
            raise OSError(28, "No space left on device")

        sharded_file.os.pwrite = full
    try:
        if how != "shape":
            sharded_file.write(path, shards(ranks), ranks)
        if how == "damaged" and ranks.first:
            path.write_bytes(b"no safetensors file")
        ranks.barrier()
        sharded_file.read(
            path, {"matrix": RankRows(local=torch.zeros(1, 3), shape=(2, 3), first_row=ranks.rank)}, ranks
        )
    except (OSError, ValueError) as e:
        return str(e)
    return ""


@pytest.mark.parametrize(
    ("how", "message"),
    [("full", "No space left"), ("damaged", "header"), ("shape", "No such file"), ("", r"expected \[2, 3\]")],
)
def test_every_rank_learns_of_an_error_of_rank_0(tmp_path: Path, how: str, message: str) -> None:
    for found in run_ranks(2, fail, tmp_path / "file", how):
        assert re.search(message, found, re.IGNORECASE), found


def meet(rank: int, size: int, rendezvous: str, pipe: Any) -> None:
    rank_module.JOIN_S = 3.0
    try:
        ranks = TrainerRanks.join(rank, size, rendezvous, device="cpu", timeout_s=20.0)
        pipe.send(ranks.all_gather(rank))
    except RankLost as e:
        pipe.send(str(e))


def at_once(size: int, calls: list[tuple[int, str]]) -> list[Any]:
    """Ranks of `size` that join as the given numbers at the given places."""
    pipes = [CONTEXT.Pipe() for _ in calls]
    started = [
        CONTEXT.Process(target=meet, args=(*call[:1], size, call[1], pipe[1]), daemon=True)
        for call, pipe in zip(calls, pipes, strict=True)
    ]
    for process in started:
        process.start()
    try:
        return [pipe[0].recv() if pipe[0].poll(30) else "no answer" for pipe in pipes]
    finally:
        for process in started:
            process.kill()


def test_stale_rank_does_not_join_a_later_start() -> None:
    """It has the port of the later start, but the name of an earlier one."""
    at = f"tcp://127.0.0.1:{free_port()}"
    *met, stale = at_once(2, [(0, f"{at}/second"), (1, f"{at}/second"), (1, f"{at}/first")])
    assert met == [[0, 1], [0, 1]]
    assert "not arrived: rank 0" in stale or "waited" in stale


def test_missing_ranks_are_named() -> None:
    began_s = time.monotonic()
    found = at_once(4, [(0, f"tcp://127.0.0.1:{free_port()}/a")])[0]
    assert "for 4 ranks: not arrived: ranks 1, 2, 3" in found
    assert "rank 0 waited 3 s at tcp://127.0.0.1:" in found
    assert time.monotonic() - began_s < 20
