"""What no option's own tests say: names of variables."""

from __future__ import annotations

import pytest

import gpuaff
from gpuaff.allocator.model import TEXT_READERS
from gpuaff.options import misspelt_variables

OURS = [
    "GPUAFF",
    *(f"GPUAFF_{name.upper()}" for name in (*TEXT_READERS, "memory", "openmp", "strict")),
    *("GPUAFF_CLAIM", "GPUAFF_FSROOT", "GPUAFF_LOCK_DIR", "GPUAFF_PINNED", "GPUAFF_SAFE_GPU"),
]


def test_our_names_and_quite_other_ones_are_no_misspelling() -> None:
    others = ["GPUAFF_CI", "GPUAFF_VENV", "GPUAFF_FAKE_STATE", "GPUAFF_NUMA_MACHINE", "MODE"]
    assert misspelt_variables([*OURS, *others]) == ()


@pytest.mark.parametrize(
    ("name", "meant"),
    [("GPUAFF_MOED", "MODE"), ("GPUAFF_LOCKDIR", "LOCK_DIR"), ("gpuaff_scope", "SCOPE")],
)
def test_a_misspelling_is_named(name: str, meant: str) -> None:
    (notice,) = misspelt_variables([name])
    assert notice.code == "variable-unknown"
    text = f"{name} is no variable of gpuaff, so it has no effect; did you mean GPUAFF_{meant}?"
    assert notice.message == text


def test_set_affinity_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUAFF_MOED", "all")
    with gpuaff.set_affinity(0, 1) as affinity:
        assert "variable-unknown" in {notice.code for notice in affinity.warnings}
