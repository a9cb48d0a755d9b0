"""Memory policies as another reader sees them: /proc, where the kernel writes them as text."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

from tests.processes import environment

_TRY = """
from gpuaff._system import mempolicy
mempolicy.set_policy(mempolicy.Policy(mempolicy.BIND | mempolicy.STATIC, mempolicy.allowed_nodes()))
"""


def of(pid: int | str = "self", thread: int | None = None) -> str:
    """A process's policy, or a thread's, as numa_maps has it: ``default``, ``bind=static:0``."""
    task = "" if thread is None else f"task/{thread}/"
    lines = Path(f"/proc/{pid}/{task}numa_maps").read_text().splitlines()
    words = {line.split()[1] for line in lines}
    assert len(words) == 1, words
    return words.pop()


def nodes() -> str:
    """The NUMA nodes that this process may have memory from, as the kernel lists them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    listed = [line.split()[1] for line in lines if line.startswith("Mems_allowed_list:")]
    return listed[0] if listed else "0"


@cache
def available() -> bool:
    """Whether this machine has them, and lets us set one: tried in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", _TRY], env=environment(), capture_output=True, check=False
    )
    return done.returncode == 0 and Path("/proc/self/numa_maps").exists()
