"""A child process of an engine group: one engine on one device, driven by the messages of the group.

    [ messages │ step │ Stepped ] ...      like engine/engine_thread.py, but between processes

It is forked by the fork server of the group, which hands it its connection, and builds its engine when it is told to.
It makes a step only while it has weights, work and a granted step; otherwise it waits for messages without using the
CPU. It exits when the connection ends, and after every error: the group starts another child.
"""

from __future__ import annotations

import select
import socket
import traceback
from typing import Any

from windfall import devices
from windfall.engine import factory
from windfall.engine.base import MAX_KEPT_SHARE
from windfall.engine.group import messages as m
from windfall.engine.module_weights import WeightMemory
from windfall.errors import WindfallError, last_line
from windfall.free_memory import free_bytes
from windfall.processes import fork_server
from windfall.weights.manifest import Manifest, decode
from windfall.weights.shared import SharedReader

READ_BYTES = 1 << 20


def main() -> int:
    with fork_server.channel() as connection:
        child = EngineChild(connection)
        try:
            child.run()
        except (ConnectionError, EOFError):  # the group is gone
            return 0
        except WindfallError as e:
            child.send(m.ChildError(what=e.what, where=e.where, fix=e.fix, for_user=True))
        except Exception as e:  # fault boundary: the group reports the error, and the log has the traceback
            traceback.print_exc()
            child.send(m.ChildError(what=last_line(e)))
    return 1


class EngineChild:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._receiver = m.Receiver(m.ToChild)
        self._engine: Any = None
        self._memory: WeightMemory | None = None
        self._reader = SharedReader()
        self._synchronize: Any = lambda: None
        self._granted = 0
        self._has_weights = False
        self._device = "cpu"
        self._base = ""
        """`_base`: digest of the base in the engine, if an adapter is merged into it."""

    def send(self, message: object) -> None:
        self._connection.sendall(m.encode(message))

    def run(self) -> None:
        while True:
            idle = not self._may_step()
            if idle or select.select([self._connection], [], [], 0)[0]:
                data = self._connection.recv(READ_BYTES)
                if not data:
                    raise EOFError
                for message in self._receiver.messages(data):
                    self._handle(message)
            if self._may_step():
                self._step()

    def _may_step(self) -> bool:
        return bool(self._granted and self._has_weights and len(self._engine))

    def _step(self) -> None:
        chunks = self._engine.step()
        self._granted -= 1
        self.send(m.Stepped(chunks=chunks, counters=self._engine.counters))

    def _handle(self, message: object) -> None:
        match message:
            case m.Add():
                self._engine.add(message.request)
            case m.CancelResponse():
                self._engine.cancel(str(message.handle))
            case m.Grant():
                self._granted += message.steps
            case m.PauseSteps():
                self._granted = 0
                self._synchronize()
                self.send(m.OrderDone(order=message.order))
            case m.LoadVersion():
                self._load(message)
            case m.Sleep():
                self.send(m.OrderDone(order=message.order, kept_weights=self._sleep()))
            case m.Build():
                self._build(message)

    def _build(self, message: m.Build) -> None:
        device, _ = devices.resolve(message.device, "auto", message.threads)
        self._device = device
        self._engine, slots = factory.build_engine(message.spec, device, share=message.share)
        if device == "cuda":
            import torch

            self._synchronize = torch.cuda.synchronize
            self._reader = SharedReader(pin=True)
        model = self._engine.model
        self._memory = WeightMemory(model)
        vocabulary = model.get_input_embeddings().num_embeddings
        self.send(
            m.Built(slots=slots, limit=self._engine.limit, vocabulary=vocabulary, engine=self._engine.capabilities)
        )

    def _load(self, message: m.LoadVersion) -> None:
        assert self._memory is not None, "Build comes first"
        self._memory.allocate()
        shared = message.shared
        try:
            weights = None if shared is None else self._reader.weights(shared, loaded_base=self._base)
            self._engine.swap(message.version, weights)
        except WindfallError as e:
            self.send(m.VersionRefused(order=message.order, why=str(e)))
            return
        self._synchronize()  # the publisher may overwrite the buffer once this is answered
        self._has_weights = True
        if shared is not None:
            self._base = decode(shared.manifest, Manifest).base
        self.send(m.OrderDone(order=message.order))

    def _sleep(self) -> bool:
        """Free the memory. Returns whether the weights were kept."""
        assert self._memory is not None, "Build comes first"
        self._engine.sleep()
        self._has_weights = False
        if self._base and self._memory.nbytes <= MAX_KEPT_SHARE * free_bytes(self._device):
            return True
        self._memory.free()
        self._base = ""
        return False
