"""Engine groups for tests: two real child processes on the CPU, with small models."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec

from tests.support.continuation import check_continuation, of_chunks
from tests.support.small_models import engine, requests
from windfall.devices import Place
from windfall.engine import factory
from windfall.engine.group.group import EngineGroup
from windfall.link.messages import EngineSpec
from windfall.types import Chunk, Request
from windfall.weights.publish import Publisher
from windfall.weights.source import Source

WAIT_S = 120.0
SIZES: dict[str, Any] = {"kv_tokens": 4096, "page_size": 16, "max_running": 16, "max_rows": 64}


def spec_of(model: Any, *, deterministic: bool = True, **options: Any) -> EngineSpec:
    """The spec of an engine for this model. The self-test has passed here, so the children do not repeat it."""
    spec = EngineSpec(
        model_config=model.config.to_json_string(use_diff=False), dtype="float32", deterministic=deterministic,
        longest=200, wanted=64, **{**SIZES, **options},
    )  # fmt: skip
    return msgspec.structs.replace(spec, checked=(factory.self_test(spec, "cpu", model),))


class Case:
    """A group and the publisher of its weights. The group is used by one test after the other."""

    def __init__(self, folder: Path, children: int = 2) -> None:
        self.folder, self.said = folder, list[str]()
        self.publisher = Publisher(folder)
        self.find: Callable[[int], Any] = lambda version: self.publisher.find(version)
        self.group = EngineGroup(
            [Place()] * children, cast(Source, self), folder=folder / "engines", threads=1, say=self.said.append
        )
        self._spec: EngineSpec | None = None

    @property
    def base(self) -> Any:
        return self.publisher.base

    def publish(self, version: int, weights: Any) -> None:
        """Publish weights, also under the number of an older version."""
        if self.publisher.current is not None and version <= self.publisher.current.version:
            self.publisher.close()
            self.publisher = Publisher(self.folder)
        self.publisher.publish(version, weights)

    def engine(self, model: Any, **options: Any) -> EngineGroup:
        """The group with these weights as version 0, in all children. It is built only if the last one was different.
        A child that the last test has killed may not be back yet, so this waits for it."""
        self._prepare(spec_of(model, **options))
        self.publish(0, model.state_dict())
        return self._loaded()

    def adapted_engine(self, model: Any, adapter: Any, scale: float) -> EngineGroup:
        """Like `engine`, with an adapter of the model as version 0."""
        self._prepare(spec_of(model))
        self.publisher.close()
        self.publisher = Publisher(self.folder)
        base = self.publisher.publish_base(model.state_dict()).digest
        self.publisher.publish(0, adapter, base=base, scale=scale)
        return self._loaded()

    def _prepare(self, spec: EngineSpec) -> None:
        for id in list(self.group._responses):
            self.group.cancel(id)
        if spec != self._spec:
            self.group.build(spec)
            self._spec = spec

    def _loaded(self) -> EngineGroup:
        self.group.swap(0)
        wait_for(lambda: self.group.step() or all(c.held for c in self.group._children), "all children have version 0")
        return self.group

    def pids(self) -> list[int]:
        return [c.link.handle.pid for c in self.group._children if c.link is not None]

    def close(self) -> None:
        self.group.close()
        self.publisher.close()


def asked(count: int = 8, tokens: int = 24) -> list[Request]:
    """Requests that run for long enough that something can happen to them."""
    return [replace(r, max_tokens=tokens + n) for n, r in enumerate(requests(count, seed=3))]


class Made(dict[str, list[Chunk]]):
    """The chunks that an engine has returned, by request."""

    def step(self, e: Any) -> None:
        chunks = e.step()
        assert len({c.version for c in chunks}) <= 1, "one step returns tokens of one version"
        for c in chunks:
            self.setdefault(c.id, []).append(c)

    def tokens(self) -> int:
        return sum(len(c.tokens) for chunks in self.values() for c in chunks)

    def more(self, e: Any, count: int) -> None:
        """Step until so many more tokens were returned."""
        wanted = self.tokens() + count
        wait_for(lambda: self.step(e) or self.tokens() >= wanted, f"{count} more tokens")

    def finish(self, e: Any) -> None:
        wait_for(lambda: self.step(e) or not len(e), "all responses have ended")


def check(wanted: list[Request], made: Made, models: list[Any]) -> None:
    """Every response is complete, and is what one engine generates."""
    for r in wanted:
        said = of_chunks(made[r.id])
        assert len(said) == r.max_tokens
        assert [c.position for c in made[r.id]] == sorted(c.position for c in made[r.id])
        assert [c.finish for c in made[r.id]] == [None] * (len(made[r.id]) - 1) + ["length"]
        check_continuation(r, said, lambda version: engine(copy.deepcopy(models[version]), deterministic=True))


def wait_for(holds: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, f"waited {WAIT_S:g} s until {what}"


def cpu_s(pid: int) -> float:
    """CPU time of a process, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def opened(folder: Path, children: int = 2) -> Iterator[Case]:
    case = Case(folder, children)
    yield case
    case.close()
