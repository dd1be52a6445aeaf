"""A child process of an engine group: one engine on one device, which does what the group says, one message at a time.

It is forked by the fork server of the group, which hands it its connection. It exits when the connection ends, and
after every error: the group starts another child.
"""

from __future__ import annotations

import traceback
from typing import Any

import msgspec

from windfall import devices
from windfall.engine import factory
from windfall.engine.group import messages as m
from windfall.engine.module_weights import WeightMemory
from windfall.errors import WindfallError, last_line
from windfall.processes import fork_server
from windfall.weights.shared import SharedReader


def main() -> int:
    decoder, child = msgspec.msgpack.Decoder(m.ToChild), EngineChild()
    with fork_server.channel() as connection, connection.makefile("rb") as stream:
        try:
            while length := stream.read(m.LENGTH_BYTES):
                message = decoder.decode(stream.read(int.from_bytes(length, "big")))
                connection.sendall(m.encode(child.handle(message)))
            return 0
        except ConnectionError:  # the group is gone
            return 0
        except WindfallError as e:
            error = m.ChildError(what=e.what, where=e.where, fix=e.fix, for_user=True)
        except Exception as e:  # fault boundary: the group reports the error, and the log has the traceback
            traceback.print_exc()
            error = m.ChildError(what=last_line(e))
        connection.sendall(m.encode(error))
    return 1


class EngineChild:
    def __init__(self) -> None:
        self._engine: Any = None
        self._memory: Any = None
        self._reader = SharedReader()
        self._synchronize: Any = lambda: None

    def handle(self, message: object) -> object:
        """Do what the message says. Returns the answer."""
        match message:
            case m.Build():
                return self._build(message)
            case m.LoadVersion():
                return self._load(message)
            case m.StepEngine():
                for request in message.add:
                    self._engine.add(request)
                for handle in message.cancel:
                    self._engine.cancel(str(handle))
                return m.Stepped(chunks=self._engine.step(), counters=self._engine.counters)
            case m.PauseEngine():
                if message.free:
                    self._engine.sleep()
                    self._memory.free()
                self._synchronize()
                return m.OrderDone()
        raise TypeError(f"unknown message {message}")

    def _build(self, message: m.Build) -> m.Built:
        device, _ = devices.resolve(message.device, "auto", message.threads)
        engine, slots = factory.build_engine(message.spec, device, share=message.share)
        if device == "cuda":
            import torch

            self._synchronize = torch.cuda.synchronize
            self._reader = SharedReader(pin=True)
        self._engine = engine
        self._memory = WeightMemory(engine.model)
        vocabulary = engine.model.get_input_embeddings().num_embeddings
        return m.Built(slots=slots, limit=engine.limit, vocabulary=vocabulary, engine=engine.capabilities)

    def _load(self, message: m.LoadVersion) -> m.OrderDone | m.VersionRefused:
        self._memory.allocate()
        try:
            self._engine.swap(message.version, self._reader.weights(message.shared))
        except WindfallError as e:
            return m.VersionRefused(why=str(e))
        self._synchronize()  # the publisher may overwrite the buffer once this is answered
        return m.OrderDone()
