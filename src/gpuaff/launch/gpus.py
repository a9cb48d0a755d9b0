"""Whether the ranks of this node see the same GPUs, or each has its own.

One visible GPU and several ranks: all are on it, unless the launcher says otherwise, or the rank
has claimed it.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from gpuaff._system import env, kernel
from gpuaff.launch import inherited, slurm
from gpuaff.launch.inherited import ParentClaim
from gpuaff.launch.launchers import Get, Launcher, number
from gpuaff.launch.masks import carries, own_variables
from gpuaff.launch.ranks import Ranks, active_row


class OwnGpus(NamedTuple):
    """The GPUs that this rank sees are its own; the other ranks see others.

    Indices count the machine's GPUs in the order of their PCI addresses; None is unknown.
    """

    named: tuple[int, ...] | None = None  # the GPUs of all ranks
    own: tuple[int, ...] | None = None  # those of this rank, as the launcher counts
    on_node: int | None = None  # how many the job has on this node
    shared: bool = False  # whether other ranks may be on this rank's GPUs, too
    claimed: bool = False  # whether this rank claimed them for itself, so that no other is on them


def own_gpus(
    ranks: Ranks, *, visible: int, is_rank: bool = False, get: Get = env.get
) -> OwnGpus | None:
    """What makes the visible GPUs this rank's own; None: all ranks see the same ones.

    ``visible`` is how many GPUs CUDA shows this process; ``is_rank`` says that it is known to be
    the rank itself, and no worker of it.
    """
    if ranks.local_size == 1 or not visible:
        return None
    is_worker = not is_rank and inherited.is_child()
    claim, _ = inherited.claim_in_environment(get)
    # A worker that a rank started has the rank's variables, too, and shares what it claimed.
    if claim and (claim.pid == os.getpid() or (not is_worker and _is_of_rank(get, claim, ranks))):
        facts = kernel.thread_facts(claim.pid, claim.pid)  # ids are used again
        if facts is None or facts.started == claim.started:
            return OwnGpus(claimed=True)
    return None if is_worker else _by_launcher(get, ranks, visible)


def _is_of_rank(get: Get, claim: ParentClaim, ranks: Ranks) -> bool:
    """Whether a rank claimed for itself; a claim around the launcher is for all ranks.

    ``gpuaff run --per-rank`` claims, and becomes its command: Python, or a wrapper of Python
    (``sh -c``), which was started with the rank's own variables, as the launcher was not.
    """
    own = own_variables(get, ranks)
    return bool(own) and carries(claim.pid, own)


def _by_launcher(get: Get, ranks: Ranks, visible: int) -> OwnGpus | None:
    """What the launcher says, for several ranks and at least one visible GPU."""
    if ranks.sources.get("local_rank") == "RANK":  # torchrun --virtual-local-rank
        return OwnGpus()
    if active_row(get, ranks).launcher is not Launcher.SLURM:
        return None
    # A worker and a task in a wrapper look alike: the same variables, and a process in between.
    # Only multiprocessing marks its workers; for others the number decides.
    if number(get("SLURM_LOCALID")) != ranks.local_rank:
        return None  # a worker that a task started, or ranks numbered differently
    return _of_task(get, ranks, visible)


def _of_task(get: Get, ranks: Ranks, visible: int) -> OwnGpus | None:
    step, on_node = slurm.gpu_indices(get("SLURM_STEP_GPUS")), number(get("SLURM_GPUS_ON_NODE"))
    if on_node is not None and on_node <= visible:
        return None  # every task sees all that the step has here
    is_part = step is not None and on_node is not None and len(step) < on_node
    if not is_part and not slurm.binds_gpus(get):
        return None
    own = OwnGpus(on_node=on_node, shared=slurm.shares_gpus(get, ranks.local_size))
    if step is not None and not is_part and len(step) > visible:
        return own._replace(named=step)
    # The batch script's GPUs: in a job of several nodes they are the first one's only.
    job = slurm.gpu_indices(get("SLURM_JOB_GPUS"))
    is_here = number(get("SLURM_JOB_NUM_NODES")) == 1 and len(job or ()) >= (on_node or 0)
    return own._replace(named=job if is_here else None, own=step)


def sharers(
    ranks: Ranks, *, visible: int, claim: ParentClaim | None = None, get: Get = env.get
) -> Ranks | None:
    """The ranks that were granted the same GPUs as this process; None: all are this process's.

    ``visible`` is how many GPUs are candidates, by what CUDA shows and the scheduler lists. All
    are this process's where

    - it is no rank, or the only one of its node;
    - the launcher gave each rank GPUs of its own (:func:`own_gpus`);
    - it sees one: usually a launcher or a wrapper shows each rank its own. If all are on the same
      one after all, the first gets it, and the others an error that says so;
    - the rank itself made the claim around it, not its launcher's parent.
    """
    if not ranks.is_told or ranks.local_size == 1 or visible == 1:
        return None
    if visible and _by_launcher(get, ranks, visible) is not None:
        return None
    is_claim_of_rank = claim is not None and _is_of_rank(get, claim, ranks)
    return None if is_claim_of_rank else ranks
