"""Which of its job's processes this is, by what its launcher put into the environment.

The rules, in order (``docs/launchers.md`` has them with examples):

1. What launchers have set is read row by row (:mod:`gpuaff.launch.launchers`), the innermost
   first, and the innermost counts, also where its numbers name no rank: another one's would be
   those of another process.
2. Variables are inherited, and may be left over from a shell inside another launcher. Where two
   launchers disagree, the nearest program of a launcher above this process decides.
3. Numbers as torchrun's that no known launcher has set come last. They count before a launcher that
   has started a single process here, which then started others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gpuaff.launch import contradictions, inherited
from gpuaff.launch.launchers import Launcher, Row
from gpuaff.launch.said import Said, all_said
from gpuaff.launch.variables import Get, number
from gpuaff.notices import Notice
from gpuaff.records import dataclass, field, replace
from gpuaff.system import environ, kernel

__all__ = ["ALONE", "Launcher", "Ranks", "found", "from_environment", "ranks"]


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process's place among those of its job.

    Attributes:
        local_rank: its number on this node, 0 … local_size − 1.
        local_size: how many there are on this node.
        rank: its number in the job; None when that is not told.
        size: how many there are in the job; None when that is not told.
        node: this node's number in the job; None when that is not told.
        nodes: how many nodes the job has; None when that is not told.
        launcher: who started the processes.
        sources: the variable that each number came from, by the number's name:
            ``{"local_rank": "SLURM_LOCALID", …}``. What it lacks is not told, or assumed.
        warnings: what was not as hoped.
    """

    local_rank: int
    local_size: int
    rank: int | None = None
    size: int | None = None
    node: int | None = None
    nodes: int | None = None
    launcher: Launcher = Launcher.UNKNOWN
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    warnings: tuple[Notice, ...] = field(default=(), compare=False)

    @property
    def is_told(self) -> bool:
        """Whether variables tell ``local_rank`` and ``local_size``; else rank 0 of 1 is assumed."""
        return "local_rank" in self.sources


ALONE = Ranks(local_rank=0, local_size=1)

Names = Callable[[], "tuple[str, ...]"]
"""Gives the names of the programs above this process, the nearest first."""


def ranks() -> Ranks:
    """Which of its job's processes this is, and where each number came from.

    Read from what the launcher put into the environment: torchrun, srun, the mpiruns of Open MPI,
    MPICH, Intel MPI and MVAPICH, Cray PALS, Flux, jsrun, DeepSpeed, Horovod and Dragon. Of several
    that run inside each other the innermost counts. :func:`gpuaff.set_affinity` without numbers
    uses the same.

    Where nobody tells, it is rank 0 of 1, with the warning ``no-rank``. It is the same with
    ``bad-rank`` where the launcher's variables name no rank; ``is_told`` is False in both cases.
    Never raises.
    """
    here = found(environ.get, host=kernel.host_name(), above=programs_above, cgroup=_own_cgroup)
    if here.is_told and inherited.is_child() and not _is_its_own(here):
        remark = inherited.remark(here.local_rank, here.local_size)
        here = replace(here, warnings=(*here.warnings, remark))
    return here


def _is_its_own(here: Ranks) -> bool:
    return inherited.has_set(here.sources[name] for name in ("local_rank", "local_size"))


def from_environment() -> tuple[Ranks | None, tuple[Notice, ...]]:
    """What :func:`ranks` finds, for ``set_affinity``.

    Returns:
        The ranks, or None where the launcher's variables name no rank; and what to say about it.
    """
    here = ranks()
    is_bad = any(notice.code == "bad-rank" for notice in here.warnings)
    return None if is_bad else here, here.warnings


def _own_cgroup() -> str:
    return kernel.Tree().read("proc/self/cgroup") or ""


def found(
    get: Get,
    *,
    host: str | None = None,
    above: Names = tuple,
    cgroup: Callable[[], str] = str,
) -> Ranks:
    """:func:`ranks`, with an environment from anywhere. Pure.

    Args:
        get: the environment.
        host: this machine's name.
        above: asked only where variables contradict each other, or this machine.
        cgroup: what ``/proc/self/cgroup`` holds; asked likewise.
    """
    told = all_said(get)
    stale = contradictions.left_by_slurm(get, told, host, above, cgroup)
    if stale is not None:
        told = [one for one in told if one.row.launcher is not Launcher.SLURM]
    said, remark = contradictions.settle(told, above)
    remarks = tuple(notice for notice in (stale, remark) if notice is not None)
    if said is None:
        alone = _world(ALONE, get, _NOBODY)
        return replace(alone, warnings=(*remarks, _no_rank(get, alone, stale)))
    if said.local_rank is None or said.local_size is None:
        return replace(ALONE, launcher=said.row.launcher, warnings=(*remarks, _bad_rank(said)))
    here = Ranks(
        local_rank=said.local_rank,
        local_size=said.local_size,
        launcher=said.row.launcher,
        sources={"local_rank": said.rank_from, "local_size": said.size_from},
    )
    here = _world(here, get, said.row)
    return replace(here, warnings=(*remarks, *said.remarks, *here.warnings))


_MOST = 64
"""The most processes that are looked at; a chain that changes meanwhile has no end."""


def programs_above() -> tuple[str, ...]:
    """The names of the programs above this process, the nearest first."""
    names: list[str] = []
    pid = kernel.parent_id()
    while pid is not None and len(names) < _MOST:
        names.append(kernel.name_of(pid) or "")
        pid = kernel.parent_of(pid)
    return tuple(names)


_NOBODY = Row(launcher=Launcher.UNKNOWN, local_rank="", rank="PMI_RANK", size="PMI_SIZE")
"""Where nobody tells the local rank, PMI or PMIx may tell the rank in the job."""


def _world(here: Ranks, get: Get, row: Row) -> Ranks:
    """With the numbers in the whole job. What cannot be meant is not told."""
    numbers: dict[str, int] = {}
    names = {"rank": row.rank, "size": row.size, "node": row.node, "nodes": row.nodes}
    if row is _NOBODY and not get("PMI_RANK"):
        names["rank"] = "PMIX_RANK"
    if row.launcher is Launcher.SLURM and not get(row.size or ""):
        names |= {"size": "SLURM_NTASKS", "nodes": "SLURM_NNODES"}
    for key, name in names.items():
        value = number(get(name)) if name else None
        if value is not None:
            numbers[key] = value
    wrong = _contradiction(here, numbers)
    if wrong is not None:
        for key in wrong:
            numbers.pop(key, None)
    sources = {**here.sources, **{key: str(names[key]) for key in numbers}}
    warnings = here.warnings
    if wrong is not None:
        said = ", ".join(f"{names[key]}={get(names[key] or '')!r}" for key in wrong if names[key])
        text = (
            f"{said} cannot be, beside rank {here.local_rank} of {here.local_size} on this node: "
            "the numbers in the whole job count as not told; look at who set them"
        )
        warnings = (*warnings, Notice("world-unknown", text, rank=here.local_rank))
    return replace(
        here,
        rank=numbers.get("rank"),
        size=numbers.get("size"),
        node=numbers.get("node"),
        nodes=numbers.get("nodes"),
        sources=sources,
        warnings=warnings,
    )


def _contradiction(here: Ranks, numbers: Mapping[str, int]) -> tuple[str, ...] | None:
    """The numbers that cannot be; None where all can."""
    rank, size = numbers.get("rank"), numbers.get("size")
    node, nodes = numbers.get("node"), numbers.get("nodes")
    if size is not None and (size < here.local_size or (rank is not None and rank >= size)):
        return ("rank", "size")
    if nodes is not None and (nodes == 0 or (node is not None and node >= nodes)):
        return ("node", "nodes")
    return None


def _bad_rank(said: Said) -> Notice:
    return Notice(
        "bad-rank",
        f"{said.why}: this names no rank of this node ({said.row.launcher.value}); correct the "
        "variables, or call set_affinity(local_rank, nproc_per_node)",
    )


def _no_rank(get: Get, alone: Ranks, stale: Notice | None) -> Notice:
    return Notice(
        "no-rank",
        f"{_why_nobody(get, alone, stale)}: {_AS_ALONE}; start under torchrun, "
        "srun or mpirun, or call set_affinity(local_rank, nproc_per_node)",
    )


_AS_ALONE = "taking this to be rank 0 of 1"


def narrows_nothing(no_rank: Notice, visible: int) -> Notice:
    """The remark ``no-rank`` where several GPUs are visible, and any of them may be this rank's.

    Args:
        no_rank: the remark as :func:`ranks` makes it.
        visible: how many GPUs are visible.
    """
    instead = f"{visible} GPUs are visible, so the mask stays"
    return replace(no_rank, message=no_rank.message.replace(_AS_ALONE, instead))


def _why_nobody(get: Get, alone: Ranks, stale: Notice | None) -> str:
    if alone.rank is not None and alone.size != 1:
        return (
            f"{alone.sources['rank']}={alone.rank} is the rank in the whole job, and no variable "
            "tells the one on this node"
        )
    if stale is not None:
        return "srun's variables count as left over, and no other launcher's tell the rank"
    if get("SLURM_JOB_ID"):
        tasks = number(get("SLURM_NTASKS")) or 1
        of_many = f", and this process is none of the job's {tasks} tasks" if tasks > 1 else ""
        return f"a batch script or a shell of Slurm is no task of srun{of_many}"
    return (
        "no launcher's variables tell the rank on this node (LOCAL_RANK and LOCAL_WORLD_SIZE, "
        "SLURM_LOCALID, OMPI_COMM_WORLD_LOCAL_RANK and others are unset)"
    )
