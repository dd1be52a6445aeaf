"""Routes over holders that have any parts of a file, against brute force over its bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from windfall.controller.directory.directory import Directory
from windfall.controller.directory.holders import NO_WORKER, WeightHolder
from windfall.controller.directory.traffic import TrafficPrices
from windfall.link.messages import FileRef, HolderFiles, Holding, PublishedFiles, Ranges
from windfall.weights.ranges import normal, subtract

SIZE = 24
FILE = FileRef(digest="v", nbytes=SIZE)
some_bytes = st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)), min_size=1, max_size=6).map(normal)
regions = st.sampled_from(["", "us", "eu"])


def members(of: Ranges) -> set[int]:
    return {n for start, stop in of for n in range(start, stop)}


@given(
    st.lists(some_bytes, min_size=1, max_size=3),
    st.lists(st.tuples(some_bytes, regions, st.booleans()), min_size=1, max_size=5),
    st.booleans(),
)
def test_a_route_has_every_byte_once_from_a_source_that_has_it(
    machines: list[Ranges], workers: list[tuple[Ranges, str, bool]], complete: bool
) -> None:
    """The machines of the trainer and the workers hold any ranges of the file, or another machine has what these do
    not have. The workers that read, do so in turn."""
    if complete:
        held = normal(piece for ranges in (*machines, *(ranges for ranges, _, _ in workers)) for piece in ranges)
        machines = [*machines, subtract(((0, SIZE),), held)]
    d, holds = Directory(TrafficPrices(), region="us"), dict[str, set[int]]()
    for n, (ranges, region, _) in enumerate(workers):
        about = WeightHolder(id=f"w{n}", kind="peer", location=f"http://w{n}", region=region)
        d.join(about, [Holding(file=FILE, ranges=ranges)] if ranges else [])
        holds[about.id] = members(ranges)
    parts = [HolderFiles(location=f"t{n}", holds=(Holding(file=FILE, ranges=r),)) for n, r in enumerate(machines) if r]
    holds |= {NO_WORKER + part.location: members(part.holds[0].ranges) for part in parts}
    d.publish(PublishedFiles(version=1, digest="v", files=(FILE,), holders=tuple(parts)), 0.0)
    readers: list[str] = []
    for reader in (f"w{n}" for n, (_, _, reads) in enumerate(workers) if reads):
        need = set(range(SIZE)) - holds[reader]
        files = d.load(reader, "v")
        sources = {id: held for id, held in holds.items() if id != reader}
        if not need:
            assert not files
        elif not need <= set().union(*sources.values()):
            assert files[0].route.parts == ()
        else:
            route, read = files[0].route, list[int]()
            for part in route.parts:
                source = route.sources[part.source].id
                assert source in readers or set(range(part.start, part.stop)) <= sources[source]
                read += range(part.start, part.stop)
            assert read == sorted(need)
            readers.append(reader)
