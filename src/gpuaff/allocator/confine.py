"""``partition="machine"``: each rank stays inside the border of its GPU, where that can be had."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from gpuaff.allocator.border import BORDER_RULE, borders
from gpuaff.allocator.reach import union
from gpuaff.allocator.sites import Seat
from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.errors import GPUAffinityError
from gpuaff.notices import Notice
from gpuaff.records import replace
from gpuaff.topology.model import Topology


def confined(
    topology: Topology, seats: Sequence[Seat], granted: Sequence[CpuSet]
) -> tuple[tuple[Seat, ...], int | None, list[Notice]]:
    """The same seats, each inside the border of its GPU; for all of them or for none.

    A border counts only where a rank was granted the whole of it: in a part of it that somebody
    else has chosen, strangers can't tell who keeps to it.

    Args:
        topology: the machine.
        seats: where each rank sits; what it may use is what it was granted, or less (``cpus=``).
        granted: what each rank was granted, by rank.

    Returns:
        The seats, the version of the rule that their borders are from (None where they are as
        they were), and what to say then.

    Raises:
        GPUAffinityError: ``cpus=`` leaves a rank nothing of its GPU's border.
    """
    found = borders(topology)
    for seat in seats:
        why = lacking(found, seat.gpu, granted[seat.rank])
        if why is not None:
            return tuple(seats), None, [_border_unused(why, granted)]
    inside = tuple(replace(seat, allowed=seat.allowed & found[seat.gpu]) for seat in seats)
    for seat, whole in zip(inside, seats, strict=True):
        if not seat.allowed:
            raise GPUAffinityError(
                f'partition="machine" puts rank {seat.rank} inside the border of GPU {seat.gpu}, '
                f"CPUs {format_cpulist(found[seat.gpu])}, but cpus= names only "
                f"{format_cpulist(whole.allowed)}; name some of it, leave cpus= out, or ask for "
                'partition="job"'
            )
    return inside, BORDER_RULE, shared_borders(topology, (seat.gpu for seat in seats))


def shared_borders(topology: Topology, gpus: Iterable[int]) -> list[Notice]:
    """MIG instances of a GPU sit where it sits: whoever has another one has the same border."""
    cut = next((gpu for gpu in gpus if topology.gpu_by_index[gpu].mig), None)
    if cut is None:
        return []
    text = (
        f"GPU {cut} has MIG instances, which share its border: a job on another instance gets the "
        "same CPUs; give each job CPUs of its own (cpus=)"
    )
    return [Notice("border-shared", text)]


def lacking(found: Mapping[int, CpuSet], gpu: int, granted: CpuSet) -> str | None:
    """Why nobody can stay inside the border of a GPU, in words; None when one can.

    Args:
        found: the borders, by GPU.
        gpu: the GPU's index.
        granted: what may be used.
    """
    if gpu not in found:
        return f"GPU {gpu} is not among the accelerators that sysfs shows"
    if not found[gpu]:
        return f"GPU {gpu} has none: there are more accelerators than cores near them"
    if denied := found[gpu] - granted:
        return (
            f"the one of GPU {gpu}, CPUs {format_cpulist(found[gpu])}, is not allowed whole here "
            f"(not {format_cpulist(denied)})"
        )
    return None


def _border_unused(why: str, granted: Sequence[CpuSet]) -> Notice:
    allowed = format_cpulist(union(granted))
    return Notice(
        "border-unused",
        f'partition="machine" cuts by the borders of GPUs, but {why}: the CPUs {allowed} are cut '
        "among the ranks of this job, which may meet another job there",
    )
