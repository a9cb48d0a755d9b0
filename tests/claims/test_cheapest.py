"""The search: what it need not try. That it finds the best, the tests of the choice tell."""

from __future__ import annotations

from gpuaff.claims.devices.selection import Search, searchable, twin_masks

ISLANDS = [[0 if i // 4 == j // 4 else 1 for j in range(8)] for i in range(8)]
PATH = [[0 if abs(i - j) <= 1 else 1 for j in range(4)] for i in range(4)]


def test_who_can_be_swapped() -> None:
    assert twin_masks(ISLANDS) == [0b1111] * 4 + [0b11110000] * 4
    # Nobody on a path: 0 and 3 have other neighbours.
    assert twin_masks(PATH) == [1, 2, 4, 8]
    assert twin_masks([[0, 5, 1], [5, 0, 1], [1, 1, 0]]) == [0b011, 0b011, 0b100]


def test_of_sets_that_differ_by_twins_the_first_is_found() -> None:
    search = Search(ISLANDS, [0] * 8, twin_masks(ISLANDS))
    assert search.sets(3, range(8)) == [(0, 1, 2), (4, 5, 6)]
    assert search.sets(3, range(1, 8)) == [(1, 2, 3), (4, 5, 6)]
    assert search.sets(5, range(8)) == [(0, 1, 2, 3, 4), (0, 4, 5, 6, 7)]
    dealt = [[0 if i % 2 == j % 2 else 1 for j in range(6)] for i in range(6)]
    search = Search(dealt, [0] * 6, twin_masks(dealt))
    # Three of one and one of the other; without 0, nor are 2 and 4 tried.
    assert search.sets(4, range(6)) == [(0, 1, 2, 4), (0, 1, 3, 5)]
    alone = [7, 7, 7, 7, 2, 2, 2, 2]
    assert Search(ISLANDS, alone, twin_masks(ISLANDS)).sets(1, range(8)) == [(4,)]


def test_all_others_are_found() -> None:
    search = Search(PATH, [0] * 4, twin_masks(PATH))
    assert search.sets(2, range(4)) == [(0, 1), (1, 2), (2, 3)]
    assert search.sets(3, range(4)) == [(0, 1, 2), (1, 2, 3)]


def test_one_of_the_cheapest() -> None:
    search = Search(PATH, [0] * 4, twin_masks(PATH))
    assert search.one(3, range(4)) == (1, (0, 1, 2))
    assert search.one(2, (0, 2, 3)) == (0, (2, 3))


def test_what_is_searched() -> None:
    """17 that all differ have 131072 sets; in four islands of eight there are 9 ** 4 kinds."""
    assert searchable(range(16), [1 << i for i in range(17)])
    assert not searchable(range(17), [1 << i for i in range(17)])
    assert searchable(range(32), [0xFF << i // 8 * 8 for i in range(32)])
    assert not searchable(range(32), [0xF << i // 4 * 4 for i in range(32)])
