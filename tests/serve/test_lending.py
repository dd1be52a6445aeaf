"""A server that lends to a run: both get what they would get alone, and serving never waits for the run."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from array import array
from pathlib import Path
from typing import Any

import pytest

from tests.support.fleets.lenders import (
    Lending,
    episode,
    expected,
    lending,
    new_lender,
    new_site,
    rollout_model,
    rollout_spec,
)
from tests.support.fleets.listening_controller import TOKEN, Site
from tests.support.servers.serving import new_host, run, serving, until
from windfall.controller.workers.members import WorkerState
from windfall.engine import factory
from windfall.errors import WindfallError
from windfall.link import invitation
from windfall.link.messages import Work
from windfall.serve import build
from windfall.serve.build import build_rollout
from windfall.serve.memory_policy import MemoryState
from windfall.serve.rollout_tenant import MAX_UNSENT, RolloutTenant
from windfall.serve.slo import Objectives
from windfall.types import Sampling

LONG = {"max_tokens": 200, "ignore_eos": True}


async def roll_out(s: Lending, count: int, max_tokens: int = 60) -> list[Any]:
    """Open responses and wait until the lender generates them."""
    episodes = [episode(f"{n}/0", max_tokens) for n in range(count)]
    for e in episodes:
        s.site.dispatch.open(e, s.site.listener)
    await until(lambda: any(len(e.tokens) for e in episodes), "the lender generates")
    return episodes


def work(handle: int) -> Work:
    return Work(
        handle=handle, prompt=array("I", range(3, 20)).tobytes(), position=0, seed=handle, max_tokens=100,
        sampling=Sampling(), stop=(),
    )  # fmt: skip


async def finished(s: Lending, episodes: list[Any]) -> None:
    await until(lambda: all(e.id in s.site.ended for e in episodes), "all responses have ended", 40.0)
    s.site.dispatch.ledger.check()


def test_both_tenants_get_what_they_would_get_alone(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving() as alone:
            prompts = [f"{n}+{n}=" for n in range(6)]
            want = [(await alone.complete(p, max_tokens=30, temperature=0))["choices"][0]["text"] for p in prompts]
        async with lending(tmp_path) as s:
            await until(lambda: s.site.state("lender") is WorkerState.READY, "it has joined")
            assert s.site.hellos[0].lease.kind == "borrowed"
            episodes = [episode(f"{n}/0") for n in range(5)]
            for e in episodes:
                s.site.dispatch.open(e, s.site.listener)
            answers = await asyncio.gather(*(s.complete(p, max_tokens=30, temperature=0) for p in prompts))
            assert [a["choices"][0]["text"] for a in answers] == want
            await finished(s, episodes)
            assert [e.tokens.tolist() for e in episodes] == [expected(e) for e in episodes]
            assert s.host.metrics.rollout_tokens >= 300
            assert await s.metric("lend_generated_tokens_total") == s.host.metrics.rollout_tokens
            assert s.host.rollout_time.predicted_s > 0

    run(main)


async def next_controller(s: Lending, site: Site) -> None:
    """A controller at the address of the first one, which is killed after a response."""
    site.port.port = s.site.port.port
    await site.port.open()
    watching = asyncio.create_task(site.dispatch.watch())
    try:
        more = episode("9/0")
        site.dispatch.open(more, site.listener)
        await until(lambda: "9/0" in site.ended, "the next controller gets its response")
        assert more.tokens.tolist() == expected(more)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await site.port.close("killed")
        site.events.close()


def test_serving_goes_on_without_the_controller(tmp_path: Path) -> None:
    async def main() -> None:
        async with lending(tmp_path / "a") as s:
            episodes = await roll_out(s, 4, max_tokens=100)
            running = asyncio.create_task(s.complete(**LONG))
            await until(lambda: s.host.requests, "a request runs")
            await s.site.port.close("killed")
            assert (await running)["usage"]["completion_tokens"] == 200
            await until(lambda: len(s.tenant.engine) == 0, "the responses of the dead controller are dropped")
            assert s.tenant.pages.held_blocks == 0
            for n in range(3):
                await s.complete(f"{n}+1=", max_tokens=5)
            await next_controller(s, new_site(tmp_path / "b"))
            assert s.lender.tenants == 1, "the engine was not built again"
            await next_controller(s, new_site(tmp_path / "c", model="model-2"))
            assert s.lender.tenants == 2, "another run with another model"
            assert len(episodes) == 4

    run(main)


def test_pressure_returns_responses_with_all_their_tokens(tmp_path: Path) -> None:
    """A burst of serving takes the memory of the rollout. The responses go back, and end as they would have."""

    async def main() -> None:
        async with lending(tmp_path, new_host(kv_tokens=1280)) as s:
            episodes = await roll_out(s, 8, max_tokens=100)  # more than fit at once
            budget = s.host.policy.budget
            assert s.host.policy.state is MemoryState.NORMAL
            options = {"max_tokens": 100, "ignore_eos": True}
            burst = await asyncio.gather(*(s.complete(f"{n}+{n}=", **options) for n in range(8)))
            assert all(b["usage"]["completion_tokens"] == 100 for b in burst)
            assert s.host.policy.state is MemoryState.FROZEN
            assert s.host.policy.budget <= budget // 2
            assert s.host.metrics.responses_returned["memory"] > 0
            assert s.host.arena.blocks.moves > 0
            assert s.host.engine.counters.evictions == 0, "serving had all the memory that it needed"
            member = s.site.dispatch.members.all["lender"]
            await until(lambda: member.moved > 0, "the controller has them back")
            frozen = lambda: member.capacity is not None and member.capacity.state == "frozen"  # noqa: E731
            await until(frozen, "the controller knows the state of the lender")
            s.host.call(s.host.begin_step).result()  # as the next version of the weights does
            await finished(s, episodes)
            assert [e.tokens.tolist() for e in episodes] == [expected(e) for e in episodes]

    run(main)


def test_rollout_gives_way_while_serving_is_late(tmp_path: Path) -> None:
    """With objectives that no machine can meet, a rollout step never runs beside a request."""

    async def main() -> None:
        async with lending(tmp_path, new_host(objectives=Objectives(ttft_s=1e-4, tpot_s=1e-4))) as s:
            episodes = await roll_out(s, 2, max_tokens=60)
            running = asyncio.create_task(s.complete(**LONG))
            await until(lambda: s.host.requests, "a request runs")
            before = s.host.call(lambda: (s.host.metrics.rollout_steps, s.host.requests)).result()
            await asyncio.sleep(0.05)
            after = s.host.call(lambda: (s.host.metrics.rollout_steps, s.host.requests)).result()
            if after[1]:  # the request has not ended meanwhile
                assert after[0] - before[0] <= 1, "at most the step that was running"
                assert s.host.metrics.rollout_waits > 0
            await running
            await finished(s, episodes)

    run(main)


def test_a_failing_rollout_does_not_end_the_service(tmp_path: Path) -> None:
    async def main() -> None:
        async with lending(tmp_path) as s:
            await roll_out(s, 2, max_tokens=100)

            def broken(*limits: int) -> Any:
                raise RuntimeError("the rollout's kernel failed")

            first = s.tenant
            first.engine.step = broken
            assert len(await s.complete(max_tokens=20, return_token_ids=True)) > 0
            await until(lambda: s.tenant is not first and s.tenant is not None, "there is another tenant")
            assert any("the rollout's kernel failed" in line for line in s.said)
            assert s.host.failed is None
            s.host.call(s.host.arena.blocks.check).result()
            late = episode("9/0")
            s.site.dispatch.open(late, s.site.listener)
            await finished(s, [late])
            assert late.tokens.tolist() == expected(late)

    run(main)


def test_a_lender_that_leaves_returns_its_responses(tmp_path: Path) -> None:
    async def main() -> None:
        async with lending(tmp_path) as s:
            episodes = await roll_out(s, 2, max_tokens=100)
            s.lender.leave("the server is shutting down")
            await until(lambda: s.site.state("lender") is WorkerState.GONE, "it has left")
            await until(lambda: s.host.rollout is None, "the tenant is gone")
            assert s.host.arena.blocks.held("rollout") == 0
            tokens = [len(e.tokens) for e in episodes]
            assert sum(tokens) > 0
            assert [e.tokens.tolist() for e in episodes] == [
                expected(e)[:n] for e, n in zip(episodes, tokens, strict=True)
            ]
            assert (await s.complete(max_tokens=5))["choices"]

    run(main)


def test_responses_of_a_lost_lender_go_on_at_another(tmp_path: Path) -> None:
    async def main() -> None:
        async with lending(tmp_path) as s, serving() as other:
            second = asyncio.create_task(new_lender(other.host, s.site, "second", s.said).run())
            for name in ("lender", "second"):
                await until(lambda name=name: s.site.state(name) is WorkerState.READY, f"{name} has joined")
            episodes = [episode(f"{n}/0") for n in range(6)]
            for e in episodes:
                s.site.dispatch.open(e, s.site.listener)
            await until(lambda: s.tenant._generated and other.host.metrics.rollout_tokens, "both generate")
            s.task.cancel()
            await finished(s, episodes)
            assert [e.tokens.tolist() for e in episodes] == [expected(e) for e in episodes]
            answer = await s.complete(max_tokens=5, ignore_eos=True)
            assert answer["usage"]["completion_tokens"] == 5, "its service goes on"
            second.cancel()
            await asyncio.gather(second, return_exceptions=True)

    run(main)


def test_a_link_that_does_not_move_does_not_stop_serving() -> None:
    async def main() -> None:
        async with serving() as s:
            stuck = threading.Event()
            tenant = RolloutTenant(s.host, make=lambda: build_rollout(s.host, rollout_spec(), "cpu"))
            tenant.start()

            def hold(message: object) -> None:
                stuck.wait()

            tenant.attach(hold)
            await until(lambda: tenant.built and s.host.rollout is tenant, "the tenant is there")
            tenant.swap(0, rollout_model().state_dict(), lambda error: None)
            tenant.add([work(n) for n in range(4)])

            def blocked() -> bool:
                return tenant._forwarder is not None and tenant._forwarder.unsent >= MAX_UNSENT

            await until(lambda: tenant.failed or blocked(), "many frames are unsent")
            assert not tenant.busy
            assert tenant.failed is None, tenant.failed
            answer = await s.complete(max_tokens=20, ignore_eos=True)
            assert answer["usage"]["completion_tokens"] == 20
            stuck.set()
            await asyncio.to_thread(tenant.close)
            assert s.host.rollout is None
            assert s.host.arena.blocks.held("rollout") == 0

    run(main)


def test_a_run_that_does_not_fit_is_refused_and_serving_goes_on(tmp_path: Path) -> None:
    async def main() -> None:
        async with lending(tmp_path, new_host(kv_tokens=300)) as s:
            await until(lambda: any("serving goes on without lending" in line for line in s.said), "it is refused")
            assert any("a page of this model takes" in line for line in s.said)
            assert s.host.arena.blocks.held("rollout") == 0
            assert (await s.complete(max_tokens=5))["usage"]["completion_tokens"] <= 5

    run(main)


def test_a_model_without_room_is_refused_before_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    host = new_host()
    room = factory.model_bytes(json.loads(rollout_spec().model_config), "float32")
    assert room == sum(p.numel() * 4 for p in rollout_model().parameters())
    monkeypatch.setattr(build, "free_bytes", lambda device: room)
    build_full_model = factory.build_full_model

    def allocate_nothing(fields: Any, dtype: str, device: str) -> Any:
        assert device == "meta", "memory was allocated"
        return build_full_model(fields, dtype, device)

    monkeypatch.setattr(factory, "build_full_model", allocate_nothing)
    with pytest.raises(WindfallError, match="the run's weights take"):
        build_rollout(host, rollout_spec(), "cpu")


def test_lending_begins_when_the_token_is_there_and_a_wrong_one_ends_it(tmp_path: Path) -> None:
    file = tmp_path / "token"

    async def main() -> None:
        async with lending(tmp_path, token=lambda: TOKEN if file.exists() else invitation.token(str(file))) as s:
            await until(lambda: any("waiting for the run's token" in line for line in s.said), "it waits")
            assert (await s.complete(max_tokens=5))["choices"], "serving does not wait"
            file.touch()
            await until(lambda: s.site.state("lender") is WorkerState.READY, "it has joined")
        async with lending(tmp_path / "b", token=lambda: "wrong-token-0123456789abcdef") as s:
            await until(lambda: any("serving goes on without lending" in line for line in s.said), "it is refused")
            assert (await s.complete(max_tokens=5))["choices"]

    run(main)


def test_load_of_a_small_trace(tmp_path: Path) -> None:
    """Requests arrive at random while a run generates: all are answered, and the run gets on."""

    async def main() -> None:
        rng = random.Random(7)
        async with lending(tmp_path, new_host(objectives=Objectives(ttft_s=5.0, tpot_s=1.0))) as s:
            await roll_out(s, 4, max_tokens=100)
            began, tasks = time.monotonic(), []
            while time.monotonic() - began < 1.5:
                prompt = [rng.randrange(3, 99) for _ in range(rng.randrange(4, 120))]
                options = {"max_tokens": rng.randrange(4, 40), "ignore_eos": True}
                tasks.append(asyncio.create_task(s.complete(prompt, **options)))
                await asyncio.sleep(rng.expovariate(8.0))
            answers = await asyncio.gather(*tasks)
            assert all(a["choices"][0]["finish_reason"] == "length" for a in answers)
            assert s.host.metrics.rollout_tokens > 20
            late = s.host.metrics.late_first_tokens + s.host.metrics.late_tokens
            assert late <= 0.2 * len(answers), "a busy machine may be late, a lender may not"

    run(main)


def test_memory_is_free_after_an_error_of_the_link(tmp_path: Path) -> None:
    """An error in the client ends its tenant and its HTTP session, and the next one gets the memory."""

    async def main() -> None:
        async with lending(tmp_path) as s:
            await roll_out(s, 2)
            first, dialer = s.tenant, s.lender._client._dialer
            first._emit(object())  # no message
            await until(lambda: s.tenant is not None and s.tenant is not first, "it lends again")
            assert dialer._session.closed
            await until(lambda: len(s.site.ended) == 2, "the responses have ended")

    run(main)
