"""Numbers, times and lists in messages."""

from __future__ import annotations

import pytest

from gpuaff.formatting import duration, size

M, G = 2**20, 2**30


@pytest.mark.parametrize(
    ("number", "said"),
    [
        *((0, "0 bytes"), (M - 1, "1048575 bytes"), (M, "1 MiB"), (G - 1, "1023 MiB")),
        *((G, "1 GiB"), (3 * G // 2, "1.5 GiB"), (80 * G, "80 GiB")),
    ],
)
def test_sizes(number: int, said: str) -> None:
    assert size(number) == said


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        *((-5, "0 s"), (0.9, "0 s"), (59, "59 s"), (60, "1 min"), (61, "1 min 1 s")),
        *((3 * 3600 + 609, "3 h 10 min"), (3609, "1 h"), (86400 * 12 + 3600, "12 d 1 h")),
    ],
)
def test_durations(seconds: float, said: str) -> None:
    assert duration(seconds) == said
