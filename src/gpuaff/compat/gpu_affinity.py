"""NVIDIA's ``gpu_affinity``, for scripts that were written for it.

    from gpuaff.compat import gpu_affinity  # was: import gpu_affinity

Nothing else changes: names, arguments, enums, errors and CPUs are those of gpu_affinity
(``docs/migrate-gpu-affinity.md`` lists the exceptions). New scripts call
:func:`gpuaff.set_affinity`, through which this works.
"""

from __future__ import annotations

from gpuaff.allocator.model import Mode, Multithreading, Scope
from gpuaff.cpuset import MAX_CPU_ID, format_cpulist
from gpuaff.errors import GpuaffError, GPUAffinityError, InvalidOptionError
from gpuaff.options import word
from gpuaff.pinning import set_affinity as set_own_affinity
from gpuaff.topology.model import Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpuaff.allocator.model import Plan

__all__ = ["GPUAffinityError", "Mode", "Multithreading", "Scope", "set_affinity"]

# More cores than there are; None would let ``GPUAFF_MAX_PHYSICAL_CORES`` set a limit.
_NO_LIMIT = MAX_CPU_ID


def set_affinity(
    gpu_id: int,
    nproc_per_node: int,
    *,
    mode: Mode = Mode.UNIQUE_CONTIGUOUS,
    scope: Scope = Scope.NODE,
    multithreading: Multithreading = Multithreading.ALL_LOGICAL,
    balanced: bool = True,
    min_physical_cores: int = 1,
    max_physical_cores: int | None = None,
) -> set[int]:
    """Pin this process to its share of the cores near GPU ``gpu_id``, as gpu_affinity did.

    The CPUs are divided among the processes of this job. The variables that apply are those for
    which gpu_affinity has no argument: ``GPUAFF=off``, ``GPUAFF_STRICT=1``, ``GPUAFF_CPUS``.

    Args:
        gpu_id: the visible GPU of this process, 0 … ``nproc_per_node`` − 1.
        nproc_per_node: how many processes share this node, each with a GPU of its own.
        mode: how near cores are divided; this and the others are :func:`gpuaff.set_affinity`'s.
        scope: what is near: the GPU's NUMA node or its socket.
        multithreading: all CPUs of a core, or only one.
        balanced: whether all processes get equally many cores (unique modes).
        min_physical_cores: for each process, as the maximum; the single modes ignore both.
        max_physical_cores: None is no limit.

    Returns:
        The CPUs of the calling thread, read back from the kernel.

    Raises:
        GPUAffinityError: the process could not be pinned; all is as it was before.
        TypeError: an argument is None that must be a number.
    """
    if None in (gpu_id, nproc_per_node):  # for gpuaff.set_affinity None means: ask the launcher
        raise TypeError("set_affinity() needs two numbers: gpu_id and nproc_per_node")
    most = _NO_LIMIT if max_physical_cores is None else min(max_physical_cores, _NO_LIMIT)
    try:
        affinity = set_own_affinity(
            gpu_id,
            nproc_per_node,
            mode=word("mode", mode, Mode),
            scope=word("scope", scope, Scope),
            multithreading=word("multithreading", multithreading, Multithreading),
            balanced=bool(balanced),
            partition="job",
            min_physical_cores=max(1, min_physical_cores),
            max_physical_cores=most,
        )
    except GPUAffinityError:
        raise
    except GpuaffError as error:  # gpu_affinity has one error, and other names of arguments
        if isinstance(error, InvalidOptionError) and error.option == "local_rank":
            error.option = "gpu_id"
        raise GPUAffinityError(str(error)) from error
    plan, rank, notices = affinity.plan, affinity.rank, affinity.warnings
    if any(notice.code == "off" for notice in notices):
        return set(affinity)
    if plan is None or rank is None or not affinity.pinned:
        raise GPUAffinityError("; ".join(notice.message for notice in notices))
    # Scripts catch this error, and one core for each process, the default, is a demand there.
    if reason := refusal(plan, rank):
        affinity.__exit__(None, None, None)
        raise GPUAffinityError(reason)
    return set(affinity)


def refusal(plan: Plan, rank: int) -> str | None:
    """Why gpu_affinity would have refused a plan; None when it would have accepted it.

    gpuaff goes on where processes have to share a core or a GPU, and where no near CPU is allowed.
    gpu_affinity raises.
    """
    share = plan.share_of(rank)
    found = {notice.code: notice.message for notice in plan.warnings if notice.rank in (None, rank)}
    if share.gpu is None:
        return "; ".join(found.values())
    gpus = {other.gpu for other in plan.shares if other.gpu is not None}
    if len({other.gpu for other in plan.shares}) < len(plan.shares):
        return (
            f"nproc_per_node={len(plan.shares)}, but only GPUs {format_cpulist(gpus)} are visible: "
            "start one process for each, or call gpuaff.set_affinity, which lets several share one"
        )
    if share.source in (Source.NEAREST, Source.ALL) and "near-not-allowed" in found:
        return found["near-not-allowed"]
    taken = frozenset().union(*(other.cpus for other in plan.shares if other.rank < rank))
    return found.get("too-few-cores") if share.cpus & taken else None
