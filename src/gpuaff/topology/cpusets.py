"""The cpuset that a process is in, of cgroup version 1 or 2.

Pinning needs it for trees of other machines only: here the kernel's own mask already has it.
"""

from __future__ import annotations

from pathlib import PurePosixPath

from gpuaff.cpuset import CpuSet
from gpuaff.system.kernel import Tree
from gpuaff.topology.sysfs import cpu_list

_FILES = ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus", "cpus")
"""Version 2; version 1 since Linux 3.17 and before; version 1 mounted as ``cpuset``."""


def cpuset_of(tree: Tree, process: int | str = "self") -> CpuSet | None:
    """The CPUs of a process's cpuset; None when the tree does not tell.

    Args:
        tree: the machine.
        process: its id; the tree's ``/proc/self`` is whoever gathered it.
    """
    group = _group(tree, process)
    if group is None:
        return None
    for mount in _mounts(tree):
        # A version 2 group without the controller has its nearest ancestor's CPUs.
        for folder in (group, *PurePosixPath(group).parents):
            for name in _FILES:
                cpus = cpu_list(tree, f"{mount}/{folder}/{name}")
                if cpus:
                    return cpus
    return None


def _group(tree: Tree, process: int | str) -> str | None:
    text = tree.read(f"proc/{process}/cpuset")
    if text is None:
        lines = (tree.read(f"proc/{process}/cgroup") or "").splitlines()
        text = next((line[3:] for line in lines if line.startswith("0::")), None)
    return None if text is None else text.strip("/")


def _mounts(tree: Tree) -> list[str]:
    found: list[str] = []
    for line in (tree.read("proc/mounts") or "").splitlines():
        words = line.split()
        if len(words) < 4:
            continue
        if words[2] in ("cgroup2", "cpuset") or (
            words[2] == "cgroup" and "cpuset" in words[3].split(",")
        ):
            found.append(words[1].strip("/"))
    return found
