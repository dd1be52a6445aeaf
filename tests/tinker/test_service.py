"""The service with a trainer and a worker: results over kills, sessions that end, accounts, calls that are wrong."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs.tinker_server import ALICE, BOB, CROSS_ENTROPY, Client, Server, contents
from windfall.errors import WindfallError
from windfall.tinker import calls as c
from windfall.tinker import samplers
from windfall.tinker.accounts import keys
from windfall.tinker.accounts.fairness import LEAST_OPEN, PER_SLOT
from windfall.tinker.calls import Refusal
from windfall.tinker.disk.saved_weights import PARTS, link_tree
from windfall.tinker.models import client_models, model, model_calls
from windfall.trainer import checkpoint
from windfall.training import Adam, given

IDS = ([5, 9, 11, 4, 8], [20, 21, 22, 23], [7] * 6)


def compared(results: list[Any]) -> list[Any]:
    """What must be equal, bit for bit."""
    out: list[Any] = []
    for result in results:
        match result:
            case c.ForwardResult():
                out.append((tuple(each.tobytes() for each in result.logprobs), result.metrics))
            case c.Sampled():
                out.append(result.sequences)
            case c.Stepped():
                out.append(result.metrics)
            case _:
                out.append(type(result))
    return out


def saved_in(model: Path) -> list[Path]:
    """The folders of saved weights of a model."""
    return [path for part in PARTS.values() for path in (model / part).glob("*")]


async def nothing() -> None:
    """No fault."""


async def loop(client: Client, between: Callable[[], Awaitable[None]] = nothing) -> tuple[list[Any], dict[str, bytes]]:
    """A training loop; `between` happens while its calls are performed. Returns its results and its weights."""
    results: list[Any] = []
    for step in range(3):
        calls = [client.gradient(IDS[step]), client.gradient(IDS[step - 1]), client.update()]
        if step == 1:
            calls.append(client.next(c.SaveWeights, name="middle"))
        entries = [await client.entry(call) for call in calls]
        await between()
        results += [await client.server.outcome(entry.id, client.account) for entry in entries]
        saved = await client.result(client.next(c.SaveForSampler, sampler_seq=step))
        entry = await client.entry(client.sample(saved.sampler))
        await between()
        results.append(await client.server.outcome(entry.id, client.account))
    path = f"tinker://{client.model}/weights/middle"
    results.append(await client.result(client.next(c.LoadWeights, path=path, optimizer=True)))
    results += [await client.result(client.gradient(IDS[0])), await client.result(client.update())]
    final = (await client.result(client.next(c.SaveWeights, name="final"))).path
    return compared(results), contents(client.server.service.weights.folder(final))


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> tuple[list[Any], dict[str, bytes]]:
    async def script(server: Server) -> tuple[list[Any], dict[str, bytes]]:
        return await loop(await Client.open(server))

    return server.play(script)


def test_kills_of_server_and_trainer_change_no_result(server: Server, undisturbed: object) -> None:
    async def script(server: Server) -> None:
        faults = [server.kill, server.lose_trainer, server.restart] * 2

        async def between() -> None:
            await faults.pop()()

        assert await loop(await Client.open(server), between) == undisturbed
        assert not faults

    server.play(script)


@pytest.mark.slow
def test_models_that_share_one_slot_are_as_if_each_was_alone(server: Server, undisturbed: object) -> None:
    async def script(server: Server) -> None:
        one, other = await Client.open(server), await Client.open(server, BOB)
        assert await asyncio.gather(loop(one), loop(other)) == [undisturbed] * 2

    server.play(script)


def test_session_without_a_sign_of_life_leaves_named_weights_only(server: Server) -> None:
    async def script(server: Server) -> None:
        service, client = server.service, await Client.open(server)
        await client.result(client.gradient(IDS[0]))
        await client.result(client.update())
        await client.result(client.update())  # a checkpoint is due
        unnamed = await client.result(client.next(c.SaveForSampler, sampler_seq=0))
        await client.result(client.next(c.SaveForSampler, sampler_seq=1, live=True))
        named = await client.result(client.next(c.SaveWeights, name="kept"))
        trained = service.models.all[client.model]
        assert list(trained.folder.glob("state-*"))
        late = await client.entry(client.next(c.OptimStepCall, adam=client.update().adam))
        waits = await client.entry(client.update())  # the number between them is missing
        while client.session.id in service.sessions.open or not trained.unloaded:
            client.session.seen = 0.0
            await asyncio.sleep(0.02)
        assert isinstance(await server.outcome(late.id), c.FailedCall | c.Stepped)
        failed = await server.outcome(waits.id)
        assert "has ended" in failed.message
        kept = service.weights.folder(named.path)
        while service.weights.folder(named.path).is_dir() and saved_in(trained.folder) != [kept]:
            await asyncio.sleep(0.02)
        assert not list(trained.folder.glob("state-*"))
        with pytest.raises(Refusal, match="has ended") as ended:
            service.sessions.get(ALICE, client.session.id)
        assert ended.value.status == 410
        for call in (client.sample(unnamed.sampler), client.update()):
            with pytest.raises(Refusal, match=r"has ended|was unloaded") as ended:
                await server.submit(ALICE, call)
            assert ended.value.status == 410
        again = await service.sessions.create(ALICE)
        create = c.CreateModel(session=again.id, seq=0, base="", path=named.path, optimizer=True)
        assert (await server.result(create)).model == f"{again.id}:train:0"
        await server.kill()
        assert server.service.weights.folder(named.path).is_dir()

    server.play(script)


def test_a_session_that_ends_while_its_model_is_saved_harms_no_other(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, saving, go_on = checkpoint._write, threading.Event(), threading.Event()

    def slow(*args: Any) -> None:
        write(*args)
        saving.set()
        assert go_on.wait(60)

    async def script(server: Server) -> None:
        client, other = await Client.open(server), await Client.open(server, BOB)
        trained = server.service.models.all[client.model]
        assert isinstance(await client.result(client.update()), c.Stepped)
        monkeypatch.setattr(checkpoint, "_write", slow)
        entry = await other.entry(other.gradient(IDS[0]))  # there is one slot: the other model is saved
        try:
            while not saving.is_set():
                await asyncio.sleep(0.01)
            ended = asyncio.create_task(server.service.end_session(client.session))
            await asyncio.wait([ended], timeout=1.0)
            assert not ended.done(), "its folder was removed while the trainer wrote into it"
        finally:
            go_on.set()
        await ended
        assert isinstance(await server.outcome(entry.id, BOB), c.ForwardResult)
        assert trained.unloaded
        assert not trained.folder.exists()

    server.play(script)


def test_a_session_that_ends_while_weights_are_copied_for_its_model_leaves_none(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    copying, go_on = threading.Event(), threading.Event()

    def slow(source: Path, target: Path) -> None:
        copying.set()
        assert go_on.wait(60)
        link_tree(source, target)

    async def script(server: Server) -> None:
        client, service = await Client.open(server), server.service
        path = (await client.result(client.next(c.SaveWeights, name="start"))).path
        session = await service.sessions.create(ALICE)
        monkeypatch.setattr(client_models, "link_tree", slow)
        entry = await server.submit(ALICE, c.CreateModel(session=session.id, seq=0, base="", path=path))
        while not copying.is_set():
            await asyncio.sleep(0.01)
        ended = asyncio.create_task(service.end_session(session))
        while not (trained := service.models.all[entry.model]).unloaded:
            await asyncio.sleep(0.01)
        go_on.set()
        await ended
        await server.outcome(entry.id)
        assert not trained.folder.exists()

    server.play(script)


def test_a_session_that_ends_leaves_no_empty_folders(server: Server) -> None:
    async def script(server: Server) -> None:
        client = await Client.open(server)
        await client.result(client.next(c.SaveForSampler, sampler_seq=0))
        folder = server.service.models.all[client.model].folder
        assert saved_in(folder)
        await server.service.end_session(client.session)
        assert not folder.exists()

    server.play(script)


def test_unnamed_weights_that_a_loop_has_left_behind_are_removed(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samplers, "KEPT_UNNAMED", 1)

    async def script(server: Server) -> None:
        service, client = server.service, await Client.open(server)
        saved = [(await client.result(client.next(c.SaveForSampler, sampler_seq=n))).sampler for n in range(4)]
        folders = [service.samplers.all[id].newest() for id in saved]
        for id in (saved[0], saved[1], saved[3]):
            service.samplers.all[id].used = 0.0
        await client.result(client.sample(saved[1]))
        while saved[0] in service.samplers.all or folders[0].is_dir():
            await asyncio.sleep(0.05)
        assert [folder.is_dir() for folder in folders] == [False, True, True, True]
        with pytest.raises(Refusal, match="save others with a name"):
            await server.submit(ALICE, client.sample(saved[0]))

    server.play(script)


def test_samplers_that_follow_live_weights_are_written_once_and_left_behind_like_others(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samplers, "KEPT_UNNAMED", 1)

    async def script(server: Server) -> None:
        client = await Client.open(server)
        saves = [client.next(c.SaveForSampler, sampler_seq=n, live=True) for n in range(3)]
        saved = [(await client.result(save)).sampler for save in saves]
        rows = {row["id"]: row["weights"] for row in server.service.shared.store.rows("select * from sampler")}
        assert len({rows[id]["folder"] for id in saved}) == 3
        await server.kill()
        found = server.service.samplers.all
        newest = found[saved[2]].newest()
        assert {found[id].newest() for id in saved} == {newest}
        assert isinstance(await client.result(client.sample(saved[0])), c.Sampled)
        for id in saved:
            found[id].used = 0.0
        while saved[0] in found or saved[1] in found:
            await asyncio.sleep(0.02)
        assert saved[2] in found
        assert newest.is_dir()

    server.play(script)


def test_a_sampler_that_is_made_again_is_on_disk_before_it_is_named(server: Server) -> None:
    async def script(server: Server) -> None:
        client, store = await Client.open(server), server.service.shared.store
        with contextlib.closing(sqlite3.connect(store.path, isolation_level=None)) as other:
            other.execute("begin immediate")  # nothing else is written
            twice = [server.service.samplers.create(ALICE, client.session.id, 0, base="tiny") for _ in range(2)]
            tasks = [asyncio.create_task(each) for each in twice]
            await asyncio.wait(tasks, timeout=0.05)
            assert not any(task.done() for task in tasks)
            other.execute("rollback")
            one, again = await asyncio.gather(*tasks)
        assert one is again

    server.play(script)


def test_account_cannot_use_what_another_one_has(server: Server) -> None:
    async def script(server: Server) -> None:
        service, client, bob = server.service, await Client.open(server), await Client.open(server, BOB)
        sampler = (await client.result(client.next(c.SaveForSampler, sampler_seq=0))).sampler
        path = (await client.result(client.next(c.SaveWeights, name="own"))).path
        entry = await client.entry(client.sample(sampler))
        await server.outcome(entry.id)
        attempts: list[Callable[[], Any]] = [
            lambda: server.submit(BOB, client.update()),
            lambda: server.submit(BOB, client.sample(sampler)),
            lambda: server.submit(BOB, c.UnloadModel(model=client.model)),
            lambda: server.submit(BOB, c.CreateModel(session=client.session.id, seq=1, base="tiny", lora=client.lora)),
            lambda: server.submit(BOB, c.CreateModel(session=bob.session.id, seq=1, base="", path=path)),
            lambda: server.submit(BOB, c.CreateModel(session=client.session.id, seq=0, base="tiny")),
            lambda: service.outcome(BOB, entry.id, 0.0),
            lambda: service.completions(BOB, sampler, 0, 0, 0.0),
            lambda: service.samplers.create(BOB, bob.session.id, 7, path=path),
            lambda: service.samplers.create(BOB, client.session.id, 7, base="tiny"),
            lambda: service.samplers.join(BOB, sampler),
            lambda: service.weights.delete(BOB, path),
            lambda: service.weights.change(BOB, path, public=True),
        ]
        for attempt in attempts:
            with pytest.raises(Refusal) as refused:
                await attempt()
            assert refused.value.status in (404, 410)
        failed = await bob.result(bob.next(c.LoadWeights, path=path))
        assert "there are no weights" in failed.message
        held = await client.entry(client.sample(sampler, max_tokens=50))
        await service.cancel(BOB, held.id)
        service.calls.retrieved(BOB, [entry.id])
        assert entry.retrieved is None
        assert isinstance(await server.outcome(held.id), c.Sampled)
        seen = client.session.seen
        for attempt in (service.outcome(BOB, entry.id, 0.0), service.completions(BOB, sampler, 0, 0, 0.0)):
            with pytest.raises(Refusal):
                await attempt
        assert client.session.seen == seen, "another account keeps the session alive"
        assert client.session.id not in [s.id for s in service.sessions.of(BOB)]
        assert client.model not in [m.id for m in service.models.of(BOB)]
        assert path not in [p.path for p in service.weights.of(BOB)]
        await service.weights.change(ALICE, path, public=True)
        assert isinstance(await bob.result(bob.next(c.LoadWeights, path=path)), c.ModelReady)
        with pytest.raises(Refusal, match="belongs to another account"):
            await service.weights.delete(BOB, path)

    server.play(script)


def test_wrong_calls_fail_in_words_and_change_nothing(server: Server) -> None:
    async def script(server: Server) -> None:
        service, client = server.service, await Client.open(server)
        known, context = service.terms.vocabulary, service.terms.context
        for call, why in (
            (client.gradient([5, known, 7]), f"token {known} is not one"),
            (client.gradient([5, 6, 7], [6, known + 5]), f"token {known + 5} is not one"),
            (client.gradient([5] * (context + 1)), "more than the context"),
            (client.next(c.LoadWeights, path="tinker://nobody/weights/x"), "there are no weights"),
            (client.next(c.SaveWeights, name="../up"), "is no name"),
            (client.next(c.OptimStepCall, adam=Adam(lr=1e38)), "at most"),
            (client.next(c.RefusedCall, message="so says the wire"), "so says the wire"),
        ):
            failed = await client.result(call)
            assert isinstance(failed, c.FailedCall)
            assert why in failed.message
        sampler = (await service.samplers.create(ALICE, client.session.id, 5, base="tiny")).id
        for prompt, options in (([5, known], {}), ([5, -1], {}), ([5], {"stop_ids": (known,)}), ([5] * context, {})):
            with pytest.raises(Refusal, match=r"is not one of|at most") as refused:
                await server.submit(ALICE, client.sample(sampler, prompt, **options))
            assert refused.value.status == 400
        nothing = c.LoraSpec(rank=1, attn=False, mlp=False, unembed=False)
        specs: list[tuple[c.LoraSpec | None, str]] = [(c.LoraSpec(rank=rank), "rank") for rank in (0, -1, 1 << 40)]
        for lora, why in (*specs, (nothing, "would have no layers"), (None, "trains adapters")):
            create = c.CreateModel(session=client.session.id, seq=9, base="tiny", lora=lora)
            with pytest.raises(Refusal, match=why):
                await server.submit(ALICE, create)
        assert isinstance(await client.result(client.gradient(IDS[0])), c.ForwardResult)
        assert not server._serving.done()

    server.play(script)


def test_wrong_calls_take_no_model_out_of_its_slot(server: Server) -> None:
    async def script(server: Server) -> None:
        service, client, other = server.service, await Client.open(server), await Client.open(server, BOB)
        assert isinstance(await client.result(client.next(c.SaveWeights, name="same")), c.WeightsSaved)
        trained, sample = service.models.all[client.model], given([5, 6, 7], [1, 3], [1.0, 1.0], ())
        base = await service.samplers.create(ALICE, client.session.id, 3, base="tiny")
        for of, call, why in (
            (client, client.next(c.SaveWeights, name="same"), "there are weights 'same' already"),
            (client, client.next(c.ForwardCall, samples=(sample,), loss=CROSS_ENTROPY), "position from 1 to 2"),
            (other, other.next(c.RefusedCall, message="so says the wire"), "so says the wire"),
            (client, client.next(c.SaveForSampler, sampler_seq=3), f"{base.id!r} already"),
        ):
            assert why in (await of.result(call)).message
            assert service._train.slot_of(trained), f"{why}: the adapter has left its slot"
        assert service.samplers.all[base.id] is base

    server.play(script)


@pytest.mark.parametrize("kind", ["named", "periodic"])
def test_weights_that_cannot_be_written_end_the_server_and_no_call_is_lost(server: Server, kind: str) -> None:
    async def script(server: Server) -> None:
        client = await Client.open(server)
        folder = server.service.models.all[client.model].folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.touch()  # nothing can be written into it
        if kind == "named":
            last = await client.entry(client.next(c.SaveWeights, name="kept"))
        else:
            assert isinstance(await client.result(client.update()), c.Stepped)
            last = await client.entry(client.update())  # a checkpoint is due
        with pytest.raises(WindfallError, match=r"cannot be saved:(?s:.*)windfall resume"):
            await asyncio.wait_for(server._serving, 60)
        folder.unlink()
        await server.restart()
        assert isinstance(await server.outcome(last.id), c.WeightsSaved if kind == "named" else c.Stepped)
        assert isinstance(await client.result(client.update()), c.Stepped)

    server.play(script)


@pytest.mark.parametrize("limit", ["calls", "bytes"])
def test_calls_up_to_the_limit_do_not_keep_out_the_one_that_they_wait_for(
    server: Server, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    async def script(server: Server) -> None:
        used, client = server.service.keys, await Client.open(server, BOB)
        first, *others, last = [client.gradient(IDS[0]) for _ in range(4)]
        calls, held = used.open_calls["bob"], used.open_bytes["bob"]
        if limit == "calls":
            client.account = BOB.model_copy(update={"calls": calls + 2})
        else:
            monkeypatch.setattr(keys, "OPEN_BYTES", held + 2 * len(c.encode(first)))
        entries = [await client.entry(call) for call in others]
        with pytest.raises(Refusal, match="calls without a result") as refused:
            await client.entry(last)
        assert refused.value.status == 429
        entries.append(await client.entry(first))
        for entry in entries:
            assert isinstance(await server.outcome(entry.id, BOB), c.ForwardResult)
        assert (used.open_calls["bob"], used.open_bytes["bob"]) == (calls, held)
        assert isinstance(await client.result(last), c.ForwardResult)

    server.play(script)


def test_gradients_without_an_update_have_a_limit(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "SAVE_BYTES", 1)

    async def script(server: Server) -> None:
        client, models = await Client.open(server, BOB), server.service.models.of(BOB)
        monkeypatch.setattr(model_calls, "KEPT_BYTES", 1 + sum(each.kept_bytes for each in models))
        calls = [client.gradient(IDS[0]), client.gradient(IDS[1]), client.update(), client.gradient(IDS[1])]
        entries = [await client.entry(call) for call in calls]
        first, second, update, third = [await server.outcome(entry.id, BOB) for entry in entries]
        assert isinstance(first, c.ForwardResult)
        assert "Call optim_step" in second.message
        assert isinstance(update, c.Stepped)
        assert isinstance(third, c.ForwardResult)  # a checkpoint has replaced what was kept
        await client.result(c.UnloadModel(model=client.model))

    server.play(script)


def test_many_calls_that_sample_wait_in_one_queue(server: Server) -> None:
    async def script(server: Server) -> None:
        client = await Client.open(server)
        sampler = (await server.service.samplers.create(ALICE, client.session.id, 0, base="tiny")).id
        calls = [client.sample(sampler, n=1, max_tokens=1, stop_texts=("never",) * (n % 2)) for n in range(200)]
        entries = await asyncio.gather(*map(client.entry, calls))
        assert len({entry.id for entry in entries}) == 200
        seen, cursor = set[str](), 0
        while len(seen) < 200:
            cursor, done = await server.service.completions(ALICE, sampler, 0, cursor, 5.0)
            assert seen.isdisjoint(entry.id for entry in done)
            seen |= {entry.id for entry in done}
        assert server.service.keys.open_calls["alice"] == 0
        server.service.calls.retrieved(ALICE, list(seen))
        assert isinstance(await server.outcome(entries[0].id), c.Sampled)

    server.play(script)


def test_a_call_with_many_responses_does_not_take_all_workers(server: Server) -> None:
    async def script(server: Server) -> None:
        service, client, other = server.service, await Client.open(server), await Client.open(server, BOB)
        many = (await service.samplers.create(ALICE, client.session.id, 0, base="tiny")).id
        few = (await service.samplers.create(BOB, other.session.id, 0, base="tiny")).id
        await client.result(client.sample(many))  # now there is a worker
        responses = service.samplers._fleet.open
        most = max(LEAST_OPEN, PER_SLOT * responses._slots())
        alice = await client.entry(client.sample(many, n=4 * most, max_tokens=20, eos=False))
        waits = await client.entry(client.sample(many, n=1))
        while not responses.open["alice"]:
            await asyncio.sleep(0)
        assert responses.open["alice"] <= most
        bob = await other.entry(other.sample(few, n=1, max_tokens=2))
        assert isinstance(await server.outcome(bob.id, BOB), c.Sampled)
        assert alice.done is None, "the call with many responses was ahead of the one with one"
        assert "busy with other calls" in service._pending(waits).why
        result = await server.outcome(alice.id)
        assert [len(sequence.tokens) for sequence in result.sequences] == [20] * (4 * most)

    server.play(script)
