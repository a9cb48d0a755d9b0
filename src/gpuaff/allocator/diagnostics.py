"""What was not as hoped, and what was done about it: the warnings of a plan.

One notice for all GPUs or ranks that it concerns; ``rank`` is set where that is one rank only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from gpuaff.allocator.cores import Cores
from gpuaff.allocator.model import Mode, Options, Scope
from gpuaff.allocator.placement import Draft, Seat, Site, Surroundings, union
from gpuaff.allocator.proximity import Near
from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.notices import Notice
from gpuaff.topology.model import Source, Topology

_MODES_WITHOUT_SHARES = (Mode.SINGLE, Mode.SINGLE_UNIQUE)


def carried_over(topology: Topology) -> Iterator[Notice]:
    """What the topology says about the visible devices: it decides which GPU a rank is on."""
    return (note for note in topology.notes if note.code.startswith("visible-"))


def no_gpu(allowed: Sequence[CpuSet], reserve: int) -> Notice:
    """There is nothing to be near to."""
    if len(set(allowed)) > 1:
        kept = "the CPUs that it may use"
    else:
        kept = f"the CPUs {format_cpulist(allowed[0])}" if allowed[0] else "whatever CPUs it has"
    nothing = "nothing is cut and nothing reserved" if reserve else "nothing is cut"
    return Notice("no-gpu", f"no GPU is visible, so {nothing}: every rank keeps {kept}")


def cpus_unknown() -> Notice:
    """A description without CPUs, e.g. a table of GPUs whose affinity cells are empty."""
    return Notice(
        "cpus-unknown",
        "the topology tells of no CPUs, so there is nothing to share out: "
        "add the output of lscpu -p, or observe the machine itself",
    )


def of_plan(
    topology: Topology,
    options: Options,
    sites: Sequence[Site],
    drafts: Mapping[int, Draft],
    seats: Sequence[Seat],
    around: Surroundings,
    cores: Cores,
    *,
    granted: CpuSet,
    confined: bool,
) -> Iterator[Notice]:
    """All warnings about a plan that pins to GPUs.

    Args:
        topology: the machine.
        options: what was asked.
        sites: where the ranks sit.
        drafts: what each rank gets.
        seats: what each rank may use.
        around: which of it is near.
        cores: the cores that the places of sites and drafts mean.
        granted: what any rank may use by its mask, also where ``cpus`` leaves it out.
        confined: whether each rank stays inside the border of its GPU.
    """
    yield from _near_unknown(topology, sites)
    yield from _near_not_allowed(sites, options, confined=confined)
    yield from _mask_narrow(topology.cpus, sites, granted)
    if topology.cores is None:
        yield Notice(
            "cores-unknown",
            "nobody tells which CPUs are siblings, so each CPU counts as a core of its own",
        )
    yield from _cores_across_nodes(topology, sites, cores)
    if options.mode is Mode.CORE_COMPLEX and not topology.l3:
        yield Notice(
            "complex-unknown",
            "nobody tells which cores share an L3 cache, so the cores are cut in blocks as "
            "mode unique_contiguous does it",
        )
    yield from _too_few_cores(sites, drafts)
    if options.scope is Scope.NODE and options.mode not in _MODES_WITHOUT_SHARES:
        yield from _scope_hint(seats, around)


def _cores_across_nodes(
    topology: Topology, sites: Sequence[Site], cores: Cores
) -> Iterator[Notice]:
    """Hypervisors make such machines: a virtual core's threads in two virtual nodes."""
    places = sorted({place for site in sites for place in site.cores})
    several = [core for core in map(cores.cpus.__getitem__, places) if len(core) > 1]
    node_of = {cpu: node.id for node in topology.numa_nodes or () for cpu in node.cpus}
    across = [core for core in several if len({node_of.get(cpu) for cpu in core} - {None}) > 1]
    if across:
        first = ", ".join(map(str, sorted(across[0])))
        nodes = format_cpulist(topology.nodes_of(union(across)))
        yield Notice(
            "cores-across-nodes",
            f"{len(across)} of the {len(places)} cores near {gpus(sites)} lie in several NUMA "
            f"nodes ({nodes}; the first core: CPUs {first}); each core stays whole, so shares "
            "reach into these nodes: on a virtual machine correct its CPU topology",
        )


def _near_unknown(topology: Topology, sites: Iterable[Site]) -> Iterator[Notice]:
    if sum(1 for node in topology.numa_nodes or () if node.cpus) == 1:
        return  # all CPUs are as near as can be (case F6)
    lost = [site for site in sites if site.near.source is Source.ALL and not site.near.told]
    if lost:
        yield Notice(
            "near-unknown",
            f"neither driver nor sysfs tells which CPUs are near {gpus(lost)}, "
            "so all allowed CPUs count as near",
            rank=_only_rank(lost),
        )


def _near_not_allowed(
    sites: Iterable[Site], options: Options, *, confined: bool
) -> Iterator[Notice]:
    for source, instead in (
        (Source.NEAREST, "the nearest allowed ones are taken"),
        (Source.ALL, "all allowed CPUs count as near"),
    ):
        lost = [site for site in sites if site.near.source is source and site.near.told]
        if lost:
            told = format_cpulist(union(site.near.told for site in lost))
            yield Notice(
                "near-not-allowed",
                f"no local CPU available: of the CPUs near {gpus(lost)} ({told}) none is "
                f"{_by_whom(lost, options, confined=confined)}, so {instead}",
                rank=_only_rank(lost),
            )


def _by_whom(sites: Iterable[Site], options: Options, *, confined: bool) -> str:
    if options.cpus is not None:
        return f"among cpus={format_cpulist(options.cpus)}"
    if confined:
        return "inside the GPU's border"
    if options.rank_allowed is not None:
        return f"allowed to {_named('rank', [rank for site in sites for rank in site.ranks])}"
    return "allowed here"


def _mask_narrow(online: CpuSet, sites: Iterable[Site], granted: CpuSet) -> Iterator[Notice]:
    """Said of what no rank may use: that another rank has a part is the purpose of masks."""
    cut = [site for site in sites if site.near.is_local and _is_cut(site.near, online, granted)]
    if cut:
        told = union(site.near.told for site in cut)
        yield Notice(
            "mask-narrow",
            f"of the CPUs near {gpus(cut)} ({format_cpulist(told)}) only "
            f"{format_cpulist(told & granted)} are allowed here; the plan stays inside these",
            rank=_only_rank(cut),
        )


def _is_cut(near: Near, online: CpuSet, granted: CpuSet) -> bool:
    """Whether an online CPU near the GPU is not allowed; masks also name offline CPUs."""
    if len(near.told) == len(near.cpus):
        return False
    return bool((near.told & online if online else near.told) - granted)


def _too_few_cores(sites: Sequence[Site], drafts: Mapping[int, Draft]) -> Iterator[Notice]:
    poor = sorted(rank for rank, draft in drafts.items() if not draft.own)
    if poor:
        where = [site for site in sites if not set(poor).isdisjoint(site.ranks)]
        cpus = format_cpulist(union(site.near.cpus for site in where))
        yield Notice(
            "too-few-cores",
            f"{_named('rank', poor)} cannot have a core alone: there are more ranks than "
            f"cores near {gpus(where)} (CPUs {cpus}), so they share; "
            "start fewer processes or allow more CPUs",
            rank=poor[0] if len(poor) == 1 else None,
        )


def _scope_hint(seats: Iterable[Seat], around: Surroundings) -> Iterator[Notice]:
    """Half of a DGX A100's cores are on no GPU's NUMA node."""
    near = [(around.near(seat, Scope.NODE), around.near(seat, Scope.SOCKET)) for seat in seats]
    sockets = union(wide.cpus for own, wide in near if own.is_local and wide.is_local)
    nodes = around.near_any_gpu() | union(own.cpus for own, _ in near)
    if idle := sockets - nodes:
        yield Notice(
            "scope-hint",
            f"the CPUs {format_cpulist(idle)} are on the same sockets as the GPUs but on no "
            'GPU\'s NUMA node, so no rank gets them; scope="socket" shares them out too',
        )


def gpus(sites: Iterable[Site]) -> str:
    """Their GPUs in words, e.g. ``GPUs 0-3``."""
    return _named("GPU", [site.gpu for site in sites])


def _named(what: str, numbers: Iterable[int]) -> str:
    each = set(numbers)  # ranks on one GPU may sit at several sites
    return f"{what}{'s' if len(each) > 1 else ''} {format_cpulist(each)}"


def _only_rank(sites: Sequence[Site]) -> int | None:
    ranks = [rank for site in sites for rank in site.ranks]
    return ranks[0] if len(ranks) == 1 else None
