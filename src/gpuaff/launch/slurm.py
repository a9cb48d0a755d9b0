"""What Slurm tells the tasks of a step.

Sources: the manual page of srun (``--cpu-bind``, ``--gpu-bind``, output environment variables),
and what Slurm 22.05 was seen to set (``tests/data/environments``). Seen, and in no manual:

- ``SLURM_CPU_BIND_LIST`` names the masks of all tasks of this node, in every task, also when
  Slurm made them itself; repetitions (``0x1*2``) come written out.
- Where tasks have GPUs of their own, ``SLURM_STEP_GPUS`` names those of the task, while
  ``SLURM_GPUS_ON_NODE`` counts those of the step. ``--gpus-per-task`` and ``--gpu-bind`` given to
  srun itself leave no variable; given to sbatch they do.
- ``SLURM_JOB_GPUS`` is the batch script's, and so names the GPUs of the job's first node.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from gpuaff.cpuset import MAX_CPU_ID, CpuSet, parse_cpulist, parse_mask
from gpuaff.launch.variables import Get, number
from gpuaff.options import natural


def tasks_here(get: Get) -> int | None:
    """How many tasks of this step are on this node; None when there is no step.

    Only ``SLURM_STEP_TASKS_PER_NODE`` counts: in a batch script ``SLURM_TASKS_PER_NODE`` and
    ``SLURM_LOCALID=0`` look like those of a step's first task, whatever starts the ranks there.

    In a step of several components of a heterogeneous job both the list and ``SLURM_NODEID`` count
    the nodes of all of them; in a step of one component, those of that one.
    """
    node, counts = number(get("SLURM_NODEID")), _counts(get("SLURM_STEP_TASKS_PER_NODE") or "")
    if node is None or counts is None:
        return None
    for tasks, nodes in counts:
        if node < nodes:
            return tasks
        node -= nodes
    return None


def _counts(text: str) -> list[tuple[int, int]] | None:
    """Slurm's short form of tasks on each node, ``2(x3),1``: how many tasks, on how many nodes."""
    found = []
    for word in text.split(","):
        count, _, times = word.strip().removesuffix(")").partition("(x")
        tasks, nodes = number(count), number(times or "1")
        if not tasks or not nodes:
            return None
        found.append((tasks, nodes))
    return found


_INTERACTIVE = str(0xFFFFFFFA)
"""``SLURM_INTERACTIVE_STEP`` of ``slurm.h``: the shell of ``salloc``, a step of one task."""


def is_shell(get: Get) -> bool:
    """Whether the step is a shell for a person: ``salloc``'s, or that of ``srun --pty``.

    Only the first task of a step has the terminal, so that what is started there is started by
    hand, once. srun sets ``SLURM_PTY_PORT`` for it.
    """
    return get("SLURM_STEP_ID") == _INTERACTIVE or bool(get("SLURM_PTY_PORT"))


def is_cgroup_of_step(get: Get, cgroup: str) -> bool:
    """Whether a process is in the cgroup of the step that its variables name.

    Args:
        get: the environment.
        cgroup: what ``/proc/self/cgroup`` holds. Paths end with ``slurm/uid_0/job_7/step_0/task_1``
            (version 1) or ``slurmstepd.scope/job_7/step_0/user/task_1`` (version 2): Slurm's pages
            about cgroups.
    """
    step = f"/job_{get('SLURM_JOB_ID')}/step_{get('SLURM_STEP_ID')}/"
    return any(step in f"{line}/" for line in cgroup.splitlines())


def binding(get: Get) -> str | None:
    """How this step's tasks were bound: ``none``, ``mask_cpu``, ``map_cpu``, …; None: not told.

    The unit that was asked for may stand before it, as in ``cores,mask_cpu:``.
    """
    text = get("SLURM_CPU_BIND_TYPE")
    return text.split(",")[-1].strip().removesuffix(":") if text else None


def named_masks(get: Get, tasks: int) -> tuple[CpuSet, ...] | None:
    """The CPUs of each task of this node, by local id; None when they can't be read.

    Args:
        get: the environment, where :func:`binding` is ``mask_cpu`` or ``map_cpu``.
        tasks: how many tasks there are. A shorter list is used again from its start.
    """
    is_mask = binding(get) == "mask_cpu"
    return _listed(get("SLURM_CPU_BIND_LIST") or "", tasks, is_mask=is_mask)


def _listed(text: str, tasks: int, *, is_mask: bool) -> tuple[CpuSet, ...] | None:
    """The numbers of each task in a list of masks or of numbers; None when it can't be read."""
    read = _mask if is_mask else _cpu
    masks: list[CpuSet] = []
    for word in text.split(","):
        one, _, times = word.strip().partition("*")
        mask, count = read(one), number(times or "1")
        if not mask or not count:
            return None
        # No more than there are tasks: 128 KB of "0x1*65535," would name 850 million.
        masks += [mask] * min(count, tasks - len(masks))
    return tuple(masks[task % len(masks)] for task in range(tasks))


def _mask(text: str) -> CpuSet | None:
    try:
        return parse_mask(text)
    except ValueError:
        return None


def _cpu(text: str) -> CpuSet | None:
    """An id, decimal, or hexadecimal after ``0x``."""
    if not (text.isascii() and text.isalnum()) or len(text) > 9:
        return None
    try:
        cpu = int(text, 16 if text.startswith("0x") else 10)
    except ValueError:
        return None
    return frozenset((cpu,)) if cpu <= MAX_CPU_ID else None


def gpu_indices(text: str | None) -> tuple[int, ...] | None:
    """The indices in ``SLURM_STEP_GPUS`` or ``SLURM_JOB_GPUS`` (``0,1``, ``8-11``), ascending."""
    try:
        return tuple(sorted(parse_cpulist(text or ""))) or None
    except ValueError:
        return None


def binds_gpus(get: Get) -> bool:
    """Whether a variable tells that each task has GPUs of its own.

    srun reads these itself when a batch script hands them down. Newer releases write
    ``--gpu-bind`` and ``--gpus-per-task`` as ``gres/gpu`` among all trackable resources.
    """
    if get("SLURM_GPUS_PER_TASK") or "gres/gpu" in (get("SLURM_TRES_PER_TASK") or ""):
        return True
    return any(kind in _KINDS for kind, _ in _gpu_bindings(get))


def shares_gpus(get: Get, tasks: int) -> bool:
    """Whether a variable tells that several tasks of this node may be on one GPU.

    ``closest`` gives each task all GPUs of its NUMA node; lists of numbers and of masks are used
    again from their start. ``--ntasks-per-gpu`` means ``single``.
    """
    for name in ("SLURM_NTASKS_PER_TRES", "SLURM_NTASKS_PER_GPU"):
        if (number(get(name)) or 1) > 1:
            return True
    return any(_is_shared(kind, text, tasks) for kind, text in _gpu_bindings(get))


_KINDS = frozenset({"closest", "map", "map_gpu", "mask", "mask_gpu", "per_task", "single"})


def _gpu_bindings(get: Get) -> Iterator[tuple[str, str]]:
    """How tasks are bound to GPUs: a kind, and what stands behind its colon.

    ``verbose,map_gpu:0,1``; among other resources ``gres/gpu:verbose,map:0,1+gres/nic:closest``.
    """
    yield _kind_of(get("SLURM_GPU_BIND") or "")
    for part in (get("SLURM_TRES_BIND") or "").split("+"):
        resource, _, text = part.strip().partition(":")
        if resource == "gres/gpu":
            yield _kind_of(text)


def _kind_of(text: str) -> tuple[str, str]:
    for word in ("verbose", "v", "quiet", "q"):
        text = text.strip().removeprefix(f"{word},")
    kind, _, rest = text.partition(":")
    return kind, rest


def _is_shared(kind: str, text: str, tasks: int) -> bool:
    if kind == "single":
        return number(text) != 1
    if kind not in ("map", "map_gpu", "mask", "mask_gpu"):
        return kind == "closest"
    sets = _listed(text, tasks, is_mask=kind.startswith("mask"))
    return sets is None or sum(map(len, sets)) > len(frozenset().union(*sets))


# Slurm's lists of nodes: ``gpu[01-04,7],login1`` (``man scontrol``, "hostlist"). Pure.


_MOST = 65_536
"""The longest list that is read, in characters."""

_ELEMENT = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")


def holds(nodes: str, host: str) -> bool | None:
    """Whether a list names a host, with its domain or without; None when it can't be read.

    Args:
        nodes: the list.
        host: a machine's name.
    """
    if len(nodes) > _MOST or not nodes.strip():
        return None
    elements = _ELEMENT.findall(nodes)
    if ",".join(elements) != nodes:
        return None
    short = host.split(".")[0].lower()
    return any(_names(element.strip().lower(), short) for element in elements)


def _names(element: str, host: str) -> bool:
    places = {0}
    for ranges, text in _PART.findall(element):
        if ranges:
            places = {end for start in places for end in _after(ranges, host, start)}
        else:
            # The rest of a full name may be a domain, which the host is given without.
            places = {end for start in places for end in _past(text, host, start)}
    return len(host) in places


def _past(text: str, host: str, start: int) -> set[int]:
    if host.startswith(text, start):
        return {start + len(text)}
    short = text.split(".")[0]
    return {len(host)} if "." in text and host[start:] == short else set()


def _after(ranges: str, host: str, start: int) -> set[int]:
    """Where the host's name goes on after a number of the ranges that stands at ``start``."""
    found = set()
    for one in ranges.split(","):
        low, _, high = one.strip().partition("-")
        first, last = natural(low), natural(high or low)
        if first is None or last is None:
            continue
        for end in range(start + len(low), len(host) + 1):
            value = natural(host[start:end])
            if value is None:
                break
            # Numbers are as long as the first one; longer ones have no zero in front.
            padded = str(value).zfill(len(low)) == host[start:end]
            if padded and first <= value <= last:
                found.add(end)
    return found
