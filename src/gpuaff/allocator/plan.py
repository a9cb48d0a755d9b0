"""From a topology to a plan: :func:`plan`.

Pure: the same inputs give the same plan in every process and on any machine, so each rank can
work out all ranks' shares by itself and take its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial

from gpuaff.allocator import diagnostics, split
from gpuaff.allocator.cores import Cores, allowed_cores
from gpuaff.allocator.cutting import Cutter, Fill, by_l3, in_blocks, in_turn
from gpuaff.allocator.domains import confine
from gpuaff.allocator.model import Mode, Multithreading, Options, Partition, Plan, Scope, Share
from gpuaff.allocator.placement import (
    Assignment,
    Neighbourhood,
    Placement,
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

    Args:
        topology: as there.
        options: the options.
        numbers: what errors call the ranks, where these are some of a job's; None: 0, 1, ….

    Raises:
        GPUAffinityError: as :func:`plan` does.
    """
    allowed: Sequence[CpuSet] = granted_cpus(topology, options)
    granted = union(allowed)
    masks, rule, warnings = allowed, None, list[Notice]()
    if options.cpus is not None:
        allowed = chosen_cpus(allowed, options.cpus, topology)
    if not topology.visible:
        notice = diagnostics.no_gpu(allowed, options.reserve)
        return _keep_all(topology, options, [None] * options.nproc, allowed, notice)
    gpus = [topology.visible[rank % len(topology.visible)] for rank in range(options.nproc)]
    if options.partition is Partition.MACHINE:
        allowed, rule, warnings = confine(topology, gpus, allowed, masks)
    around = {own: Neighbourhood(topology, own) for own in set(allowed)}
    names = range(options.nproc) if numbers is None else numbers
    placements, cores = place_ranks(topology, gpus, allowed, around, options.scope, names)
    if not cores.cpus:
        return _keep_all(topology, options, gpus, allowed, diagnostics.cpus_unknown())
    assignments = _assign(topology, placements, options, cores)
    _check_least(placements, assignments, options, cores)
    if options.most is not None:
        most = options.most
        assignments = {
            rank: found._replace(cores=cores.divide(found.cores, most)[0])
            for rank, found in assignments.items()
        }
    warnings += diagnostics.plan_warnings(
        topology,
        options,
        placements,
        assignments,
        cores,
        around,
        granted=granted,
        confined=rule is not None,
    )
    shares = _shares(topology, placements, assignments, options.multithreading, cores)
    return _plan(topology, options, shares, warnings, border_rule=rule)


def _assign(
    topology: Topology,
    placements: Sequence[Placement],
    options: Options,
    cores: Cores,
) -> split.Assignments:
    """The cores of each rank, before they are trimmed to a maximum."""
    count = options.reserve
    picks: Mapping[Mode, Callable[[Sequence[Placement]], split.Assignments]] = {
        Mode.ALL: split.pick_all,
        Mode.SINGLE: partial(split.pick_single, cores=cores, unique=False),
        Mode.SINGLE_UNIQUE: partial(split.pick_single, cores=cores, unique=True),
    }
    if options.mode in picks:
        if not count:
            return picks[options.mode](placements)
        return split.reserve_from_near(placements, picks[options.mode], count, cores)
    cutter = Cutter(cores.slow_from, _fill(topology, options.mode, cores))
    found = split.cut_unique(placements, options.scope, cutter, cores, balanced=options.balanced)
    if not count:
        return found
    return split.reserve_from_shares(placements, found, count, cores)


def _fill(topology: Topology, mode: Mode, cores: Cores) -> Fill:
    if mode is Mode.UNIQUE_INTERLEAVED:
        return in_turn
    return by_l3(topology, cores) if mode is Mode.CORE_COMPLEX else in_blocks


def _check_least(
    placements: Sequence[Placement],
    assignments: Mapping[int, Assignment],
    options: Options,
    cores: Cores,
) -> None:
    """An explicit minimum is kept or refused, for all ranks alike."""
    for placed in placements:
        assigned = assignments[placed.rank]
        found = cores.count(assigned.cores) if assigned.own else 0
        if found < options.least:
            wider = ', or try scope="socket"' if options.scope is Scope.NODE else ""
            besides = f" besides the {options.reserve} to reserve" if options.reserve else ""
            raise GPUAffinityError(
                f"requested min_physical_cores={options.least}, but rank {placed.name} on "
                f"GPU {placed.gpu} can have {found}{besides}: {cores.count(placed.cores)} cores "
                f"near its GPU are allowed (of the CPUs {format_cpulist(placed.allowed)}), and "
                "ranks near the same cores share them; request fewer, start fewer processes, "
                f"allow more CPUs{wider}"
            )


def _shares(
    topology: Topology,
    placements: Sequence[Placement],
    assignments: Mapping[int, Assignment],
    multithreading: Multithreading,
    cores: Cores,
) -> list[Share]:
    """From the places of cores back to CPUs."""

    @cache  # ranks may have the same ones
    def at(places: tuple[int, ...]) -> tuple[CpuSet, tuple[int, ...]]:
        cpus: CpuSet = frozenset().union(*map(cores.cpus.__getitem__, places))
        if multithreading is Multithreading.SINGLE_LOGICAL:
            cpus = _lowest(places, cores)
        return cpus, topology.nodes_of(cpus)

    return [
        Share(
            rank=placed.rank,
            gpu=placed.gpu,
            cpus=at(found.cores)[0],
            cores=cores.count(found.cores),
            numa_nodes=at(found.cores)[1],
            source=placed.near.source,
            reserved=at(found.reserved)[0],
        )
        for placed in placements
        for found in [assignments[placed.rank]]
    ]


def _lowest(places: Iterable[int], cores: Cores) -> CpuSet:
    """The lowest CPU of each core, whose pieces may be at several places."""
    lowest: dict[int, int] = {}
    for place in places:
        core, cpu = cores.core(place), min(cores.cpus[place])
        lowest[core] = min(cpu, lowest.get(core, cpu))
    return frozenset(lowest.values())


def _keep_all(
    topology: Topology,
    options: Options,
    gpus: Sequence[int | None],
    allowed: Sequence[CpuSet],
    notice: Notice,
) -> Plan:
    """Every rank keeps what it has, and nothing is reserved: no GPU or no CPU is known."""
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
    if least < options.least:
        raise GPUAffinityError(
            f"requested min_physical_cores={options.least}, but a rank would keep {least} cores: "
            f"{notice.message}"
        )
    return _plan(topology, options, shares, [notice])


def _plan(
    topology: Topology,
    options: Options,
    shares: Iterable[Share],
    warnings: Iterable[Notice],
    *,
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
