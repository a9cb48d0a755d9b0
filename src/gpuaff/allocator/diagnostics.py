"""The warnings of a plan: what is unknown or missing, what the plan does instead, the remedy.

One notice for all GPUs or ranks that it concerns; ``rank`` is set where that is one rank only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from gpuaff.allocator.cores import Cores
from gpuaff.allocator.model import Mode, Options, Scope
from gpuaff.allocator.placement import Assignment, Near, Neighbourhood, Placement, union
from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.notices import Notice
from gpuaff.topology.model import Source, Topology


def no_gpu(allowed: Sequence[CpuSet], reserve: int) -> Notice:
    """Nothing to be near to."""
    if len(set(allowed)) > 1:
        kept = "the CPUs that it may use"
    else:
        kept = f"the CPUs {format_cpulist(allowed[0])}" if allowed[0] else "all its CPUs"
    reserved = ", and no core is reserved" if reserve else ""
    return Notice(
        "no-gpu",
        f"no GPU is visible, so every rank keeps {kept}{reserved}; "
        "check CUDA_VISIBLE_DEVICES and the driver",
    )


def cpus_unknown() -> Notice:
    """A description without CPUs, e.g. a table of GPUs whose affinity cells are empty."""
    return Notice(
        "cpus-unknown",
        "the topology has no CPUs, so there is nothing to share out; "
        "add the output of `lscpu -p`, or observe the machine itself",
    )


def plan_warnings(
    topology: Topology,
    options: Options,
    placements: Sequence[Placement],
    assignments: Mapping[int, Assignment],
    cores: Cores,
    around: Mapping[CpuSet, Neighbourhood],
    *,
    granted: CpuSet,
    confined: bool,
) -> Iterator[Notice]:
    """All warnings about a plan that pins to GPUs.

    ``around`` has the search for near CPUs, for each set of allowed ones; ``granted`` is what any
    rank may use by its mask, also where ``cpus`` leaves it out; ``confined`` is whether each rank
    stays inside the domain of its GPU.
    """
    yield from _near_unknown(topology, placements)
    yield from _near_not_allowed(placements, options, confined=confined)
    yield from _mask_narrow(topology.cpus, placements, granted)
    if topology.cores is None:
        yield Notice(
            "cores-unknown",
            "the topology does not show which CPUs are siblings (hyperthreads), so each CPU counts "
            "as a core; add the output of `lscpu -p`, or observe the machine itself",
        )
    yield from _cores_across_nodes(topology, placements, cores)
    if options.mode is Mode.CORE_COMPLEX and not topology.l3:
        yield Notice(
            "complex-unknown",
            "the topology does not show which cores share an L3 cache, so the cores are cut as by "
            "mode unique_contiguous; add the output of `lscpu -p`, or observe the machine itself",
        )
    yield from _too_few_cores(placements, assignments)
    if options.scope is Scope.NODE and not options.is_single:
        yield from _scope_hint(topology, placements, around)


def _near_unknown(topology: Topology, placements: Iterable[Placement]) -> Iterator[Notice]:
    if sum(1 for node in topology.numa_nodes or () if node.cpus) == 1:
        return  # all CPUs are as near as can be (case F6)
    lost = [p for p in placements if p.near.source is Source.ALL and not p.near.reported]
    if lost:
        yield Notice(
            "near-unknown",
            f"neither the driver nor sysfs reports which CPUs are near {gpus(lost)}, so all "
            "allowed CPUs count as near; on a virtual machine, request its NUMA layout",
            rank=_only_rank(lost),
        )


def _near_not_allowed(
    placements: Sequence[Placement], options: Options, *, confined: bool
) -> Iterator[Notice]:
    for source, instead in (
        (Source.NEAREST, "the nearest allowed CPUs are used"),
        (Source.ALL, "all allowed CPUs count as near"),
    ):
        lost = [p for p in placements if p.near.source is source and p.near.reported]
        if lost:
            cpus = format_cpulist(union(placed.near.reported for placed in lost))
            yield Notice(
                "near-not-allowed",
                f"no local CPU available: none of the CPUs near {gpus(lost)} ({cpus}) is "
                f"{_limit(lost, options, confined=confined)}, so {instead}; allow some of these",
                rank=_only_rank(lost),
            )


def _limit(placements: Iterable[Placement], options: Options, *, confined: bool) -> str:
    """What leaves the near CPUs out."""
    if options.cpus is not None:
        return f"in cpus={format_cpulist(options.cpus)}"
    if confined:
        return "in the GPU's domain"
    if options.rank_allowed is not None:
        return f"allowed for {_named('rank', (placed.rank for placed in placements))}"
    return "allowed by the CPU mask"


def _mask_narrow(
    online: CpuSet, placements: Iterable[Placement], granted: CpuSet
) -> Iterator[Notice]:
    """For what no rank may use: that another rank has a part is the purpose of masks."""
    cut = [p for p in placements if p.near.is_local and _is_cut(p.near, online, granted)]
    if cut:
        near = union(placed.near.reported for placed in cut)
        yield Notice(
            "mask-narrow",
            f"the CPU mask allows only {format_cpulist(near & granted)} of the CPUs near "
            f"{gpus(cut)} ({format_cpulist(near)}), and the plan stays inside it; if an OpenMP "
            "runtime has narrowed the mask, call gpuaff before importing it",
            rank=_only_rank(cut),
        )


def _is_cut(near: Near, online: CpuSet, granted: CpuSet) -> bool:
    """Whether an online CPU near the GPU is not allowed; masks also name offline CPUs."""
    if len(near.reported) == len(near.cpus):
        return False
    return bool((near.reported & online if online else near.reported) - granted)


def _cores_across_nodes(
    topology: Topology, placements: Sequence[Placement], cores: Cores
) -> Iterator[Notice]:
    """Hypervisors make such machines: a virtual core's threads in two virtual nodes."""
    places = sorted(set().union(*{placed.cores for placed in placements}))
    several = [core for core in map(cores.cpus.__getitem__, places) if len(core) > 1]
    node_of = {cpu: node.id for node in topology.numa_nodes or () for cpu in node.cpus}
    across = [core for core in several if len({node_of.get(cpu) for cpu in core} - {None}) > 1]
    if across:
        nodes = format_cpulist(topology.nodes_of(union(across)))
        yield Notice(
            "cores-across-nodes",
            f"{len(across)} of the {len(places)} cores near {gpus(placements)} have CPUs in "
            f"several NUMA nodes ({nodes}; the first core: CPUs {format_cpulist(across[0])}); "
            "cores stay whole, so shares reach into these nodes. On a virtual machine, correct "
            "its CPU topology",
        )


def _too_few_cores(
    placements: Sequence[Placement], assignments: Mapping[int, Assignment]
) -> Iterator[Notice]:
    poor = [placed for placed in placements if not assignments[placed.rank].own]
    if poor:
        cpus = format_cpulist(union(placed.near.cpus for placed in poor))
        yield Notice(
            "too-few-cores",
            f"{_named('rank', (placed.rank for placed in poor))} must share cores: there are more "
            f"ranks than cores near {gpus(poor)} (CPUs {cpus}); "
            "start fewer processes or allow more CPUs",
            rank=_only_rank(poor),
        )


def _scope_hint(
    topology: Topology,
    placements: Sequence[Placement],
    around: Mapping[CpuSet, Neighbourhood],
) -> Iterator[Notice]:
    """Half of a DGX A100's cores are on no GPU's NUMA node."""
    wide = {(placed.gpu, placed.allowed): placed.near for placed in placements}
    known = topology.gpu_by_index
    local = {key for key, near in wide.items() if near.is_local}
    sockets = [around[allowed].near(known[gpu], Scope.SOCKET) for gpu, allowed in local]
    anyone = union(around)
    search = around.get(anyone) or Neighbourhood(topology, anyone)
    nodes = [near for gpu in topology.gpus if (near := search.near(gpu, Scope.NODE)).is_local]
    taken = union(near.cpus for near in (*nodes, *wide.values()))
    if idle := union(near.cpus for near in sockets if near.is_local) - taken:
        yield Notice(
            "scope-hint",
            f"the CPUs {format_cpulist(idle)} are on the same sockets as the GPUs but on no "
            'GPU\'s NUMA node, so no rank gets them; scope="socket" shares them out too',
        )


def gpus(placements: Iterable[Placement]) -> str:
    """Their GPUs in words, e.g. ``GPUs 0-3``."""
    return _named("GPU", (placed.gpu for placed in placements))


def _named(what: str, numbers: Iterable[int]) -> str:
    each = frozenset(numbers)
    return f"{what}{'s' if len(each) > 1 else ''} {format_cpulist(each)}"


def _only_rank(placements: Sequence[Placement]) -> int | None:
    return placements[0].rank if len(placements) == 1 else None
