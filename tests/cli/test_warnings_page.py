"""``docs/warnings.md`` lists every code that a notice can have, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpuaff.cli
from gpuaff.notices import KINDS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/warnings.md"
SOURCE = Path(gpuaff.cli.__file__).parents[1]

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="needs the docs of a checkout")


def rows() -> list[str]:
    """Every code in a first cell; a row may have several."""
    cells = re.findall(r"^\| (<a id=[^|]+) \|", PAGE.read_text(), re.MULTILINE)
    return [code for cell in cells for code in re.findall(r"`([a-z0-9-]+)`", cell)]


def listed() -> set[str]:
    return set(rows())


def quoted(start: str, end: str) -> set[str]:
    """The codes in a sentence of the page."""
    sentence = PAGE.read_text().split(start)[1].split(end)[0]
    return set(re.findall(r"`([a-z0-9-]+)`", sentence))


def trees() -> Iterator[ast.Module]:
    return (ast.parse(file.read_text()) for file in SOURCE.rglob("*.py"))


def strings() -> set[str]:
    """Every string in the package."""
    return {
        node.value
        for tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def codes() -> set[str]:
    """The codes that are written where a Notice is made: its first argument."""
    made = (
        node.args[0]
        for tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "Notice"
        and node.args
        and isinstance(node.args[0], (ast.Constant, ast.IfExp))
    )
    parts = (part for first in made for part in ast.walk(first))
    return {
        part.value
        for part in parts
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    }


def test_every_code_is_listed() -> None:
    assert codes() - listed() == set()


def test_each_code_has_one_row() -> None:
    assert sorted(rows()) == sorted(listed())


def test_every_listed_code_is_made() -> None:
    assert listed() - strings() == set()


def test_the_table_has_every_code() -> None:
    assert set(KINDS) == listed()


def test_each_code_is_an_anchor() -> None:
    assert re.findall(r'<a id="([a-z0-9-]+)"></a>`\1`', PAGE.read_text()) == rows()


def test_the_strict_codes_are_marked() -> None:
    marked = re.findall(r"`([a-z0-9-]+)` \| (?:yes|with several visible GPUs) \|", PAGE.read_text())
    above = quoted("Of the others above", " are.\n")
    assert {code for code, kind in KINDS.items() if kind.strict} == set(marked) | above


def test_the_codes_that_rank_0_logs_alone_are_named() -> None:
    named = quoted("in the log (", ", which are the same for all ranks")
    assert {code for code, kind in KINDS.items() if kind.once_per_job} == named
