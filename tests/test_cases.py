"""``docs/cases.md`` and the tests name the same cases: nothing is listed that nobody proves."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs/cases.md"

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="needs the docs of a checkout")


def named() -> set[str]:
    """The arguments of each ``pytest.mark.case(…)``, and the cases of written plans and pastes."""
    found: set[str] = set()
    for file in TESTS.rglob("*.py"):
        text = file.read_text("utf-8")
        for node in ast.walk(ast.parse(text if "mark.case(" in text else "")):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.case":
                found.update(str(a.value) for a in node.args if isinstance(a, ast.Constant))
    for file in (TESTS / "data").glob("[ps]*/*.txt"):
        for cases in re.findall(r"^== .* \[(.*)\]$", file.read_text("utf-8"), re.MULTILINE):
            found.update(cases.split())
    return found


def test_each_case_that_a_test_names_has_one_row_and_each_row_a_test() -> None:
    rows = re.findall(r"^\| `([a-zA-Z0-9-]+)` \|", PAGE.read_text("utf-8"), re.MULTILINE)
    assert sorted(rows) == sorted(named())
