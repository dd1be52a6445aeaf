"""The price table: device names as in torch, which price takes precedence, and devices without a price."""

from __future__ import annotations

import math

import pytest

from windfall.controller.cost import prices
from windfall.errors import WindfallError
from windfall.types import Lease


@pytest.mark.parametrize(
    ("device", "usd_per_h"),
    [
        ("NVIDIA H200", 3.29),
        ("NVIDIA H200 NVL", 3.29),
        ("NVIDIA H100 80GB HBM3", 2.63),
        ("NVIDIA H100 PCIe", 2.63),
        ("H100", 2.63),
        ("NVIDIA A100-SXM4-80GB", 2.14),
        ("NVIDIA A100 80GB PCIe", 2.14),
        ("A100-80GB", 2.14),
        ("NVIDIA L40S", 1.56),
        ("nvidia l4", 0.70),
        ("NVIDIA A10G", 0.87),
        ("2xH100", 5.26),
        ("2x NVIDIA H100 80GB HBM3", 5.26),
        ("8 x H100", 21.04),
    ],
)
def test_device_names_are_recognized(device: str, usd_per_h: float) -> None:
    price = prices.lookup(device, kind="spot")
    assert price is not None
    assert price.usd_per_h == pytest.approx(usd_per_h)
    assert price.known
    assert price.date == prices.DATE
    assert prices.SOURCE in price.source


@pytest.mark.parametrize(
    "device",
    [
        "cpu", "", "here", "NVIDIA L40", "NVIDIA A10", "NVIDIA H20", "NVIDIA GH200 480GB", "NVIDIA A100-SXM4-40GB",
        "NVIDIA GeForce RTX 4090", "AMD Instinct MI300X", "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "0xH100", "8 H100", "MI100",
    ],
)  # fmt: skip
def test_device_missing_from_the_table_has_no_price(device: str) -> None:
    assert prices.lookup(device, kind="spot") is None
    price = prices.of(Lease(device=device))
    assert (price.usd_per_h, price.known, price.if_known) == (0.0, False, None)


def test_named_cloud_is_used() -> None:
    def usd(where: str) -> float | None:
        price = prices.lookup("NVIDIA H100 80GB HBM3", kind="reserved", where=where)
        return price and price.usd_per_h

    assert usd("aws") == usd("AWS/us-east-1") == 7.36
    assert usd("gcp:us-central1-a") == 11.17
    assert usd("nebius eu-north1") == 3.85
    assert usd("") == usd("us-east-1") == usd("cellar") == 7.36, "the median of the three clouds"
    assert prices.lookup("NVIDIA H200", kind="spot", where="gcp") is None, "the price of another cloud is not used"


def test_on_demand_and_spot_price_are_of_one_cloud() -> None:
    for gpu in prices.GPUS:
        pair = [prices.lookup(gpu, kind=kind) for kind in ("reserved", "spot")]
        assert (gpu, pair[0] and pair[0].usd_per_h, pair[1] and pair[1].usd_per_h) in {r[1:] for r in prices.TABLE}


def test_price_depends_on_the_terms() -> None:
    assert prices.of(Lease(kind="reserved", device="NVIDIA H200")).usd_per_h == 8.55
    borrowed = prices.of(Lease(kind="borrowed", device="NVIDIA H200"))
    assert (borrowed.usd_per_h, borrowed.known) == (0.0, True)
    assert prices.of(Lease(kind="borrowed", device="cpu", price_usd_per_h=0.1)).if_known == 0.1
    with pytest.raises(WindfallError, match="Did you mean 'spot'"):
        prices.lookup("H100", kind="sport")  # pyright: ignore


def test_price_of_the_lease_takes_precedence() -> None:
    price = prices.of(Lease(device="NVIDIA H100 80GB HBM3", price_usd_per_h=1.25))
    assert price == prices.Price(usd_per_h=1.25, source="the lease")
    assert prices.of(Lease(device="cpu", price_usd_per_h=0.05)).if_known == 0.05


@pytest.mark.parametrize("price", [-1.0, math.nan, math.inf])
def test_invalid_price_is_refused(price: float) -> None:
    with pytest.raises(WindfallError, match="price_usd_per_h"):
        prices.of(Lease(device="cpu", price_usd_per_h=price))


def test_table_is_consistent() -> None:
    assert len({row[:2] for row in prices.TABLE}) == len(prices.TABLE)
    assert all(0 < spot < on_demand for _, _, on_demand, spot in prices.TABLE)
