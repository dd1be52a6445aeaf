"""Measures the cost of the fleet: token intake, a migration, a lost worker. Takes a few minutes on two cores.

    python benchmarks/fleet/costs.py                   all three
    python benchmarks/fleet/costs.py intake --profile  (a) tokens/s that one controller accepts, and where the time goes
    python benchmarks/fleet/costs.py migration         (b) a response that moves once, compared with one that does not
    python benchmarks/fleet/costs.py losses            (c) tokens lost by killing workers at random

The machine should be otherwise idle: `others` shows how many cores other processes used meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # so that `benchmarks` is found

from benchmarks.fleet import intake, losses
from windfall.errors import WindfallError

LARGE = "qwen3-0.6b shape"
ROWS = ((1, 30), (4, 20), (16, 10))
"""Pairs of (tokens per response and frame, rounds)."""


@contextmanager
def others(out: list[float]) -> Iterator[None]:
    """Appends how many cores were used by other processes than this one and its children."""
    before, started = _busy_s(), time.perf_counter()
    ours = sum(os.times()[:4])
    yield
    wall_s = time.perf_counter() - started
    out.append(max(0.0, _busy_s() - before - (sum(os.times()[:4]) - ours)) / wall_s)


def _busy_s() -> float:
    user, nice, system = map(int, Path("/proc/stat").read_text().split()[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def show_intake(profile: bool) -> None:
    workers, each = 1000, 20
    print(
        f"(a) tokens/s that one controller takes in; {workers:,} workers, {workers * each:,} open responses, one core"
    )
    print("    in process            tokens  tok/s of CPU   us/frame  others")
    for count, rounds in ROWS:
        for journaled in (False, True):
            busy: list[float] = []
            with intake.work_folder() as folder, others(busy):
                got = asyncio.run(
                    intake.in_process(
                        Path(folder), workers=workers, each=each, count=count, rounds=rounds, journaled=journaled
                    )
                )
            name = "with a journal" if journaled else "no journal"
            print(f"    {name:20} {count:7} {got.tok_per_s:13,.0f} {got.frame_us:10.1f}  {busy[0]:6.1f}")
    print("    over 50 WebSockets, journaled, driven by a second process")
    print("    open responses        tokens  tok/s of CPU   us/frame  others   tok/s by the clock")
    for each, count in ((20, 1), (20, 4), (400, 1), (400, 4)):
        busy = []
        with intake.work_folder() as folder, others(busy):
            rounds = 100 if each == 20 else 20
            got = asyncio.run(
                intake.over_links(Path(folder), links=50, each=each, count=count, rounds=rounds, journaled=True)
            )
        said = f"{got.tok_per_s:13,.0f} {got.frame_us:10.1f}  {busy[0]:6.1f} {got.wall_tok_per_s:20,.0f}"
        print(f"    {50 * each:<20,} {count:7} {said}")
    if profile:
        print("    shares by function, in process, one token per frame and response, journaled (under a profiler):")
        with intake.work_folder() as folder:
            asyncio.run(
                intake.in_process(
                    Path(folder), workers=workers, each=20, count=1, rounds=10, journaled=True, profile=True
                )
            )


# a migration


def show_migration(model: str, lengths: tuple[int, ...], responses: int = 8) -> None:
    try:
        loaded, tokens = _model(model)
    except WindfallError as e:
        print(f"    {model}: left out ({e.what})")
        return
    begin = [(prompt, 0) for prompt in _prompts(tokens, responses)]
    _make(loaded, begin, 4)  # warms up
    for length in lengths:
        half = length // 2
        whole_s, said = _make(loaded, begin, length)
        moved = [((*prompt, *said[i][:half]), half) for i, (prompt, _) in enumerate(begin)]
        first_s, _ = _make(loaded, begin, 1)
        prefill_s, _ = _make(loaded, moved, 1)
        # A step of plain decoding would have given the same token, so it is not an extra cost.
        step_s = (whole_s - first_s) / (length - 1)
        extra_s = prefill_s - step_s
        _, exact = _make(loaded, begin, 32, deterministic=True)
        _, rest = _make(loaded, [((*p, *exact[i][:16]), 16) for i, (p, _) in enumerate(begin)], 16, deterministic=True)
        same = all(exact[i][16:] == rest[i] for i in range(responses))
        print(
            f"    {model:14} {length:6} {1000 * whole_s:10.0f} {1000 * step_s:12.1f} {1000 * extra_s:14.1f} "
            f"{100 * extra_s / whole_s:11.2f} %   {'the same' if same else 'OTHER'}"
        )


def _model(name: str) -> tuple[Any, int]:
    from windfall import devices
    from windfall.models import load
    from windfall.models.attention import NAME

    device, dtype = devices.resolve("auto", "auto", 1)
    if name == LARGE:
        if device == "cpu":
            raise WindfallError("it needs a GPU")
        model = _random(device, dtype)
    else:
        model = load.load(name, dtype=dtype, device=device)
        model.set_attn_implementation(NAME)
    return model, model.config.vocab_size


def _random(device: str, dtype: str) -> Any:
    """A model with the shape of Qwen3-0.6B and random weights, which do not affect the time."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from windfall.models.attention import NAME

    config = AutoConfig.for_model(
        "qwen3", hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, vocab_size=151_936, max_position_embeddings=40_960,
        tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), attn_implementation=NAME)
    return model.to(device).eval()


def _prompts(vocabulary: int, count: int, length: int = 32) -> list[tuple[int, ...]]:
    return [tuple(3 + (7 * i + 13 * j) % (vocabulary - 3) for j in range(length)) for i in range(count)]


def _make(
    model: Any, work: list[tuple[tuple[int, ...], int]], count: int, *, deterministic: bool = False
) -> tuple[float, list[tuple[int, ...]]]:
    """The seconds and the tokens of an engine with an empty prefix cache."""
    from windfall.engine.torch.engine import TorchEngine
    from windfall.types import Request

    longest = max(len(prompt) for prompt, _ in work) + count + 32
    engine = TorchEngine(model, kv_tokens=len(work) * longest, max_rows=1 << 15, deterministic=deterministic)
    said: list[tuple[int, ...]] = [()] * len(work)
    started = time.perf_counter()
    for i, (prompt, position) in enumerate(work):
        engine.add(Request(id=str(i), prompt=prompt, seed=i, max_tokens=count, position=position, stop=frozenset()))
    while len(engine):
        for chunk in engine.step():
            said[int(chunk.id)] += tuple(chunk.tokens)
    return time.perf_counter() - started, said


# lost workers


def show_losses(seed: int) -> None:
    print("(c) tokens kept when all 8 siblings are cut; log-normal lengths, median 4,096, sigma 0.7")
    print("    cut at       windfall    from zero    group to its shortest")
    for cut in (2048, 3072, 5120, 8192):
        zero, shortest = losses.drawn(cut)
        print(f"    {cut:6} {'100 %':>13} {100 * zero:10.0f} % {100 * shortest:16.0f} %")
    with intake.work_folder() as folder:
        got = asyncio.run(losses.killed(Path(folder), seed=seed))
    print(f"    measured: {got.kills} SIGKILLs, median length {losses.MEDIAN}, {got.moved} responses moved")
    rows = {
        "tokens accepted and kept": got.trained,
        "accepted and lost": got.accepted - got.trained,
        "made, on their way at a kill": got.made - got.accepted,
        "from zero, the same kills": got.from_zero,
        "group to its shortest": got.to_shortest,
    }
    for what, tokens in rows.items():
        print(f"    {what:30} {tokens:10,} tokens {100 * tokens / got.made:8.2f} % of those made")
    print(f"    responses that differ from an uninterrupted one: {got.wrong}")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("part", nargs="?", choices=["intake", "migration", "losses"], help="default: all")
    p.add_argument("--profile", action="store_true", help="also print where the time of the intake goes")
    p.add_argument("--seed", type=int, default=0)
    a = p.parse_args()
    if a.part in (None, "intake"):
        show_intake(a.profile)
    if a.part in (None, "migration"):
        print("(b) 8 responses that move at half their length: prefill again, beside the whole; prompts of 32 tokens")
        print("    model          length   whole ms  one step ms     extra ms  of the whole   continued")
        show_migration("tiny", (64, 256, 448))
        show_migration("smollm2-135m", (32, 128, 256))
        show_migration(LARGE, (256, 1024, 2048))
        print("    extra: one prefill less one step. continued: tokens after a move, deterministic mode, are the same")
    if a.part in (None, "losses"):
        show_losses(a.seed)


if __name__ == "__main__":
    main()
