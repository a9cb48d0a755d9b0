"""A call of ``set_affinity``, from its arguments to its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gpuaff.allocator.modes import Partition
from gpuaff.allocator.options import check_count, check_rank
from gpuaff.allocator.plan import Plan
from gpuaff.binding.affinity import Affinity
from gpuaff.binding.apply import Attempt, Outcome, RefusedError, UnknownRankError
from gpuaff.binding.extras import Asked
from gpuaff.binding.process import this_process
from gpuaff.binding.report import refuse_if_broken, say, say_where
from gpuaff.binding.undo import current, refused
from gpuaff.binding.unpinnable import reason
from gpuaff.binding.whole import whole
from gpuaff.launch import beside, claimed
from gpuaff.launch.ranks import ALONE, Ranks, from_environment
from gpuaff.notices import Notice
from gpuaff.records import replace
from gpuaff.settings import is_strict, plan_options
from gpuaff.system import kernel


def bind(
    local_rank: int | None,
    nproc_per_node: int | None,
    *,
    strict: bool | None,
    memory: str | None,
    openmp: bool | None,
    let_rest: Callable[[], None],
    arguments: Mapping[str, object],
) -> Affinity:
    """See :func:`gpuaff.set_affinity`.

    Args:
        local_rank: as there.
        nproc_per_node: as there.
        strict: as there.
        memory: as there.
        openmp: as there.
        let_rest: called when the driver has been asked everything.
        arguments: the options of a plan by name.
    """
    strict = is_strict(strict)
    ranks, remarks = _ranks(local_rank, nproc_per_node)
    options = plan_options((ranks or ALONE).local_size, arguments)
    asked = Asked.of(memory, openmp)
    why = reason()
    if why is not None and (ranks is not None or why.code == "off"):
        return _unpinned(ranks, (why,), strict=strict)
    if ranks is None:
        return _unpinned(ranks, remarks, strict=strict)
    try:
        process = this_process()
    except OSError as error:  # a seccomp filter
        return _unpinned(ranks, (refused(error),), strict=strict)
    claim, said_of_claim = claimed.observe()
    if claim is not None and options.partition is Partition.AUTO:
        # Strangers' claims don't meet, nor do their CPUs.
        options = replace(options, partition=Partition.MACHINE)
    attempt = Attempt(
        process=process,
        ranks=ranks,
        options=options,
        asked=asked,
        strict=strict,
        let_rest=let_rest,
        in_claim=claim is not None,
        no_rank=next((notice for notice in remarks if notice.code == "no-rank"), None),
    )
    if claim is not None and claim.pid == kernel.process_id():
        # Alone on its GPUs: whoever else is on this node has others.
        remarks = tuple(notice for notice in remarks if notice.code != "no-rank")
    said = () if said_of_claim is None else (said_of_claim,)
    if not any(notice.code in _ABOUT_RANKS for notice in remarks):
        said = (*beside.observe(ranks), *said)
    try:
        return _twice(attempt, (*remarks, *said))
    except UnknownRankError as error:
        others = tuple(notice for notice in remarks if notice.code != "no-rank")
        return _unpinned(None, (*others, *said, *error.warnings), strict=strict)


_ABOUT_RANKS = frozenset({"no-rank", "ranks-contradict", "ranks-stale"})
"""They say already that others may be on this node."""


def _twice(attempt: Attempt, remarks: tuple[Notice, ...]) -> Affinity:
    def work() -> Affinity:
        return _pinned(attempt.rank, attempt.pin(), remarks)

    process, memory = attempt.process, attempt.asked.memory is not None
    with process.lock:
        try:
            return whole(process, work, memory=memory)
        except (RefusedError, OSError):  # a cpuset changed meanwhile: plan from what is left
            pass
        try:
            return whole(process, work, memory=memory)
        except RefusedError as last:
            plan, warnings = last.plan, last.warnings
        except OSError as error:
            plan, warnings = None, (refused(error),)
    return _unpinned(attempt.ranks, warnings + remarks, strict=attempt.strict, plan=plan)


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
    size = check_count("nproc_per_node", nproc_per_node)
    return Ranks(local_rank=check_rank(local_rank, size), local_size=size), ()


def _unpinned(
    ranks: Ranks | None, warnings: tuple[Notice, ...], *, strict: bool, plan: Plan | None = None
) -> Affinity:
    if strict:
        refuse_if_broken(warnings)
    rank = None if ranks is None else ranks.local_rank
    cpus = current()
    say(warnings, rank=rank)
    say_where(rank, None, cpus)
    return Affinity(cpus, rank=rank, plan=plan, warnings=warnings)


def _pinned(rank: int, outcome: Outcome, remarks: tuple[Notice, ...]) -> Affinity:
    warnings = remarks + outcome.warnings
    share = outcome.plan.share_of(rank) if outcome.pinned else None
    placed = outcome.extras.memory.get(kernel.thread_id())
    memory = None if placed is None else str(placed.ours)
    say(warnings, rank=rank)
    say_where(rank, share, outcome.cpus, memory=memory)
    return Affinity(
        outcome.cpus,
        rank=rank,
        before=outcome.before,
        extras=outcome.extras,
        plan=outcome.plan,
        pinned=outcome.pinned,
        memory=memory,
        warnings=warnings,
    )
