"""Building an engine: sizes from free memory, one process at a time, and errors with a fix. Not covered: a real GPU
that runs out of memory."""

from __future__ import annotations

import asyncio
import fcntl
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from transformers import LlamaConfig

from windfall import devices
from windfall.engine import factory
from windfall.errors import WindfallError
from windfall.link.messages import EngineSpec
from windfall.trainer.service import run_beside

CONFIG = LlamaConfig(
    vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, max_position_embeddings=4096,
)  # fmt: skip
TOKEN_BYTES = 2 * 2 * 1 * 16 * 4


def spec(**changed: Any) -> EngineSpec:
    how = {"kv_tokens": 0, "max_running": 8, "longest": 64, "wanted": 8, **changed}
    return EngineSpec(
        model_config=CONFIG.to_json_string(), dtype="float32", page_size=16, max_rows=64, deterministic=False, **how
    )


@pytest.mark.parametrize(
    ("free_tokens", "share", "kv_tokens"), [(10**6, 0.5, 8 * 64), (400, 0.5, 200), (200, 0.5, 100), (128, 0.5, 64)]
)
def test_cache_uses_only_its_share_of_free_memory(
    monkeypatch: pytest.MonkeyPatch, free_tokens: int, share: float, kv_tokens: int
) -> None:
    monkeypatch.setattr(factory, "free_bytes", lambda device: free_tokens * TOKEN_BYTES)
    assert factory.engine_sizes(spec(), TOKEN_BYTES, "cpu", share) == (8, kv_tokens)


def test_engine_is_built_for_adapters_and_leaves_room_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factory, "self_test", lambda *_: "")
    wanted = spec(adapters=2, adapter_rank=4)
    model = factory.build_model(wanted, "cpu")
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    sizes = sum(sum(shape) for name, shape in shapes.items() if "layers" in name and len(shape) == 2)
    sizes += 2 * sum(shapes["model.embed_tokens.weight"])  # adapters of the embeddings and of the head
    room = 2 * 16 * 4 * sizes
    assert factory.adapter_bytes(wanted, shapes, 4) == room > 0
    monkeypatch.setattr(factory, "free_bytes", lambda device: 400 * TOKEN_BYTES + room)
    engine, _ = factory.build_engine(wanted, "cpu", model=model, share=0.5)
    assert (engine.capabilities.adapters, engine.versions, engine.kv_tokens) == (2, {}, 208)  # whole pages
    assert factory.adapter_bytes(spec(), shapes, 4) == 0


def test_room_for_less_than_one_response_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factory, "free_bytes", lambda device: 100 * TOKEN_BYTES)
    with pytest.raises(WindfallError, match="room for 50 tokens; one response may have 64") as e:
        factory.engine_sizes(spec(), TOKEN_BYTES, "cpu", 0.5)
    assert e.value.where == "fleet.worker_memory"
    assert factory.engine_sizes(spec(kv_tokens=48), TOKEN_BYTES, "cpu", 0.5) == (8, 48)  # somebody has said so


def test_out_of_memory_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has ...")

    monkeypatch.setattr(factory, "_build_engine", full)
    with pytest.raises(WindfallError, match="not enough memory for the engine: CUDA out of memory") as e:
        factory.build_engine(spec(), "cuda")
    assert "fewer workers" in str(e.value.fix)


def test_prompt_longer_than_those_of_the_first_tasks_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller knows lengths only from the first tasks. The limit is the size of the cache or of the model."""
    monkeypatch.setattr(factory, "cuda_engine_disabled", lambda spec: None)
    model = factory.build_full_model(CONFIG.to_dict(), "float32", "cpu")
    for kv_tokens, limit in ((2048, 2047), (65_536, 4111)):
        how = {"kv_tokens": kv_tokens, "page_size": 16, "max_running": 4, "max_rows": 64, "version": 0}
        assert factory.make_engine(spec(), "cuda", model, **how).limit == limit


@pytest.mark.parametrize("speculation", ["auto", "off"])
def test_engine_drafts_unless_speculation_is_off(monkeypatch: pytest.MonkeyPatch, speculation: str) -> None:
    monkeypatch.setattr(factory, "cuda_engine_disabled", lambda spec: None)
    model = factory.build_full_model(CONFIG.to_dict(), "float32", "cpu")
    how = {"kv_tokens": 256, "page_size": 16, "max_running": 4, "max_rows": 64, "version": 0}
    made = factory.make_engine(spec(speculation=speculation, kv_dtype="fp8"), "cuda", model, **how)
    assert made.capabilities.drafts == (speculation == "auto")
    assert made._device.pool.dtype == torch.float8_e4m3fn
    assert made.capabilities.rounding == "cuda fp8"
    for deterministic in (False, True):
        asked = msgspec.structs.replace(spec(speculation=speculation), deterministic=deterministic)
        made = factory.make_engine(asked, "cpu", model, **how)
        assert made.capabilities.name == "torch"
        assert made.capabilities.drafts == (speculation == "auto")


def test_texts_have_the_length_of_a_response_and_not_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer rows would be too few: some running responses would have none."""
    monkeypatch.setattr(factory, "cuda_engine_disabled", lambda spec: None)
    model = factory.build_full_model(CONFIG.to_dict(), "float32", "cpu")
    how = {"kv_tokens": 8192, "page_size": 16, "max_running": 4, "max_rows": 64, "version": 0}
    made = factory.make_engine(spec(longest=200), "cuda", model, **how)
    assert made.limit > 4000
    assert (made._texts.length, made._texts.rows) == (202, 16)


@pytest.mark.parametrize(
    ("changed", "device", "capability", "why"),
    [
        ({"deterministic": True}, "cuda", (9, 0), "run.deterministic is set"),
        ({}, "cpu", (9, 0), "it needs a GPU, and this worker runs on cpu"),
        ({}, "cuda", (8, 0), "compute capability 8.9 or higher, and A100 has 8.0"),
    ],
)
def test_fp8_is_refused_where_it_cannot_work(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], device: str, capability: tuple[int, int], why: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    asked = msgspec.structs.replace(spec(kv_dtype="fp8"), **changed)
    with pytest.raises(WindfallError, match=why) as e:
        factory.build_engine(asked, device)
    assert e.value.where == "engine.kv_dtype"
    factory.check_kv_dtype(msgspec.structs.replace(asked, kv_dtype="bf16"), device)
    if not changed and device == "cuda":
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
        factory.check_kv_dtype(asked, device)


def test_model_without_the_gpu_engine_has_no_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factory, "cuda_engine_refusal", lambda spec, model: "it has a new kind of layer")
    with pytest.raises(WindfallError, match="it has a new kind of layer") as e:
        factory.make_engine(spec(kv_dtype="fp8"), "cuda", None)
    assert e.value.where == "engine.kv_dtype"


def test_token_in_fp8_has_one_byte_per_value() -> None:
    model = factory.build_full_model(CONFIG.to_dict(), "float32", "cpu")
    assert [factory.token_bytes(model, name) for name in ("auto", "bf16", "fp8")] == [256, 256, 64]


@pytest.fixture
def lock_file(monkeypatch: pytest.MonkeyPatch) -> Path:
    name = f"test-{os.getpid()}"
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda n: SimpleNamespace(uuid=name))
    return Path(tempfile.gettempdir()) / f"windfall-{os.getuid()}-{name}.lock"


def test_one_process_at_a_time_allocates_memory(lock_file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with devices.gpu_memory_lock("cuda"), open(lock_file) as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with open(lock_file) as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it was released
        with devices.gpu_memory_lock("cuda", timeout_s=0.2):
            assert "waited 0.2 s for another worker to allocate its GPU memory" in capfd.readouterr().err
    lock_file.unlink()


def test_trainer_ends_if_its_own_engine_fails() -> None:
    async def scene() -> None:
        async def for_ever() -> int:
            await asyncio.Event().wait()
            return 0

        async def local() -> None:
            raise WindfallError("too little memory", where="cuda")

        async with asyncio.timeout(60):
            await run_beside([for_ever()], local())

    with pytest.raises(WindfallError, match="too little memory"):
        asyncio.run(scene())


def test_run_ends_normally_after_its_local_engine_was_drained() -> None:
    async def scene() -> int:
        async def run() -> int:
            await asyncio.sleep(0.01)
            return 7

        async def local() -> None: ...

        return await run_beside([run()], local())

    assert asyncio.run(scene()) == 7
