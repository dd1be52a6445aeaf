"""Several accounts on one server: each pays for what is its own, within its limits."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from tests.support.runs.tinker_server import ACCOUNTS, Server
from windfall.algorithms.given import Loss
from windfall.client import Client
from windfall.controller.cost.bill import Totals, add
from windfall.errors import WindfallError
from windfall.events.log import scan
from windfall.run.views.policy_costs import bill_of
from windfall.run.views.summary import summarize
from windfall.tinker.accounts import view
from windfall.tinker.accounts.bill import AccountBill
from windfall.training import Adam, given

CAROL, DAVE = "tml-carol-0123", "tml-dave-012345"
WAIT_S = 60.0


def accounts(carol: float, dave: float | None = None, end: str = "") -> str:
    """The file of accounts, with the limits of these two (`max_usd`)."""
    text = f'{ACCOUNTS}[carol]\nkey = "{CAROL}"\nmax_usd = {carol}\n'
    return text + ("" if dave is None else f'[dave]\nkey = "{DAVE}"\nmax_usd = {dave}\n') + end


@pytest.fixture
def file(server: Server) -> Iterator[Path]:
    yield server.accounts
    server.accounts.write_text(ACCOUNTS)


def events(server: Server, name: str) -> list[dict[str, object]]:
    return [event for event in scan(server.folder / "events.jsonl") if event["name"] == name]


def wait_for(what: str, condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {WAIT_S:g} s for {what}"
        time.sleep(0.02)


async def use(client: Client, updates: int) -> None:
    policy = await client.create(rank=4)
    samples = [given([1, 7, 11, 5], [1, 2, 3], [1.0] * 3)]
    for n in range(updates):
        await policy.forward_backward(samples, Loss(name="cross_entropy"), id=f"{n}/gradient")
        await policy.optim_step(adam=Adam(lr=1e-3), id=f"{n}/step")
    await policy.sample([1, 2, 3], 2, id="sample", max_tokens=8)


async def create_until_refused(client: Client) -> None:
    async with asyncio.timeout(WAIT_S):
        while True:
            await client.create(rank=4)
            await asyncio.sleep(0.02)


def test_accounts_come_are_charged_and_end_at_their_limit(server: Server, file: Path) -> None:
    def read_again() -> int:
        return len(events(server, "tinker_accounts"))

    async def run() -> tuple[dict[str, float], dict[str, float]]:
        with pytest.raises(WindfallError, match="not one of the server's"):
            async with Client(server.url, DAVE):
                pass
        file.write_text(accounts(0, 100, "[erin"))
        await asyncio.to_thread(wait_for, "the mistake", lambda: events(server, "tinker_accounts_wrong"))
        before = read_again()
        file.write_text(accounts(0, 100))
        await asyncio.to_thread(wait_for, "the new account", lambda: read_again() > before)
        async with Client(server.url, CAROL) as carol, Client(server.url, DAVE) as dave:
            await asyncio.gather(use(carol, 6), use(dave, 1))
            async with asyncio.timeout(WAIT_S):
                while not ((await dave.usage())["usd"] and (await carol.usage())["worker_s"]):
                    await asyncio.sleep(0.02)
            file.write_text(accounts(0, 1e-9))
            with pytest.raises(WindfallError, match="its limit is"):
                await create_until_refused(dave)
            await carol.create(rank=4)
            return await carol.usage(), await dave.usage()

    carol, dave = asyncio.run(run())
    assert carol["trained_tokens"] == 24
    assert dave["trained_tokens"] == 4
    assert min(carol["usd"], dave["usd"]) > 0
    assert carol["calls"] > dave["calls"] > 4


def test_the_bill_of_the_accounts_and_of_idle_time_is_that_of_the_run(server: Server) -> None:
    server.play(lambda server: server.restart())
    log = list(scan(server.folder / "events.jsonl"))
    bill = AccountBill.restored(log)
    bill.check()
    run = sum((bill_of(event) for event in log), Totals())
    assert {"carol", "dave"} <= set(bill.parts)
    assert add(*run.holders.values()).total_usd == pytest.approx(
        bill.idle.usd + sum(part.usd for part in bill.parts.values()), rel=1e-9
    )
    assert min(bill.idle.usd, bill.usd("carol"), bill.usd("dave")) > 0
    shown = dict(summarize(log))
    assert shown["cost"].startswith(f"${run.all.total_usd:,.2f}, of it idle $")
    assert shown["cost of carol"].startswith("$")


def test_top_shows_accounts_models_and_slots() -> None:
    part = {"usd": 1.25, "trainer_s": 3.0, "worker_s": 4.0}
    used = {"sessions": 1, "models": 2, "open_calls": 3, "calls": 4000.0, "sampled_tokens": 1e6}
    model = {"model": "x:train:0", "account": "alice", "rank": 8, "slot": "t1", "calls": 7, "waiting": 1}
    out = io.StringIO()
    console = Console(width=160, file=out)
    shown = view.of_server({
        "url": "http://127.0.0.1:1", "base": "tiny", "sessions": 1, "models": [model, model | {"slot": ""}],
        "accounts": {"alice": used}, "bill": {"accounts": {"alice": part}, "idle": part, "usd": 2.5},
        "calls_per_s": 2.0, "sampled_per_s": 1000.0, "trained_per_s": 10.0,
    })  # fmt: skip
    for each in shown:
        console.print(each)
    text = out.getvalue()
    for expected in ("2.0 calls/s, 1,000 tok/s sampled", "$2.50", "1,000,000", "1.2500", "idle", "t1", "on disk"):
        assert expected in text
