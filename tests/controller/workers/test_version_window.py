"""The window has the newest versions that the bound allows, each with the one digest that it was published with."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from windfall.controller.workers.versions import VersionWindow


@given(eta=st.integers(0, 4), moves=st.lists(st.integers(-3, 1), max_size=30))
def test_window_follows_the_trainer(eta: int, moves: list[int]) -> None:
    """The trainer publishes the next version (1), comes back with the one it had (0), or falls back (below 0)."""
    window = VersionWindow().advance(0, "d0", staleness=eta)
    version, published = 0, {0: "d0"}
    for n, move in enumerate(moves):
        version = max(0, version + move)
        published = {v: d for v, d in published.items() if v <= version}
        digest = published.setdefault(version, f"d{n + 1}")
        window = window.advance(version, digest, staleness=eta)
        assert (window.oldest, window.newest) == (version - eta, version)
        assert window.digests.items() <= published.items(), "a digest of an abandoned version is forgotten"
        assert set(window.digests) <= set(range(version - eta, version + 1))
        assert window.is_newest(version, digest)
        assert all(window.allows(v, d) and (v == version) == window.is_newest(v, d) for v, d in window.digests.items())


def test_versions_in_a_row_are_all_allowed() -> None:
    window = VersionWindow()
    for version in range(10):
        window = window.advance(version, f"d{version}", staleness=2)
    assert window.digests == {7: "d7", 8: "d8", 9: "d9"}
    assert not window.allows(6, "d6")
    assert not window.allows(8, "d9")
    assert not window.allows(10, "d10")


def test_version_that_is_trained_again_has_only_its_new_digest() -> None:
    window = VersionWindow().advance(3, "a", staleness=2).advance(4, "b", staleness=2).advance(5, "c", staleness=2)
    window = window.advance(3, "a", staleness=2).advance(4, "b again", staleness=2)
    assert window.digests == {3: "a", 4: "b again"}
    assert not window.allows(4, "b")
    assert not window.allows(5, "c")


def test_staleness_0_allows_one_version() -> None:
    window = VersionWindow().advance(3, "a", staleness=0).advance(4, "b", staleness=0)
    assert window.digests == {4: "b"}
    assert window.oldest == window.newest == 4


def test_empty_window_allows_nothing() -> None:
    assert not VersionWindow().allows(-1, "")
    assert not VersionWindow().is_newest(-1, "")
