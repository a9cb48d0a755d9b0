"""A plan as text: a table of the ranks, and a picture of who has which core."""

from __future__ import annotations

import string
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

from gpuaff.allocator.modes import Mode, Multithreading, Partition
from gpuaff.allocator.plan import Plan, Share
from gpuaff.cli import seats
from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.text import GAP, Line, Span, counted, cpulist, line, plain, table
from gpuaff.topology.model import Topology

_Owners = dict[int, set[int]]
"""The ranks that have a CPU, by its id."""

_LETTERS = string.digits + string.ascii_letters
"""One for each rank; ranks above them share ``#``."""

_LONGEST = 64
"""Cores in one row of the picture, where the terminal is wide enough."""

_CUTTING = (Mode.UNIQUE_CONTIGUOUS, Mode.UNIQUE_INTERLEAVED, Mode.CORE_COMPLEX)
"""The modes that heed whether shares are balanced."""

_MEANINGS = {
    ".": "free",
    "+": "kept free for helpers",
    "-": "not allowed",
    "*": "several ranks",
    "#": f"a rank above {len(_LETTERS) - 1}",
}


def lines(topology: Topology, plan: Plan, name: str, *, width: int | None = None) -> list[Line]:
    """The whole text.

    Args:
        topology: what the plan was made for.
        plan: what to show.
        name: what to call the machine.
        width: the terminal's; None when the text must not be broken.
    """
    return [
        line(Span(name, "head"), f": {', '.join(_choices(plan))}"),
        (),
        *_table(plan, width),
        *_picture(topology, plan, width),
    ]


def _choices(plan: Plan) -> list[str]:
    choices = [counted(len(plan.shares), "rank"), str(plan.mode), f"by {plan.scope}"]
    if plan.multithreading is not Multithreading.ALL_LOGICAL:
        choices.append(str(plan.multithreading))
    if not plan.balanced and plan.mode in _CUTTING:
        choices.append("unbalanced")
    if plan.partition is not Partition.JOB:
        choices.append(f"cut by {plan.partition}")
    return choices


def _table(plan: Plan, width: int | None) -> list[Line]:
    titles = ["rank", "GPU", "NUMA", "cores", "source", "CPUs"]
    reserved = any(share.reserved for share in plan.shares)
    rows = [[line(Span(title, "head")) for title in titles + ["reserved"] * reserved]]
    rows += [_row(share) + _reserved(share) * reserved for share in plan.shares]
    return table(rows, width=width, right=(0, 1, 2, 3))


def _row(share: Share) -> list[Line]:
    style = f"rank:{share.rank}"
    return [
        line(Span(str(share.rank), style)),
        line("-" if share.gpu is None else str(share.gpu)),
        line(format_cpulist(share.numa_nodes) or "-"),
        line(str(share.cores)),
        line(str(share.source)),
        cpulist(share.cpus, style) or line("-"),
    ]


def _reserved(share: Share) -> list[Line]:
    return [cpulist(share.reserved, f"rank:{share.rank}") or line("-")]


def _picture(topology: Topology, plan: Plan, width: int | None) -> list[Line]:
    owners = _owners((share.rank, share.cpus) for share in plan.shares)
    keepers = _owners((share.rank, share.reserved) for share in plan.shares)
    regions = seats.regions(topology)
    strips = [_strip(topology, region.cpus, owners, keepers) for region in regions]
    used = {span.text[0] for strip in strips for span in strip}
    rows = [
        row
        for region, strip in zip(regions, strips, strict=True)
        for row in _region(region, strip, _room(regions, width))
    ]
    return [(), line(Span(_legend(used, cores=topology.cores is not None), "dim"))] + (
        table(rows, width=width) if rows else []
    )


def _legend(used: Iterable[str], *, cores: bool) -> str:
    meanings = [f"{sign} {meaning}" for sign, meaning in _MEANINGS.items() if sign in set(used)]
    what = "one character a core" if cores else "one character a CPU (cores are not known)"
    return ", ".join([f"{what}: the rank that has it", *meanings])


def _owners(held: Iterable[tuple[int, CpuSet]]) -> _Owners:
    owners: _Owners = defaultdict(set)
    for rank, cpus in held:
        for cpu in cpus:
            owners[cpu].add(rank)
    return owners


def _strip(topology: Topology, cpus: CpuSet, owners: _Owners, keepers: _Owners) -> Line:
    """The cores of a region, a blank after each L3 domain."""
    cores = _cores_in(topology, cpus)
    domain = {cpu: number for number, cpus in enumerate(topology.l3 or ()) for cpu in cpus}
    domains = [domain.get(min(core)) for core in cores]
    blanks = [" " if here != after else "" for here, after in pairwise(domains)]
    return tuple(
        _sign(_ranks(core, owners), blank) or _unused(core, topology.allowed, keepers, blank)
        for core, blank in zip(cores, [*blanks, ""], strict=True)
    )


def _cores_in(topology: Topology, cpus: CpuSet) -> list[CpuSet]:
    if topology.cores is None:
        return [frozenset({cpu}) for cpu in sorted(cpus)]
    known = [core for core in topology.cores if core & cpus]
    rest = cpus.difference(*known)
    return known + [frozenset({cpu}) for cpu in sorted(rest)]


def _ranks(core: CpuSet, owners: _Owners) -> set[int]:
    return {rank for cpu in core for rank in owners.get(cpu, ())}


def _unused(core: CpuSet, allowed: CpuSet, keepers: _Owners, blank: str) -> Span:
    """A core that no rank has; one that is kept for a rank's helpers has the rank's colour."""
    ranks = sorted(_ranks(core, keepers))
    if ranks:
        return Span("+" + blank, f"rank:{ranks[0]}" if len(ranks) == 1 else "dim")
    return Span(("." if core & allowed else "-") + blank, "dim")


def _sign(ranks: set[int], blank: str) -> Span | None:
    if not ranks:
        return None
    if len(ranks) > 1:
        return Span("*" + blank, "bad")
    (rank,) = ranks
    return Span((_LETTERS[rank] if rank < len(_LETTERS) else "#") + blank, f"rank:{rank}")


def _region(region: seats.Region, strip: Line, room: int) -> list[list[Line]]:
    gpus = format_cpulist(gpu.index for gpu in region.gpus)
    first, *rest = [strip[start : start + room] for start in range(0, len(strip), room)]
    name = line(Span(region.name, "head"))
    sitting = line(Span(f"GPU {gpus}" if gpus else "", "gpu"))
    return [
        [name, sitting, first, cpulist(region.cpus)],
        *([(), (), piece, ()] for piece in rest),
    ]


def _room(regions: Sequence[seats.Region], width: int | None) -> int:
    """How many cores fit into one row, in eights."""
    if width is None or not regions:
        return _LONGEST
    names = max(len(region.name) for region in regions)
    gpus = max(len(f"GPU {format_cpulist(g.index for g in r.gpus)}") for r in regions)
    lists = min(24, max(len(plain(cpulist(region.cpus))) for region in regions))
    free = (width - names - gpus - lists - 3 * GAP) * 4 // 5  # a fifth for the blanks
    return max(8, min(_LONGEST, free // 8 * 8))
