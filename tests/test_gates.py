"""One gate per foreign thing: what the linter cannot see."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import gpuaff

SOURCE = Path(str(gpuaff.__path__[0]))
GATES = {
    "_system/nvml.py",
    "_system/kernel.py",
    "_system/env.py",
    "_system/mempolicy.py",
    "_system/cuda.py",
    "_system/nvml_prewarm.py",
    "_system/descriptors.py",
    "_system/locks.py",
}
OPENS = {
    "cli/dispatch.py",  # the null device, when a reader has gone
    "cli/source.py",  # what the user names
    "topology/serialize.py",  # what the user names, and what ships
}


@cache
def modules() -> Sequence[tuple[str, ast.Module]]:
    """Each module's name and tree, parsed once for all tests."""
    return [
        (str(file.relative_to(SOURCE)), ast.parse(file.read_text("utf-8")))
        for file in SOURCE.rglob("*.py")
    ]


def imported(tree: ast.Module) -> set[str]:
    """The packages that a module imports."""
    return {name.split(".")[0] for name in imported_modules(tree)}


def imported_modules(tree: ast.Module) -> set[str]:
    """Likewise the modules; of ``from a import b``, whatever ``b`` is, ``a`` and ``a.b``."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def test_pynvml_has_one_gate() -> None:
    assert [name for name, tree in modules() if "pynvml" in imported(tree)] == ["_system/nvml.py"]


def test_psutil_has_one_gate() -> None:
    assert [name for name, tree in modules() if "psutil" in imported(tree)] == [
        "_system/processes.py"
    ]


def test_programs_have_one_gate() -> None:
    assert [name for name, tree in modules() if "subprocess" in imported(tree)] == [
        "_system/subprocess.py"
    ]


def test_foreign_code_is_called_by_gates_only() -> None:
    assert {name for name, tree in modules() if "ctypes" in imported(tree)} <= GATES


def test_nobody_else_opens_files() -> None:
    """`kernel.Tree` reads /sys and /proc; what users name themselves is read where it is read."""
    for name, tree in modules():
        calls = {ast.unparse(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)}
        calls = {c for c in calls if not c.startswith("locks.read_at")}  # opened by that gate
        opens = {call for call in calls if call in ("open", "os.open")}
        opens |= {c for c in calls if c.endswith((".open", ".read_text", ".read_bytes"))}
        if opens:
            assert name in GATES | OPENS


def test_gates_know_nobody_above_them() -> None:
    """Neither at the top nor inside functions, and not for annotations either."""
    above = {"allocator", "pinning", "claims", "cli", "compat", "launch"}
    for name, tree in modules():
        if name.startswith("_system/"):
            known = {part for module in imported_modules(tree) for part in module.split(".")[1:2]}
            assert not known & above, name
