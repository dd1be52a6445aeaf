"""Readers that need only some slices of the tensors: each reads the chunks that these touch, from whoever has them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.support.weight_shelves import CHUNK, KEY, load_for
from windfall.link.messages import Ranges
from windfall.weights.buffers import Buffer
from windfall.weights.held_files import HeldFile, HeldFiles
from windfall.weights.manifest import Manifest, hash_chunk, layout, make
from windfall.weights.pull import Puller
from windfall.weights.serve import RunningServer, serve_in_thread
from windfall.weights.slices import chunk_ranges, layout_ranges, normal, size, tensor_parallel

SHAPES = {"embed": (600, 256), "up": (1024, 128), "down": (128, 1024), "norm": (128,)}
DIMS = {"embed": 0, "up": 0, "down": 1}
"""Split by rows, and, as the last matrix of a layer, by columns."""


def model() -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape, generator=torch.Generator().manual_seed(1)) for name, shape in SHAPES.items()}


class Machine:
    """A machine of the trainer, which has some chunks of the weights."""

    def __init__(self, made: Manifest, data: np.ndarray, ranges: Ranges) -> None:
        self.files, buffer = HeldFiles(), Buffer(made.nbytes, used=ranges)
        for start, stop in ranges:
            buffer.data[start:stop] = data[start:stop]
        self.files.add(HeldFile(made, buffer, ranges=ranges, filled=True))
        self.server = serve_in_thread(self.files, host="127.0.0.1", port=0, key=KEY)
        self.url = url(self.server)


def url(server: RunningServer) -> str:
    return f"http://127.0.0.1:{server.port}"


@pytest.fixture
def machines() -> Iterator[tuple[Manifest, list[Machine]]]:
    """Both machines of a trainer, each with every other chunk."""
    entries, nbytes = layout([(name, "float32", shape, i) for i, (name, shape) in enumerate(SHAPES.items())])
    data = np.zeros(nbytes, np.uint8)
    for entry in entries:
        data[entry.offset : entry.offset + entry.nbytes] = model()[entry.name].numpy().reshape(-1).view(np.uint8)
    bounds = [*range(0, nbytes, CHUNK), nbytes]
    both = [hash_chunk(data[start:stop].data) for start, stop in pairwise(bounds)]
    hashes = {"chunks": b"".join(c for c, _ in both), "seals": b"".join(s for _, s in both)}
    made = make(nbytes=nbytes, chunk_bytes=CHUNK, entries=entries, version=3, **hashes)
    chunks = list(pairwise(bounds))
    out = [Machine(made, data, normal(chunks[first::2])) for first in range(2)]
    yield made, out
    for each in out:
        each.server.close()


def test_two_readers_of_half_each_feed_each_other(machines: tuple[Manifest, list[Machine]]) -> None:
    made, trainers = machines
    holders = {each.url: each.files.describe() for each in trainers}
    full, bounds = model(), made.bounds()
    layouts = [tensor_parallel(made.entries, rank, 2, DIMS) for rank in range(2)]
    exact = [layout_ranges(made.entries, each) for each in layouts]
    wanted = [chunk_ranges(each, bounds) for each in exact]
    readers = [Puller(key=KEY, need=each) for each in layouts]
    readers[0].pull(load_for(made, "", holders))
    server = serve_in_thread(readers[0].files, host="127.0.0.1", port=0, key=KEY)
    with_peer = {url(server): readers[0].files.describe(), **holders}
    used = readers[1].pull(load_for(made, "", with_peer)).used
    for rank, reader in enumerate(readers):
        assert reader.bytes_received == size(wanted[rank]) + len(made.encode())
        (holding,) = reader.files.describe()
        assert holding.ranges == wanted[rank]
        half = slice(rank * 300, rank * 300 + 300)
        assert torch.equal(reader.tensors()["embed"][half], full["embed"][half])
        half = slice(rank * 512, rank * 512 + 512)
        assert torch.equal(reader.tensors()["up"][half], full["up"][half])
        assert torch.equal(reader.tensors()["down"][:, half], full["down"][:, half])
        assert torch.equal(reader.tensors()["norm"], full["norm"])
        memory = reader._weights._buffer
        assert size(exact[rank]) < made.nbytes * 0.6
        assert memory_of(memory) <= size(wanted[rank]) + 2 * 4096 * len(wanted[rank])
    assert {use.source: use.bytes > 0 for use in used}[url(server)], "the first reader feeds the second"
    server.close()


def memory_of(buffer: Buffer) -> int:
    return os.fstat(buffer.fd).st_blocks * 512
