"""What the tests of the command line share: real processes, real terminals, a small machine."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from gpuaff.topology.model import Gpu, NumaNode, Package, Topology
from tests import trees
from tests.processes import as_text, command_line, is_forkable

COMMAND = (sys.executable, "-m", "gpuaff")

_LEFT_OUT = (
    *("GPUAFF_", "CUDA_", "COLUMNS", "FORCE_COLOR", "NO_COLOR", "TERM"),
    *("PYTHONIOENCODING", "PYTHONUNBUFFERED"),
)


def clean_environment() -> dict[str, str]:
    """The environment without what would change the answers."""
    kept = (item for item in os.environ.items() if not item[0].startswith(_LEFT_OUT))
    return dict(kept)


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ.keys() - clean_environment().keys():
        monkeypatch.delenv(name)


Runner = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def gpuaff(tmp_path: Path) -> Runner:
    """Run the command as its users do: a process of its own, read through pipes."""

    def run(
        *args: str,
        given: str | bytes = b"",
        env: Mapping[str, str] | None = None,
        fresh: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        text = given.encode() if isinstance(given, str) else given
        variables = clean_environment() | dict(env or {})
        if is_forkable(env or {}) and not fresh:
            return as_text(command_line(*args, given=text, folder=tmp_path, env=variables))
        command = [*COMMAND, *args]
        return as_text(
            subprocess.run(
                command, input=text, capture_output=True, cwd=tmp_path, env=variables, check=False
            )
        )

    return run


@pytest.fixture
def on_terminal(tmp_path: Path) -> Callable[..., str]:
    """Run the command with a terminal as its standard output; returns what it shows."""

    def run(*args: str, columns: int = 80, env: Mapping[str, str] | None = None) -> str:
        ours, theirs = pty.openpty()
        extra = {"TERM": "xterm-256color", "COLUMNS": str(columns)} | dict(env or {})
        child = subprocess.Popen(
            [*COMMAND, *args],
            stdin=subprocess.DEVNULL,
            stdout=theirs,
            stderr=subprocess.DEVNULL,
            cwd=tmp_path,
            env=clean_environment() | extra,
        )
        os.close(theirs)
        shown = _drained(ours)
        assert child.wait() == 0
        return shown.replace("\r\n", "\n")

    return run


def _drained(handle: int) -> str:
    data = b""
    with os.fdopen(handle, "rb", buffering=0) as stream:
        while True:
            try:
                piece = stream.read(4096)
            except OSError:  # EIO: the other side is closed
                return data.decode()
            if not piece:
                return data.decode()
            data += piece


@pytest.fixture
def box() -> Topology:
    """Two sockets of four cores, (0,8) … (7,15), two L3 each; core 7 is not allowed.

    GPU 1 sits at node 0 and is cuda:0; GPU 0 at node 1 and is cuda:1; where GPU 2 is nobody
    knows, and CUDA does not see it.
    """
    left = frozenset({0, 1, 2, 3, 8, 9, 10, 11})
    right = frozenset({4, 5, 6, 7, 12, 13, 14, 15})
    return Topology(
        cpus=left | right,
        allowed=(left | right) - {7, 15},
        cores=tuple(frozenset({cpu, cpu + 8}) for cpu in range(8)),
        packages=(Package(id=0, cpus=left), Package(id=1, cpus=right)),
        l3=tuple(frozenset({c, c + 1, c + 8, c + 9}) for c in (0, 2, 4, 6)),
        numa_nodes=(
            NumaNode(id=0, cpus=left, has_memory=True),
            NumaNode(id=1, cpus=right, has_memory=False),
        ),
        gpus=(
            Gpu(index=0, name="Alpha", pci_bus_id="0000:01:00.0", node_cpus=right, numa_node=1),
            Gpu(index=1, name="Alpha", pci_bus_id="0000:02:00.0", node_cpus=left, numa_node=0),
            Gpu(index=2, name="Beta", pci_bus_id="0000:03:00.0"),
        ),
        links=(("X", "NV4", "SYS"), ("NV4", "X", "SYS"), ("SYS", "SYS", "X")),
        visible=(1, 0),
    )


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of a machine's /sys without GPUs: four CPUs, two cores, one node."""
    root = tmp_path / "tree"
    trees.write_cpus(root, cpus=4, siblings=lambda cpu: f"{cpu % 2},{cpu % 2 + 2}")
    trees.write_nodes(root, "0-3")
    trees.write(root, "sys/devices/system/cpu/possible", "0-3\n")
    (root / "proc").mkdir()
    return root
