"""Nobody holds the whole: two machines of a trainer have every other chunk, and a worker some of both."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.support.weights.held_bytes import held
from tests.support.weights.weight_shelves import KEY, load_for
from windfall.weights.held_files import HeldFile, HeldFiles
from windfall.weights.pulling.pull import Puller
from windfall.weights.ranges import normal, size
from windfall.weights.serve import serve_in_thread


@pytest.mark.parametrize("worker", [[], [2, 3], [0, 5, 6, 7, 20]])
def test_a_reader_gets_each_part_from_a_holder_of_that_part(worker: list[int]) -> None:
    """`worker`: the chunks that a worker has, which cannot be read from the trainer any more."""
    whole = held()
    chunks = list(pairwise(whole.manifest.bounds()))
    by_trainer = [[i for i in range(first, len(chunks), 2) if i not in worker] for first in range(2)]
    parts = [normal(chunks[i] for i in mine) for mine in (*by_trainer, worker) if mine]
    holders, servers = {}, []
    for ranges in parts:
        files = HeldFiles()
        files.add(HeldFile(whole.manifest, whole.buffer, ranges=ranges, filled=True))
        servers.append(serve_in_thread(files, host="127.0.0.1", port=0, key=KEY))
        holders[f"http://127.0.0.1:{servers[-1].port}"] = files.describe()
    reader = Puller(key=KEY)
    used = reader.pull(load_for(whole.manifest, "", holders)).used
    assert bytes(reader.tensors()["w"].numpy()) == bytes(whole.buffer.data)
    sent = sorted(use.bytes for use in used if use.bytes)
    assert len(sent) == len(parts)
    assert sum(sent) == whole.manifest.nbytes + len(whole.manifest.encode())
    assert sent[0] <= min(map(size, parts)) + len(whole.manifest.encode())
    for server in servers:
        server.close()
