"""Who is next on the trainer and on workers."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from windfall.tinker.accounts import fairness
from windfall.tinker.accounts.fairness import LEAST_OPEN, OpenResponses, TrainerTurns


def run(work: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(30):
            await work

    asyncio.run(limited())


class FakeTime:
    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    found = FakeTime()
    monkeypatch.setattr(fairness, "time", found)
    return found


def test_accounts_get_the_trainer_by_what_they_used_not_by_how_many_ask(clock: FakeTime) -> None:
    order: list[str] = []

    async def work() -> None:
        turns = TrainerTurns()

        async def call(account: str, s: float) -> None:
            async with turns.turn(account):
                order.append(account)
                await asyncio.sleep(0)
                clock.now_s += s

        await asyncio.gather(*(call("many", 1.0) for _ in range(6)), *(call("few", 2.0) for _ in range(2)))
        assert turns.take() == {"many": 6.0, "few": 4.0}
        assert turns.take() == {}
        assert turns.recent_s("many") > turns.recent_s("few")
        clock.now_s += 1000
        assert turns.recent_s("many") < 0.01

    run(work())
    assert order == ["many", "few", "many", "many", "few", "many", "many", "many"]


@pytest.mark.parametrize("accounts", [("a", "a", "a"), ("a", "b", "c")])
def test_a_client_whose_update_is_short_samples_while_others_train(clock: FakeTime, accounts: tuple[str, ...]) -> None:
    order: list[str] = []

    async def work() -> None:
        turns = TrainerTurns()

        async def step(number: int) -> None:
            for what, s in (("gradient", 0.5), ("update", 0.01), ("save", 0.1)):
                async with turns.turn(accounts[number], short=what != "gradient"):
                    order.append(f"{number} {what}")
                    await asyncio.sleep(0)
                    clock.now_s += s
                await asyncio.sleep(0)

        await asyncio.gather(*map(step, range(3)))

    run(work())
    assert order.index("0 save") < order.index("2 gradient") + 2
    assert order.index("2 gradient") > order.index("0 update"), "in the order of arrival it would come before"


def test_short_calls_of_one_account_do_not_hold_up_another_one(clock: FakeTime) -> None:
    order: list[str] = []

    async def work() -> None:
        turns = TrainerTurns()

        async def call(account: str, s: float, *, short: bool) -> None:
            async with turns.turn(account, short=short):
                order.append(account)
                await asyncio.sleep(0)
                clock.now_s += s

        many = (call("many", fairness.AHEAD_S / 4, short=True) for _ in range(20))
        await asyncio.gather(*many, call("few", 1.0, short=False))

    run(work())
    assert order.index("few") in (4, 5)


def test_a_long_turn_is_counted_while_it_lasts(clock: FakeTime) -> None:
    async def work() -> None:
        turns = TrainerTurns()
        async with turns.turn("a") as turn:
            clock.now_s += 5
            assert turns.take() == {"a": 5.0}
            clock.now_s += 2
            turn.end()
            clock.now_s += 9
        assert turns.take() == {"a": 2.0}

    run(work())


def test_who_is_canceled_while_waiting_passes_the_turn_on() -> None:
    async def work() -> None:
        turns, got = TrainerTurns(), []

        async def call(account: str) -> None:
            async with turns.turn(account):
                got.append(account)

        async with turns.turn("a") as turn:
            waiting = {name: asyncio.create_task(call(name)) for name in ("b", "c", "d")}
            await asyncio.sleep(0)
            waiting["b"].cancel()
            turn.end()  # wakes c
            waiting["c"].cancel()
        await asyncio.wait(waiting.values())
        assert got == ["d"]
        async with turns.turn("e"):
            pass

    run(work())


def test_an_account_with_many_samples_lets_others_pass() -> None:
    async def work() -> None:
        slots, order = 0, []
        responses = OpenResponses(lambda: slots)

        async def call(account: str, count: int) -> None:
            await responses.admit(account, count)
            order.append(account)

        tasks = [asyncio.create_task(call("many", 4)) for _ in range(30)]
        await asyncio.sleep(0)
        assert sum(responses.open.values()) == LEAST_OPEN
        tasks += [asyncio.create_task(call("few", 1)) for _ in range(2)]
        await asyncio.sleep(0)
        responses.ended("many", 4)
        await asyncio.sleep(0)
        assert order == ["many"] * 4 + ["few"] * 2 + ["many"]
        tasks[10].cancel()
        slots = 100  # workers have joined
        responses.look()
        await asyncio.sleep(0)
        assert len(order) == 29 + 2
        for account, count in list(responses.open.items()):
            responses.ended(account, count)
        assert responses.open == {}

    run(work())


def test_every_response_of_a_call_ends_once() -> None:
    async def work() -> None:
        responses = OpenResponses(lambda: 0)
        async with responses.opened("a", 3) as ended:
            ended()
            assert responses.open == {"a": 2}
        assert responses.open == {}
        ended()  # its worker says so late
        assert responses.open == {}

    run(work())


def test_a_call_that_is_canceled_just_when_it_was_admitted_leaves_no_response_open() -> None:
    async def work() -> None:
        responses = OpenResponses(lambda: 0)
        await responses.admit("a", LEAST_OPEN)
        waiting = asyncio.create_task(responses.admit("b", 3))
        await asyncio.sleep(0)
        responses.ended("a", LEAST_OPEN)
        assert responses.open == {"b": 3}
        waiting.cancel()
        await asyncio.wait([waiting])
        assert responses.open == {}

    run(work())


def test_thousands_of_waiting_calls_may_be_canceled_at_once() -> None:
    async def script() -> None:
        responses = OpenResponses(lambda: 0)
        await responses.admit("a", LEAST_OPEN)
        waiting = [asyncio.create_task(responses.admit("a", 1)) for _ in range(3000)]
        other = asyncio.create_task(responses.admit("b", 1))
        await asyncio.sleep(0)
        for task in waiting:
            task.cancel()
        responses.ended("a", LEAST_OPEN)
        await other
        await asyncio.gather(*waiting, return_exceptions=True)
        assert responses.open == {"b": 1}

    run(script())
