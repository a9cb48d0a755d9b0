"""From a topology to a plan: :func:`plan`.

Pure: the same inputs give the same plan in every process and on any machine, so each rank can
work out all ranks' shares by itself and take its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache

from gpuaff.allocator import split
from gpuaff.allocator.cores import allowed_cores
from gpuaff.allocator.model import Mode, Multithreading, Options, Partition, Plan, Scope, Share
from gpuaff.allocator.placement import (
    Assignment,
    Job,
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

    ``numbers`` is what errors call the ranks, where these are some of a job's; None: 0, 1, ….
    """
    allowed = granted = granted_cpus(topology, options)
    if options.cpus is not None:
        allowed = chosen_cpus(granted, options.cpus, topology.cpus)
    visible = topology.visible
    gpus = [visible[rank % len(visible)] for rank in range(options.nproc) if visible]
    if not gpus:
        return _keep_all(topology, options, gpus, allowed)
    rule, warnings = None, list[Notice]()
    if options.partition is Partition.MACHINE:
        from gpuaff.allocator.domains import confine  # most plans need no domains

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
    warnings += plan_warnings(job, assignments)
    return _plan(topology, options, _shares(job, assignments), warnings, rule)


def _check_least(job: Job, assignments: Mapping[int, Assignment]) -> None:
    """An explicit minimum is kept or refused, for all ranks alike."""
    options, cores, least = job.options, job.cores, job.options.min_physical_cores or 0
    for placed in job.placements:
        found = job.own_cores(assignments[placed.rank])
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
    topology: Topology, options: Options, gpus: Sequence[int], allowed: Sequence[CpuSet]
) -> Plan:
    """Every rank keeps what it has, and nothing is reserved: no GPU or no CPU is known."""
    notice = nothing_to_cut(topology, options, allowed)
    cores = allowed_cores(topology, union(allowed))
    shares = [
        Share(
            rank=rank,
            gpu=gpus[rank] if gpus else None,
            cpus=own,
            cores=len(cores.places(own)),
            numa_nodes=topology.nodes_of(own),
            source=Source.ALL,
        )
        for rank, own in enumerate(allowed)
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


# ---- warnings ------------------------------------------------------------------------------------
# One for all GPUs or ranks that it concerns; ``rank`` is set where that is one rank only.

_ADD = "add the output of `lscpu -p`, or observe the machine itself"
_UNKNOWN = {
    "cpus-unknown": "the topology has no CPUs, so there is nothing to share out",
    "cores-unknown": "the topology does not show which CPUs are siblings (hyperthreads), so each "
    "CPU counts as a core",
    "complex-unknown": "the topology does not show which cores share an L3 cache, so the cores are "
    "cut as by mode unique_contiguous",
}


def _unknown(code: str) -> Notice:
    """A description lacks something, e.g. a table of GPUs whose affinity cells are empty."""
    return Notice(code, f"{_UNKNOWN[code]}; {_ADD}")


def nothing_to_cut(topology: Topology, options: Options, allowed: Sequence[CpuSet]) -> Notice:
    """Why every rank keeps what it has."""
    if topology.visible:
        return _unknown("cpus-unknown")
    kept = f"the CPUs {format_cpulist(allowed[0])}" if allowed[0] else "all its CPUs"
    if len(set(allowed)) > 1:
        kept = "the CPUs that it may use"
    reserved = ", and no core is reserved" if options.reserve else ""
    return Notice(
        "no-gpu",
        f"no GPU is visible, so every rank keeps {kept}{reserved}; "
        "check CUDA_VISIBLE_DEVICES and the driver",
    )


def plan_warnings(job: Job, assignments: Mapping[int, Assignment]) -> Iterator[Notice]:
    """All warnings about a plan that pins to GPUs."""
    topology, options = job.topology, job.options
    yield from _near(job)
    yield from _mask_narrow(job)
    if topology.cores is None:
        yield _unknown("cores-unknown")
    yield from _cores_across_nodes(job)
    if options.mode is Mode.CORE_COMPLEX and not topology.l3:
        yield _unknown("complex-unknown")
    if poor := [placed for placed in job.placements if not assignments[placed.rank].own]:
        text = (
            f"{_named('rank', (placed.rank for placed in poor))} must share cores: there are more "
            f"ranks than cores near {_gpus(poor)} (CPUs "
            f"{format_cpulist(union(placed.near.cpus for placed in poor))}); "
            "start fewer processes or allow more CPUs"
        )
        yield _about(poor, "too-few-cores", text)
    if options.scope is Scope.NODE and not options.is_single:
        yield from _scope_hint(job)


def _near(job: Job) -> Iterator[Notice]:
    """What is near is unknown, or not allowed."""
    at_all = [placed for placed in job.placements if placed.near.source is Source.ALL]
    lost = [placed for placed in at_all if not placed.near.reported]
    # On a single node all CPUs are as near as can be (case F6).
    if lost and sum(1 for node in job.topology.numa_nodes or () if node.cpus) != 1:
        text = (
            f"neither the driver nor sysfs reports which CPUs are near {_gpus(lost)}, so all "
            "allowed CPUs count as near; on a virtual machine, request its NUMA layout"
        )
        yield _about(lost, "near-unknown", text)
    nearest = [placed for placed in job.placements if placed.near.source is Source.NEAREST]
    for found, instead in (
        (nearest, "the nearest allowed CPUs are used"),
        (at_all, "all allowed CPUs count as near"),
    ):
        if denied := [placed for placed in found if placed.near.reported]:
            cpus = format_cpulist(union(placed.near.reported for placed in denied))
            text = (
                f"no local CPU available: none of the CPUs near {_gpus(denied)} ({cpus}) is "
                f"{_limit(job, denied)}, so {instead}; allow some of these"
            )
            yield _about(denied, "near-not-allowed", text)


def _limit(job: Job, placements: Iterable[Placement]) -> str:
    """What leaves the near CPUs out."""
    if job.options.cpus is not None:
        return f"in cpus={format_cpulist(job.options.cpus)}"
    if job.domain_rule is not None:
        return "in the GPU's domain"
    if job.options.rank_allowed is not None:
        return f"allowed for {_named('rank', (placed.rank for placed in placements))}"
    return "allowed by the CPU mask"


def _mask_narrow(job: Job) -> Iterator[Notice]:
    """For what no rank may use: that another rank has a part is the purpose of masks."""
    online, granted = job.topology.cpus, job.granted  # masks also name offline CPUs
    local = [placed for placed in job.placements if placed.near.is_local]
    reported = {placed.near.reported for placed in local}
    narrow = {near for near in reported if (near & (online or near)) - granted}
    if cut := [placed for placed in local if placed.near.reported in narrow]:
        near = union(placed.near.reported for placed in cut)
        text = (
            f"the CPU mask allows only CPUs {format_cpulist(near & granted)} of those near "
            f"{_gpus(cut)} ({format_cpulist(near)}), and the plan stays inside it; if an OpenMP "
            "runtime has narrowed the mask, call gpuaff before importing it"
        )
        yield _about(cut, "mask-narrow", text)


def _cores_across_nodes(job: Job) -> Iterator[Notice]:
    """Hypervisors make such machines: a virtual core's threads in two virtual nodes."""
    places = sorted(set().union(*{placed.cores for placed in job.placements}))
    node_of = {cpu: node.id for node in job.topology.numa_nodes or () for cpu in node.cpus}
    across = [
        core
        for core in map(job.cores.cpus.__getitem__, places)
        if len(core) > 1 and len({node_of.get(cpu) for cpu in core} - {None}) > 1
    ]
    if across:
        nodes = format_cpulist(job.topology.nodes_of(union(across)))
        yield Notice(
            "cores-across-nodes",
            f"{len(across)} of the {len(places)} cores near {_gpus(job.placements)} have CPUs in "
            f"several NUMA nodes ({nodes}; the first core: CPUs {format_cpulist(across[0])}); "
            "cores stay whole, so shares reach into these nodes. On a virtual machine, correct "
            "its CPU topology",
        )


def _scope_hint(job: Job) -> Iterator[Notice]:
    """Half of a DGX A100's cores are on no GPU's NUMA node."""
    known = job.topology.gpu_by_index
    wide = {(placed.gpu, placed.allowed): placed.near for placed in job.placements}
    sockets = [
        job.around[allowed].near(known[gpu], Scope.SOCKET)
        for (gpu, allowed), near in wide.items()
        if near.is_local
    ]
    anyone = union(job.around)
    search = job.around.get(anyone) or Neighbourhood(job.topology, anyone)
    nodes = [near for gpu in known.values() if (near := search.near(gpu, Scope.NODE)).is_local]
    taken = union(near.cpus for near in (*nodes, *wide.values()))
    if idle := union(near.cpus for near in sockets if near.is_local) - taken:
        yield Notice(
            "scope-hint",
            f"the CPUs {format_cpulist(idle)} are on the same sockets as the GPUs but on no "
            'GPU\'s NUMA node, so no rank gets them; scope="socket" shares them out too',
        )


def _about(placements: Sequence[Placement], code: str, message: str) -> Notice:
    return Notice(code, message, rank=placements[0].rank if len(placements) == 1 else None)


def _gpus(placements: Iterable[Placement]) -> str:
    """Their GPUs in words, e.g. ``GPUs 0-3``."""
    return _named("GPU", (placed.gpu for placed in placements))


def _named(what: str, numbers: Iterable[int]) -> str:
    each = frozenset(numbers)
    return f"{what}{'s' if len(each) > 1 else ''} {format_cpulist(each)}"
