"""A call of ``set_affinity``: its arguments and the launcher's variables, checked."""

from __future__ import annotations

import os
from collections.abc import Callable

from gpuaff.allocator.model import Options, Partition, check_rank
from gpuaff.launch import inherited
from gpuaff.launch.masks import consistency
from gpuaff.launch.ranks import ALONE, Ranks, from_environment
from gpuaff.notices import Notice
from gpuaff.options import count
from gpuaff.pinning.pin import Attempt, unpinned, without_no_rank
from gpuaff.pinning.report import UnavailableError, try_twice, unsupported_reason
from gpuaff.settings import flag, value_of, with_environment

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpuaff.pinning.memory import MemoryOption
    from gpuaff.pinning.restore import Affinity

_ABOUT_RANKS = frozenset({"no-rank", "ranks-contradict", "ranks-stale"})
"""They say already that other ranks may be on this node."""


def pin(
    local_rank: int | None,
    nproc_per_node: int | None,
    end_prewarm: Callable[[], None],
    *,
    strict: bool | None,
    memory: str | None,
    openmp: bool | None,
    **arguments: object,
) -> Affinity:
    """See :func:`gpuaff.set_affinity`; ``arguments`` are the options of the plan.

    ``end_prewarm`` is called when the driver is not needed any more.
    """
    strict = flag("strict", strict)
    ranks, remarks = _ranks(local_rank, nproc_per_node)
    options = Options.of((ranks or ALONE).local_size, **with_environment(arguments))
    memory_option, openmp = _memory_option(memory), flag("openmp", openmp)
    why = unsupported_reason()
    if ranks is None or why is not None:
        counts = why is not None and (ranks is not None or why.code == "off")
        return unpinned(ranks, (why,) if why and counts else remarks, strict=strict)
    claim, unreadable = inherited.claim_in_environment()
    if claim is not None and options.partition is Partition.AUTO:
        # Other jobs' claims have other GPUs, and so other CPUs.
        options = options._replace(partition=Partition.MACHINE)
    no_rank = next((notice for notice in remarks if notice.code == "no-rank"), None)
    if claim is not None and claim.pid == os.getpid():
        remarks = without_no_rank(remarks)  # it is alone on its GPUs
    if _ABOUT_RANKS.isdisjoint(notice.code for notice in remarks):
        remarks += consistency(ranks)
    if unreadable is not None:
        remarks += (unreadable,)
    attempt = Attempt(
        ranks=ranks,
        remarks=remarks,
        options=options,
        memory=memory_option,
        openmp=openmp,
        strict=strict,
        end_prewarm=end_prewarm,
        in_claim=claim is not None,
        no_rank=no_rank,
    )
    found = try_twice(attempt.run)
    if isinstance(found, UnavailableError):
        return unpinned(ranks, found.warnings + remarks, strict=strict, plan=found.plan)
    return found


def _ranks(
    local_rank: int | None, nproc_per_node: int | None
) -> tuple[Ranks | None, tuple[Notice, ...]]:
    if local_rank is None and nproc_per_node is None:
        return from_environment()
    if local_rank is None or nproc_per_node is None:
        missing = "local_rank" if local_rank is None else "nproc_per_node"
        raise TypeError(
            f"set_affinity() needs {missing} too: give both numbers, or neither to take "
            "the launcher's (gpuaff.ranks())"
        )
    size = count("nproc_per_node", nproc_per_node)
    return Ranks(local_rank=check_rank(local_rank, size), local_size=size), ()


def _memory_option(argument: object) -> MemoryOption | None:
    name, value = value_of("memory", argument)
    if value is None:
        return None
    from gpuaff.pinning.memory import parse_memory  # only where it is requested

    return parse_memory(name, value)
