"""``docs/design.md`` is a map of the house: each module stands there, and each row once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/design.md"
SRC = ROOT / "src/gpuaff"

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="needs the docs of a checkout")

WHOLE = {"machines", "pasted"}
"""Folders that are named as one."""


def test_each_module_is_named() -> None:
    rows = re.findall(r"^\|.*", PAGE.read_text("utf-8"), re.MULTILINE)
    named = set(re.findall(r"\w+", " ".join(re.findall(r"`[^`]+`", "\n".join(rows)))))
    modules = {
        path.stem
        for path in SRC.rglob("*.py")
        if path.parent.name not in WHOLE and not path.name.startswith("_")
    }
    assert {*modules, *WHOLE} - named == set()


def test_each_part_has_one_row() -> None:
    rows = re.findall(r"^\| (`.*?) \|", PAGE.read_text("utf-8"), re.MULTILINE)
    assert len(rows) > 30
    assert sorted(rows) == sorted(set(rows))
