"""Moments in 8 bits: what a code keeps, and that training with them is training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.trainer.adam.test_weight_state import Kind, model_of, optimizer_of, state_of, train
from windfall.trainer.adam.eight_bit import LEVELS, SIGNED, UNSIGNED, block_size, decode, encode
from windfall.trainer.model.gradients import trained

BLOCK = 256


def round_trip(numbers: Tensor, dtype: torch.dtype, step: int = 1) -> Tensor:
    codes, scales = torch.empty(numbers.shape, dtype=dtype), torch.empty(len(numbers) // BLOCK)
    encode(numbers, codes, scales, step)
    return decode(codes, scales)


def spread(count: int) -> Tensor:
    """Numbers of many sizes."""
    drawn = torch.Generator().manual_seed(0)
    return torch.randn(count, generator=drawn) * torch.randn(count, generator=drawn).mul(2).exp()


@pytest.mark.parametrize("dtype", [SIGNED, UNSIGNED])
def test_a_number_is_kept_to_the_distance_of_two_codes_and_to_itself_on_average(dtype: torch.dtype) -> None:
    numbers = spread(BLOCK << 9)
    numbers = numbers if dtype == SIGNED else numbers.square()
    found, scales = round_trip(numbers, dtype), numbers.abs().view(-1, BLOCK).amax(1, keepdim=True)
    share = (numbers.abs().view(-1, BLOCK) / scales).view(-1)
    gap = ((share.pow(0.25) + 1 / LEVELS[dtype]).pow(4) - share) / share
    wrong = (found - numbers) / numbers
    assert (wrong.abs() <= gap).all()
    assert torch.equal(found.view(-1, BLOCK).abs().amax(1, keepdim=True), scales), "the largest is exact"
    usual = share > 1e-4
    assert 0.005 < wrong[usual].abs().mean() < 0.06
    assert wrong[usual].mean().abs() < 1e-3, "up as often as down"


def test_zero_stays_zero_and_no_second_moment_becomes_zero() -> None:
    numbers = torch.zeros(2 * BLOCK)
    assert not round_trip(numbers, SIGNED).any()
    assert not round_trip(numbers, UNSIGNED).any()
    numbers[: BLOCK // 2] = torch.logspace(0, -30, BLOCK // 2)
    assert torch.equal(round_trip(numbers, UNSIGNED) > 0, numbers > 0)


def test_a_moment_follows_changes_that_are_smaller_than_the_distance_of_two_codes() -> None:
    """Rounded to the nearest code it would never move."""
    numbers, wanted, target = torch.ones(BLOCK), torch.ones(BLOCK), torch.ones(BLOCK)
    numbers[1:], wanted[1:], target[1:] = 0.02, 0.02, 0.04
    distance = 0.02 * ((1 + 1 / (0.02**0.25 * LEVELS[UNSIGNED])) ** 4 - 1)
    assert distance / 10 > 0.004 * 0.02, "the first change"
    for step in range(200):
        wanted = wanted.lerp(target, 0.004)
        numbers = round_trip(numbers.lerp(target, 0.004), UNSIGNED, step)
    assert 0.028 < wanted[1] < 0.032
    assert numbers[1:].mean() == pytest.approx(float(wanted[1]), rel=0.01)
    assert numbers[1:].std() < 0.1 * wanted[1], "single numbers wander little"


def losses(kind: Kind, beta: float = 0.95) -> Tensor:
    """Of predicting the next number."""
    model = model_of(torch.float32)
    optimizer, out = optimizer_of(model, kind=kind, lr=0.003, clip_norm=100.0, betas=(0.9, beta)), []
    drawn = torch.Generator().manual_seed(0)
    for _ in range(25):
        ids = torch.randint(0, 37, (16, 9), generator=drawn)
        loss = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), (ids.flatten() + 1) % 37)
        out.append(loss.detach())
        loss.backward()
        optimizer.update(1.0)
    return torch.stack(out)


def test_the_loss_falls_as_with_moments_in_float32() -> None:
    """The curves differ far less than with another beta."""
    wanted, found, other = losses("adamw"), losses("adamw_8bit"), losses("adamw", beta=0.9)
    assert wanted[-1] < 0.5 * wanted[0]
    assert not torch.equal(found, wanted)
    assert 5 * (found - wanted).abs().mean() < (other - wanted).abs().mean()


def test_which_moments_have_8_bits_and_that_a_checkpoint_belongs_to_one_form(tmp_path: Path) -> None:
    models = [model_of(torch.bfloat16) for _ in range(2)]
    eight, full = optimizer_of(models[0], kind="adamw_8bit"), optimizer_of(models[1])
    files = []
    for model, optimizer in zip(models, (eight, full), strict=True):
        train(model, optimizer, range(1))
        files.append(state_of(optimizer, tmp_path / optimizer.options.optimizer))
    for name, p in trained(models[0]).items():
        if f"step.{name}" in files[0]:
            coded = block_size(p.shape) > 0
            assert coded == (name in ("embed.weight", "up.weight", "down.weight"))
            assert (files[0][f"exp_avg.{name}"].dtype == SIGNED) == coded
            assert (f"exp_avg_sq_scale.{name}" in files[0]) == coded
            assert files[0][f"exp_avg.{name}"].shape == files[1][f"exp_avg.{name}"].shape == p.shape
    with pytest.raises(ValueError, match=r"not that of train\.optimizer = 'adamw'"):
        full.restore(tmp_path / "adamw_8bit")
    with pytest.raises(ValueError, match=r"not that of train\.optimizer = 'adamw_8bit'"):
        eight.restore(tmp_path / "adamw")
