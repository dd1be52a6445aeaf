"""Which adapters are in which slots, and what is saved when they leave."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from windfall.errors import WindfallError
from windfall.tinker.accounts.fairness import TrainerTurns
from windfall.tinker.models.adapter_slots import SampleSlots, Trainers, TrainSlots
from windfall.training import TrainerLost


class Link:
    """A trainer's link: only whether it is connected."""

    def __init__(self) -> None:
        self.hello: object | None = object()


class Resident:
    def __init__(self, id: str, said: list[str]) -> None:
        self.id, self.account, self._said = id, "alice", said

    async def enter(self, trainer: Any) -> None:
        self._said.append(f"{self.id} enters")

    async def leave(self, trainer: Any) -> None:
        self._said.append(f"{self.id} leaves")


def resident(id: str, said: list[str]) -> Any:
    return Resident(id, said)


def trainers(names: list[str]) -> Trainers:
    links: Any = {name: Link() for name in names}

    async def connect() -> dict[str, object]:
        for link in links.values():
            link.hello = link.hello or object()
        return {name: link.hello for name, link in links.items()}

    return Trainers(links, connect, lambda why: None)


def test_the_least_recently_used_model_is_saved_for_another_one() -> None:
    async def run() -> list[str]:
        said: list[str] = []
        of = trainers(["t0", "t1"])
        slots, (a, b, c) = TrainSlots(of, ["t0", "t1"], TrainerTurns()), (resident(name, said) for name in "abc")
        await of.ready()
        for model in (a, b, a, c, a, b):
            async with slots.hold(model):
                pass
        return said

    enters = ["a enters", "b enters", "b leaves", "c enters", "c leaves", "b enters"]
    assert asyncio.run(run()) == enters


def test_a_model_waits_while_all_slots_are_in_use() -> None:
    async def run() -> None:
        of, said = trainers(["t0"]), list[str]()
        slots, a, b = TrainSlots(of, ["t0"], TrainerTurns()), resident("a", said), resident("b", said)
        await of.ready()

        async def use_b() -> None:
            async with slots.hold(b):
                pass

        async with slots.hold(a):
            waiting = asyncio.create_task(use_b())
            for _ in range(5):
                await asyncio.sleep(0)
            assert slots.full
            assert said == ["a enters"]
        async with asyncio.timeout(30):
            await waiting
        assert said == ["a enters", "a leaves", "b enters"]

    asyncio.run(run())


def test_a_new_trainer_has_empty_slots() -> None:
    async def run() -> None:
        of, said = trainers(["t0", "s0"]), list[str]()
        train, a = TrainSlots(of, ["t0"], TrainerTurns()), resident("a", said)
        loads: list[str] = []

        async def load(slot: str, folder: Path) -> None:
            loads.append(f"{folder} in {slot}")

        sample = SampleSlots(of, ["s0"], load)
        await of.ready()
        async with sample.hold("w", "alice", lambda: Path("w")), sample.hold("w", "alice", lambda: Path("w")):
            with pytest.raises(TrainerLost):
                async with train.hold(a):
                    raise TrainerLost("killed")
            links: Any = of.trainers
            links["t0"].hello = None
            assert not of.current
            await of.ready()
            assert loads == ["w in s0", "w in s0"]  # a worker that joins now can get it
        async with train.hold(a):
            assert said == ["a enters", "a enters"]

    asyncio.run(run())


@pytest.mark.parametrize("names", [["s0"], ["s0", "s1"]])
def test_streams_of_calls_for_loaded_weights_keep_no_others_out(names: list[str]) -> None:
    async def run() -> list[str]:
        of, order = trainers(names), list[str]()

        async def load(slot: str, folder: Path) -> None: ...

        sample = SampleSlots(of, names, load)
        await of.ready()

        async def call(key: str) -> None:
            async with sample.hold(key, "alice", lambda: Path(key)):
                order.append(key)
                for _ in range(10):
                    await asyncio.sleep(0)

        async def stream(key: str, delay: int) -> None:
            for _ in range(delay):
                await asyncio.sleep(0)
            for _ in range(20):
                await call(key)

        # Two streams of each keep its slot in use without a gap.
        streams = [asyncio.create_task(stream(f"many{n}", delay)) for n in range(len(names)) for delay in (0, 5)]
        while len(order) < 3 * len(names):
            await asyncio.sleep(0)
        await asyncio.gather(*(call(f"few{n}") for n in range(3)), *streams)
        return order

    order = asyncio.run(run())
    assert len(order) == 40 * len(names) + 3
    assert max(order.index(f"few{n}") for n in range(3)) < 30 * len(names)


def test_adapters_of_one_account_that_wait_for_a_slot_let_another_account_pass() -> None:
    async def run() -> list[str]:
        of, order = trainers(["s0"]), list[str]()

        async def load(slot: str, folder: Path) -> None: ...

        sample = SampleSlots(of, ["s0"], load)
        await of.ready()

        async def call(account: str, key: str) -> None:
            async with sample.hold(key, account, lambda: Path(key)):
                order.append(f"{account} {key}")
                for _ in range(10):
                    await asyncio.sleep(0)

        many = [("alice", f"a{n}") for n in range(4)]
        await asyncio.gather(*(call(*each) for each in (*many, ("bob", "b0"), ("bob", "b1"))))
        return order

    assert asyncio.run(run()) == ["alice a0", "bob b0", "alice a1", "bob b1", "alice a2", "alice a3"]


def test_live_weights_change_while_they_are_used() -> None:
    async def run() -> list[str]:
        of, loads = trainers(["s0"]), list[str]()

        async def load(slot: str, folder: Path) -> None:
            loads.append(str(folder))

        sample = SampleSlots(of, ["s0"], load)
        await of.ready()
        async with sample.hold("live/m", "alice", lambda: Path("1")):
            await sample.changed("live/m", Path("2"))
        async with sample.hold("live/m", "alice", lambda: Path("2")):
            pass
        return loads

    assert asyncio.run(run()) == ["1", "2"]


def test_a_model_that_cannot_be_loaded_harms_no_other() -> None:
    async def run() -> list[str]:
        of, said = trainers(["t0"]), list[str]()
        slots, a, b = TrainSlots(of, ["t0"], TrainerTurns()), resident("a", said), resident("b", said)
        await of.ready()

        async def refuse(trainer: Any) -> None:
            raise WindfallError("damaged")

        async with slots.hold(a):
            pass
        b.enter = refuse
        with pytest.raises(WindfallError, match="damaged"):
            async with slots.hold(b):
                pass
        async with slots.hold(a):
            return said

    assert asyncio.run(run()) == ["a enters", "a leaves", "a enters"]


def test_a_new_trainer_is_known_although_the_call_that_noticed_it_was_canceled() -> None:
    async def run() -> list[str]:
        of, said, loads = trainers(["t0", "s0"]), list[str](), list[str]()
        gate = asyncio.Event()
        gate.set()

        async def load(slot: str, folder: Path) -> None:
            loads.append(f"{folder} in {slot}")
            await gate.wait()

        sample, train, a = SampleSlots(of, ["s0"], load), TrainSlots(of, ["t0"], TrainerTurns()), resident("a", said)
        await of.ready()
        async with train.hold(a):
            pass
        async with sample.hold("w", "alice", lambda: Path("w")):
            links: Any = of.trainers
            for link in links.values():
                link.hello = None
            gate.clear()
            noticed = asyncio.create_task(of.ready())
            while len(loads) < 2:
                await asyncio.sleep(0)
            noticed.cancel()
            await asyncio.wait([noticed])
            assert not of.current
            gate.set()
            await of.ready()
            assert loads == ["w in s0"] * 3
        async with train.hold(a):
            return said

    assert asyncio.run(run()) == ["a enters", "a enters"]
