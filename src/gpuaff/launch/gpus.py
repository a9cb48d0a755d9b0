"""Whose GPUs: whether the launcher shows each rank GPUs of its own.

One visible GPU and several ranks: all of them are on it, unless the launcher says that it has
given each its own (case D10).
"""

from __future__ import annotations

from gpuaff.launch import above, claimed, inherited, slurm
from gpuaff.launch.innermost import innermost
from gpuaff.launch.launchers import Launcher
from gpuaff.launch.ranks import Ranks
from gpuaff.launch.variables import Get, number
from gpuaff.records import dataclass
from gpuaff.system import environ, kernel


@dataclass(frozen=True, kw_only=True)
class OwnGpus:
    """The GPUs that this rank sees are its own; the other ranks see others.

    Indices count the machine's GPUs in the order of their PCI addresses.

    Attributes:
        named: the GPUs of all ranks; None when they are not told.
        own: those of this rank, as the launcher counts; None when they are not told.
        on_node: how many the job has on this node; None when that is not told.
        shared: whether it is told that other ranks may be on this rank's too.
        claimed: whether this rank has claimed them for itself, so that nobody else is on them.
    """

    named: tuple[int, ...] | None = None
    own: tuple[int, ...] | None = None
    on_node: int | None = None
    shared: bool = False
    claimed: bool = False


def observe(ranks: Ranks, *, visible: int, is_rank: bool = False) -> OwnGpus | None:
    """What the launcher says about the visible GPUs; None: all ranks see the same ones.

    Args:
        ranks: the ranks in use.
        visible: how many GPUs CUDA shows this process.
        is_rank: whether it is known that it stands for the rank itself, and is no worker.
    """
    is_worker = not is_rank and inherited.is_child()
    if ranks.local_size > 1 and visible and _has_claimed(ranks, is_worker=is_worker):
        return OwnGpus(claimed=True)
    if is_worker:
        return None  # a worker has its task's variables, whatever its number is
    return classify(environ.get, ranks, visible=visible)


def _has_claimed(ranks: Ranks, *, is_worker: bool) -> bool:
    """Whether this rank has claimed for itself; a claim around the launcher is for all ranks.

    ``gpuaff run --per-rank`` claims, and becomes its command: Python, or a wrapper of Python
    (``sh -c``), which was started with the rank's own variables, as the launcher was not. A worker
    that a rank has started has these as well, and shares what the rank has claimed.
    """
    claim, pid = claimed.observe()[0], kernel.process_id()
    if claim is None:
        return False
    if claim.pid != pid:
        own = above.own_variables(environ.get, ranks)
        is_mine = bool(own) and not is_worker and above.carries(claim.pid, own)
        if not is_mine:
            return False
    facts = kernel.thread_facts(claim.pid, claim.pid)  # ids are used again
    return facts is None or facts.started == claim.started


def classify(get: Get, ranks: Ranks, *, visible: int) -> OwnGpus | None:
    """:func:`observe`, with an environment from anywhere."""
    if ranks.local_size == 1 or not visible:
        return None
    if ranks.sources.get("local_rank") == "RANK":  # torchrun --virtual-local-rank
        return OwnGpus()
    if innermost(get, ranks) is not Launcher.SLURM:
        return None
    if number(get("SLURM_LOCALID")) != ranks.local_rank:
        return None  # a worker that a task has started, or ranks numbered otherwise
    told = slurm.gpu_indices(get("SLURM_STEP_GPUS"))
    on_node = number(get("SLURM_GPUS_ON_NODE"))
    if on_node is not None and on_node <= visible:
        return None  # all that the step has here is seen by everybody
    is_part = told is not None and on_node is not None and len(told) < on_node
    if not is_part and not slurm.binds_gpus(get):
        return None
    shared = slurm.shares_gpus(get, ranks.local_size)
    if told is not None and not is_part and len(told) > visible:
        return OwnGpus(named=told, on_node=on_node, shared=shared)
    return OwnGpus(named=_of_job(get, on_node or 0), own=told, on_node=on_node, shared=shared)


def _of_job(get: Get, on_node: int) -> tuple[int, ...] | None:
    """The batch script's GPUs: in a job of several nodes they are those of the first one only."""
    named = slurm.gpu_indices(get("SLURM_JOB_GPUS"))
    is_here = number(get("SLURM_JOB_NUM_NODES")) == 1
    return named if named is not None and is_here and len(named) >= on_node else None
