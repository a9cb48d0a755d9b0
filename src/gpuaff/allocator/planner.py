"""From a topology to a plan: :func:`plan`.

Pure: the same inputs give the same plan in every process and on any machine, so each rank can
work out all ranks' shares by itself and take its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from gpuaff.allocator import remarks
from gpuaff.allocator.cores import Cores, allowed_cores
from gpuaff.allocator.modes import Mode, Multithreading, Partition, Scope
from gpuaff.allocator.near import Neighbourhood
from gpuaff.allocator.options import Options
from gpuaff.allocator.partition import Cutter
from gpuaff.allocator.picks import pick_all, pick_single, pick_single_unique
from gpuaff.allocator.plan import Plan, Share
from gpuaff.allocator.shares import ShareBuilder, share_of_all
from gpuaff.allocator.sites import Draft, Site, find_sites
from gpuaff.allocator.unique import cut_unique
from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.errors import GPUAffinityError
from gpuaff.notices import Notice
from gpuaff.topology.model import Topology


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
    max-min fair. Nobody gets a CPU that is not in ``topology.allowed``.

    Args:
        topology: the machine, with the CPUs that may be used and the GPUs that are visible.
        nproc: how many processes share the machine, one per rank.
        mode: how the cores near a GPU are cut.
        scope: what counts as near: the GPU's NUMA node or its socket.
        multithreading: all allowed CPUs of a core, or only the lowest.
        balanced: whether all ranks get equally many cores; only the unique modes heed it.
        min_physical_cores: the least number of physical cores for each rank. The modes
            ``single`` and ``single_unique`` heed neither this nor the next.
        max_physical_cores: the largest number of physical cores for each rank.
        partition: whether the CPUs are cut among the ranks of this job (``auto`` and ``job``), or
            each rank stays inside the border of its GPU (``machine``).
        cpus: the only CPUs that are shared out, as a cpulist or as ids. They must be allowed.
        reserve: how many physical cores of each rank's part stay out of its share, for helpers;
            they are :attr:`Share.reserved`.
        rank_allowed: the CPUs that each rank may use, by rank; for ranks that have masks of
            their own. None: every rank may use ``topology.allowed``.

    Raises:
        InvalidOptionError: an argument cannot be meant.
        GPUAffinityError: a rank cannot have ``min_physical_cores``, or has no core beside those
            to reserve; ``cpus`` or ``rank_allowed`` name CPUs that cannot be had; or the
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


def plan_with(topology: Topology, options: Options) -> Plan:
    """:func:`plan` for options that are validated already.

    Raises:
        GPUAffinityError: as :func:`plan` does.
    """
    allowed = _usable(topology)
    cores = allowed_cores(topology, allowed)
    if not topology.visible:
        return _uncut(topology, options, allowed, cores)
    around = Neighbourhood(topology, allowed)
    sites = find_sites(topology, options.nproc, options.scope, cores, around)
    if not allowed:
        return _unknown(topology, options, sites)
    drafts = _draft(sites, options, cores)
    _check_least(sites, drafts, options, allowed)
    drafts = {rank: _trimmed(draft, options.most) for rank, draft in drafts.items()}
    warnings = remarks.of_plan(topology, options, sites, around, drafts)
    build = ShareBuilder(topology, cores, options.multithreading)
    shares = [build.share(rank, site, drafts[rank]) for site in sites for rank in site.ranks]
    return _plan(topology, options, shares, tuple(warnings))


def _usable(topology: Topology) -> CpuSet:
    """The allowed CPUs that are online: masks also name CPUs that are not (case A18)."""
    usable = topology.allowed & topology.cpus if topology.cpus else topology.allowed
    if topology.cpus and not usable:
        raise GPUAffinityError(
            f"no CPU is allowed: the allowed set ({format_cpulist(topology.allowed) or 'empty'}) "
            f"holds none of the online CPUs {format_cpulist(topology.cpus)}; "
            "check the CPU mask or cpuset that the job was started with"
        )
    return usable


def _draft(sites: Sequence[Site], options: Options, cores: Cores) -> dict[int, Draft]:
    contiguous = options.mode is Mode.UNIQUE_CONTIGUOUS
    cutter = Cutter(contiguous=contiguous, slow_from=cores.slow_from)
    unique = partial(cut_unique, scope=options.scope, cutter=cutter, balanced=options.balanced)
    cut = {
        Mode.ALL: pick_all,
        Mode.SINGLE: pick_single,
        Mode.SINGLE_UNIQUE: pick_single_unique,
    }.get(options.mode, unique)
    return cut(sites)


def _trimmed(draft: Draft, most: int | None) -> Draft:
    return Draft(draft.cores[:most], own=draft.own)


def _check_least(
    sites: Sequence[Site], drafts: Mapping[int, Draft], options: Options, allowed: CpuSet
) -> None:
    """A demand that was spelled out is kept or refused, for all ranks alike."""
    for site in sites:
        for rank in site.ranks:
            found = len(drafts[rank].cores) if drafts[rank].own else 0
            if found < options.least:
                raise _too_few(rank, site, found, options, allowed)


def _too_few(
    rank: int, site: Site, found: int, options: Options, allowed: CpuSet
) -> GPUAffinityError:
    wider = ', or try scope="socket"' if options.scope is Scope.NODE else ""
    return GPUAffinityError(
        f"min_physical_cores={options.least} was asked for, but rank {rank} on GPU {site.gpu} "
        f"can have {found}: {len(site.cores)} cores near its GPU are allowed (of the CPUs "
        f"{format_cpulist(allowed)}), which ranks near the same cores share; "
        f"ask for fewer, start fewer processes, allow more CPUs{wider}"
    )


def _uncut(topology: Topology, options: Options, allowed: CpuSet, cores: Cores) -> Plan:
    """No GPU is known: every rank keeps what it has."""
    found = len(cores.cpus)
    if found < options.least:
        raise GPUAffinityError(
            f"min_physical_cores={options.least} was asked for, but no GPU is visible and each "
            f"rank keeps the {found} allowed cores (CPUs {format_cpulist(allowed) or 'unknown'}); "
            "ask for fewer or allow more CPUs"
        )
    share = partial(share_of_all, topology, gpu=None, cpus=allowed, cores=found)
    shares = [share(rank) for rank in range(options.nproc)]
    return _plan(topology, options, shares, (remarks.no_gpu(allowed),))


def _unknown(topology: Topology, options: Options, sites: Sequence[Site]) -> Plan:
    """GPUs are known but not a single CPU, as in a table whose affinity cells are empty."""
    if options.least:
        raise GPUAffinityError(
            f"min_physical_cores={options.least} was asked for, but the topology "
            "tells of no CPUs; add the output of lscpu -p, or observe the machine itself"
        )
    share = partial(share_of_all, topology, cpus=frozenset(), cores=0)
    shares = [share(rank, gpu=site.gpu) for site in sites for rank in site.ranks]
    return _plan(topology, options, shares, (remarks.cpus_unknown(),))


def _plan(
    topology: Topology, options: Options, shares: Sequence[Share], warnings: tuple[Notice, ...]
) -> Plan:
    return Plan(
        mode=options.mode,
        scope=options.scope,
        multithreading=options.multithreading,
        balanced=options.balanced,
        shares=tuple(sorted(shares, key=lambda share: share.rank)),
        warnings=(*remarks.carried_over(topology), *warnings),
    )
