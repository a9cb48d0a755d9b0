"""How ``gpuaff run`` reads how many, how long, how much, and which."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpuaff import options
from gpuaff.cli.run import gpu_count, wait_time
from gpuaff.errors import InvalidOptionError


def refused(read: Callable[[str, str], object], text: str) -> InvalidOptionError:
    with pytest.raises(InvalidOptionError) as caught:
        read("--it", text)
    assert (caught.value.option, caught.value.value) == ("--it", text)
    return caught.value


class TestGpuCount:
    @pytest.mark.parametrize(("text", "count"), [("1", 1), ("16", 16), ("007", 7)])
    def test_a_number(self, text: str, count: int) -> None:
        assert gpu_count("-n", text) == count

    def test_as_many_as_granted(self) -> None:
        assert gpu_count("-n", "auto") == "auto"

    @pytest.mark.parametrize("text", ["0", "", "-1", "1.5", "two", "AUTO", "1,2", "²", "1_0", " 1"])
    def test_no_number(self, text: str) -> None:
        refused(gpu_count, text)


class TestDuration:
    @pytest.mark.parametrize(
        ("text", "seconds"),
        [
            ("0", 0),
            ("90", 90),
            ("0.5", 0.5),
            ("90s", 90),
            ("10m", 600),
            ("10M", 600),
            ("1h30m", 5400),
            ("1h30m15s", 5415),
            ("2d", 172800),
            ("1d1s", 86401),
            ("1.5h", 5400),
            ("0m", 0),
        ],
    )
    def test_is_seconds(self, text: str, seconds: float) -> None:
        assert wait_time("--wait", text) == seconds

    @pytest.mark.parametrize(
        "text",
        ["", "-1", "m", "1h30", "30m1h", "1m1m", "1 m", "1e3", "inf", "nan", ".5", "1.", "10min"],
    )
    def test_is_none(self, text: str) -> None:
        assert "10m or 1h30m" in refused(wait_time, text).expected

    @given(*[st.integers(0, 999)] * 4)
    def test_units_add_up(self, days: int, hours: int, minutes: int, seconds: int) -> None:
        total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
        assert wait_time("--wait", f"{days}d{hours}h{minutes}m{seconds}s") == total


class TestSize:
    @pytest.mark.parametrize(
        ("text", "number"),
        [
            ("0", 0),
            ("500000000", 500_000_000),
            ("512B", 512),
            ("1K", 1024),
            ("512M", 536_870_912),
            ("40G", 42_949_672_960),
            ("40GiB", 42_949_672_960),
            ("40 GiB", 42_949_672_960),
            ("40gib", 42_949_672_960),
            ("40Gi", 42_949_672_960),  # as Kubernetes spells it
            ("40GB", 40_000_000_000),
            ("1.5G", 1_610_612_736),
            ("0.25T", 274_877_906_944),
            ("1P", 1_125_899_906_842_624),
        ],
    )
    def test_is_bytes(self, text: str, number: int) -> None:
        assert options.size("--min-free-memory", text) == number

    @pytest.mark.parametrize("text", ["", "G", "-1G", "1.5", "1.5B", "40X", "40Gx", "40%", "1e9"])
    def test_is_none(self, text: str) -> None:
        assert "40GiB" in refused(options.size, text).expected


class TestPercent:
    @pytest.mark.parametrize(("text", "number"), [("0", 0), ("10", 10), ("10%", 10), ("100", 100)])
    def test_is_read(self, text: str, number: int) -> None:
        assert options.percent("--max-utilization", text) == number

    @pytest.mark.parametrize("text", ["", "%", "-1", "101", "5.5", "10%%", "ten"])
    def test_is_none(self, text: str) -> None:
        refused(options.percent, text)


ADDRESS = "0000:07:00.0"


class TestDevices:
    @pytest.mark.parametrize(
        ("text", "names"),
        [
            ("0", (0,)),
            ("2,0", (2, 0)),
            ("4-7", (4, 5, 6, 7)),
            ("3-3", (3,)),
            ("0, 2-3", (0, 2, 3)),
            ("GPU-8f3c,MIG-1a", ("GPU-8f3c", "MIG-1a")),
            (ADDRESS, (ADDRESS,)),
            ("00000000:0A:1F.7,07:00.0", ("00000000:0A:1F.7", "07:00.0")),
        ],
    )
    def test_are_named(self, text: str, names: tuple[int | str, ...]) -> None:
        assert options.gpus("--gpus", text) == names

    @pytest.mark.parametrize(
        "text",
        ["", ",", "0,", "-1", "3-1", "0-", "0-1-2", "a", "gpu0", "07:00.8", "0-999999", "0-1024"],
    )
    def test_are_not(self, text: str) -> None:
        assert "by UUID" in refused(options.gpus, text).expected

    @pytest.mark.parametrize("text", ["1,1", "0-3,2", "GPU-1,GPU-1"])
    def test_each_once(self, text: str) -> None:
        assert "each GPU once" in refused(options.gpus, text).expected


@given(st.text(max_size=12))
@example("١")
@example("1" * 400)
@example("1" * 15 + "d")
def test_any_text_is_read_or_refused(text: str) -> None:
    readers: list[Callable[[str, str], object]] = [
        gpu_count,
        wait_time,
        options.size,
        options.percent,
        options.gpus,
    ]
    for read in readers:
        try:
            read("--it", text)
        except InvalidOptionError as error:
            assert error.expected  # noqa: PT017 - any other error is a failure
