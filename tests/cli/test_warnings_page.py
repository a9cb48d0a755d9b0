"""``docs/warnings.md`` lists every code that a notice can have, and no other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import gpuaff.cli
from gpuaff.notices import KINDS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/warnings.md"
SOURCE = Path(gpuaff.cli.__file__).parents[1]

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="needs the docs of a checkout")


TEXT = PAGE.read_text() if PAGE.exists() else ""


def rows() -> list[str]:
    """Every code in a first cell; a row may have several."""
    cells = re.findall(r"^\| (<a id=[^|]+) \|", TEXT, re.MULTILINE)
    return [code for cell in cells for code in re.findall(r"`([a-z0-9-]+)`", cell)]


def quoted(start: str, end: str) -> set[str]:
    """The codes in a sentence of the page."""
    return set(re.findall(r"`([a-z0-9-]+)`", TEXT.split(start)[1].split(end)[0]))


def strings(node: ast.AST) -> set[str]:
    """Every string in a piece of code."""
    constants = (one.value for one in ast.walk(node) if isinstance(one, ast.Constant))
    return {value for value in constants if isinstance(value, str)}


def test_the_page_has_every_code_once_and_each_is_made() -> None:
    trees = [ast.parse(file.read_text()) for file in SOURCE.rglob("*.py")]
    made = {
        code
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Notice" and node.args
        if isinstance(node.args[0], (ast.Constant, ast.IfExp))
        for code in strings(node.args[0])
    }
    listed = set(rows())
    assert len(listed) == len(rows())
    assert listed == set(KINDS)
    assert made <= listed <= set().union(*map(strings, trees))


def test_each_code_is_an_anchor() -> None:
    assert re.findall(r'<a id="([a-z0-9-]+)"></a>`\1`', TEXT) == rows()


def test_the_strict_codes_are_marked() -> None:
    marked = re.findall(r"`([a-z0-9-]+)` \| (?:yes|with several visible GPUs) \|", TEXT)
    above = quoted("Of the others above", " are.\n")
    assert {code for code, kind in KINDS.items() if kind.strict} == set(marked) | above


def test_the_codes_that_rank_0_logs_alone_are_named() -> None:
    named = quoted("in the log (", ", which are the same for all ranks")
    assert {code for code, kind in KINDS.items() if kind.once_per_job} == named
