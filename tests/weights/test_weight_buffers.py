"""Buffers that other processes map."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from windfall.errors import WindfallError
from windfall.weights import buffers
from windfall.weights.buffers import Buffer, BufferHandle


@pytest.mark.parametrize("free", [1e12, 0.0])
def test_another_process_writes_to_a_buffer(free: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "free_bytes", lambda: free)
    buffer = Buffer(10_000, tmp_path)
    assert ("memfd" in os.readlink(f"/proc/self/fd/{buffer.fd}")) == (free > 0)
    child = os.fork()
    if child == 0:  # without an exception handler of the test framework
        mapped = Buffer.map(buffer.handle)
        mapped.data[5000] = 7
        mapped.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert buffer.data[5000] == 7
    buffer.close()


def test_mapped_memory_outlives_the_descriptors() -> None:
    buffer = Buffer(100)
    mapped = Buffer.map(buffer.handle)
    buffer.data[3] = 9
    buffer.close()
    mapped.close()
    assert mapped.data[3] == 9
    assert mapped.dup() is None


@pytest.mark.parametrize("change", [{"fd": 9999}, {"pid": 2**22 - 1}, {"inode": 1}])
def test_wrong_handle_is_refused(change: dict[str, Any]) -> None:
    gc.collect()  # what earlier tests have left
    before = len(os.listdir("/proc/self/fd"))
    buffer = Buffer(100)
    handle: BufferHandle = buffer.handle._replace(**change)
    with pytest.raises(WindfallError, match=f"/proc/{handle.pid}/fd/{handle.fd}"):
        Buffer.map(handle)
    buffer.close()
    del buffer
    assert len(os.listdir("/proc/self/fd")) <= before


def test_handle_of_a_pipe_is_refused_without_waiting_for_a_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    fd = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    refused: list[str] = []

    def attempt() -> None:
        try:
            buffers.open_buffer(buffers.handle_of(fd, 100), os.O_RDONLY)
        except WindfallError as e:
            refused.append(e.what)

    opening = threading.Thread(target=attempt, daemon=True)
    opening.start()
    opening.join(60)
    assert refused == ["this is not the weight buffer any more"]
    os.close(fd)


def test_processes_of_this_machine_have_one_name() -> None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, buffers.machine().encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 1000).decode() == buffers.machine()
    os.close(read)
    os.close(write)


class LockedPages:
    """Stands in for the CUDA runtime: the addresses that are locked now."""

    def __init__(self) -> None:
        self.addresses: list[int] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.addresses.append(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.addresses.remove(address)
        return 0


@pytest.mark.parametrize("closed", [True, False])
def test_pages_are_unlocked_before_their_addresses_can_be_mapped_again(
    monkeypatch: pytest.MonkeyPatch, closed: bool
) -> None:
    pages = LockedPages()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: pages)
    buffer = Buffer(1 << 20)
    for _ in range(2):  # only the first call has an effect
        buffer.lock([(0, 10), (1 << 19, 1 << 20)])
    assert len(pages.addresses) == 2
    if closed:
        buffer.close()
    else:
        del buffer
        gc.collect()
    assert not pages.addresses
