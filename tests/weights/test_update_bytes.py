"""The size of an update, as reported: what a worker with the previous version really pulls, from all machines."""

from __future__ import annotations

import pytest
import torch

from tests.support.weight_writers import KEY, State, Writers, shards
from windfall.weights.pull import Puller


def sizes(state: State) -> tuple[int, int]:
    """The update as reported, and the delta of this machine."""
    newest = state.publisher.readable[0]
    return newest.update_bytes, newest.delta.nbytes if newest.delta else 0


def pulled(puller: Puller, writers: Writers, version: int, digest: str) -> int:
    before = puller.bytes_received
    puller.pull(writers.urls[0], version, digest)
    return puller.bytes_received - before


@pytest.mark.parametrize("machines", [[0], [0, 0, 0], [0, 0, 1], [0, 1, 2]])
def test_update_is_the_sum_over_machines(machines: list[int]) -> None:
    with Writers(len(machines), machines=machines) as writers:
        puller = Puller(key=KEY, timeout_s=60)
        for version, (seed, share) in enumerate([(1, 1.0), (2, 0.02), (3, 0.02), (4, 1.0)]):
            manifest = writers.publish(version, seed, share)[0]["manifest"]
            received = pulled(puller, writers, version, manifest.digest)
            reported, deltas = zip(*writers.all(sizes), strict=True)
            assert set(reported) == {sum(deltas) or manifest.nbytes}
            assert (sum(deltas) > 0) == (version == 2)  # version 1 differs from version 0 almost everywhere
            assert reported[0] == pytest.approx(received, rel=0.1), "the rest are manifests"


def publish_half(state: State, version: int) -> str:
    """Of 2000 rows, the last 1000 change in every version."""
    rows = torch.zeros(2000, 500)
    rows[1000:] = torch.randn(1000, 500, generator=torch.Generator().manual_seed(version))
    mine = shards({"rows": rows}, state.ranks.rank, state.ranks.size)
    return state.publisher.publish(version, mine).digest


def test_machine_without_a_delta_counts_with_all_its_rows() -> None:
    with Writers(2, machines=[0, 1]) as writers:
        puller = Puller(key=KEY, timeout_s=60)
        for version in range(2):
            digest = writers.all(publish_half, version)[0]
            received = pulled(puller, writers, version, digest)
        (reported, first), (_, second) = writers.all(sizes)
        assert 0 < first < 10_000
        assert second == 0
        assert reported == 1000 * 500 * 4 + first
        assert reported == pytest.approx(received, rel=0.1)
