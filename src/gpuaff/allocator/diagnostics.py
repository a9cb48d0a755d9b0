"""The warnings of a plan: what is unknown or missing, what the plan does instead, the remedy.

One notice for all GPUs or ranks that it concerns; ``rank`` is set where that is one rank only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from gpuaff.allocator.model import Mode, Options, Scope
from gpuaff.allocator.placement import Assignment, Job, Near, Neighbourhood, Placement, union
from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.notices import Notice
from gpuaff.topology.model import Source, Topology

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
    online, granted = job.topology.cpus, job.granted
    cut = [
        placed
        for placed in job.placements
        if placed.near.is_local and _is_cut(placed.near, online, granted)
    ]
    if cut:
        near = union(placed.near.reported for placed in cut)
        text = (
            f"the CPU mask allows only {format_cpulist(near & granted)} of the CPUs near "
            f"{_gpus(cut)} ({format_cpulist(near)}), and the plan stays inside it; if an OpenMP "
            "runtime has narrowed the mask, call gpuaff before importing it"
        )
        yield _about(cut, "mask-narrow", text)


def _is_cut(near: Near, online: CpuSet, granted: CpuSet) -> bool:
    """Whether an online CPU near the GPU is not allowed; masks also name offline CPUs."""
    if len(near.reported) == len(near.cpus):
        return False
    return bool((near.reported & online if online else near.reported) - granted)


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
