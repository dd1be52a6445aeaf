"""Who is next on the trainer and on workers."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
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


class Waiting:
    """Responses that wait for their turn, then are open until they are told to end."""

    def __init__(self, responses: OpenResponses) -> None:
        self._responses = responses
        self.opened: list[tuple[str, asyncio.Event]] = []
        """In order: the account, and what ends the response."""

    def ask(self, account: str, count: int) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(self._respond(account)) for _ in range(count)]

    async def _respond(self, account: str) -> None:
        async with self._responses.opened(account):
            self.opened.append((account, end := asyncio.Event()))
            await end.wait()

    async def end(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.opened[number][1].set()
        await settle()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_an_account_with_many_responses_lets_others_pass() -> None:
    async def work() -> None:
        slots = 0
        responses = OpenResponses(lambda: slots)
        waiting = Waiting(responses)
        tasks = waiting.ask("many", 100)
        await settle()
        assert responses.open == {"many": LEAST_OPEN}
        tasks += waiting.ask("few", 2)
        await waiting.end(range(3))
        assert [account for account, _ in waiting.opened[LEAST_OPEN:]] == ["few", "few", "many"]
        tasks[50].cancel()
        slots = 100  # workers have joined
        responses.look()
        await settle()
        assert len(waiting.opened) == 99 + 2
        await waiting.end(range(99 + 2))
        await asyncio.wait(tasks)
        assert responses.open.total() == 0

    run(work())


def test_a_response_that_is_canceled_just_when_it_was_opened_does_not_stay_open() -> None:
    async def work() -> None:
        responses = OpenResponses(lambda: 0)
        waiting = Waiting(responses)
        tasks = waiting.ask("a", LEAST_OPEN)
        await settle()
        (late,) = waiting.ask("b", 1)
        await asyncio.sleep(0)
        tasks[0].cancel()
        while not responses.open["b"]:
            await asyncio.sleep(0)
        late.cancel()
        await asyncio.wait([late])
        assert responses.open.total() == LEAST_OPEN - 1
        await waiting.end(range(LEAST_OPEN))
        assert responses.open.total() == 0

    run(work())


def test_thousands_of_waiting_responses_may_be_canceled_at_once() -> None:
    async def work() -> None:
        responses = OpenResponses(lambda: 0)
        waiting = Waiting(responses)
        waiting.ask("a", LEAST_OPEN)
        await settle()
        tasks, _ = waiting.ask("a", 3000), waiting.ask("b", 1)
        await settle()
        for task in tasks:
            task.cancel()
        await waiting.end(range(LEAST_OPEN))
        await asyncio.gather(*tasks, return_exceptions=True)
        assert responses.open.total() == responses.open["b"] == 1
        await waiting.end([LEAST_OPEN])

    run(work())
