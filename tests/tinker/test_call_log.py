"""What is kept of calls, for how long, and what a client is told of those that have a result."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from windfall.tinker import calls as c
from windfall.tinker.accounts.keys import ApiAccount, Keys
from windfall.tinker.disk.call_log import CLONE, KEPT_S, CallLog, Entry
from windfall.tinker.disk.store import TinkerStore

ALICE, BOB = (ApiAccount(name=name, key=f"tml-{name}-secret") for name in ("alice", "bob"))
DONE = c.Stepped(metrics={"lr": 0.5})


def entry(number: int, sampler: str = "s") -> Entry:
    call = c.UnloadModel(model="m")
    body = c.encode(call)
    return Entry(
        id=f"{sampler}/{number}", account="alice", sampler=sampler, seq=number, digest=c.digest(body), call=call,
        body=body, size=len(body), created=time.time(),
    )  # fmt: skip


def play(folder: Path, script: Callable[[TinkerStore], Awaitable[None]]) -> None:
    async def main() -> None:
        store = TinkerStore(folder)
        await script(store)
        await store.close()

    asyncio.run(main())


def test_every_result_is_announced_once_in_order(tmp_path: Path) -> None:
    async def script(store: TinkerStore) -> None:
        log, entries = CallLog(store, keys := Keys({})), [entry(n) for n in range(300)]
        for each in (*entries, entry(CLONE + 1)):
            log.add(each)
        assert keys.open_calls["alice"] == 301
        found, cursor = list[str](), 0
        for n in (100, 1, 199):
            await asyncio.gather(*(log.done(e, DONE) for e in entries[len(found) : len(found) + n]))
            cursor, new = await log.completions("s", 0, cursor, 5.0)
            found += [e.id for e in new]
        assert found == [e.id for e in entries]
        assert await log.completions("s", 0, cursor, 0.01) == (cursor, [])
        assert keys.open_calls["alice"] == 1

    play(tmp_path, script)


def test_a_call_that_is_canceled_several_times_at_once_ends_once(tmp_path: Path) -> None:
    async def script(store: TinkerStore) -> None:
        log, canceled = CallLog(store, keys := Keys({})), entry(1)
        log.add(canceled)
        await asyncio.gather(*(log.fail([canceled], "the call was canceled") for _ in range(3)))
        _, found = await log.completions("s", 0, 0, 0.0)
        assert found == [canceled]
        assert (keys.open_calls["alice"], keys.open_bytes["alice"]) == (0, 0)
        assert keys.usage("alice") == {"calls": 1}

    play(tmp_path, script)


def test_results_are_on_disk_and_forgotten_some_time_after_they_were_retrieved(tmp_path: Path) -> None:
    async def script(store: TinkerStore) -> None:
        log, (seen, unseen, open_, repeated) = CallLog(store, Keys({})), map(entry, range(4))
        for each in (seen, unseen, open_, repeated):
            log.add(each)
        await asyncio.gather(log.done(seen, DONE), log.done(unseen, DONE), log.done(repeated, DONE, repeated=True))
        log.retrieved(BOB, [seen.id])
        log.retrieved(ALICE, [seen.id, open_.id, repeated.id])
        assert await log.outcome(seen, 0.0) == c.Done(result=DONE, size=unseen.size)
        assert await log.outcome(open_, 0.0) is None
        for each in (seen, repeated):
            assert each.retrieved is not None
            each.retrieved -= KEPT_S + 1
        await log.forget(lambda entry: False)
        assert [log.get(e.id) for e in (seen, unseen, open_, repeated)] == [None, unseen, open_, repeated]
        assert unseen.done is not None
        unseen.done -= KEPT_S + 1
        await log.forget(lambda entry: True)  # nobody will come for it
        assert log.get(unseen.id) is None

    async def next_server(store: TinkerStore) -> None:
        log = CallLog(store, keys := Keys({}))
        assert [[e.id for e in found] for found in log.restore()] == [["s/2"], ["s/3"]]
        assert keys.open_calls["alice"] == 1
        assert keys.open_bytes["alice"] == entry(2).size
        again = log.get("s/3")
        assert again is not None
        assert await log.outcome(again, 0.0) == c.Done(result=DONE, size=again.size)

    play(tmp_path, script)
    play(tmp_path, next_server)


def test_call_that_cannot_be_written_is_told_to_everybody_who_made_it(tmp_path: Path) -> None:
    async def script(store: TinkerStore) -> None:
        log, lost = CallLog(store, Keys({})), entry(1)
        store.write(("insert into nowhere values (1)", ()))
        log.add(lost)
        assert lost.written is not None
        await asyncio.wait([lost.written])
        assert "cannot be written" in str(lost.written.exception())
        await asyncio.wait([store.failed])
        assert "cannot be written" in str(store.failed.exception())

    play(tmp_path, script)


def test_a_number_that_cannot_be_stored_is_refused_and_ends_nothing(tmp_path: Path) -> None:
    async def script(store: TinkerStore) -> None:
        log, huge, other = CallLog(store, keys := Keys({})), entry(1 << 63), entry(1)
        with pytest.raises(OverflowError):
            log.add(huge)
        assert log.get(huge.id) is None
        assert keys.open_calls["alice"] == 0
        log.add(other)
        assert other.written is not None
        await other.written

    play(tmp_path, script)


def test_a_number_belongs_to_one_call_also_after_a_restart(tmp_path: Path) -> None:
    call, other = c.UnloadModel(model="m"), c.UnloadModel(model="n")

    async def first(store: TinkerStore) -> None:
        log = CallLog(store, Keys({}))
        log.add(made := entry(1))
        await log.done(made, DONE)

    async def second(store: TinkerStore) -> None:
        log = CallLog(store, Keys({}))
        log.restore()
        assert log.entry("s/1", ALICE, call, c.encode(call)).done
        assert log.entry("s/2", ALICE, other, c.encode(other)).call is other
        with pytest.raises(c.Refusal, match="s/1 was made before with other content"):
            log.entry("s/1", ALICE, other, c.encode(other))

    play(tmp_path, first)
    play(tmp_path, second)


def test_calls_continue_in_the_order_in_which_they_came_although_the_clock_was_set(tmp_path: Path) -> None:
    async def script(store: TinkerStore) -> None:
        log = CallLog(store, Keys({}))
        for number in (2, 1):
            log.add(made := entry(number))
            assert made.written is not None
            await made.written
        await store.write(("update call set created = 0 where seq = 1", ()))

    async def next_server(store: TinkerStore) -> None:
        open_, _ = CallLog(store, Keys({})).restore()
        assert [each.seq for each in open_] == [2, 1]

    play(tmp_path, script)
    play(tmp_path, next_server)
