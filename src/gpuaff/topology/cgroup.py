"""The cpuset and the quota of CPU time that a process is under, of cgroup version 1 or 2.

See ``Documentation/admin-guide/cgroup-v2.rst`` and ``Documentation/scheduler/sched-bwc.rst`` of
Linux.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpuaff._system.kernel import Tree
from gpuaff.cpuset import CpuSet
from gpuaff.options import natural
from gpuaff.topology.sysfs import cpu_list

_FILES = ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus", "cpus")
"""Version 2; version 1 since Linux 3.17 and before; version 1 mounted as ``cpuset``."""


def cpuset_of(tree: Tree, process: int | str = "self") -> CpuSet | None:
    """The CPUs of a process's cpuset; None when unknown.

    On the live machine the kernel's own mask has it already.

    Args:
        tree: the machine.
        process: its id; the tree's ``/proc/self`` is the process that gathered the files.
    """
    group = tree.read(f"proc/{process}/cpuset")
    if group is None:
        group = _groups(tree, process).get("")
    if group is None:
        return None
    for kind, mount, options in _mounts(tree):
        if not (kind in ("cgroup2", "cpuset") or (kind == "cgroup" and "cpuset" in options)):
            continue
        # A version 2 group without the controller has its nearest ancestor's CPUs.
        for folder in reversed(_folders(mount, group)):
            for name in _FILES:
                if cpus := cpu_list(tree, f"{folder}/{name}"):
                    return cpus
    return None


def quotas(tree: Tree, process: int | str = "self") -> dict[str, float]:
    """The limits that a process is under, each in CPUs, by the folder of its cgroup.

    A quota (``docker --cpus``, Kubernetes' ``limits.cpu``) limits time and leaves the mask alone:
    a process with a thread for each CPU of its mask is stopped for a part of each period.

    Args:
        tree: the machine.
        process: its id; the tree's ``/proc/self`` is the process that gathered the files.
    """
    groups = _groups(tree, process)
    found: dict[str, float] = {}
    for kind, mount, options in _mounts(tree):
        if kind not in ("cgroup", "cgroup2") or (kind == "cgroup" and "cpu" not in options):
            continue
        group = groups.get("cpu" if kind == "cgroup" else "")
        if group is None:
            continue
        for folder in _folders(mount, group):
            limit = _limit(tree, folder)
            if limit is not None:
                found[folder] = limit
    return found


def _groups(tree: Tree, process: int | str) -> dict[str, str]:
    """The process's group by controller; that of version 2 by an empty name."""
    found: dict[str, str] = {}
    for line in (tree.read(f"proc/{process}/cgroup") or "").splitlines():
        controllers, _, group = line.partition(":")[2].partition(":")
        found.update(dict.fromkeys(controllers.split(","), group))
    return found


def _mounts(tree: Tree) -> Iterator[tuple[str, str, list[str]]]:
    """The type, place and options of each mount."""
    for line in (tree.read("proc/mounts") or "").splitlines():
        words = line.split()
        if len(words) >= 4:
            yield words[2], words[1].strip("/"), words[3].split(",")


def _folders(mount: str, group: str) -> list[str]:
    """The folders of a group and of those above it, from the top."""
    names = [name for name in group.split("/") if name not in ("", ".", "..")]
    return ["/".join([mount, *names[:depth]]) for depth in range(len(names) + 1)]


def _limit(tree: Tree, folder: str) -> float | None:
    """A group's own limit; None where it has none (``max``, ``-1``), or is not mounted here."""
    text = tree.read(f"{folder}/cpu.max")
    if text is None:
        quota = tree.read(f"{folder}/cpu.cfs_quota_us") or ""
        text = f"{quota} {tree.read(f'{folder}/cpu.cfs_period_us') or ''}"
    quota, _, period = text.strip().partition(" ")
    time, each = natural(quota), natural(period.strip())
    return time / each if time and each else None
