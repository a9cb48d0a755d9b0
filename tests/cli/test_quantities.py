"""How ``gpuaff run`` reads how many, how long, how much, and which."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpuaff import options
from gpuaff.cli.run import gpu_count, wait_time
from gpuaff.errors import InvalidOptionError

READERS: dict[str, Callable[[str, str], object]] = {
    "-n": gpu_count,
    "--wait": wait_time,
    "--min-free-memory": options.size,
    "--max-utilization": options.percent,
    "--gpus": options.gpus,
}

TABLE: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data/quantities.json").read_text("utf-8")
)
"""For each option the values of texts, and texts that are refused, with what is expected."""


@pytest.mark.parametrize("option", READERS)
def test_what_is_read(option: str) -> None:
    for text, value in TABLE[option]["values"].items():
        expected = tuple(value) if isinstance(value, list) else value
        assert READERS[option](option, text) == expected, text


@pytest.mark.parametrize(
    ("option", "text"), [(option, text) for option in TABLE for text in TABLE[option]["refused"]]
)
def test_what_is_refused(option: str, text: str) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        READERS[option](option, text)
    assert (caught.value.option, caught.value.value) == (option, text)
    assert TABLE[option]["expected"] in caught.value.expected


@given(*[st.integers(0, 999)] * 4)
def test_units_of_time_add_up(days: int, hours: int, minutes: int, seconds: int) -> None:
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    assert wait_time("--wait", f"{days}d{hours}h{minutes}m{seconds}s") == total


@given(st.text(max_size=12))
@example("١")
@example("1" * 400)
@example("1" * 15 + "d")
def test_any_text_is_read_or_refused(text: str) -> None:
    for read in READERS.values():
        try:
            read("--it", text)
        except InvalidOptionError as error:
            assert error.expected  # noqa: PT017 - any other error is a failure
