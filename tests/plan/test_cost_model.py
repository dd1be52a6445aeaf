"""The cost model agrees with measurements that it was not fitted to, and behaves as hardware does."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from windfall.errors import WindfallError
from windfall.plan.model import cluster, cost_model, devices
from windfall.plan.model.cost_model import Efficiency, ZonePull
from windfall.plan.model.workload import MODELS, Workload, model
from windfall.plan.run.recipe import recipe_workload
from windfall.recipe.file import parse_recipe
from windfall.trainer.ranks.state_layout import MOMENT_BYTES, StateLayout

WORK = Workload(shape=MODELS["Qwen3-8B"])
FITTED = Efficiency()


def test_moments_of_lengths_are_those_of_draws() -> None:
    work = replace(WORK, median_tokens=800, sigma=0.9, max_tokens=3000, prompt_tokens=0)
    draw = random.Random(3)
    lengths = [min(3000, 800 * draw.lognormvariate(0, 0.9)) for _ in range(100_000)]
    assert work.mean_tokens == pytest.approx(sum(lengths) / len(lengths), rel=0.01)
    running = sum(x * x / 2 for x in lengths) / sum(lengths)
    assert work.mean_context == pytest.approx(running, rel=0.01)


def test_more_gpus_train_faster_and_need_less_memory_each() -> None:
    h100 = devices.find("H100")
    trained = [cost_model.fsdp(WORK, h100, n, 8, 50e9, FITTED) for n in (4, 8, 16)]
    assert [t.step_s for t in trained] == sorted((t.step_s for t in trained), reverse=True)
    assert [t.memory_bytes for t in trained] == sorted((t.memory_bytes for t in trained), reverse=True)


def test_what_does_not_fit_says_how_much_is_missing() -> None:
    big = replace(WORK, shape=MODELS["Qwen3-32B"])
    with pytest.raises(cost_model.DoesNotFit, match="GB per GPU"):
        cost_model.replica(big, devices.find("L4"), 1, FITTED)
    with pytest.raises(cost_model.DoesNotFit, match="training on 4 H100"):
        cost_model.fsdp(big, devices.find("H100"), 4, 8, 50e9, FITTED)


def test_context_groups_train_what_one_gpu_cannot_hold() -> None:
    h100, long = devices.find("H100"), replace(WORK, max_tokens=300_000)
    with pytest.raises(cost_model.DoesNotFit):
        cost_model.fsdp(long, h100, 8, 8, 50e9, FITTED)
    split = cost_model.fsdp(replace(long, context_parallel=8), h100, 8, 8, 50e9, FITTED)
    assert split.pack_tokens >= long.prompt_tokens + long.max_tokens
    with pytest.raises(
        cost_model.DoesNotFit, match=r"8 H100 cannot be divided into groups of train\.context_parallel = 3"
    ):
        cost_model.fsdp(replace(WORK, context_parallel=3), h100, 8, 8, 50e9, FITTED)
    with pytest.raises(cost_model.DoesNotFit, match="3 ranks cannot divide 32 heads equally"):
        cost_model.fsdp(replace(WORK, context_parallel=3), h100, 6, 8, 50e9, FITTED)


def test_larger_packs_need_more_memory_and_smaller_ones_send_more() -> None:
    h100 = devices.find("H100")
    auto = cost_model.fsdp(WORK, h100, 8, 8, 50e9, FITTED)
    small, large = (
        cost_model.fsdp(replace(WORK, micro_tokens=n), h100, 8, 8, 50e9, FITTED)
        for n in (auto.pack_tokens // 4, 4 * auto.pack_tokens)
    )
    assert small.sent_bytes > auto.sent_bytes > large.sent_bytes
    assert small.memory_bytes <= auto.memory_bytes < large.memory_bytes
    with pytest.raises(cost_model.DoesNotFit, match="GB besides, mostly for activations"):
        cost_model.fsdp(replace(WORK, groups=4096, micro_tokens=10**8), h100, 8, 8, 50e9, FITTED)
    assert recipe_workload(parse_recipe({"train": {"micro_tokens": 5000}}, where="here")).micro_tokens == 5000


def test_reading_the_kv_cache_costs_time() -> None:
    long = replace(WORK, median_tokens=8000, max_tokens=30_000)
    h200 = devices.find("H200")
    short_engine, long_engine = (cost_model.replica(w, h200, 1, FITTED) for w in (WORK, long))
    assert long_engine.tok_per_s(64, long) < 0.8 * short_engine.tok_per_s(64, WORK)
    assert long_engine.slots < short_engine.slots


def test_kv_cache_in_fp8_has_twice_the_tokens_and_is_read_in_half_the_time() -> None:
    narrow, h200 = replace(WORK, kv_value_bytes=1), devices.find("H200")
    wide, half = (cost_model.replica(w, h200, 1, FITTED) for w in (WORK, narrow))
    assert half.kv_tokens == pytest.approx(2 * wide.kv_tokens, abs=1)
    assert half.service.context_s == pytest.approx(wide.service.context_s / 2)
    assert recipe_workload(parse_recipe({"engine": {"kv_dtype": "fp8"}}, where="here")).kv_value_bytes == 1


def test_fast_links_matter_only_between_machines() -> None:
    h100 = devices.find("H100")
    slow, fast = (cost_model.fsdp(WORK, h100, 16, 8, network, FITTED) for network in (0.2e9, 50e9))
    assert slow.step_s > 1.5 * fast.step_s
    inside = [cost_model.fsdp(WORK, h100, 8, 8, network, FITTED).step_s for network in (0.2e9, 50e9)]
    assert inside[0] == inside[1]


def test_training_takes_the_time_of_its_flops_and_bytes() -> None:
    """Worked out by hand for 8B on 16 H100 in two machines with 10 GB/s each."""
    work = replace(WORK, sigma=0.0, median_tokens=3000, prompt_tokens=1000, max_tokens=3000)
    e = replace(FITTED, train=0.5, elementwise=0.0, publish_s=0.0, publish_bytes_per_s=1e30)
    h100, parameters = devices.find("H100"), 8_190_427_136
    inside = cost_model.fsdp(work, h100, 8, 8, 10e9, e)
    tokens = 512 * 4000
    per_token = 6 * parameters + 12 * 36 * 32 * 128 * 2000  # a token attends to 2,000 others on average
    assert cost_model._token_s(work, h100, e, 1.0) == pytest.approx(per_token / (989e12 * 0.5))
    least_s = tokens * per_token / 8 / (989e12 * 0.5)
    assert least_s <= inside.compute_s <= 4 / 3 * least_s
    apart = cost_model.fsdp(work, h100, 16, 8, 10e9, e)
    packs = -(-tokens // 16 // apart.pack_tokens)
    # Gathered twice in bfloat16, reduced once in float32; 15 of 16 parts; 80 % of the network.
    assert apart.send_s == pytest.approx(packs * (2 * 2 + 4) * parameters * 15 / 16 / 8e9, rel=0.01)


def test_reference_and_proximal_policy_cost_a_forward_pass_each() -> None:
    h200 = devices.find("H200")
    small = replace(WORK, shape=MODELS["Qwen3-0.6B"])
    plain, kl, several = (
        cost_model.fsdp(w, h200, 1, 8, 1e9, FITTED).compute_s
        for w in (small, replace(small, kl=True), replace(small, minibatches=4))
    )
    assert kl / plain == pytest.approx(4 / 3, rel=0.01)
    assert several / plain == pytest.approx(4 / 3, rel=0.01)


def test_adapters_are_updated_published_and_pulled_without_the_base() -> None:
    h200 = devices.find("H200")
    lora = replace(WORK, adapter_parameters=20_000_000)
    full, adapted = (cost_model.fsdp(w, h200, 4, 8, 1e9, FITTED) for w in (WORK, lora))
    assert adapted.update_s - FITTED.publish_s < 0.01 * (full.update_s - FITTED.publish_s)
    assert cost_model.pull_s(lora, [ZonePull(1e9)], 1) == pytest.approx(2 * 20e6 / 0.8e9)


def test_zones_are_links_of_their_own() -> None:
    data = {"machine": [{"gpu": "H100", "count": 8, "zone": "a"}, {"gpu": "H100", "count": 8, "zone": "b"},
            {"gpu": "L40S", "count": 8, "zone": "b"}, {"gpu": "L40S", "count": 8}],
            "links": {"across_types_gb_per_s": 3}, "link": [{"between": ["a", "b"], "gb_per_s": 1}]}  # fmt: skip
    made = cluster.parse(data, "c.toml")
    a, b, c, d = made.machines
    assert [made.bandwidth(a, b), made.bandwidth(c, a), made.bandwidth(b, c), made.bandwidth(a, d)] == [
        1e9, 1e9, 3e9, 3e9,
    ]  # fmt: skip
    assert "1 GB/s between zones a and b" in str(made.links)


def test_clusters_from_toml_and_text() -> None:
    data = {"machine": [{"gpu": "h100", "count": 8}, {"gpu": "X1", "count": 2, "machines": 3, "lease": "spot",
            "price_usd_per_gpu_h": 1.5}],
            "device": [{"name": "X1", "memory_gb": 64, "bandwidth_gb_per_s": 1600, "tflops": 200, "link_gb_per_s": 50}],
            "links": {"same_type_gb_per_s": 5, "across_types_gb_per_s": 1.5}}  # fmt: skip
    made = cluster.parse(data, "c.toml")
    assert str(made) == "8 H100 + 6 X1 spot"
    assert made.usd_per_h == pytest.approx(8 * 7.36 + 6 * 1.5)
    a, b, c = made.machines[0], made.machines[1], made.machines[2]
    assert [made.bandwidth(a, a), made.bandwidth(b, c), made.bandwidth(a, b)] == [450e9, 5e9, 1.5e9]
    assert cluster.from_text("8xH100 + 6x2xH100:spot").gpus == 20


@pytest.mark.parametrize(
    ("data", "what"),
    [
        ({}, "no machines"),
        ({"machine": [{"gpu": "H1000"}]}, "unknown GPU"),
        ({"machine": [{"gpu": "H100", "count": 0}]}, "count is 0"),
        ({"machine": [{"gpu": "H100", "zone": 1}]}, "zone is 1"),
        ({"machine": [{"gpu": "H100", "zone": "a"}], "link": [{"between": ["a"], "gb_per_s": 1}]}, "between is"),
        ({"machine": [{"gpu": "H100", "zone": "a"}], "link": [{"between": ["a", "b"], "gb_per_s": 1}]}, "the zone 'b'"),
        ({"machine": [{"gpu": "H100", "zone": "a"}], "link": [{"between": ["a", "a"]}]}, "'gb_per_s' is missing"),
        ({"machine": [{"gpu": "H100", "counts": 8}]}, "unknown key"),
        ({"machine": [{"gpu": "H100", "lease": "free"}]}, "unknown lease"),
        ({"machine": [{"gpu": "H100", "price_usd_per_gpu_h": -1}]}, "price_usd_per_gpu_h"),
        ({"machine": {"gpu": "H100"}}, "list of tables"),
        ({"device": [{"name": "X"}], "machine": [{"gpu": "X"}]}, "missing"),
        ({"machine": [{"gpu": "H100", "count": 8, "machines": 1000}]}, "8,000 GPUs"),
    ],
)
def test_bad_clusters_are_refused(data: dict, what: str) -> None:
    with pytest.raises(WindfallError, match=what):
        cluster.parse(data, "c.toml")


def test_unknown_names_suggest_known_ones() -> None:
    with pytest.raises(WindfallError, match="Did you mean 'H100'"):
        devices.find("H10")
    with pytest.raises(WindfallError, match="not known"):
        model("gpt-9")
    with pytest.raises(WindfallError, match="no on-demand price"):
        devices.find("A100-40GB").price(spot=False)


def test_updates_of_8b_take_what_was_measured_on_an_h200() -> None:
    """Seconds of docs/ranks.md, which include the wait for the device."""
    shape, h200 = MODELS["Qwen3-8B"], devices.find("H200")
    layout = StateLayout(trained=shape.parameters)
    away = replace(layout, host_share=43.3e9 / layout.movable)
    eight = replace(layout, moment_bytes=MOMENT_BYTES["adamw_8bit"])
    for found, measured_s in ((away, 1.01), (eight, 1.58)):
        assert cost_model.state_s(found, h200, FITTED) == pytest.approx(measured_s, rel=0.1)
