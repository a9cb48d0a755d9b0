"""Slurm's lists of nodes, against all the names that a list is written out to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuaff.launch.slurm import holds


@pytest.mark.parametrize(
    ("nodes", "names", "others"),
    [
        ("n1", ["n1", "N1", "n1.example.org"], ["n", "n11", "n2"]),
        ("n[1-3,7]", ["n1", "n2", "n3", "n7"], ["n4", "n01", "n", "n17"]),
        ("gpu[098-101]", ["gpu098", "gpu100", "gpu101"], ["gpu98", "gpu0100", "gpu097"]),
        ("a[1-2],b,c[3]x", ["a2", "b", "c3x"], ["a3", "b1", "c3"]),
        ("r[1-2]n[10-11]", ["r1n10", "r2n11"], ["r3n10", "r1n1", "r1n12"]),
        ("n1.example.org,n[2-3].example.org", ["n1", "n3"], ["n4"]),
        ("n[9-11]", ["n9", "n10"], ["n09", "n8"]),
        ("n[x,2,3-y]", ["n2"], ["nx", "n3"]),
    ],
)
def test_lists(nodes: str, names: list[str], others: list[str]) -> None:
    assert [holds(nodes, name) for name in names] == [True] * len(names)
    assert [holds(nodes, name) for name in others] == [False] * len(others)


@pytest.mark.parametrize("nodes", ["", " ", "n[1", "n]1", "n[[1]]", ",n1", "n" * 70_000])
def test_lists_that_cannot_be_read(nodes: str) -> None:
    assert holds(nodes, "n1") is None


@given(st.text("n0123456789[]-,. x", max_size=30), st.text("n0123456789.x", max_size=12))
def test_any_list(nodes: str, host: str) -> None:
    assert holds(nodes, host) in (True, False, None)


@given(st.integers(0, 999), st.integers(0, 99), st.integers(1, 4), st.integers(0, 1200))
def test_a_range_has_the_names_that_it_is_written_out_to(
    first: int, more: int, width: int, other: int
) -> None:
    low, high = str(first).zfill(width), str(first + more).zfill(width)
    names = {f"n{str(number).zfill(width)}" for number in range(first, first + more + 1)}
    if len(low) == width or not low.startswith("0"):
        assert all(holds(f"n[{low}-{high}]", name) for name in names)
    assert holds(f"n[{low}-{high}]", f"n{other}") is (f"n{other}" in names)
