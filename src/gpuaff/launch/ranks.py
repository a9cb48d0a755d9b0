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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpuaff._system import env, kernel
from gpuaff.launch import inherited, slurm
from gpuaff.launch.launchers import BY_PROGRAM, Launcher, Row, present, size_by
from gpuaff.launch.variables import Get, number
from gpuaff.notices import Notice

# What each launcher's variables say of this process's place on its node. Pure.


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherReport:
    """What one launcher says; both numbers are None where they name no rank.

    Attributes:
        row: the launcher.
        local_rank: the number on this node.
        local_size: how many there are on this node.
        rank_from: the variable that tells ``local_rank``.
        size_from: the one that tells ``local_size``.
        is_partial: whether only ``local_size`` is missing, as nobody tells it; ``told_rank`` is
            the number then.
        told_rank: the number on this node, whether or not ``local_size`` bears it out.
        why: what is wrong, where the numbers name no rank.
        remarks: what is assumed, where they do.
    """

    row: Row
    local_rank: int | None = None
    local_size: int | None = None
    rank_from: str
    size_from: str = ""
    is_partial: bool = False
    told_rank: int | None = None
    why: str = ""
    remarks: tuple[Notice, ...] = ()

    @property
    def place(self) -> tuple[int | None, int | None]:
        """Both numbers."""
        return self.local_rank, self.local_size


def launcher_reports(get: Get) -> list[LauncherReport]:
    """What the launchers say whose variables are there, from the inside out."""
    return [_report(get, row) for row in present(get)]


def _report(get: Get, row: Row) -> LauncherReport:
    text, name = get(row.local_rank), row.local_rank
    rank = number(text)
    if rank is None:
        why = f"{name}={_shown(text)} is no number of a rank"
        return LauncherReport(row=row, rank_from=name, is_partial=not text, why=why)
    if row.launcher is Launcher.TORCHRUN and rank == 0:
        rank, name = _virtual(get) or (rank, name)
    if row.local_size is None or not get(row.local_size):
        return _without_size(get, row, rank)
    size = size_by(get, row)
    size_text = f"{row.local_size}={_shown(get(row.local_size))}"
    if not size:
        also = f" with SLURM_NODEID={_shown(get('SLURM_NODEID'))}" if _is_srun(row) else ""
        why = f"{size_text}{also} tells no number of processes here"
    elif rank >= size:
        here = f" ({size} on this node)" if _is_srun(row) else ""
        why = f"{name}={rank} is not below {size_text}{here}"
    else:
        return LauncherReport(
            row=row,
            local_rank=rank,
            local_size=size,
            told_rank=rank,
            rank_from=name,
            size_from=row.local_size,
        )
    return LauncherReport(row=row, rank_from=name, told_rank=rank, why=why)


def _is_srun(row: Row) -> bool:
    return row.launcher is Launcher.SLURM


def _without_size(get: Get, row: Row, rank: int) -> LauncherReport:
    """A job of one process has one here.

    Flux tells how many processes and nodes the job has, and spreads them evenly.
    """
    name = row.size or ""
    size, nodes = number(get(name)), number(get(row.nodes or ""))
    if (rank, size) == (0, 1):
        return LauncherReport(
            row=row,
            local_rank=0,
            local_size=1,
            told_rank=0,
            rank_from=row.local_rank,
            size_from=name,
        )
    if row.local_size is not None or not size or not nodes:
        lacks = row.local_size or f"{row.size} or {row.nodes}"
        why = f"{row.local_rank}={rank} is set, and {lacks} does not tell how many there are here"
        return LauncherReport(
            row=row, rank_from=row.local_rank, told_rank=rank, is_partial=True, why=why
        )
    most = -(-size // nodes)
    if rank >= most:
        why = (
            f"{row.local_rank}={rank} is more than {row.size}={size} processes on "
            f"{row.nodes}={nodes} nodes allow, when they are spread evenly"
        )
        return LauncherReport(
            row=row, rank_from=row.local_rank, told_rank=rank, is_partial=True, why=why
        )
    return LauncherReport(
        row=row,
        local_rank=rank,
        local_size=most,
        told_rank=rank,
        rank_from=row.local_rank,
        size_from=name,
        remarks=() if nodes == 1 else (_spread(row, size, nodes, most, rank),),
    )


def _spread(row: Row, size: int, nodes: int, most: int, rank: int) -> Notice:
    return Notice(
        "size-assumed",
        f"{row.launcher.value} does not tell how many of its {size} processes are on this node; "
        f"on {nodes} nodes, evenly, it is {most}: where they are spread otherwise, call "
        "set_affinity(local_rank, nproc_per_node)",
        rank=rank,
    )


def _virtual(get: Get) -> tuple[int, str] | None:
    """The place that ``torchrun --virtual-local-rank`` hides.

    It sets LOCAL_RANK=0 for each, and shows each the GPU of its place alone. RANK counts on from
    node to node, by GROUP_RANK.
    """
    rank, size = number(get("RANK")), number(get("WORLD_SIZE"))
    here = number(get("LOCAL_WORLD_SIZE"))
    if rank is None or not here or "," in (get("CUDA_VISIBLE_DEVICES") or ","):
        return None
    group = 0 if size == here else number(get("GROUP_RANK"))
    groups = 1 if size == here else number(get("GROUP_WORLD_SIZE"))
    if group is None or groups is None or size != groups * here:
        return None
    place = rank - group * here
    return (place, "RANK") if 0 < place < here else None


def _shown(text: str | None) -> str:
    """A value as it is quoted; a long one is cut."""
    if text is None:
        return "(unset)"
    return repr(text if len(text) <= 40 else f"{text[:37]}...")


# Which launcher counts where several have left variables. Pure.


def settle(
    told: Sequence[LauncherReport], above: Callable[[], tuple[str, ...]]
) -> tuple[LauncherReport | None, Notice | None]:
    """The launcher that counts, and what to say where others contradict it.

    Args:
        told: what each says, from the inside out.
        above: gives the names of the programs above this process, the nearest first.
    """
    told = _completed(told)
    if not told:
        return None, None
    first, last = told[0], told[-1]
    is_outside = len(told) == 2 and first.local_size == 1 < (last.local_size or 1)
    if is_outside and last.row.launcher is Launcher.UNKNOWN:
        return last, None  # the one process has started others
    against = [one for one in told[1:] if _contradicts(one, first)]
    if not against or not first.row.programs:
        return first, _contradiction_notice(first, against, is_above=None) if _matters(
            against
        ) else None
    nearest = next((BY_PROGRAM[name] for name in above() if name in BY_PROGRAM), None)
    if nearest is first.row.launcher:
        left = [one for one in against if one.row.launcher is Launcher.UNKNOWN]
        return first, _contradiction_notice(first, left, is_above=nearest) if left else None
    chosen = next((one for one in against if one.row.launcher is nearest), None)
    if chosen is not None:
        return chosen, _contradiction_notice(chosen, [first], is_above=nearest)
    return first, _contradiction_notice(first, against, is_above=None)


def _completed(told: Sequence[LauncherReport]) -> list[LauncherReport]:
    """Without those who lack a number that somebody else tells of the same rank.

    LOCAL_RANK alone is set by many scripts; beside a launcher's numbers it tells nothing new.
    """
    return [one for one in told if not (one.is_partial and _is_told(one, told))]


def _is_told(part: LauncherReport, told: Sequence[LauncherReport]) -> bool:
    others = [one for one in told if one is not part and one.local_rank is not None]
    if part.row.launcher is Launcher.UNKNOWN:
        return bool(others)
    if not part.row.programs:
        return False  # it starts children of another launcher's process
    return any(one.local_rank == part.told_rank for one in others)


def _contradicts(one: LauncherReport, first: LauncherReport) -> bool:
    """Whether it tells of several processes here, and of another place for this one.

    A launcher that has started one process here has started another launcher.
    """
    if one.local_size is None or one.place == first.place:
        return False
    return one.local_size > 1 or one.row.launcher is Launcher.UNKNOWN


def _matters(against: Sequence[LauncherReport]) -> bool:
    """Launchers around torchrun are no contradiction: ``launch.consistency`` names them."""
    return any(one.row.launcher is Launcher.UNKNOWN for one in against)


def _contradiction_notice(
    counts: LauncherReport, against: Sequence[LauncherReport], *, is_above: Launcher | None
) -> Notice:
    other = against[0]
    why = (
        f"{is_above.value} has started this process, and the others are left over"
        if is_above is not None
        else f"{counts.row.launcher.value} mostly runs inside the others"
    )
    return Notice(
        "ranks-contradict",
        f"{_place(counts)}, and {_place(other)}: the first counts, as {why}; unset what is left "
        "over, or call set_affinity(local_rank, nproc_per_node)",
        rank=counts.local_rank,
    )


def _place(said: LauncherReport) -> str:
    where = f"{said.rank_from}, {said.size_from}" if said.size_from else said.rank_from
    if said.local_rank is None:
        return f"{where} name no rank"
    return f"{where} tell of rank {said.local_rank} of {said.local_size}"


def left_by_slurm(
    get: Get,
    told: Sequence[LauncherReport],
    host: str | None,
    above: Callable[[], tuple[str, ...]],
    cgroup: Callable[[], str] = str,
) -> Notice | None:
    """What to say where srun's variables are those of a step on other machines.

    A shell that was opened from a step (ssh with the environment, tmux, a container) keeps them. A
    node's name in Slurm need not be its host's, so a step's daemon above this process proves that
    they are right. So does the step's cgroup, where the daemon cannot be seen: /proc may hide
    root's processes (``hidepid``), as a container may.
    """
    if host is None or all(one.row.launcher is not Launcher.SLURM for one in told):
        return None

    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"):
        nodes = get(name)
        if not nodes:
            continue
        if slurm.holds(nodes, host) is not False or "slurmstepd" in above():
            return None
        if slurm.is_cgroup_of_step(get, cgroup()):
            return None
        return Notice(
            "ranks-stale",
            f"{name}={nodes[:80]} does not name this machine, {host}, and no step of Slurm is "
            "above this process: srun's variables are left over and do not count; unset them, or "
            "in a container that has another host name, call set_affinity(local_rank, "
            "nproc_per_node)",
        )
    return None


__all__ = ["ALONE", "Launcher", "Ranks", "found", "from_environment", "ranks"]


@dataclass(frozen=True, slots=True, kw_only=True)
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
    here = found(env.get, host=kernel.host_name(), above=programs_above, cgroup=_own_cgroup)
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
    told = launcher_reports(get)
    stale = left_by_slurm(get, told, host, above, cgroup)
    if stale is not None:
        told = [one for one in told if one.row.launcher is not Launcher.SLURM]
    said, remark = settle(told, above)
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


def _bad_rank(said: LauncherReport) -> Notice:
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


# Which launcher started the ranks in use.
#
# Launchers run inside each other (torchrun inside srun, mpirun inside a batch job), and a process
# inherits the variables of all of them. Only the innermost one's speak of these ranks.


def active_launcher(get: Get, ranks: Ranks) -> Launcher:
    """The launcher that started these ranks.

    Args:
        get: the environment.
        ranks: the ranks in use. Where they were given as arguments, a launcher whose own count
            differs has started something else: a shell, one process that started the ranks itself.
    """
    if ranks.launcher is not Launcher.UNKNOWN:
        return ranks.launcher
    for row in present(get):
        if row.launcher is not Launcher.UNKNOWN and _started(get, row, ranks):
            return row.launcher
    return Launcher.UNKNOWN


def _started(get: Get, row: Row, ranks: Ranks) -> bool:
    """LOCAL_RANK and LOCAL_SIZE alone prove little: scripts set them, too."""
    if row.local_rank == "LOCAL_RANK" and number(get(row.local_rank)) != ranks.local_rank:
        return False
    return size_by(get, row) == ranks.local_size
