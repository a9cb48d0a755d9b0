"""How much CPU time a process's cgroup grants it, of cgroup version 1 or 2.

A quota takes time and no CPUs: the mask stays as wide as it is, and whoever starts a thread for
each of its CPUs is stopped for a part of each period. Containers are limited so
(``docker --cpus``, Kubernetes' ``limits.cpu``). ``cpu.max`` and ``cpu.cfs_quota_us``: see
``Documentation/admin-guide/cgroup-v2.rst`` and ``Documentation/scheduler/sched-bwc.rst`` of Linux.
"""

from __future__ import annotations

from gpuaff.digits import natural
from gpuaff.system.kernel import Tree


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
