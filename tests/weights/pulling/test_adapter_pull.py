"""From a trainer's adapters to a worker's engine: published, served, pulled and merged, version after version."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.engines.small_models import build
from windfall.engine.module_weights import copy_weights
from windfall.recipe.lora import Lora
from windfall.trainer.model import lora
from windfall.types import Lease
from windfall.weights.merged import AdapterPair, merge
from windfall.weights.pulling.pull import LocalCopy
from windfall.worker.controller_client import ControllerClient


def test_worker_merges_every_version_and_copies_the_base_once(
    serving: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    s = serving()
    adapters = lora.attach(build("llama"), Lora(rank=3, targets=["q_proj", "up_proj"]), base="", seed=0)
    base = s.publisher.publish_base(lora.base_tensors(adapters.model)).digest
    model, puller = build("llama"), s.puller()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    client = ControllerClient("http://x", "token", name="w", lease=Lease(), puller=puller, build=lambda spec: (None, 0))
    session: Any = SimpleNamespace(held={})
    client._worker_link = session
    written: list[str] = []
    names = {t.data_ptr(): name for name, t in model.state_dict().items()}
    real = torch.Tensor.copy_
    monkeypatch.setattr(
        torch.Tensor, "copy_",
        lambda self, *a, **k: (written.append(names.get(self.data_ptr(), "")), real(self, *a, **k))[1],
    )  # fmt: skip

    def load(version: int, *, fails: bool = False, refused: bool = False) -> int:
        """Publish the adapters, and do what a worker does. Returns the bytes that it pulled. `refused`: the engine
        keeps what it has."""
        with torch.no_grad():
            for layer in adapters.layers.values():
                layer.lora_B.add_(0.1 * torch.randn(layer.lora_B.shape))
        made = s.publisher.publish(version, adapters.tensors(), base=base, scale=adapters.scale)
        pulled = client._pull(s.load(made, puller.held.digest if puller.held else ""), threading.Event())
        assert pulled.tensors is not None
        written.clear()
        if not refused:
            session.held = {}  # as a session does until the swap is complete
        if not fails and not refused:
            copy_weights(model, version, pulled.tensors)
            session.held = {"": (version, made.digest)}
        return pulled.bytes

    def check(copied: set[str]) -> None:
        for name, t in model.state_dict().items():
            layer = adapters.layers.get(name.removesuffix(".weight"))
            expected = lora.base_tensors(adapters.model)[name]
            if layer is not None:
                expected = merge(layer.weight, AdapterPair(layer.lora_A, layer.lora_B), adapters.scale)
            assert torch.equal(t, expected), name
        assert {name for name in written if name} == copied

    everything = set(names.values())
    adapted = {f"{name}.weight" for name in adapters.layers}
    first = load(1)
    check(everything)
    second = load(2)
    check(adapted)
    assert second < first / 5
    load(3, fails=True)
    load(4)  # what the engine holds is not known, so all of it is written
    check(everything)
    load(5, refused=True)
    load(6)
    check(adapted)


def test_two_adapters_of_one_base_read_it_once(serving: Callable[..., Any]) -> None:
    s = serving()
    adapters = lora.attach(build("llama"), Lora(rank=3, targets=["q_proj"]), base="", seed=0)
    base = s.publisher.publish_base(lora.base_tensors(adapters.model)).digest
    first = s.puller()
    second, versions = first.beside(), []
    for puller in (first, second):
        with torch.no_grad():
            for layer in adapters.layers.values():
                layer.lora_B.add_(1.0)
        versions.append(s.publisher.publish(len(versions), adapters.tensors(), base=base, scale=adapters.scale))
        s.pull(puller, versions[-1])
    assert second.bytes_received < first.bytes_received / 5
    for name, tensor in first.base_tensors().items():
        assert tensor.data_ptr() == second.base_tensors()[name].data_ptr()
    held = {holding.file.digest for holding in first.files.describe()}
    assert {base, *(made.digest for made in versions)} <= held, "others can read all of it here"
    second.close()
    assert {holding.file.digest for holding in first.files.describe()} == {base, versions[0].digest}
    assert first.base_tensors()


def test_pullers_of_one_base_wait_for_each_other(serving: Callable[..., Any]) -> None:
    """A pull of an earlier link may still run when the next link begins one, or closes its puller."""
    s = serving()
    adapters = lora.attach(build("llama"), Lora(rank=3, targets=["q_proj"]), base="", seed=0)
    base = s.publisher.publish_base(lora.base_tensors(adapters.model)).digest
    made = s.publisher.publish(0, adapters.tensors(), base=base, scale=adapters.scale)
    first = s.puller()
    second, began, go_on = first.beside(), threading.Event(), threading.Event()
    read, reading = LocalCopy.begin, list[str]()

    def begin(copy: Any, wanted: Any, **how: Any) -> Any:
        reading.append(threading.current_thread().name)
        if not began.is_set():
            began.set()
            assert go_on.wait(60)
            reading.append("end")
        return read(copy, wanted, **how)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(3) as threads:
        patch.setattr(LocalCopy, "begin", begin)
        one = threads.submit(s.pull, first, made)
        assert began.wait(60)
        two, closed = threads.submit(s.pull, second, made), threads.submit(first.close)
        assert not wait([two, closed], 0.2).done
        go_on.set()
        assert one.result().digest == two.result().digest
        closed.result()
    assert len(set(reading[: reading.index("end")])) == 1
    assert second.base_tensors()
