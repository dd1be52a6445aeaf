"""Who writes and hashes what, when several ranks publish together."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windfall.errors import WindfallError
from windfall.weights.publishing import plan
from windfall.weights.publishing.plan import HeldRows, RankOffer


def offers(
    shapes: list[tuple[str, tuple[int, ...]]], machines: list[int], chunk_bytes: int, tied: bool = False
) -> list[RankOffer]:
    """Tensors split as by FSDP2: equal numbers of rows, the last ranks have fewer."""
    out, size = [], len(machines)
    for rank, machine in enumerate(machines):
        rows = []
        for i, (dtype, shape) in enumerate(shapes):
            total = shape[0] if shape else 1
            each = -(-total // size) if shape else 1
            first = min(rank * each, total) if shape else 0
            count = min(each, total - first) if 0 not in shape else 0
            rows.append(HeldRows(f"t{i}", dtype, shape, i if count else -1, first, count))
        if tied:
            rows.append(HeldRows("tied", *shapes[0], rows[0].storage, rows[0].first, rows[0].count))
        out.append(RankOffer(machine=str(machine), chunk_bytes=chunk_bytes, tensors=tuple(rows)))
    return out


@settings(max_examples=150, deadline=None)
@given(
    shapes=st.lists(
        st.tuples(
            st.sampled_from(["float32", "bfloat16", "int8"]),
            st.one_of(st.just(()), st.tuples(st.integers(0, 40)), st.tuples(st.integers(1, 300), st.integers(0, 700))),
        ),
        min_size=1, max_size=6,
    ),
    machines=st.lists(st.integers(0, 2), min_size=1, max_size=6),
    chunk_bytes=st.sampled_from([64, 100, 4096, 1 << 20]),
    tied=st.booleans(),
)  # fmt: skip
def test_every_byte_and_chunk_has_one_owner(
    shapes: list[tuple[str, tuple[int, ...]]], machines: list[int], chunk_bytes: int, tied: bool
) -> None:
    made = plan.make(offers(shapes, machines, chunk_bytes, tied))
    file = made.file
    writer = np.full(file.nbytes, -1)
    for rank, share in enumerate(made.shares):
        for piece in share.pieces:
            assert (writer[piece.start : piece.stop] == -1).all()
            writer[piece.start : piece.stop] = rank
    inside = np.zeros(file.nbytes, bool)
    for e in made.entries:
        inside[e.offset : e.offset + e.nbytes] = True
    assert ((writer >= 0) == inside).all()

    # Chunks: hashed once, on the machine that has all of their bytes.
    leader = np.array([share.leader for share in made.shares])
    assert sorted(c for r in set(leader.tolist()) for c in file.chunks(r)) == [*range(len(file.bounds) - 1)]
    for first in set(leader.tolist()):
        for c in file.chunks(first):
            found = set(writer[file.bounds[c] : file.bounds[c + 1]].tolist()) - {-1}
            assert {leader[r] for r in found} <= {first}

    # Parts: every byte of a tensor comes from the machine that has it, and no other byte is left out.
    seen = np.full(file.nbytes, -1)
    for first, parts in file.parts.items():
        for start, stop in parts:
            assert (seen[start:stop] == -1).all()
            seen[start:stop] = first
    assert (seen[inside] == leader[writer[inside]]).all()
    assert (seen >= 0).all()


def test_parts_of_machines() -> None:
    shapes = [("float32", (10, 10)), ("int8", (7,))]
    assert plan.make(offers(shapes, [0, 0, 0], 64)).file.parts == {0: ((0, 455),)}
    made = plan.make(offers(shapes, [0, 0, 1], 64))
    assert made.file.parts == {0: ((0, 320), (448, 454)), 2: ((320, 448), (454, 455))}
    assert made.file.cuts == (320, 448, 454)
    assert made.file.bounds[:7] == (0, 64, 128, 192, 256, 320, 384)
    delta, starts = made.delta([100, 50, 70])
    assert (delta.parts, delta.cuts, starts) == ({0: ((0, 150),), 2: ((150, 220),)}, (100, 150), [0, 100, 150])


def test_tensors_are_tied_only_if_they_are_tied_on_every_rank() -> None:
    made = plan.make(offers([("float32", (4, 4)), ("float32", (4, 4))], [0, 0], 64, tied=True))
    assert [e.offset for e in made.entries] == [0, 64, 0]
    found = offers([("float32", (4, 4))], [0, 0], 64, tied=True)
    untied = RankOffer(
        machine="0", chunk_bytes=64,
        tensors=(found[1].tensors[0], HeldRows("tied", "float32", (4, 4), 7, 2, 2)),
    )  # fmt: skip
    assert [e.offset for e in plan.make([found[0], untied]).entries] == [0, 64]


def test_missing_rows_are_refused() -> None:
    with pytest.raises(WindfallError, match="no rank has rows 4 to 8"):
        plan.make([o for i, o in enumerate(offers([("int8", (12,))], [0, 0, 0], 64)) if i != 1])
    with pytest.raises(WindfallError, match="4 of 12 rows"):
        plan.make(offers([("int8", (12,))], [0, 0, 0], 64)[:1])
