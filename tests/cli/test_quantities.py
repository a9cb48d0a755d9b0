"""How ``gpuaff run`` reads how many, how long, how much, and which."""

from __future__ import annotations

from collections.abc import Callable

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

VALUES: dict[str, dict[str, object]] = {
    "-n": {"1": 1, "16": 16, "007": 7, "auto": "auto"},
    "--wait": {
        "0": 0,
        "90": 90,
        "0.5": 0.5,
        "90s": 90,
        "10m": 600,
        "10M": 600,
        "1h30m": 5400,
        "1h30m15s": 5415,
        "2d": 172800,
        "1d1s": 86401,
        "1.5h": 5400,
        "0m": 0,
    },
    "--min-free-memory": {
        "0": 0,
        "500000000": 500_000_000,
        "512B": 512,
        "1K": 1024,
        "512M": 536_870_912,
        **dict.fromkeys(["40G", "40GiB", "40 GiB", "40gib"], 42_949_672_960),
        "40Gi": 42_949_672_960,
        "40GB": 40_000_000_000,
        "1.5G": 1_610_612_736,
        "0.25T": 274_877_906_944,
        "1P": 1_125_899_906_842_624,
    },
    "--max-utilization": {"0": 0, "10": 10, "10%": 10, "100": 100},
    "--gpus": {
        "0": (0,),
        "2,0": (2, 0),
        "4-7": (4, 5, 6, 7),
        "3-3": (3,),
        "0, 2-3": (0, 2, 3),
        "GPU-8f3c,MIG-1a": ("GPU-8f3c", "MIG-1a"),
        "0000:07:00.0": ("0000:07:00.0",),
        "00000000:0A:1F.7,07:00.0": ("00000000:0A:1F.7", "07:00.0"),
    },
}

REFUSED: dict[str, tuple[str, list[str]]] = {
    "-n": (
        "a number of GPUs from 1 on, or auto",
        ["0", "", "-1", "1.5", "two", "AUTO", "1,2", "²", "1_0", " 1"],
    ),
    "--wait": (
        "10m or 1h30m",
        ["", "-1", "m", "1h30", "30m1h", "1m1m", "1 m", "1e3", "inf", "nan", ".5", "1.", "10min"],
    ),
    "--min-free-memory": ("40GiB", ["", "G", "-1G", "1.5", "1.5B", "40X", "40Gx", "40%", "1e9"]),
    "--max-utilization": ("percentage", ["", "%", "-1", "101", "5.5", "10%%", "ten"]),
    "--gpus": (
        "GPU",
        [
            *("", ",", "0,", "-1", "3-1", "0-", "0-1-2", "a", "gpu0", "07:00.8", "0-999999"),
            *("0-1024", "1,1", "0-3,2", "GPU-1,GPU-1"),
        ],
    ),
}


@pytest.mark.parametrize("option", READERS)
def test_what_is_read(option: str) -> None:
    read, expected = READERS[option], VALUES[option]
    assert {text: read(option, text) for text in expected} == expected


@pytest.mark.parametrize(
    ("option", "text"), [(option, text) for option, (_, texts) in REFUSED.items() for text in texts]
)
def test_what_is_refused(option: str, text: str) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        READERS[option](option, text)
    assert (caught.value.option, caught.value.value) == (option, text)
    assert REFUSED[option][0] in caught.value.expected


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
