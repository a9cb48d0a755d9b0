"""What a process inherits from the one that started it: a claim, a pinned share, a rank.

A claim sets GPUAFF_CLAIM for all that it starts, and pinning sets GPUAFF_PINNED. ``slot`` is the
claim's in the registry; ``start``, field 22 of ``/proc/<pid>/stat``, distinguishes its process from
a later one with the same id; the UUIDs are in the order of CUDA's devices.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

from gpuaff._system import env, kernel
from gpuaff.cpuset import CpuSet, format_cpulist, parse_cpulist
from gpuaff.launch import Get, number, quoted
from gpuaff.notices import Notice

CLAIM_VARIABLE = "GPUAFF_CLAIM"  # v1:<slot>:<pid>:<start>:<uuid>[,<uuid>…]
PINNED_VARIABLE = "GPUAFF_PINNED"  # v1:<rank>:<ranks>:<cpulist>:<cpulist of the reserved CPUs>

# After months of uptime, ticks have more than nine digits.
_CLAIM = re.compile(r"v1:(\d{1,9}):(\d{1,9}):(\d{1,20}):(.*)", re.ASCII)


class ParentClaim(NamedTuple):
    """A claim, by its slot, process, and GPUs or MIG instances; ``str()`` gives the variable."""

    slot: int
    pid: int
    started: int  # in clock ticks since boot
    uuids: tuple[str, ...]

    def __str__(self) -> str:
        return f"v1:{self.slot}:{self.pid}:{self.started}:{','.join(self.uuids)}"


def claim_in_environment(get: Get = env.get) -> tuple[ParentClaim | None, Notice | None]:
    """The claim around this process, or a warning about an invalid value, which is ignored."""
    text = (get(CLAIM_VARIABLE) or "").strip()
    if not text:
        return None, None
    match = _CLAIM.fullmatch(text)
    uuids = match[4].split(",") if match else []
    if match and int(match[2]) and len(set(uuids)) == len(uuids) and all(map(is_uuid, uuids)):
        slot, pid, started = map(int, match.groups()[:3])
        return ParentClaim(slot, pid, started, tuple(uuids)), None
    invalid = Notice(
        "claim-unreadable",
        f"{CLAIM_VARIABLE}={quoted(text, most=80)} is not what a claim sets, so it is not known "
        "which claim this process is in; unset it, or leave it as gpuaff set it",
    )
    return None, invalid


def is_uuid(text: str) -> bool:
    """Whether a text has the form of the driver's UUIDs."""
    rest = text[4:].replace("-", "")
    return text.startswith(("GPU-", "MIG-")) and rest.isascii() and rest.isalnum()


class Pinned(NamedTuple):
    """The share that a rank was pinned to; ``str()`` gives the variable's value."""

    local_rank: int
    local_size: int
    cpus: CpuSet
    reserved: CpuSet = frozenset()

    def __str__(self) -> str:
        sets = f"{format_cpulist(self.cpus)}:{format_cpulist(self.reserved)}"
        return f"v1:{self.local_rank}:{self.local_size}:{sets}"


def classify_pinned(get: Get, own: CpuSet) -> Pinned | None:
    """The share that this process was started with; None where its mask is not inside one. Pure.

    A mask alone does not show that it is this rank's share already.
    """
    fields = (get(PINNED_VARIABLE) or "").split(":")
    if len(fields) != 5 or fields[0] != "v1":
        return None
    rank, size = number(fields[1]), number(fields[2])
    try:
        cpus, reserved = map(parse_cpulist, fields[3:])
    except ValueError:
        return None
    if rank is None or size is None or not own <= cpus:
        return None
    return Pinned(rank, size, cpus, reserved)


def share_inherited(share: Pinned, local_rank: int, local_size: int) -> Notice:
    """The warning where a rank was started with the share of another one."""
    return Notice(
        "share-inherited",
        f"rank {local_rank} of {local_size} was started by a process pinned as rank "
        f"{share.local_rank} of {share.local_size}, so it is confined to that share, CPUs "
        f"{format_cpulist(share.cpus)}; start the ranks before set_affinity() is called there, or "
        "after restore()",
        rank=local_rank,
    )


# A child of multiprocessing (a DataLoader worker, a spawned process) has its parent's variables.


def maker() -> int | None:
    """The process whose multiprocessing started this one; None if there is none.

    Nor is it known while the child imports the main script again: see :func:`imports_script`.
    """
    parent = _multiprocessing("parent_process")
    return None if parent is None else int(parent.pid)


def imports_script() -> bool:
    """Whether this process is importing the main script again, before it runs its target.

    Spawned children do, and those of a fork server. multiprocessing looks at the same flag when it
    refuses to start processes there.
    """
    return getattr(_multiprocessing("current_process"), "_inheriting", None) is True


def is_child() -> bool:
    """Whether multiprocessing started this process, by whatever method."""
    return maker() is not None or imports_script()


def _multiprocessing(name: str) -> Any:
    """Call its function, where it is imported: a child has it, because it was started by it."""
    function = getattr(sys.modules.get("multiprocessing.process"), name, None)
    return None if function is None else function()


IMPORTED = Notice(
    "imported-again",
    "multiprocessing imports this script again in a child, which repeats its claim inside the "
    'first one: put claim_gpus under `if __name__ == "__main__":`',
)
"""The warning where a claim fails there."""


def rank_inherited(rank: int, size: int, variables: Iterable[str]) -> Notice | None:
    """The warning where such a child has its parent's rank."""
    if not is_child():
        return None
    # Where a variable has changed since this program was started, the numbers are the child's own,
    # as in ``torch.multiprocessing.spawn``; or its parent had set them: then the warning is missed.
    began = kernel.variables_of(os.getpid())
    if began and any(env.get(name) != began.get(name) for name in variables):
        return None
    return Notice(
        "rank-inherited",
        f"multiprocessing started this process, so rank {rank} of {size} is its parent's: several "
        "such children get the same CPUs; call set_affinity(local_rank, nproc_per_node) with "
        "numbers of their own",
        rank=rank,
    )
