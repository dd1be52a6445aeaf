"""What the directory tells readers: examples with names."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.fleets.directory_rules import check
from windfall.controller.directory.directory import Directory
from windfall.controller.directory.holders import NO_WORKER, PeerUse, WeightHolder
from windfall.controller.directory.routes import MAX_FAN_OUT, fan_out
from windfall.controller.directory.traffic import TrafficPrices
from windfall.link.messages import FileRef, HolderFiles, Holding, PublishedFiles, ReadRoute, SourceUse

GB = 10**9
V1, V2 = FileRef(digest="v1", nbytes=16 * GB), FileRef(digest="v2", nbytes=16 * GB)
DELTA = FileRef(digest="d2", nbytes=10**8, before="v1", after="v2")


def worker(id: str, region: str = "us", **more: Any) -> WeightHolder:
    return WeightHolder(id=id, kind="peer", location=f"http://{id}", region=region, **more)


def published(*files: FileRef, version: int = 1, bucket: str = "") -> PublishedFiles:
    holds = tuple(Holding(file=f) for f in files)
    holders = [HolderFiles(location=at, holds=holds) for at in ("trainer", bucket) if at]
    return PublishedFiles(version=version, digest=files[0].digest, files=files, holders=tuple(holders), bucket=bucket)


def directory(*workers: WeightHolder, peers: PeerUse = "all", bucket: str = "", **prices: float) -> Directory:
    out = Directory(TrafficPrices(**prices), peers=peers, region="us")
    for each in workers:
        out.join(each)
    out.publish(published(V1, bucket=bucket), 0.0)
    return out


def firsts(route: ReadRoute) -> list[str]:
    return [route.sources[part.source].id.removeprefix(NO_WORKER) for part in route.parts]


def named(source: str) -> str:
    """The id of a source."""
    return NO_WORKER + source if source in ("trainer", "s3://b") else source


def load(d: Directory, reader: str, wanted: str = "v1") -> list[str]:
    """The first sources of each part of all its files."""
    routes = d.load(reader, wanted)
    check(d)
    return [id for each in routes for id in firsts(each.route)]


def test_a_region_is_a_chain_and_one_reader_crosses_into_the_next() -> None:
    d = directory(*(worker(f"u{n}") for n in range(3)), *(worker(f"e{n}", "eu") for n in range(3)))
    assert [load(d, f"u{n}") for n in range(3)] == [["trainer"], ["u0"], ["u1"]]
    assert [load(d, f"e{n}") for n in range(3)] == [["trainer"], ["e0"], ["e1"]]
    importer = {"region": "eu", "worker": "e0", "file": "v1", "at_bytes": 0, "why": "first"}
    assert d.events() == [("importer", importer)]


def test_an_importer_that_dies_is_replaced_by_the_reader_with_most_bytes() -> None:
    d = directory(*(worker(f"e{n}", "eu", machine=f"m{n}") for n in range(2)), worker("e2", "eu", machine="m0"))
    assert [load(d, id) for id in ("e0", "e1", "e2")] == [["trainer"], ["e0"], ["e0"]]
    for id, received in (("e0", 9 * GB), ("e1", 5 * GB), ("e2", 7 * GB)):
        d.progress(id, received)
    d.events()
    d.leave("e0")
    check(d)
    routes = {reader: each.route for reader, each in d.routed()}
    assert list(routes) == ["e2", "e1"]
    assert {id: firsts(route) for id, route in routes.items()} == {"e2": ["trainer"], "e1": ["e2"]}
    taken = {"region": "eu", "worker": "e2", "file": "v1", "at_bytes": 7 * GB, "why": "e0"}
    assert d.events() == [("importer", taken)]
    assert d.routed() == []
    asked = d.ask("e2", "v1", (), 7 * GB + 1)  # what it says itself is exact
    assert (asked.parts[0].start, firsts(asked)) == (7 * GB + 1, ["trainer"])


def test_readers_of_one_machine_read_from_one_of_them() -> None:
    d = directory(*(worker(f"a{n}", machine="m") for n in range(8)), worker("b"))
    assert [load(d, f"a{n}") for n in range(8)] == [["trainer"], *[["a0"]] * 7]
    assert load(d, "b") == ["a1"]


@given(
    st.lists(st.sampled_from(["us", "eu", "asia"]), min_size=1, max_size=40), st.data(), st.sampled_from([V1, DELTA])
)
@settings(max_examples=60, deadline=None)
def test_the_trainer_feeds_its_fan_out_and_one_reader_of_each_other_region(
    regions: list[str], data: Any, size: FileRef
) -> None:
    file = FileRef(digest="v", nbytes=size.nbytes)
    d = Directory(TrafficPrices(), region="us")
    names = [f"w{n}" for n in range(len(regions))]
    for name, region in zip(names, regions, strict=True):
        d.join(worker(name, region))
    d.publish(published(file), 0.0)
    routes = {name: d.load(name, "v")[0].route for name in data.draw(st.permutations(names))}
    limit = fan_out(len(names) + 1, file.nbytes, 1e9)
    for dying in [None, *data.draw(st.lists(st.sampled_from(names), unique=True, max_size=5))]:
        if dying is not None:
            d.leave(dying)
            routes.pop(dying, None)
            routes.update((reader, each.route) for reader, each in d.routed())
        check(d)
        crossing = [name for name, route in routes.items() if "trainer" in firsts(route)]
        at = [regions[names.index(name)] for name in crossing]
        assert at.count("us") <= limit
        assert max(at.count("eu"), at.count("asia")) <= 1
        assert all(route.sources for route in routes.values())


def test_a_small_file_makes_a_tree_and_a_large_one_a_chain() -> None:
    assert fan_out(16, 16 * GB, 1e9) == 1
    assert 2 <= fan_out(1000, 10**6, 1e9) <= MAX_FAN_OUT
    assert fan_out(1, 10**6, 1e9) == 1


def complain(d: Directory, reader: str, source: str, why: Any) -> list[str]:
    route = d.ask(reader, "v1", [SourceUse(source=named(source), bytes=0, s=0.0, why=why)], 0)
    check(d)
    return firsts(route)


def test_a_liar_is_refused_by_one_and_then_by_all() -> None:
    d = directory(*(worker(id, machine=id) for id in ("liar", "a", "b", "c")))
    for id in ("liar", "a", "b", "c"):
        load(d, id)
    d.loaded("liar", "v1", (), 1.0)
    assert complain(d, "a", "liar", "wrong") == ["trainer"]
    assert d.events() == []  # one reader could slander
    d.stopped("c")
    d.stopped("b")
    assert load(d, "b") == ["liar"]
    assert complain(d, "b", "liar", "wrong") != ["liar"]
    [(name, about)] = d.events()
    assert name == "source_dropped"
    assert (about["source"], about["by"]) == ("liar", "b")
    assert "liar" not in load(d, "c")
    d.join(worker("liar"), [Holding(file=V1)])
    d.stopped("c")
    assert load(d, "c") == ["liar"]


def test_a_source_that_is_dropped_loses_its_readers() -> None:
    d = directory(*(worker(id, "eu", machine=id) for id in ("liar", "a", "b", "c")))
    assert [load(d, id) for id in ("liar", "a", "b")] == [["trainer"], ["liar"], ["a"]]
    d.loaded("a", "v1", [SourceUse(source="liar", bytes=0, s=0.0, why="wrong")], 1.0)
    assert load(d, "c") == ["liar"]
    d.loaded("b", "v1", [SourceUse(source="liar", bytes=0, s=0.0, why="wrong")], 1.0)
    assert [(reader, firsts(each.route)) for reader, each in d.routed()] == [("c", ["a"])]
    check(d)


def test_who_only_reads_does_not_cross_where_another_has_crossed() -> None:
    readers = [WeightHolder(id=f"x{n}", kind="peer", region="eu") for n in range(3)]
    d = directory(worker("a", "eu"), *readers, across_usd_per_gb=0.0)
    assert [load(d, id) for id in ("a", "x0", "x1", "x2")] == [["trainer"], ["a"], ["a"], ["a"]]


def test_a_reader_that_has_lost_a_delta_gets_a_route_for_it() -> None:
    d = directory()
    d.publish(published(V2, DELTA, version=2), 0.0)
    d.join(worker("a", "eu"), [Holding(file=V1), Holding(file=DELTA)])
    assert [(each.file, each.route.parts) for each in d.load("a", "v2")] == [(DELTA, ())]
    assert firsts(d.ask("a", "d2", (), 0)) == ["trainer"]
    check(d)


def test_who_finds_everything_wrong_is_not_believed() -> None:
    names = ("a", "b", "c", "d", "e", "f")
    d = directory(*(worker(id, machine=id) for id in names))
    for id in ("a", "b", "c"):
        d.join(worker(id, machine=id), [Holding(file=V1)])
    load(d, "d")
    load(d, "e")
    for id in ("a", "b", "c"):
        complain(d, "d", id, "wrong")
    complain(d, "e", "a", "wrong")
    assert d.events() == []
    load(d, "f")
    complain(d, "f", "a", "wrong")  # the second who is believed
    assert [name for name, _ in d.events()] == ["source_dropped"]


def test_a_stalled_source_comes_back_if_there_is_no_other() -> None:
    d = directory(worker("a"), worker("b"))
    load(d, "a")
    load(d, "b")
    assert complain(d, "b", "a", "stalled") == ["trainer"]
    assert complain(d, "a", "trainer", "stalled") == ["b"]
    d.leave("a")
    assert complain(d, "b", "trainer", "stalled") == ["trainer"]


def test_workers_follow_each_other_rather_than_the_upload_to_the_bucket() -> None:
    d = directory(worker("a"), worker("b"), worker("e", "eu"), worker("f", "eu"), bucket="s3://b")
    assert [load(d, id) for id in "abef"] == [["trainer"], ["a"], ["trainer"], ["e"]]
    assert complain(d, "e", "trainer", "unreachable") == ["s3://b"]


def test_a_file_that_is_damaged_in_the_bucket_is_uploaded_again_and_read_there_last() -> None:
    d = directory(worker("a"), worker("b"), worker("c"), bucket="s3://b", peers="none")
    for id in "ab":
        load(d, id)
        assert complain(d, id, "trainer", "unreachable") == ["s3://b"]
    assert complain(d, "a", "s3://b", "wrong") == ["trainer"]
    assert (d.damaged(), d.damaged(), d.wrong) == (("v1",), (), ("v1",))
    assert [name for name, _ in d.events()] == ["source_dropped"]
    assert (load(d, "b"), load(d, "c")) == (["s3://b"], ["trainer"])  # b reaches nothing else
    assert complain(d, "b", "s3://b", "wrong") == ["trainer"]
    assert d.damaged() == ()  # known
    for damaged in (("v1",), (), ()):  # a has reported damage once
        d.uploaded("v1", 100, failed=False)
        assert complain(d, "a", "trainer", "unreachable") == ["s3://b"]
        complain(d, "a", "s3://b", "wrong")
        assert d.damaged() == damaged
    d.publish(published(V2, version=2, bucket="s3://b"), 1.0)


def test_a_failed_upload_leaves_nothing_in_the_bucket() -> None:
    d = directory(worker("a"), bucket="s3://b")
    load(d, "a")
    assert complain(d, "a", "trainer", "unreachable") == ["s3://b"]
    d.uploaded("v1", 5, failed=True)
    check(d)
    assert [firsts(each.route) for _, each in d.routed()] == [["trainer"]]
    assert d.traffic.describe()["upload_bytes"] == 5
    d.uploaded("v1", 5, failed=False)  # the second attempt
    assert load(d, "a") == ["s3://b"]


def test_each_machine_of_the_trainer_uploads_its_own_part() -> None:
    first, second = ((0, 4 * GB),), ((4 * GB, V1.nbytes),)
    d = directory(worker("a"), bucket="s3://b")
    load(d, "a")
    assert complain(d, "a", "trainer", "unreachable") == ["s3://b"]
    d.uploaded("v1", 0, second, failed=True)
    assert load(d, "a") == ["trainer"], "the bucket has only a part"
    d.uploaded("v1", 5, first, failed=False)
    assert load(d, "a") == ["trainer"]
    d.uploaded("v1", 5, second, failed=False)
    assert load(d, "a") == ["s3://b"]
    d.uploaded("v1", 0, failed=True)
    assert "#s3://b" not in d._files["v1"].held
    check(d)


def test_a_trainer_that_cannot_be_reached_is_tried_again_if_there_is_no_other() -> None:
    d = directory(worker("a", "eu"), worker("b", "eu"), bucket="s3://b")
    load(d, "a")
    assert complain(d, "a", "trainer", "unreachable") == ["s3://b"]
    assert load(d, "a") == ["s3://b"]
    assert complain(d, "a", "s3://b", "unreachable") == ["trainer"]
    d.leave("#s3://b")
    assert load(d, "a") == ["trainer"]
    d.publish(published(V1, bucket="s3://b"), 1.0)  # the trainer has connected again
    assert load(d, "a") == ["trainer"]


def test_late_messages_about_an_older_load_change_nothing() -> None:
    d = directory(worker("a"), worker("b"))
    load(d, "a")
    d.publish(published(V2, DELTA, version=2), 2.0)
    load(d, "a", "v2")
    assert d.ask("a", "v1", [SourceUse(source="#trainer", bytes=5, s=1.0)], 0) == ReadRoute(sources=(), parts=())
    assert d.traffic.describe()["trainer_bytes"] == 5  # but what was sent is counted
    assert d.ask("a", "unheard of", (), 0) == ReadRoute(sources=(), parts=())
    d.loaded("a", "v1", (), 3.0)
    assert load(d, "b", "v2") == ["a"]  # which is still reading
    d.leave("a")
    assert [firsts(each.route) for _, each in d.routed()] == [["trainer"]]
    check(d)


@pytest.mark.parametrize(("peers", "sources"), [("none", ["trainer"] * 3), ("machine", ["trainer", "a", "trainer"])])
def test_peers_can_be_limited(peers: PeerUse, sources: list[str]) -> None:
    d = directory(worker("a", machine="m"), worker("b", machine="m"), worker("c"), peers=peers)
    assert [load(d, id)[0] for id in ("a", "b", "c")] == sources


def test_a_worker_with_the_name_of_the_trainer_or_the_bucket_replaces_neither() -> None:
    d = directory(worker("a"), bucket="s3://b")
    for name in ("trainer", "s3://b"):
        d.join(worker(name, seen="6.6.6.6"))
        d.leave(name)
    assert load(d, "a") == ["trainer"]
    assert complain(d, "a", "trainer", "unreachable") == ["s3://b"]


def test_a_claimed_machine_needs_the_address_of_that_machine() -> None:
    victim, liar = worker("v", machine="m", seen="10.0.0.1"), worker("l", machine="m", seen="6.6.6.6", own="10.0.0.9")
    limits: list[PeerUse] = ["all", "machine"]
    for peers in limits:
        here = worker("h", machine="m", seen="127.0.0.1")
        d = directory(liar, victim, here, worker("n", machine="m", seen="127.0.0.1"), peers=peers)
        assert [load(d, id) for id in "lvhn"] == [["trainer"], ["trainer"], ["trainer"], ["h"]]
        assert complain(d, "v", "trainer", "unreachable") == ["trainer"]
    d = directory(worker("p", machine="m", seen="1.1.1.1", own="1.1.1.1"), victim)
    load(d, "p")
    (source,) = d.load("v", "v1")[0].route.sources
    assert (source.id, source.machine) == ("p", "")  # over the network, not over memory


def test_behind_a_nat_only_neighbors_are_reached() -> None:
    inside = [worker(id, "eu", seen="1.2.3.4", own=f"10.0.0.{n}") for n, id in enumerate("ab")]
    d = directory(*inside, worker("c", "eu", seen="5.6.7.8", own="5.6.7.8"))
    assert [load(d, id) for id in "abc"] == [["trainer"], ["a"], ["trainer"]]  # c cannot reach a
    assert directory(WeightHolder(id="x", kind="peer", region="us"), worker("y")).load("x", "v1")


def test_each_machine_of_the_trainer_serves_its_shard() -> None:
    d = Directory(TrafficPrices(), region="us")
    d.join(worker("a"))
    d.join(worker("b"))
    half = V1.nbytes // 2
    holders = (
        HolderFiles(location="t0", holds=(Holding(file=V1, ranges=((0, half),)),)),
        HolderFiles(location="t1", holds=(Holding(file=V1, ranges=((half, V1.nbytes),)),)),
    )
    d.publish(PublishedFiles(version=1, digest="v1", files=(V1,), holders=holders), 0.0)
    route = d.load("a", "v1")[0].route
    assert [(p.start, p.stop, firsts(route)[n]) for n, p in enumerate(route.parts)] == [
        (0, half, "t0"),
        (half, V1.nbytes, "t1"),
    ]
    assert load(d, "b") == ["a"]


def test_a_trainer_with_thousands_of_ranges_on_two_machines() -> None:
    d, count = Directory(TrafficPrices(), region="us"), 10_000
    d.join(worker("a"))
    pieces = [(n * 10**6, (n + 1) * 10**6) for n in range(count)]
    file = FileRef(digest="v", nbytes=count * 10**6)
    holders = tuple(
        HolderFiles(location=f"t{n}", holds=(Holding(file=file, ranges=tuple(pieces[n::2])),)) for n in range(2)
    )
    d.publish(PublishedFiles(version=1, digest="v", files=(file,), holders=holders), 0.0)
    started_s = time.process_time()
    assert len(d.load("a", "v")[0].route.parts) == count
    assert time.process_time() - started_s < 5


def test_a_machine_of_the_trainer_that_has_less_of_a_file_than_before() -> None:
    d = Directory(TrafficPrices(), region="us")
    d.join(worker("a"))
    third = V1.nbytes // 3
    ranges = {"t0": ((0, third), (2 * third, V1.nbytes)), "t1": ((third, 2 * third),)}
    for lost in (False, True):
        if lost:
            ranges = {"t0": ((0, third),), "t1": ((third, V1.nbytes),)}
        holders = tuple(HolderFiles(location=id, holds=(Holding(file=V1, ranges=r),)) for id, r in ranges.items())
        d.publish(PublishedFiles(version=1, digest="v1", files=(V1,), holders=holders), 0.0)
        if not lost:
            assert load(d, "a") == ["t0", "t1", "t0"]
    check(d)
    assert [firsts(each.route) for _, each in d.routed()] == [["t0", "t1"]]


def test_deltas_for_who_has_the_copy_and_the_copy_for_who_has_lost_it() -> None:
    d = directory(worker("a", "eu"), worker("b", "eu"))
    load(d, "a")
    d.loaded("a", "v1", (), 1.0)
    d.publish(published(V2, DELTA, version=2), 2.0)
    assert d.needed() == {"v2", "d2"}
    assert [each.file for each in d.load("a", "v2")] == [DELTA]
    assert firsts(d.ask("a", "v2", (), 0)) == ["trainer"]
    assert [each.file for each in d.load("b", "v2")] == [V2]
    check(d)


def test_an_adapter_comes_after_its_base() -> None:
    adapters = [FileRef(digest=f"a{n}", nbytes=10**7, before="v1") for n in (1, 2)]
    d = directory(worker("a"))
    d.publish(published(adapters[0], V1), 0.0)
    assert [each.file for each in d.load("a", "a1")] == [V1, adapters[0]]
    d.loaded("a", "a1", (), 1.0)
    d.publish(published(adapters[1], V1, version=2), 2.0)
    assert d.needed() == {"v1", "a2"}
    assert [each.file for each in d.load("a", "a2")] == [adapters[1]]
    d.join(worker("b"))
    assert {id for each in d.load("b", "a2") for id in firsts(each.route)} <= {"a", "trainer"}
    check(d)


def test_traffic_of_a_version() -> None:
    d = directory(worker("a"), worker("b", machine="m"), worker("c", machine="m"), worker("e", "eu"))
    sources = {id: load(d, id)[0] for id in "abce"}
    assert sources == {"a": "trainer", "b": "a", "c": "b", "e": "trainer"}
    for n, id in enumerate("abce"):
        d.loaded(id, "v1", [SourceUse(source=named(sources[id]), bytes=V1.nbytes, s=16.0)], 10.0 * (n + 1))
    weights = d.traffic.describe()
    assert weights == {
        "version": 1, "readers": 4, "full_bytes": 16 * GB, "delta_bytes": 0, "trainer_bytes": 32 * GB,
        "peer_bytes": 16 * GB, "machine_bytes": 16 * GB, "bucket_bytes": 0, "upload_bytes": 0, "across_bytes": 16 * GB,
        "usd": pytest.approx(0.32), "half_s": 20.0, "all_s": 40.0,
    }  # fmt: skip
    d.join(worker("late"))
    d.load("late", "v1")
    d.loaded("late", "v1", (), 90.0)
    d.events()
    d.publish(published(V2, version=2), 100.0)
    assert d.events() == [("weights", weights | {"readers": 5})]
    d.leave("a")
    d.publish(published(V1, version=3), 101.0)
    assert d.events() == [], "nobody has read it"


def test_traffic_from_a_region_that_is_not_known_has_no_price_and_one_reader_of_each_region() -> None:
    d = Directory(TrafficPrices())
    for id in ("a", "b"):
        d.join(worker(id, "us"))
    d.publish(published(V1), 0.0)
    assert [load(d, id) for id in ("a", "b")] == [["trainer"], ["a"]]
    d.loaded("a", "v1", [SourceUse(source="#trainer", bytes=V1.nbytes, s=16.0)], 1.0)
    assert d.usd == 0


def test_deltas_are_packed_for_slow_links() -> None:
    d = directory(worker("a"))
    assert not d.pack()
    d.join(worker("e", "eu"))
    assert d.pack()
    load(d, "e")
    d.loaded("e", "v1", [SourceUse(source="#trainer", bytes=V1.nbytes, s=4.0)], 4.0)
    assert not d.pack()


def test_a_slow_holder_gets_no_readers() -> None:
    d = directory(*(worker(id) for id in "abcdef"))
    for id in "abcd":
        d.join(worker(id), [Holding(file=V1)])
    load(d, "e")
    uses = [SourceUse(source=id, bytes=GB, s=100.0 if id == "a" else 1.0, why="slow") for id in "abcd"]
    d.ask("e", "v1", uses, 0)
    assert "a" not in load(d, "f")


def story() -> str:
    """Everything that a long course of calls answers."""
    said: list[Any] = []
    d = directory(*(worker(f"w{n}", f"r{n % 3}", machine=f"m{n // 2}") for n in range(24)), bucket="s3://b")
    for n in range(24):
        said.append(d.load(f"w{n}", "v1"))
    for n in range(0, 24, 5):
        d.leave(f"w{n}")
        said.append(d.routed())
    for n in range(1, 24, 5):
        said.append(d.ask(f"w{n}", "v1", [SourceUse(source="#trainer", bytes=5, s=1, why="stalled")], n))
        d.loaded(f"w{n}", "v1", (), 2.0)
    return repr([said, d.routed(), d.events(), sorted(d.needed())])


def test_the_same_calls_have_the_same_answers_in_every_process() -> None:
    command = [sys.executable, "-c", "from tests.controller.directory.test_directory import story; print(story())"]
    told = {
        subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert told == {story() + "\n"}


@pytest.mark.slow
def test_a_thousand_workers(capsys: pytest.CaptureFixture[str]) -> None:
    """Prints what a load takes; the time decides nothing here, because other tests run beside this one."""
    for file in (V1, FileRef(digest="v1", nbytes=10**7)):
        d = Directory(TrafficPrices(), region="r0")
        for n in range(1000):
            d.join(worker(f"w{n}", f"r{n // 8 % 4}", machine=f"m{n // 8}"))
        d.publish(published(file), 0.0)
        since = time.perf_counter()
        routes = [d.load(f"w{n}", "v1")[0].route for n in range(1000)]
        each_ms = time.perf_counter() - since
        with capsys.disabled():
            print(f"\n1,000 workers, {file.nbytes / 1e6:,.0f} MB: load takes {each_ms:.2f} ms each")
        check(d)
        assert sum("trainer" in firsts(route) for route in routes) <= MAX_FAN_OUT + 3
