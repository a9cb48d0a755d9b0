"""Numbers, times and lists in messages."""

from __future__ import annotations

import pytest

from gpuaff.formatting import duration, enumeration, size


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (0, "0 bytes"),
        (2**20 - 1, "1048575 bytes"),
        (2**20, "1 MiB"),
        (2**30 - 1, "1023 MiB"),
        (2**30, "1 GiB"),
        (3 * 2**29, "1.5 GiB"),
        (80 * 2**30, "80 GiB"),
    ],
)
def test_sizes(number: int, said: str) -> None:
    assert size(number) == said


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (-5, "0 s"),
        (0.9, "0 s"),
        (59, "59 s"),
        (60, "1 min"),
        (61, "1 min 1 s"),
        (3 * 3600 + 10 * 60 + 9, "3 h 10 min"),
        (3600 + 9, "1 h"),
        (86400 * 12 + 3600, "12 d 1 h"),
    ],
)
def test_durations(seconds: float, said: str) -> None:
    assert duration(seconds) == said


@pytest.mark.parametrize(
    ("count", "said"),
    [(0, ""), (1, "a"), (2, "a and b"), (3, "a, b and c"), (5, "a, b, c and 2 more")],
)
def test_enumerations(count: int, said: str) -> None:
    assert enumeration(list("abcde"[:count])) == said
