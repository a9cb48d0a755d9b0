"""From a topology to a plan: :func:`plan`.

Pure: the same inputs give the same plan in every process and on any machine, so each rank can
work out all ranks' shares by itself and take its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from gpuaff.allocator import diagnostics, placement
from gpuaff.allocator.blocks import Cutter, domains_of
from gpuaff.allocator.cores import Cores, allowed_cores
from gpuaff.allocator.model import Mode, Multithreading, Options, Partition, Plan, Scope, Share
from gpuaff.allocator.placement import Draft, Seat, Site, Surroundings, find_sites, take_seats
from gpuaff.allocator.split import cut_unique, pick_all, pick_single, pick_single_unique
from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.errors import GPUAffinityError
from gpuaff.notices import Notice
from gpuaff.topology.model import Source, Topology

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias

# From the places of cores back to CPUs: the shares of a plan.


class ShareBuilder:
    """Makes shares; what several ranks have alike is worked out once."""

    def __init__(self, topology: Topology, cores: Cores, multithreading: Multithreading) -> None:
        self._topology = topology
        self._cores = cores
        self._single = multithreading is Multithreading.SINGLE_LOGICAL
        self._built: dict[tuple[int, ...], tuple[CpuSet, tuple[int, ...]]] = {}

    def share(self, rank: int, site: Site, draft: Draft) -> Share:
        """What a rank gets."""
        cpus, nodes = self._at(draft.cores)
        return Share(
            rank=rank,
            gpu=site.gpu,
            cpus=cpus,
            cores=self._cores.count(draft.cores),
            numa_nodes=nodes,
            source=site.near.source,
            reserved=self._at(draft.reserved)[0],
        )

    def _at(self, places: tuple[int, ...]) -> tuple[CpuSet, tuple[int, ...]]:
        """The CPUs at these places, and their NUMA nodes."""
        if places not in self._built:
            cpus = self._cpus(places)
            self._built[places] = cpus, self._topology.nodes_of(cpus)
        return self._built[places]

    def _cpus(self, places: Sequence[int]) -> CpuSet:
        if self._single:
            return frozenset(self._lowest(places))
        return frozenset().union(*map(self._cores.cpus.__getitem__, places))

    def _lowest(self, places: Iterable[int]) -> Iterable[int]:
        """The lowest CPU of each core, whose pieces may be at several places."""
        lowest: dict[int, int] = {}
        for place in places:
            core, cpu = self._cores.core(place), min(self._cores.cpus[place])
            lowest[core] = min(cpu, lowest.get(core, cpu))
        return lowest.values()


def share_of_all(
    topology: Topology, rank: int, *, gpu: int | None, cpus: CpuSet, cores: int
) -> Share:
    """What a rank keeps where nothing is cut."""
    return Share(
        rank=rank,
        gpu=gpu,
        cpus=cpus,
        cores=cores,
        numa_nodes=topology.nodes_of(cpus),
        source=Source.ALL,
    )


_Pick: TypeAlias = Callable[[Sequence[Site]], dict[int, Draft]]


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
    granted = placement.granted(topology, options)
    allowed = granted
    if options.cpus is not None:
        allowed = placement.chosen(allowed, options.cpus, topology)
    if not topology.visible:
        return _uncut(topology, options, allowed)
    seats: Sequence[Seat] = take_seats(topology, allowed)
    rule, warnings = None, list[Notice]()
    if options.partition is Partition.MACHINE:
        seats, rule, warnings = _confined(topology, seats, granted)
    around = Surroundings(topology, seats)
    cores = _cores(topology, options, seats, around)
    sites = find_sites(seats, options.scope, around, cores)
    if not cores.cpus:
        return _unknown(topology, options, sites)
    names = range(options.nproc) if numbers is None else numbers
    drafts = _draft(sites, options, _cutter(topology, options, cores), names)
    _check_least(sites, drafts, options, cores, seats, names)
    if options.most is not None:
        drafts = {rank: _trimmed(draft, options.most, cores) for rank, draft in drafts.items()}
    warnings += diagnostics.of_plan(
        topology,
        options,
        sites,
        drafts,
        seats,
        around,
        cores,
        granted=placement.union(granted),
        confined=rule is not None,
    )
    build = ShareBuilder(topology, cores, options.multithreading)
    shares = [build.share(rank, site, drafts[rank]) for site in sites for rank in site.ranks]
    plan = _plan(topology, options, shares, tuple(warnings))
    return plan if rule is None else replace(plan, partition=Partition.MACHINE, border_rule=rule)


def _confined(
    topology: Topology, seats: Sequence[Seat], granted: Sequence[CpuSet]
) -> tuple[Sequence[Seat], int | None, list[Notice]]:
    from gpuaff.allocator.domains import confined  # most plans need none of it

    return confined(topology, seats, granted)


def _cores(
    topology: Topology, options: Options, seats: Sequence[Seat], around: Surroundings
) -> Cores:
    """The cores that any rank may use; in pieces where ranks may use different siblings."""
    cores = allowed_cores(topology, placement.union(seat.allowed for seat in seats))
    if not around.differ:
        return cores
    from gpuaff.allocator.cores import split

    return split(cores, [(s.allowed, around.near(s, options.scope).cpus) for s in seats])


def _cutter(topology: Topology, options: Options, cores: Cores) -> Cutter:
    complexes = options.mode is Mode.CORE_COMPLEX
    return Cutter(
        cores=cores,
        contiguous=complexes or options.mode is Mode.UNIQUE_CONTIGUOUS,
        domains=domains_of(topology, cores) if complexes else (),
    )


def _draft(
    sites: Sequence[Site], options: Options, cutter: Cutter, names: Sequence[int]
) -> dict[int, Draft]:
    cores, count = cutter.cores, options.reserve
    picks: Mapping[Mode, _Pick] = {
        Mode.ALL: pick_all,
        Mode.SINGLE: partial(pick_single, cores=cores),
        Mode.SINGLE_UNIQUE: partial(pick_single_unique, cores=cores),
    }
    unique = partial(cut_unique, scope=options.scope, cutter=cutter, balanced=options.balanced)
    if not count:
        return picks.get(options.mode, unique)(sites)
    from gpuaff.allocator import reserve

    if options.mode in picks:
        return reserve.set_aside(sites, picks[options.mode], count, cores, names)
    return reserve.cut_off(sites, unique(sites), count, cores, names)


def _trimmed(draft: Draft, most: int, cores: Cores) -> Draft:
    return replace(draft, cores=cores.divide(draft.cores, most)[0])


def _check_least(
    sites: Sequence[Site],
    drafts: Mapping[int, Draft],
    options: Options,
    cores: Cores,
    seats: Sequence[Seat],
    names: Sequence[int],
) -> None:
    """A demand that was spelled out is kept or refused, for all ranks alike."""
    for site in sites:
        for rank in site.ranks:
            found = cores.count(drafts[rank].cores) if drafts[rank].own else 0
            if found < options.least:
                near = cores.count(site.cores)
                raise _too_few(names[rank], site.gpu, found, near, options, seats[rank].allowed)


def _too_few(
    rank: int, gpu: int, found: int, near: int, options: Options, allowed: CpuSet
) -> GPUAffinityError:
    wider = ', or try scope="socket"' if options.scope is Scope.NODE else ""
    beside = f" beside the {options.reserve} to reserve" if options.reserve else ""
    return GPUAffinityError(
        f"min_physical_cores={options.least} was asked for, but rank {rank} on GPU {gpu} "
        f"can have {found}{beside}: {near} cores near its GPU are allowed (of the CPUs "
        f"{format_cpulist(allowed)}), which ranks near the same cores share; "
        f"ask for fewer, start fewer processes, allow more CPUs{wider}"
    )


def _uncut(topology: Topology, options: Options, allowed: Sequence[CpuSet]) -> Plan:
    """No GPU is known: every rank keeps what it has, and nothing is reserved."""
    cores = allowed_cores(topology, placement.union(allowed))
    shares = [
        share_of_all(topology, rank, gpu=None, cpus=own, cores=len(cores.places(own)))
        for rank, own in enumerate(allowed)
    ]
    for share in shares:
        if share.cores < options.least:
            raise GPUAffinityError(
                f"min_physical_cores={options.least} was asked for, but no GPU is visible and "
                f"each rank keeps the {share.cores} allowed cores (CPUs "
                f"{format_cpulist(share.cpus) or 'unknown'}); ask for fewer or allow more CPUs"
            )
    return _plan(topology, options, shares, (diagnostics.no_gpu(allowed, options.reserve),))


def _unknown(topology: Topology, options: Options, sites: Sequence[Site]) -> Plan:
    """GPUs are known but not a single CPU, as in a table whose affinity cells are empty."""
    if options.least:
        raise GPUAffinityError(
            f"min_physical_cores={options.least} was asked for, but the topology "
            "tells of no CPUs; add the output of lscpu -p, or observe the machine itself"
        )
    share = partial(share_of_all, topology, cpus=frozenset(), cores=0)
    shares = [share(rank, gpu=site.gpu) for site in sites for rank in site.ranks]
    return _plan(topology, options, shares, (diagnostics.cpus_unknown(),))


def _plan(
    topology: Topology, options: Options, shares: Sequence[Share], warnings: tuple[Notice, ...]
) -> Plan:
    return Plan(
        mode=options.mode,
        scope=options.scope,
        multithreading=options.multithreading,
        balanced=options.balanced,
        shares=tuple(sorted(shares, key=lambda share: share.rank)),
        warnings=(*diagnostics.carried_over(topology), *warnings),
    )
