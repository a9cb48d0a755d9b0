"""The cpuset that a process is in, of cgroup version 1 or 2.

Pinning needs it for trees of other machines only: here the kernel's own mask already has it.
"""

from __future__ import annotations

from pathlib import PurePosixPath

from gpuaff._system.kernel import Tree
from gpuaff.cpuset import CpuSet
from gpuaff.options import natural
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


# How much CPU time a process's cgroup grants it, of cgroup version 1 or 2.
#
# A quota takes time and no CPUs: the mask stays as wide as it is, and whoever starts a thread for
# each of its CPUs is stopped for a part of each period. Containers are limited so
# (``docker --cpus``, Kubernetes' ``limits.cpu``). ``cpu.max`` and ``cpu.cfs_quota_us``: see
# ``Documentation/admin-guide/cgroup-v2.rst`` and ``Documentation/scheduler/sched-bwc.rst`` of
# Linux.


def quotas(tree: Tree, process: int | str = "self") -> dict[str, float]:
    """The limits that a process is under, each in CPUs, by the folder of its cgroup.

    Args:
        tree: the machine.
        process: its id; the tree's ``/proc/self`` is whoever gathered it.
    """
    found: dict[str, float] = {}
    for mount, group in _groups(tree, process):
        names = [name for name in group.split("/") if name not in ("", ".", "..")]
        for depth in range(len(names) + 1):
            folder = "/".join([mount, *names[:depth]])
            limit = _limit(tree, folder)
            if limit is not None:
                found[folder] = limit
    return found


def _groups(tree: Tree, process: int | str) -> list[tuple[str, str]]:
    """The mounts of hierarchies that may limit CPU time, and the process's group in each."""
    groups: dict[str, str] = {}
    for line in (tree.read(f"proc/{process}/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if not controllers or "cpu" in controllers.split(","):
            groups["cgroup" if controllers else "cgroup2"] = group
    found = []
    for line in (tree.read("proc/mounts") or "").splitlines():
        words = line.split()
        if len(words) < 4 or words[2] not in groups:
            continue
        if words[2] == "cgroup2" or "cpu" in words[3].split(","):
            found.append((words[1].strip("/"), groups[words[2]]))
    return found


def _limit(tree: Tree, folder: str) -> float | None:
    """A group's own limit; None where it has none (``max``, ``-1``), or is not mounted here."""
    text = tree.read(f"{folder}/cpu.max")
    if text is None:
        quota = tree.read(f"{folder}/cpu.cfs_quota_us") or ""
        text = f"{quota} {tree.read(f'{folder}/cpu.cfs_period_us') or ''}"
    quota, _, period = text.strip().partition(" ")
    time, each = natural(quota), natural(period.strip())
    return time / each if time and each else None
