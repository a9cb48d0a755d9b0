"""One gate per foreign thing: what the linter cannot see."""

from __future__ import annotations

import ast
import sys
from functools import cache
from pathlib import Path

import pytest

import gpuaff
from tests.fakedriver.driver import FakeDriver
from tests.fakedriver.play import this_machine

SOURCE = Path(str(gpuaff.__path__[0]))
GATES = {
    "pynvml": {"_system/nvml.py"},
    "psutil": {"_system/processes.py"},
    "subprocess": {"_system/subprocess.py"},
    "ctypes": {
        *("_system/cuda.py", "_system/mempolicy.py"),
        *("_system/nvml.py", "_system/nvml_prewarm.py"),
    },
}
"""The modules that may import each."""
OPENS = {
    *("_system/kernel.py", "_system/locks.py", "_system/descriptors.py"),
    "cli/dispatch.py",  # the null device, when a reader has gone
    *("cli/topo.py", "topology/serialize.py"),  # what the user names, and what ships
}
"""The modules that may open files."""


@cache
def modules() -> dict[str, ast.Module]:
    """Each module's tree, parsed once for all tests."""
    return {
        str(file.relative_to(SOURCE)): ast.parse(file.read_text("utf-8"))
        for file in SOURCE.rglob("*.py")
    }


@cache
def imported(name: str) -> set[str]:
    """What a module imports, in functions too; of ``from a import b`` both ``a`` and ``a.b``."""
    names: set[str] = set()
    for node in ast.walk(modules()[name]):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


@pytest.mark.parametrize("foreign", GATES)
def test_only_its_gates_import_it(foreign: str) -> None:
    users = {name for name in modules() if foreign in {n.split(".")[0] for n in imported(name)}}
    assert users <= GATES[foreign]


def test_only_gates_open_files() -> None:
    for name, tree in modules().items():
        calls = {ast.unparse(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)}
        opens = {call for call in calls if call in ("open", "os.open")}
        opens |= {c for c in calls if c.endswith((".open", ".read_text", ".read_bytes"))}
        assert not opens or name in OPENS, name


def test_gates_import_nothing_above_them() -> None:
    above = {"allocator", "pinning", "claims", "cli", "compat", "launch", "topology"}
    for name in modules():
        if name.startswith("_system/"):
            known = {part for module in imported(name) for part in module.split(".")[1:2]}
            assert not known & above, name


@pytest.mark.fake_driver
def test_pinning_does_without_dataclasses(tmp_path: Path, driver_builds: Path) -> None:
    """They import inspect: most of what gpuaff would cost a process beside NVML."""
    program = """
import sys
before = set(sys.modules)
import gpuaff
gpuaff.set_affinity(0, 2)
print({"dataclasses", "inspect"} & sys.modules.keys() - before)
"""
    driver = FakeDriver(this_machine(2), tmp_path / "driver", builds=driver_builds)
    assert driver.run([sys.executable, "-c", program]).stdout.strip() == "set()"


@pytest.mark.fake_driver
@pytest.mark.parametrize(("call", "most"), [("set_affinity(0, 2)", 35), ("claim_gpus(1)", 48)])
def test_a_call_loads_few_modules(
    call: str, most: int, tmp_path: Path, driver_builds: Path
) -> None:
    """A process that imports it pays for each of them."""
    program = f"""
import sys, gpuaff
gpuaff.{call}
print(*sorted(name for name in sys.modules if name.startswith("gpuaff")))
"""
    driver = FakeDriver(this_machine(2), tmp_path / "driver", builds=driver_builds)
    env = {"GPUAFF_LOCK_DIR": str(tmp_path / "locks")}
    loaded = driver.run([sys.executable, "-c", program], env=env).stdout.split()
    assert len(loaded) <= most, loaded
