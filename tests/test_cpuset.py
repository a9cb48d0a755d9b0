"""cpulists and masks, against the kernel's documentation and each other."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpuaff import cpuset

cpus = st.frozensets(st.integers(0, cpuset.MAX_CPU_ID), max_size=300)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" \n", []),
        ("8,0-3", [0, 1, 2, 3, 8]),
        (" 1 , 3-4 ", [1, 3, 4]),
        ("5-5", [5]),
        ("0-3,2-5", [0, 1, 2, 3, 4, 5]),
        ("007", [7]),
        # Documentation/admin-guide/kernel-parameters.rst: the first 2 of every 8
        ("0-31:2/8", [0, 1, 8, 9, 16, 17, 24, 25]),
    ],
)
def test_cpulists_that_are_read(text: str, expected: list[int]) -> None:
    assert sorted(cpuset.parse_cpulist(text)) == expected


@pytest.mark.parametrize(
    "text",
    ["a", "0-", "-1", "3-1", "0,,1", "0-3-5", "0x3", "1.5", "1;2", "٣", "0-3:0/2", "0-3:3/2",
     "65536", "0-99999999", "9" * 30, "0-3:1", "1 2", "\0"],
)  # fmt: skip
def test_cpulists_that_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not|backwards|above|stride"):
        cpuset.parse_cpulist(text)


@pytest.mark.case("G2")
@given(cpus)
def test_a_cpulist_comes_back(ids: frozenset[int]) -> None:
    assert cpuset.parse_cpulist(cpuset.format_cpulist(ids)) == ids


@given(cpus)
def test_a_cpulist_is_as_short_as_can_be(ids: frozenset[int]) -> None:
    runs = sum(1 for cpu in ids if cpu - 1 not in ids)
    text = cpuset.format_cpulist(ids)
    assert len(text.split(",")) == max(runs, 1)
    assert ("-" in text) == any(cpu + 1 in ids for cpu in ids)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", []),
        ("0xff", [0, 1, 2, 3, 4, 5, 6, 7]),
        ("00000001,00000003", [0, 1, 32]),
        ("1,0", [32]),
        ("f" + "0" * 20, [80, 81, 82, 83]),
    ],
)
def test_masks_that_are_read(text: str, expected: list[int]) -> None:
    assert sorted(cpuset.parse_mask(text)) == expected


@pytest.mark.parametrize("text", ["", "0x", "g", "1,,2", ",1", "1,", "-1", "f" * 20_000, "0x1,0x2"])
def test_masks_that_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="mask"):
        cpuset.parse_mask(text)


@pytest.mark.case("G2")
@given(cpus)
def test_a_mask_comes_back(ids: frozenset[int]) -> None:
    assert cpuset.parse_mask(cpuset.format_mask(ids)) == ids


@given(st.text("0123456789,-:/ xaf", max_size=12) | st.text(max_size=8))
@example("0-65535:1/2," * 10_000)
@example("0," * 100_000)
def test_any_text_is_read_and_comes_back_or_is_refused(text: str) -> None:
    for parse, show in (
        (cpuset.parse_cpulist, cpuset.format_cpulist),
        (cpuset.parse_mask, cpuset.format_mask),
    ):
        ids, refusal = None, ""
        try:
            ids = parse(text)
        except ValueError as error:
            refusal = str(error)
        assert len(refusal.splitlines()) == (ids is None)
        if ids is not None:
            assert ids <= set(range(cpuset.MAX_CPU_ID + 1))
            assert parse(show(ids)) == ids
