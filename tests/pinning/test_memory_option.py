"""``memory=``: words and nodes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuaff import InvalidOptionError
from gpuaff.pinning.memory import MemoryOption, parse_memory


@pytest.mark.parametrize(
    ("text", "word", "nodes", "own"),
    [
        ("preferred", "preferred", set(), False),
        ("bind", "bind", set(), False),
        ("interleave", "interleave", set(), False),
        ("bind:8", "bind", {8}, False),
        ("preferred:0-1", "preferred", {0, 1}, False),
        (" interleave : 0-2 , 9 ", "interleave", {0, 1, 2, 9}, False),
        ("interleave:gpu", "interleave", set(), True),
        ("bind:0,gpu", "bind", {0}, True),
        ("bind:1023", "bind", {1023}, False),
    ],
)
def test_it_is_read(text: str, word: str, nodes: set[int], own: bool) -> None:
    found = parse_memory("memory", text)
    assert (found.word, set(found.nodes), found.own) == (word, nodes, own)
    assert found.named is (":" in text)


@pytest.mark.parametrize(
    "value",
    [
        "", "local", "default", "Bind", "membind:0", "bind:", "bind:,", "bind:0,", "bind:,gpu",
        "bind:gpu,", "bind:x", "bind:3-1", "bind:-1", "bind:0:1", "bind:GPU",
        ":0", "gpu", "0", 0, True, 1.5, b"bind", ["bind"], ("bind", 0),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_raises(value: object) -> None:
    with pytest.raises(InvalidOptionError, match="preferred, bind, interleave") as caught:
        parse_memory("GPUAFF_MEMORY", value)
    assert caught.value.option == "GPUAFF_MEMORY"


def test_a_typing_error_gets_a_hint() -> None:
    with pytest.raises(InvalidOptionError, match="did you mean interleave"):
        parse_memory("memory", "interleaved")


@given(st.text(max_size=20) | st.from_regex(r"(bind|preferred):[0-9gpu,:-]{0,9}", fullmatch=True))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        found = parse_memory("memory", text)
    except InvalidOptionError:
        return
    assert isinstance(found, MemoryOption)
    assert found.named is (":" in text)
