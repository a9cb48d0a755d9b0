"""What Slurm's variables say about the tasks of a step.

Sources: srun's manual page, and what Slurm 22.05 was seen to set (``tests/data/environments``). In
no manual: ``SLURM_CPU_BIND_LIST`` has the masks of all tasks of this node, also when Slurm chose
them itself. Where tasks have GPUs of their own, ``SLURM_STEP_GPUS`` lists those of the task, and
``SLURM_GPUS_ON_NODE`` counts those of the step. ``SLURM_JOB_GPUS`` are those of the first node.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from gpuaff.cpuset import MAX_CPU_ID, CpuSet, parse_cpulist, parse_mask
from gpuaff.launch import Get, number
from gpuaff.options import natural

LISTED = ("mask_cpu", "map_cpu")  # the kinds of binding whose masks ``SLURM_CPU_BIND_LIST`` lists
_GPU_BINDINGS = frozenset({"closest", "map", "map_gpu", "mask", "mask_gpu", "per_task", "single"})


def tasks_here(get: Get) -> int | None:
    """How many tasks of this step are on this node; None outside a step.

    Only ``SLURM_STEP_TASKS_PER_NODE`` (``2(x3),1``) counts: in a batch script
    ``SLURM_TASKS_PER_NODE`` and ``SLURM_LOCALID=0`` look like those of a step's first task.
    """
    node, tasks_here = number(get("SLURM_NODEID")), None
    for word in (get("SLURM_STEP_TASKS_PER_NODE") or "").split(","):
        count, _, times = word.strip().removesuffix(")").partition("(x")
        tasks, nodes = number(count), number(times or "1")
        if node is None or not tasks or not nodes:
            return None
        if tasks_here is None and node < nodes:
            tasks_here = tasks
        node -= nodes
    return tasks_here


# The tasks' CPUs.


def binding(get: Get) -> str | None:
    """How this step's tasks were bound: ``none``, ``mask_cpu``, ``map_cpu``, …; None: unknown.

    The unit that was requested may stand before it, as in ``cores,mask_cpu:``.
    """
    text = get("SLURM_CPU_BIND_TYPE")
    return text.split(",")[-1].strip().removesuffix(":") if text else None


def named_masks(get: Get, tasks: int) -> tuple[CpuSet, ...] | None:
    """The CPUs of each of so many tasks of this node, by local id; None when they are not listed.

    A shorter list is used again from its start.
    """
    kind = binding(get)
    if kind not in LISTED:
        return None
    return _sets(get("SLURM_CPU_BIND_LIST") or "", tasks, is_mask=kind == "mask_cpu")


def task_masks(get: Get) -> tuple[CpuSet, list[CpuSet]] | None:
    """The CPUs that srun lists for this task, and those of the node's others; None: unknown."""
    task, masks = number(get("SLURM_LOCALID")), named_masks(get, tasks_here(get) or 0)
    if not masks or task is None or task >= len(masks):
        return None
    return masks[task], [*masks[:task], *masks[task + 1 :]]


def _sets(text: str, tasks: int, *, is_mask: bool) -> tuple[CpuSet, ...] | None:
    """The sets of the tasks in a list of masks or of ids; None when it is malformed."""
    sets: list[CpuSet] = []
    for word in text.split(","):
        one, _, times = word.strip().partition("*")
        found, count = _set(one, is_mask=is_mask), number(times or "1")
        if not found or not count:
            return None
        # No more than there are tasks: 128 KB of "0x1*65535," would be 850 million.
        sets += [found] * min(count, tasks - len(sets))
    return tuple(sets[task % len(sets)] for task in range(tasks))


def _set(text: str, *, is_mask: bool) -> CpuSet | None:
    """A mask, or an id: decimal, or hexadecimal after ``0x``."""
    if is_mask:
        try:
            return parse_mask(text)
        except ValueError:
            return None
    found = int(text, 16) if re.fullmatch("0x[0-9a-fA-F]{1,7}", text) else natural(text)
    return None if found is None or found > MAX_CPU_ID else frozenset((found,))


# The tasks' GPUs.


def gpu_indices(text: str | None) -> tuple[int, ...] | None:
    """The indices in ``SLURM_STEP_GPUS`` or ``SLURM_JOB_GPUS`` (``0,1``, ``8-11``), ascending."""
    try:
        return tuple(sorted(parse_cpulist(text or ""))) or None
    except ValueError:
        return None


def gpus_of_tasks(get: Get, tasks: int) -> tuple[bool, bool]:
    """Whether variables say that each task has its own GPUs, and that several may be on one.

    ``--gpus-per-task`` and ``--gpu-bind`` leave variables when sbatch was given them, none when
    srun was. Newer releases write them as ``gres/gpu`` among all trackable resources.
    ``--ntasks-per-gpu`` means ``single``.
    """
    bound = [_is_shared(*one, tasks) for one in _gpu_bindings(get) if one[0] in _GPU_BINDINGS]
    per_task = get("SLURM_GPUS_PER_TASK") or "gres/gpu" in (get("SLURM_TRES_PER_TASK") or "")
    counts = map(number, map(get, ("SLURM_NTASKS_PER_TRES", "SLURM_NTASKS_PER_GPU")))
    return bool(bound or per_task), any(bound) or any((count or 1) > 1 for count in counts)


def _gpu_bindings(get: Get) -> Iterator[tuple[str, str]]:
    """How tasks are bound to GPUs: a kind, and what stands behind its colon.

    ``verbose,map_gpu:0,1``; among other resources ``gres/gpu:verbose,map:0,1+gres/nic:closest``.
    """
    resources = (get("SLURM_TRES_BIND") or "").split("+")
    parts = (part.strip().partition(":") for part in resources)
    texts = [text for resource, _, text in parts if resource == "gres/gpu"]
    for text in (get("SLURM_GPU_BIND") or "", *texts):
        kind, _, rest = re.sub(r"^\s*(verbose|v|quiet|q),", "", text).strip().partition(":")
        yield kind, rest


def _is_shared(kind: str, text: str, tasks: int) -> bool:
    """``closest`` gives each task all GPUs of its NUMA node; lists are used again from start."""
    if kind in ("closest", "per_task"):
        return kind == "closest"
    if kind == "single":
        return number(text) != 1
    sets = _sets(text, tasks, is_mask=kind.startswith("mask"))
    return sets is None or sum(map(len, sets)) > len(frozenset().union(*sets))
