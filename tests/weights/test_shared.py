"""Tensors that other processes map."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
import torch

from windfall.errors import WindfallError
from windfall.weights.shared import TensorFile

TENSORS = {
    "a": torch.arange(7, dtype=torch.float32), "b": torch.randn(3, 5).to(torch.bfloat16), "c": torch.tensor(2.5),
    "none": torch.empty(0, 4), "d": torch.arange(6, dtype=torch.int64).view(2, 3),
}  # fmt: skip
READ_FILE = """
import pickle, sys
shared = pickle.loads(sys.stdin.buffer.read())
print({name: (str(t.dtype), tuple(t.shape), float(t.double().sum())) for name, t in shared.tensors()})
"""
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
