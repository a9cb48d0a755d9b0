"""From a topology to a plan: :func:`plan`.

Pure: the same inputs give the same plan in every process and on any machine, so each rank can
work out all ranks' shares by itself and take its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache

from gpuaff.allocator import diagnostics, split
from gpuaff.allocator.cores import allowed_cores
from gpuaff.allocator.domains import confine
from gpuaff.allocator.model import Mode, Multithreading, Options, Partition, Plan, Scope, Share
from gpuaff.allocator.placement import (
    Assignment,
    Job,
    chosen_cpus,
    granted_cpus,
    place_ranks,
    union,
)
from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.errors import GPUAffinityError
from gpuaff.notices import Notice
from gpuaff.topology.model import Source, Topology


def plan(
    topology: Topology,
    nproc: int,
    *,
    mode: Mode | str = Mode.UNIQUE_CONTIGUOUS,
    scope: Scope | str = Scope.NODE,
    multithreading: Multithreading | str = Multithreading.ALL_LOGICAL,
    balanced: bool = True,
    min_physical_cores: int | None = None,
    max_physical_cores: int | None = None,
    partition: Partition | str = Partition.AUTO,
    cpus: str | Iterable[int] | None = None,
    reserve: int = 0,
    rank_allowed: Iterable[str | Iterable[int]] | None = None,
) -> Plan:
    """Decide which CPUs each of ``nproc`` processes gets.

    Rank r is on the visible GPU r modulo their number. Where the CPUs near the GPUs are the
    same or apart, the answer is gpu_affinity's, core for core; where they overlap, shares are
    max-min fair. No rank gets a CPU that is not in ``topology.allowed``.

    Args:
        topology: the machine, with the CPUs that may be used and the GPUs that are visible.
        nproc: how many processes share the machine, one per rank.
        mode: how the cores near a GPU are cut.
        scope: what counts as near: the GPU's NUMA node or its socket.
        multithreading: all allowed CPUs of a core, or only the lowest.
        balanced: whether all ranks get equally many cores (unique modes only).
        min_physical_cores: the least number of physical cores for each rank. The modes
            ``single`` and ``single_unique`` ignore this and the next.
        max_physical_cores: the largest number of physical cores for each rank.
        partition: whether the CPUs are cut among the ranks of this job (``auto`` and ``job``), or
            each rank stays inside the domain of its GPU (``machine``).
        cpus: the only CPUs that are shared out, as a cpulist or as ids. They must be allowed.
        reserve: how many physical cores of each rank's part stay out of its share, for helpers;
            they are :attr:`Share.reserved`.
        rank_allowed: the CPUs that each rank may use, by rank; for ranks that have masks of
            their own. None: every rank may use ``topology.allowed``.

    Raises:
        InvalidOptionError: an argument is invalid.
        GPUAffinityError: a rank can't have ``min_physical_cores``, or has no core besides those
            to reserve; ``cpus`` or ``rank_allowed`` name CPUs that are not available; or the
            topology contradicts itself.
    """
    options = Options.of(
        nproc,
        mode=mode,
        scope=scope,
        multithreading=multithreading,
        balanced=balanced,
        min_physical_cores=min_physical_cores,
        max_physical_cores=max_physical_cores,
        partition=partition,
        cpus=cpus,
        reserve=reserve,
        rank_allowed=rank_allowed,
    )
    return plan_with(topology, options)


def plan_with(
    topology: Topology, options: Options, *, numbers: Sequence[int] | None = None
) -> Plan:
    """:func:`plan` for options that are validated already.

    ``numbers`` is what errors call the ranks, where these are some of a job's; None: 0, 1, ….
    """
    allowed = granted = granted_cpus(topology, options)
    if options.cpus is not None:
        allowed = chosen_cpus(granted, options.cpus, topology.cpus)
    if not topology.visible:
        return _keep_all(topology, options, [None] * options.nproc, allowed)
    gpus = [topology.visible[rank % len(topology.visible)] for rank in range(options.nproc)]
    rule, warnings = None, list[Notice]()
    if options.partition is Partition.MACHINE:
        allowed, rule, warnings = confine(topology, gpus, allowed, granted)
    placed = place_ranks(topology, options, gpus, allowed, numbers or range(options.nproc))
    job = Job(topology, options, *placed, union(granted), rule)
    if not job.cores.cpus:
        return _keep_all(topology, options, gpus, allowed)
    assignments = split.assign(job)
    _check_least(job, assignments)
    if options.max_physical_cores is not None:
        for rank, found in assignments.items():
            kept, _ = job.cores.divide(found.cores, options.max_physical_cores)
            assignments[rank] = found._replace(cores=kept)
    warnings += diagnostics.plan_warnings(job, assignments)
    return _plan(topology, options, _shares(job, assignments), warnings, rule)


def _check_least(job: Job, assignments: Mapping[int, Assignment]) -> None:
    """An explicit minimum is kept or refused, for all ranks alike."""
    options, cores, least = job.options, job.cores, job.options.min_physical_cores or 0
    for placed in job.placements:
        assigned = assignments[placed.rank]
        found = cores.count(assigned.cores) if assigned.own else 0
        if found < least:
            wider = ', or try scope="socket"' if options.scope is Scope.NODE else ""
            besides = f" besides the {options.reserve} to reserve" if options.reserve else ""
            raise GPUAffinityError(
                f"requested min_physical_cores={least}, but rank {placed.name} on "
                f"GPU {placed.gpu} can have {found}{besides}: {cores.count(placed.cores)} cores "
                f"near its GPU are allowed (of the CPUs {format_cpulist(placed.allowed)}), and "
                "ranks near the same cores share them; request fewer, start fewer processes, "
                f"allow more CPUs{wider}"
            )


def _shares(job: Job, assignments: Mapping[int, Assignment]) -> list[Share]:
    """From the places of cores back to CPUs."""
    one_each = job.options.multithreading is Multithreading.SINGLE_LOGICAL

    @cache  # ranks may have the same ones
    def cpus(places: tuple[int, ...]) -> CpuSet:
        cores = job.cores
        if one_each:  # the lowest CPU of each core, whose pieces may be at several places
            lowest = {cores.core_of[place]: cores.cpus[place] for place in sorted(places)[::-1]}
            return frozenset(map(min, lowest.values()))
        return union(map(cores.cpus.__getitem__, places))

    nodes_of = cache(job.topology.nodes_of)
    return [
        Share(
            rank=placed.rank,
            gpu=placed.gpu,
            cpus=cpus(found.cores),
            cores=job.cores.count(found.cores),
            numa_nodes=nodes_of(cpus(found.cores)),
            source=placed.near.source,
            reserved=cpus(found.reserved),
        )
        for placed in job.placements
        for found in [assignments[placed.rank]]
    ]


def _keep_all(
    topology: Topology, options: Options, gpus: Sequence[int | None], allowed: Sequence[CpuSet]
) -> Plan:
    """Every rank keeps what it has, and nothing is reserved: no GPU or no CPU is known."""
    notice = diagnostics.nothing_to_cut(topology, options, allowed)
    cores = allowed_cores(topology, union(allowed))
    shares = [
        Share(
            rank=rank,
            gpu=gpu,
            cpus=own,
            cores=len(cores.places(own)),
            numa_nodes=topology.nodes_of(own),
            source=Source.ALL,
        )
        for rank, (gpu, own) in enumerate(zip(gpus, allowed, strict=True))
    ]
    least = min(share.cores for share in shares)
    if least < (options.min_physical_cores or 0):
        raise GPUAffinityError(
            f"requested min_physical_cores={options.min_physical_cores}, but a rank would keep "
            f"{least} cores: {notice.message}"
        )
    return _plan(topology, options, shares, [notice])


def _plan(
    topology: Topology,
    options: Options,
    shares: Iterable[Share],
    warnings: Iterable[Notice],
    border_rule: int | None = None,
) -> Plan:
    # What the topology says about the visible devices decides which GPU a rank is on.
    visible = (note for note in topology.notes if note.code.startswith("visible-"))
    return Plan(
        mode=options.mode,
        scope=options.scope,
        multithreading=options.multithreading,
        balanced=options.balanced,
        shares=tuple(shares),
        partition=Partition.JOB if border_rule is None else Partition.MACHINE,
        border_rule=border_rule,
        warnings=(*visible, *warnings),
    )
