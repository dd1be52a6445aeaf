"""The trainer's processes, called ranks: which one this is, and how they talk to each other.

Rank 0 decides and the others follow: every rank has the same objects, and `Orders.call` runs a method of one of them on
all ranks at the same time, each with its own arguments; the other ranks wait in `Orders.follow`. There are five kinds
of waiting, each with its own limit:

    for the next order          none: the trainer may be idle for hours. If rank 0 dies, its connection ends the wait
    to give an order            `timeout_s`: rank 0 waits until each rank has taken it, which a frozen one never does
    for objects (gather, ...)   CONTROL_S: another rank may be writing a checkpoint meanwhile
    for objects, in `quick`     `timeout_s`: no rank waits for a disk, so one that hangs is noticed quickly
    in collectives of tensors   `timeout_s`: the same

A rank that is lost, or that does not arrive in time, raises `RankLost` on the others, and every rank ends. All of them
are started again together, from the last checkpoint (run/ranks/rank_group.py).

Ranks may run on several machines. Machine 0 has rank 0, its disk and the run's folder; a rank on any other machine is
`remote` and gets everything from rank 0. They meet at a store of torch that rank 0 serves. Its address has a name which
is new for every start of the trainer, so a rank that is left over from an earlier start never joins a later one.

`TrainerRanks.alone()` is the one rank of a trainer that is not distributed: nothing is sent, and torch.distributed is
not initialized.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from types import MethodType
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous as rendezvous_with

T = TypeVar("T")
CONTROL_S = 1800.0
"""Seconds to wait for another rank where it may be busy with a disk."""
JOIN_S = 300.0
"""Seconds until all ranks must have started."""
FOREVER = timedelta(days=365)


class RankLost(Exception):
    """Another rank is gone, or did not arrive in time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerRanks:
    rank: int = 0
    size: int = 1
    device: str = "cpu"
    """Where tensors of collectives are: "cpu", or "cuda" for the current GPU."""
    timeout_s: float = 0.0
    machine: int = 0
    """The machine of this rank; 0 is that of rank 0."""
    tensors: Any = None
    control: Any = None
    control_s: float = CONTROL_S
    """Seconds to wait for objects in the group `control`."""
    quick_control: Any = None
    """Like `control`, with the limit `timeout_s`."""
    orders: Any = None

    @staticmethod
    def alone(device: str = "cpu") -> TrainerRanks:
        return TrainerRanks(device=device)

    @staticmethod
    def join(
        rank: int, size: int, rendezvous: str, *, device: str, timeout_s: float, machine: int = 0, on_gpu: str = "nccl"
    ) -> TrainerRanks:
        """Wait for all other ranks. `rendezvous` is file://PATH with a path that was never used before, or
        tcp://HOST:PORT/NAME, where rank 0 listens on that address, and NAME was never used before. `on_gpu`: moves
        tensors of GPUs; NCCL refuses two ranks on one GPU, gloo does not."""
        backend = "gloo" if device == "cpu" else f"cpu:gloo,cuda:{on_gpu}"
        options: dict[str, Any] = {"timeout": timedelta(seconds=timeout_s)}
        started_s, store = time.monotonic(), None
        try:
            store = _store(rendezvous, rank, size)
            store.set(f"arrived/{rank}", "")
            store.wait([f"arrived/{other}" for other in range(size)], timedelta(seconds=JOIN_S))
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, **options)
            limits = timedelta(seconds=CONTROL_S), timedelta(seconds=timeout_s), FOREVER
            control, quick, orders = [dist.new_group(backend="gloo", timeout=limit) for limit in limits]
        except (RuntimeError, ValueError, OSError) as e:
            where = rendezvous.rpartition("/")[0] if rendezvous.startswith("tcp:") else rendezvous
            waited = f"rank {rank} waited {time.monotonic() - started_s:.0f} s at {where} for {size} ranks"
            raise RankLost(f"{waited}: {_missing(store, size) or _first_line(e)}") from e
        return TrainerRanks(
            rank=rank,
            size=size,
            device=device,
            timeout_s=timeout_s,
            machine=machine,
            tensors=dist.group.WORLD,
            control=control,
            quick_control=quick,
            orders=orders,
        )

    @property
    def distributed(self) -> bool:
        """Whether the model is split over ranks, even if there is only one."""
        return self.tensors is not None

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def remote(self) -> bool:
        """Whether this rank is on another machine than rank 0, and so cannot open files of the run."""
        return self.machine != 0

    @property
    def quick(self) -> TrainerRanks:
        """The same ranks, for exchanges of objects in which no rank waits for a disk."""
        return replace(self, control=self.quick_control, control_s=self.timeout_s)

    def mesh(self) -> DeviceMesh:
        """All ranks in one dimension, over the group with the short timeout. A mesh that makes its own groups would use
        the default timeout of torch."""
        return DeviceMesh.from_group(self.tensors, "cpu" if self.device == "cpu" else "cuda")

    def subgroup(self, size: int) -> Any:
        """The process group of this rank and those beside it: ranks 0 to size - 1, and so on. All ranks call this
        together."""
        assert self.size % size == 0
        limit = timedelta(seconds=self.timeout_s)
        made = [dist.new_group(range(i, i + size), timeout=limit) for i in range(0, self.size, size)]
        return made[self.rank // size]

    def broadcast(self, value: Any = None) -> Any:
        """Rank 0's value, on every rank."""
        box = [value]
        if self.size > 1:
            with self._noticing("for an object of rank 0", self.control_s):
                dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def all_gather(self, value: Any) -> list[Any]:
        """The values of all ranks, on every rank."""
        values: list[Any] = [value] * self.size
        if self.size > 1:
            with self._noticing("for objects of all ranks", self.control_s):
                dist.all_gather_object(values, value, group=self.control)
        return values

    def gather(self, value: Any) -> list[Any] | None:
        """The values of all ranks, on rank 0."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.first else None
        with self._noticing("to give an object to rank 0", self.control_s):
            dist.gather_object(value, values, dst=0, group=self.control)
        return values

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.all_gather(None)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        if self.size > 1:
            with self._noticing("for a sum over all ranks", self.timeout_s):
                dist.all_reduce(tensor, group=self.tensors)
        return tensor

    def broadcast_tensor(self, tensor: Tensor) -> Tensor:
        """Overwrite the tensor with that of rank 0."""
        if self.size > 1:
            with self._noticing("for a tensor of rank 0", self.timeout_s):
                dist.broadcast(tensor, 0, group=self.tensors)
        return tensor

    def send(self, tensor: Tensor, to: int) -> None:
        """Send a tensor in host memory to another rank, which calls `receive`."""
        with self._noticing(f"to give bytes to rank {to}", self.control_s):
            dist.send(tensor, to, group=self.control)

    def receive(self, tensor: Tensor, sender: int) -> None:
        """Overwrite a tensor in host memory with the one that another rank sends."""
        with self._noticing(f"for bytes of rank {sender}", self.control_s):
            dist.recv(tensor, sender, group=self.control)

    @contextlib.contextmanager
    def _noticing(self, what: str, limit_s: float) -> Iterator[None]:
        """Turn errors of torch.distributed into RankLost."""
        started_s = time.monotonic()
        try:
            yield
        except RuntimeError as e:
            if isinstance(e, torch.OutOfMemoryError):
                raise
            waited_s = time.monotonic() - started_s
            raise RankLost(
                f"rank {self.rank} waited {waited_s:.0f} s {what} (limit {limit_s:g} s): {_first_line(e)}"
            ) from e


class Orders:
    """Lets all ranks run a method together when rank 0 orders it."""

    def __init__(self, ranks: TrainerRanks) -> None:
        self.ranks = ranks
        self._objects: list[Any] = [self]
        self._stopped = False

    def add(self, target: object) -> None:
        """Let orders reach this object. Every rank adds the same objects in the same order: an order names its object
        by the number in which it was added."""
        self._objects.append(target)

    def call(self, method: Callable[..., T], *args: Any, each: Sequence[tuple[Any, ...]] | None = None) -> T:
        """Run a method of an added object on every rank, with `args`, or with `each[rank]`. Returns the result of this
        rank's part."""
        size = self.ranks.size
        if size > 1:
            assert isinstance(method, MethodType)
            target, function = method.__self__, method.__func__
            number = next(i for i, each in enumerate(self._objects) if each is target)
            self._announce()
            orders = [(number, function, each[rank] if each is not None else args) for rank in range(size)]
            with self.ranks._noticing("to give an order", self.ranks.timeout_s):
                dist.scatter_object_list([None], orders, src=0, group=self.ranks.quick_control)
        with self._noticing_losses(method):
            return method(*(args if each is None else each[0]))

    def follow(self, around: Callable[[Any], AbstractContextManager[None]] = lambda target: nullcontext()) -> None:
        """Run the orders of rank 0 until it says `stop`. `around`: makes the context of an order to this object."""
        while not self._stopped:
            box: list[Any] = [None]
            with self.ranks._noticing("for an order of rank 0", FOREVER.total_seconds()):
                dist.recv(torch.zeros(1), 0, group=self.ranks.orders)
                dist.scatter_object_list(box, None, src=0, group=self.ranks.quick_control)
            number, function, args = box[0]
            target = self._objects[number]
            with around(target), self._noticing_losses(function):
                function(target, *args)

    def _announce(self) -> None:
        """Wait until each other rank asks for an order. Not a collective, which has one time limit for both sides."""
        sent: list[Any] = []
        for rank in range(1, self.ranks.size):
            with self.ranks._noticing(f"to give an order to rank {rank}", self.ranks.timeout_s):
                sent.append(dist.isend(torch.zeros(1), rank, group=self.ranks.orders))
        for rank, work in enumerate(sent, 1):
            with self.ranks._noticing(f"to give an order to rank {rank}", self.ranks.timeout_s):
                work.wait(timedelta(seconds=self.ranks.timeout_s))

    @contextlib.contextmanager
    def _noticing_losses(self, method: Callable[..., Any]) -> Iterator[None]:
        """Turn errors of the collectives that FSDP2 runs within a method into RankLost."""
        try:
            yield
        except RuntimeError as e:
            if self.ranks.size > 1 and _from_collective(e):
                during = method.__name__.strip("_")
                raise RankLost(f"rank {self.ranks.rank} lost another one during `{during}`: {_first_line(e)}") from e
            raise

    def stop(self) -> None:
        """Let the other ranks end."""
        self.call(self._stop)

    def _stop(self) -> None:
        self._stopped = True


def _store(rendezvous: str, rank: int, size: int) -> Any:
    """The store at which the ranks meet."""
    limit = timedelta(seconds=JOIN_S)
    if not rendezvous.startswith("tcp:"):
        return next(rendezvous_with(rendezvous, rank, size, timeout=limit))[0]
    url = urlsplit(rendezvous)
    assert url.hostname is not None
    assert url.port is not None
    options: dict[str, Any] = {"timeout": limit, "wait_for_workers": False, "is_master": rank == 0}
    if rank == 0:  # by default, torch would listen on all interfaces
        family = socket.AF_INET6 if ":" in url.hostname else socket.AF_INET
        with socket.create_server((url.hostname, url.port), family=family, backlog=1024) as listening:
            options["master_listen_fd"] = listening.detach()  # closed by the store
    return PrefixStore(url.path.strip("/"), TCPStore(url.hostname, url.port, size, **options))


def _missing(store: Any, size: int) -> str:
    """Which ranks have not arrived at the store; "" if all have, or if it is not known."""
    try:
        late = [str(rank) for rank in range(size) if store is not None and not store.check([f"arrived/{rank}"])]
    except RuntimeError:  # rank 0, which serves the store, is gone
        return ""
    return f"not arrived: {'rank' if len(late) == 1 else 'ranks'} {', '.join(late)}" if late else ""


def _from_collective(error: RuntimeError) -> bool:
    """Whether an error says that another rank is gone or late. Errors of gloo are plain RuntimeErrors."""
    return isinstance(error, dist.DistError) or any(
        sign in str(error) for sign in ("gloo/", "Connection closed by peer", "Connection reset by peer", "NCCL error")
    )


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
