"""Two tenants carve pages from the same blocks: which gets a block, and what each loses. No tensors."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from windfall.engine.blocks import MemoryBlocks, TenantPages, layout
from windfall.engine.pages import ROOT, key_of
from windfall.serve.memory_policy import MemoryPolicy


class Tenants:
    """Two tenants whose sequences are lists of pages."""

    def __init__(self, blocks: int, serving_page: int = 1024, rollout_page: int = 1500) -> None:
        self.blocks = MemoryBlocks(
            layout(blocks * 4 * serving_page, serving_page, block_bytes=4 * serving_page, least_blocks=1)
        )
        self.serving = TenantPages(self.blocks, "serving", page_bytes=serving_page, size=4, priority=True)
        self.rollout = TenantPages(self.blocks, "rollout", page_bytes=rollout_page, size=4)
        self.rollout.evict = self._evict
        self.held: dict[str, list[list[int]]] = {"serving": [], "rollout": []}
        self.evicted = 0

    def _evict(self, pages: frozenset[int]) -> None:
        lost = [s for s in self.held["rollout"] if pages & set(s)]
        assert lost, "a block without holders is trimmed, not evicted"
        for sequence in lost:
            self.held["rollout"].remove(sequence)
            self.rollout.release(sequence)
            self.evicted += 1

    def check(self) -> None:
        self.blocks.check()
        self.serving.check(self.held["serving"])
        self.rollout.check(self.held["rollout"])
        ours = {
            p
            for b in self.blocks.of("serving")
            for p in range(b * self.blocks.layout.granules, (b + 1) * self.blocks.layout.granules)
        }
        assert not ours & {p for s in self.held["rollout"] for p in s}, "the rollout holds a page in serving's memory"


def test_layout_fits_pages_of_both() -> None:
    found = layout(8 << 30, 16 * 57344 * 2)
    assert found.pages(16 * 57344 * 2) * 16 * 57344 * 2 == found.block_bytes, "serving loses nothing"
    assert found.pages(16 * 73728 * 2) * 16 * 73728 * 2 > 0.95 * found.block_bytes
    assert found.count * found.block_bytes <= 8 << 30


def test_serving_takes_what_the_rollout_holds() -> None:
    t = Tenants(6)
    for _ in range(6):
        t.held["rollout"].append([p for _ in range(t.rollout.per_block) if (p := t.rollout.allocate()) is not None])
    assert t.blocks.held("rollout") == 6
    assert t.rollout.allocate() is None
    assert t.serving.free == 6 * t.serving.per_block
    taken = [t.serving.allocate() for _ in range(6 * t.serving.per_block)]
    assert None not in taken
    assert len(set(taken)) == len(taken)
    assert (t.evicted, t.blocks.held("rollout"), t.serving.allocate()) == (6, 0, None)


def test_cached_pages_are_given_up_before_those_in_use() -> None:
    t = Tenants(4)
    page = t.serving.allocate()
    assert page is not None
    t.serving.register(page, key := key_of(ROOT, (1, 2, 3, 4)))
    t.serving.release([page])
    assert t.serving.find(key) == page
    t.serving.release([page])
    pages = [t.rollout.allocate() for _ in range(4 * t.rollout.per_block)]
    assert None not in pages, "serving does not use the block of its cached page"
    assert t.serving.find(key) is None
    t.held["rollout"].append([p for p in pages if p is not None])
    t.check()


@given(
    st.integers(0, 1 << 32), st.integers(1, 12), st.sampled_from([(1024, 1500), (1024, 1024), (640, 4000), (96, 80)])
)
def test_serving_is_never_refused_a_page_that_the_rollout_holds(seed: int, blocks: int, sizes: tuple[int, int]) -> None:
    rng, t = random.Random(seed), Tenants(blocks, *sizes)
    policy = MemoryPolicy(t.blocks.layout.count)
    policy.begin_step(0)
    for turn in range(60):
        t.rollout.limit = policy.budget
        tenant = rng.choice(("serving", "rollout"))
        pages, held = getattr(t, tenant), t.held[tenant]
        if rng.random() < 0.6:
            sequence: list[int] = []
            held.append(sequence)
            for n in range(rng.randrange(1, 6)):
                expected = pages.free
                page = pages.allocate()
                assert (page is not None) == (expected > 0), "`free` is exact"
                if page is None:
                    other = t.blocks.held("rollout")
                    assert tenant == "rollout" or not other, "the rollout holds a block that serving needs"
                    break
                if not any(sequence is s for s in held):  # evicted meanwhile: only the rollout's can be
                    raise AssertionError("a tenant evicted its own sequence")
                sequence.append(page)
                if rng.random() < 0.5:
                    pages.register(page, key_of(ROOT, (turn, n, 0, 0)))
        elif held:
            pages.release(held.pop(rng.randrange(len(held))))
        excess = policy.observe(t.serving.held_blocks, t.rollout.owned_blocks)
        if excess:
            assert t.rollout.yield_blocks(excess) == excess
        if rng.random() < 0.05:
            policy.begin_step(t.serving.held_blocks)
        t.held = {name: [s for s in held if s or name == "serving"] for name, held in t.held.items()}
        t.check()
