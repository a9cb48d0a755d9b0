"""Cores in pieces, where ranks may use different siblings: the parts by themselves."""

from __future__ import annotations

from dataclasses import replace

from gpuaff.allocator.cores import Cores, keep_whole, split_siblings
from tests.allocator.described import cpus

CORES = Cores(cpus=(cpus("0,8"), cpus("1,9"), cpus("2,10")), slow_from=2, core_of=(0, 1, 2))


def test_whole_masks_split_nothing() -> None:
    masks = [(mask, mask) for mask in (cpus("0,8"), cpus("1-2,9-10"))]
    assert split_siblings(CORES, masks).cpus == CORES.cpus


def test_a_core_is_split_by_who_may_have_it() -> None:
    masks = [(mask, mask) for mask in (cpus("0-1,8"), cpus("0-2,9-10"))]
    found = split_siblings(CORES, masks)
    assert found.cpus == (cpus("0"), cpus("8"), cpus("1"), cpus("9"), cpus("2,10"))
    assert (found.core_of, found.slow_from) == ([0, 0, 1, 1, 2], 4)


def test_pieces_come_by_their_lowest_cpu() -> None:
    """Whichever of them it is that has a mask of its own."""
    whole = cpus("0-2,8-10")
    for half in (cpus("0"), cpus("8")):
        found = split_siblings(CORES, [(half, half), (whole, whole)])
        assert found.cpus == (cpus("0"), cpus("8"), cpus("1,9"), cpus("2,10"))
        assert (found.core_of, found.slow_from) == ([0, 0, 1, 2], 3)


def test_a_rank_that_does_not_want_a_core_does_not_split_it() -> None:
    masks = [(cpus("0-1,8"), cpus("0,8")), (cpus("0-2,8-10"), cpus("1,9"))]
    assert split_siblings(CORES, masks).cpus == CORES.cpus


def test_two_that_want_a_whole_core_compete_for_one_piece() -> None:
    """Places 0 and 1 are core 0; 0 is also for the third rank, so 1 is what they want."""
    cores = replace(CORES, cpus=(cpus("0"), cpus("8"), cpus("1,9")), core_of=(0, 0, 1))
    wanted = [frozenset({0, 1, 2}), frozenset({0, 1}), frozenset({0})]
    assert keep_whole(wanted, cores) == [{1, 2}, {1}, {0}]
    assert keep_whole(wanted[1:], cores) == wanted[1:]
