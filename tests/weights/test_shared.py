"""Weights read from the publisher's buffer by another process. Not covered: pages locked for a GPU."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from windfall.errors import WindfallError
from windfall.weights.publish import Publisher
from windfall.weights.shared import MAX_MAPS, OpenVersion, SharedReader, TensorFile

READ = """
import sys, msgspec, torch
from windfall.weights.shared import SharedReader, SharedVersion
tensors = SharedReader().weights(msgspec.msgpack.decode(sys.stdin.buffer.read(), type=SharedVersion))
print({n: (str(t.dtype), tuple(t.shape), float(t.double().sum())) for n, t in tensors.items()})
"""


def weights(value: float) -> dict[str, torch.Tensor]:
    one = torch.full((3, 5), value)
    return {"a": one, "b": torch.full((7,), value, dtype=torch.bfloat16), "tied": one, "none": torch.zeros(0, 4)}


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Publisher]:
    it = Publisher(tmp_path)
    yield it
    it.close()


def test_other_process_reads_the_same_pages(publisher: Publisher) -> None:
    publisher.publish(4, weights(2.0))
    opened = OpenVersion(publisher, 4)
    said = subprocess.run(
        [sys.executable, "-c", READ], input=msgspec.msgpack.encode(opened.shared), capture_output=True, check=True
    ).stdout.decode()
    assert said.strip() == (
        "{'a': ('torch.float32', (3, 5), 30.0), 'b': ('torch.bfloat16', (7,), 14.0), "
        "'tied': ('torch.float32', (3, 5), 30.0), 'none': ('torch.float32', (0, 4), 0.0)}"
    )
    opened.close()


def test_version_is_intact_until_its_buffer_is_needed(publisher: Publisher) -> None:
    reader = SharedReader()
    publisher.publish(0, weights(0.0))
    opened = OpenVersion(publisher, 0)
    views = reader.tensors(opened.shared.tensors)
    copy = views["a"].clone()
    assert (opened.version, opened.intact()) == (0, True)
    publisher.publish(1, weights(1.0))
    assert opened.intact(), "the previous version can still be read"
    assert torch.equal(views["a"], copy)
    publisher.publish(2, weights(2.0))
    assert not opened.intact()
    assert float(views["a"][0, 0]) == 2.0, "the buffer has been overwritten, and only `intact` shows it"
    with pytest.raises(WindfallError, match="does not publish version 0"):
        OpenVersion(publisher, 0)
    opened.close()


def test_buffers_are_mapped_once_each(publisher: Publisher) -> None:
    reader, seen = SharedReader(), set()
    for version in range(6):
        publisher.publish(version, weights(float(version)))
        opened = OpenVersion(publisher, version)
        views = reader.tensors(opened.shared.tensors)
        assert float(views["tied"].sum()) == 15.0 * version
        seen.add(views["a"].data_ptr())
        opened.close()
    assert len(seen) == 2
    for version, size in ((9, 4000), (10, 5000)):
        publisher.publish(version, {"other": torch.ones(size)})
        opened = OpenVersion(publisher, version)
        assert float(reader.tensors(opened.shared.tensors)["other"].sum()) == size
        opened.close()
    assert len(reader._maps) == MAX_MAPS, "a buffer that was not used for long is forgotten"


def test_adapter_comes_with_its_base(publisher: Publisher) -> None:
    base = {"x.weight": torch.ones(4, 3), "y": torch.full((2,), 7.0)}
    digest = publisher.publish_base(base).digest
    adapter = {"x.lora_A.weight": torch.ones(1, 3), "x.lora_B.weight": torch.ones(4, 1)}
    publisher.publish(0, adapter, base=digest, scale=0.5)
    reader = SharedReader()
    opened = OpenVersion(publisher, 0)
    copied: Any = reader.weights(opened.shared)
    assert torch.equal(copied["x.weight"], torch.full((4, 3), 1.5))
    target = torch.zeros(2)
    copied.copy_into("y", target)
    assert torch.equal(target, base["y"])
    opened.close()


def test_buffer_that_is_gone_is_refused(publisher: Publisher) -> None:
    publisher.publish(0, weights(1.0))
    opened = OpenVersion(publisher, 0)
    opened.close()
    with pytest.raises(WindfallError, match="cannot open the weight buffer"):
        SharedReader().tensors(opened.shared.tensors)


TENSORS = {
    "a": torch.arange(7, dtype=torch.float32), "b": torch.randn(3, 5).to(torch.bfloat16), "c": torch.tensor(2.5),
    "none": torch.empty(0, 4), "d": torch.arange(6, dtype=torch.int64).view(2, 3),
}  # fmt: skip
READ_FILE = """
import pickle, sys
shared = pickle.loads(sys.stdin.buffer.read())
print({name: (str(t.dtype), tuple(t.shape), float(t.double().sum())) for name, t in shared.tensors()})
"""


def test_another_process_maps_a_file_of_tensors() -> None:
    file = TensorFile(TENSORS)
    read = subprocess.run(
        [sys.executable, "-c", READ_FILE], input=pickle.dumps(file.shared), capture_output=True, check=True
    )
    expected = {name: (str(t.dtype), tuple(t.shape), float(t.double().sum())) for name, t in TENSORS.items()}
    assert read.stdout.decode().strip() == repr(expected)
    assert all(torch.equal(t, TENSORS[name]) for name, t in file.shared.tensors())
    file.close()


def test_replaced_file_is_noticed() -> None:
    first = TensorFile(TENSORS)
    shared = first.shared
    first.close()
    second = TensorFile({"a": torch.zeros(99)})  # gets the descriptor of the first
    assert second.shared.buffer.fd == shared.buffer.fd
    with pytest.raises(WindfallError, match="not the weight buffer"):
        next(shared.tensors())
    second.close()
