"""This process's rank, by what its launcher put into the environment.

The rules (``docs/launchers.md`` has examples):

1. Launchers are read innermost first (:mod:`gpuaff.launch.launchers`), and the innermost counts,
   even where its numbers are invalid: another launcher's are those of another process.
2. Variables may be left over from a shell inside another launcher. Where two launchers disagree,
   the nearest launcher program among this process's ancestors decides.
3. Numbers in torchrun's variables without torchrun come last, but before those of a launcher that
   started a single process here, which then started others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from gpuaff._system import env, kernel
from gpuaff.launch import inherited, slurm
from gpuaff.launch.launchers import BY_PROGRAM, ROWS, Get, Launcher, Row, number, quoted
from gpuaff.notices import Notice

__all__ = ["ALONE", "Launcher", "Ranks", "classify_ranks", "from_environment", "ranks"]

_CALL = "call set_affinity(local_rank, nproc_per_node)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process's place among those of its job.

    Attributes:
        local_rank: its number on this node, 0 … local_size − 1.
        local_size: the number of processes on this node.
        rank: its number in the job; None when unknown.
        size: the number of processes in the job; None when unknown.
        node: this node's number in the job; None when unknown.
        nodes: the number of nodes of the job; None when unknown.
        launcher: what started the processes.
        sources: the variable that each number comes from, by the number's name:
            ``{"local_rank": "SLURM_LOCALID", …}``. Missing names are unknown, or assumed.
        warnings: what was assumed, ignored or contradictory.
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
        """Whether variables give ``local_rank`` and ``local_size``; if not, 0 of 1 is assumed."""
        return "local_rank" in self.sources


ALONE = Ranks(local_rank=0, local_size=1)


def ranks() -> Ranks:
    """This process's rank on its node and in its job, and where each number comes from.

    Read from the variables of torchrun, srun, the mpiruns of Open MPI, MPICH, Intel MPI and
    MVAPICH, Cray PALS, Flux, jsrun, DeepSpeed, Horovod and Dragon. Of several that run inside each
    other the innermost counts. :func:`gpuaff.set_affinity` without numbers uses the same.

    Without a launcher it is rank 0 of 1, with the warning ``no-rank``; where the launcher's numbers
    are invalid, the same with ``bad-rank``. ``is_told`` is False in both cases. Never raises.
    """
    here = classify_ranks(
        env.get,
        host=kernel.host_name(),
        ancestors=lambda: tuple(kernel.name_of(pid) or "" for pid in kernel.ancestors()),
        cgroup=lambda: kernel.Tree().read("proc/self/cgroup") or "",
    )
    if not here.is_told:
        return here
    variables = (here.sources["local_rank"], here.sources["local_size"])
    notice = inherited.rank_inherited(here.local_rank, here.local_size, variables)
    return here if notice is None else replace(here, warnings=(*here.warnings, notice))


def from_environment() -> tuple[Ranks | None, tuple[Notice, ...]]:
    """:func:`ranks` for ``set_affinity``: None where the launcher's numbers are invalid."""
    here = ranks()
    is_bad = any(notice.code == "bad-rank" for notice in here.warnings)
    return None if is_bad else here, here.warnings


def classify_ranks(
    get: Get,
    *,
    host: str | None = None,
    ancestors: Callable[[], tuple[str, ...]] = tuple,
    cgroup: Callable[[], str] = str,
) -> Ranks:
    """:func:`ranks` for any environment. Pure.

    The names of the processes above this one, the nearest first, and the text of
    ``/proc/self/cgroup`` are read only where variables contradict each other or this machine.
    """
    reports, stale = [_report(get, row) for row in present(get)], None
    if any(report.row.launcher is Launcher.SLURM for report in reports):
        stale = _stale_step(get, host, ancestors, cgroup)
    if stale is not None:
        reports = [report for report in reports if report.row.launcher is not Launcher.SLURM]
    report, contradiction = _settle(reports, ancestors)
    warnings = tuple(notice for notice in (stale, contradiction) if notice is not None)
    if report is None:
        alone = _with_job_numbers(ALONE, get, _PMI)
        return replace(alone, warnings=(*warnings, _no_rank(get, alone, stale)))
    if report.local_rank is None or report.local_size is None:
        bad = Notice(
            "bad-rank",
            f"{report.problem}, so the rank on this node is invalid ({report.row.launcher.value}); "
            f"correct the variables, or {_CALL}",
        )
        return replace(ALONE, launcher=report.row.launcher, warnings=(*warnings, bad))
    here = Ranks(
        local_rank=report.local_rank,
        local_size=report.local_size,
        launcher=report.row.launcher,
        sources={"local_rank": report.rank_variable, "local_size": report.size_variable},
        warnings=(*warnings, *report.warnings),
    )
    return _with_job_numbers(here, get, report.row)


# What one launcher says.


class _Report(NamedTuple):
    """A launcher's numbers for this node."""

    row: Row
    rank_variable: str
    local_rank: int | None = None  # None when it is missing or malformed
    local_size: int | None = None  # None when there is a problem
    size_variable: str = ""
    problem: str = ""  # why the numbers are no valid rank
    is_partial: bool = False  # one of the numbers is missing, and that is the only problem
    warnings: tuple[Notice, ...] = ()


def present(get: Get) -> Iterator[Row]:
    """The rows whose variables are set, valid or not, the innermost first.

    ``LOCAL_RANK`` belongs to the first launcher whose marks are set.
    """
    taken: set[str] = set()
    for row in ROWS:
        if row.local_rank not in taken and _is_set(get, row):
            taken.add(row.local_rank)
            yield row


def _is_set(get: Get, row: Row) -> bool:
    if row.launcher is Launcher.UNKNOWN:  # one alone is an incomplete rank, which is reported
        return any(map(get, (row.local_rank, row.local_size)))
    if row.launcher is Launcher.SLURM and slurm.is_shell(get):
        return False
    return all(map(get, (row.local_rank, *row.marks)))


def local_size(get: Get, row: Row) -> int | None:
    """How many processes a launcher says that it started on this node; None if it does not."""
    return slurm.tasks_here(get) if row.launcher is Launcher.SLURM else number(get(row.local_size))


def _report(get: Get, row: Row) -> _Report:
    text, name = get(row.local_rank), row.local_rank
    rank = number(text)
    if rank is None:
        problem = f"{name}={quoted(text)} is not a rank number"
        return _Report(row, name, problem=problem, is_partial=not text)
    if row.launcher is Launcher.TORCHRUN and rank == 0:
        rank, name = _virtual_rank(get) or (rank, name)
    report, size = _Report(row, name, rank), local_size(get, row)
    if not get(row.local_size):
        return _by_job_size(get, report, rank)
    is_slurm = row.launcher is Launcher.SLURM
    given = f"{row.local_size}={quoted(get(row.local_size))}"
    if size and rank < size:
        return report._replace(local_size=size, size_variable=row.local_size)
    if size:
        here = f" ({size} on this node)" if is_slurm else ""
        return report._replace(problem=f"{name}={rank} is not below {given}{here}")
    at = f" at SLURM_NODEID={quoted(get('SLURM_NODEID'))}" if is_slurm else ""
    return report._replace(problem=f"{given}{at} is not a number of processes on this node")


def _by_job_size(get: Get, report: _Report, rank: int) -> _Report:
    """A job of one process has one here.

    Flux gives the numbers of processes and nodes only; it spreads the processes evenly.
    """
    row = report.row
    size, nodes = number(get(row.size)), number(get(row.nodes))
    if (rank, size) == (0, 1):
        return report._replace(local_size=1, size_variable=row.size)
    if row.local_size or not size or not nodes:
        missing = row.local_size or f"{row.size} or {row.nodes}"
        problem = f"{row.local_rank}={rank} is set, but {missing} is not"
        return report._replace(problem=problem, is_partial=True)
    most = -(-size // nodes)
    if rank >= most:
        problem = (
            f"{row.local_rank}={rank} is not below {most}, the most processes per node when "
            f"{row.size}={size} are spread evenly over {row.nodes}={nodes}"
        )
        return report._replace(problem=problem, is_partial=True)
    assumed = Notice(
        "size-assumed",
        f"{row.launcher.value} does not give the number of ranks on this node; {most} are assumed "
        f"({size} spread evenly over {nodes} nodes): if they are not spread evenly, {_CALL}",
        rank=rank,
    )
    warnings = (assumed,) if nodes > 1 else ()
    return report._replace(local_size=most, size_variable=row.size, warnings=warnings)


def _virtual_rank(get: Get) -> tuple[int, str] | None:
    """The local rank that ``torchrun --virtual-local-rank`` hides.

    It sets LOCAL_RANK=0 for every rank and shows each rank its own GPU only. RANK counts on from
    node to node, by GROUP_RANK.
    """
    rank, size = number(get("RANK")), number(get("WORLD_SIZE"))
    here = number(get("LOCAL_WORLD_SIZE"))
    if rank is None or not here or "," in (get("CUDA_VISIBLE_DEVICES") or ","):
        return None
    group, groups = number(get("GROUP_RANK")), number(get("GROUP_WORLD_SIZE"))
    if size == here:
        group, groups = 0, 1
    if group is None or groups is None or size != groups * here:
        return None
    hidden = rank - group * here
    return (hidden, "RANK") if 0 < hidden < here else None


# Contradictions between launchers.


def _settle(
    reports: Sequence[_Report], ancestors: Callable[[], tuple[str, ...]]
) -> tuple[_Report | None, Notice | None]:
    """The report that counts, and a warning where another one contradicts it."""
    reports = [report for report in reports if not _is_completed(report, reports)]
    if not reports:
        return None, None
    first, last = reports[0], reports[-1]
    is_unknown_inside = len(reports) == 2 and last.row.launcher is Launcher.UNKNOWN
    if is_unknown_inside and first.local_size == 1 < (last.local_size or 1):
        return last, None  # the one process of the launcher has started the ranks
    others = [report for report in reports[1:] if _contradicts(report, first)]
    nearest = None
    if others and first.row.programs:
        nearest = next((BY_PROGRAM[name] for name in ancestors() if name in BY_PROGRAM), None)
    chosen = next((report for report in others if report.row.launcher is nearest), None)
    if chosen is not None:
        return chosen, _ranks_contradict(chosen, first, is_proven=True)
    is_proven = nearest is first.row.launcher
    if is_proven or not first.row.programs:  # known launchers around it are `ranks-beside`
        others = [report for report in others if report.row.launcher is Launcher.UNKNOWN]
    return first, _ranks_contradict(first, others[0], is_proven=is_proven) if others else None


def _is_completed(partial: _Report, reports: Sequence[_Report]) -> bool:
    """Whether another launcher gives all of the numbers that one gives in part.

    Many scripts set LOCAL_RANK alone; launchers without programs start children of other ranks.
    """
    if not partial.is_partial:
        return False
    valid = [report.local_rank for report in reports if not report.problem]
    if partial.row.launcher is Launcher.UNKNOWN:
        return bool(valid)
    return bool(partial.row.programs) and partial.local_rank in valid


def _contradicts(report: _Report, first: _Report) -> bool:
    """A launcher that started one process here may have started the other launcher."""
    place = report.local_rank, report.local_size
    if report.local_size is None or place == (first.local_rank, first.local_size):
        return False
    return report.local_size > 1 or report.row.launcher is Launcher.UNKNOWN


def _ranks_contradict(used: _Report, other: _Report, *, is_proven: bool) -> Notice:
    started = "started this process" if is_proven else "usually runs inside the other"
    return Notice(
        "ranks-contradict",
        f"{_gives(used)}, but {_gives(other)}: the first is used, because "
        f"{used.row.launcher.value} {started}; unset the variables that are left over, or {_CALL}",
        rank=used.local_rank,
    )


def _gives(report: _Report) -> str:
    if report.problem:
        return f"{report.rank_variable} gives no valid rank"
    variables = f"{report.rank_variable} and {report.size_variable}"
    return f"{variables} give rank {report.local_rank} of {report.local_size}"


def _stale_step(
    get: Get,
    host: str | None,
    ancestors: Callable[[], tuple[str, ...]],
    cgroup: Callable[[], str],
) -> Notice | None:
    """The warning where srun's variables are those of a step on other machines.

    A shell that was opened from a step (ssh with the environment, tmux, a container) keeps them. A
    node's name in Slurm may differ from its host name, so the step's daemon among the ancestors
    proves that they are right. So does the step's cgroup, where /proc hides root's processes
    (``hidepid``, a container).
    """
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    name = next(filter(get, names), names[0])
    nodes = get(name) or ""
    if host is None or slurm.holds(nodes, host) is not False:
        return None
    if "slurmstepd" in ancestors() or slurm.is_cgroup_of_step(get, cgroup()):
        return None
    return Notice(
        "ranks-stale",
        f"{name}={nodes[:80]} does not name this machine, {host}, and this process is in no step "
        "of Slurm, so srun's variables are ignored; unset them, or, in a container with another "
        f"host name, {_CALL}",
    )


# Numbers in the whole job.

_PMI = Row(Launcher.UNKNOWN, "", rank="PMI_RANK", size="PMI_SIZE")
"""Without a local rank, PMI or PMIx may give the rank in the job."""


def _with_job_numbers(here: Ranks, get: Get, row: Row) -> Ranks:
    """With the numbers in the whole job; invalid ones are unknown."""
    names = {"rank": row.rank, "size": row.size, "node": row.node, "nodes": row.nodes}
    if row is _PMI and not get("PMI_RANK"):
        names["rank"] = "PMIX_RANK"
    if row.launcher is Launcher.SLURM and not get(row.size):
        names |= {"size": "SLURM_NTASKS", "nodes": "SLURM_NNODES"}
    found = {key: number(get(name)) for key, name in names.items()}
    warnings, impossible = here.warnings, _impossible(here, **found)
    if impossible:
        given = ", ".join(f"{names[key]}={get(names[key])!r}" for key in impossible if names[key])
        text = (
            f"{given} is impossible for rank {here.local_rank} of {here.local_size} on this node, "
            "so the numbers in the whole job are unknown; correct what sets them"
        )
        warnings = (*warnings, Notice("world-unknown", text, rank=here.local_rank))
        found |= dict.fromkeys(impossible)
    sources = {key: names[key] for key, value in found.items() if value is not None}
    numbers: dict[str, Any] = dict(found)
    return replace(here, **numbers, sources={**here.sources, **sources}, warnings=warnings)


def _impossible(
    here: Ranks, rank: int | None, size: int | None, node: int | None, nodes: int | None
) -> tuple[str, ...]:
    if size is not None and size < max(here.local_size, (rank or 0) + 1):
        return ("rank", "size")
    return ("node", "nodes") if nodes is not None and nodes <= (node or 0) else ()


# No rank.

_ASSUMED = "rank 0 of 1 is assumed"


def _no_rank(get: Get, alone: Ranks, stale: Notice | None) -> Notice:
    tasks = number(get("SLURM_NTASKS")) or 1
    if alone.rank is not None and alone.size != 1:
        given = f"{alone.sources['rank']}={alone.rank}"
        why = f"{given} is the rank in the whole job; that on this node is not set"
    elif stale is not None:
        why = "srun's variables are ignored, and no other launcher's are set"
    elif get("SLURM_JOB_ID"):
        of_many = f", and none of the job's {tasks} tasks" if tasks > 1 else ""
        why = f"a batch script or a shell of Slurm is no task of srun{of_many}"
    else:
        why = (
            "no launcher has set the rank on this node (LOCAL_RANK and LOCAL_WORLD_SIZE, "
            "SLURM_LOCALID, OMPI_COMM_WORLD_LOCAL_RANK and others are unset)"
        )
    return Notice("no-rank", f"{why}: {_ASSUMED}; start under torchrun, srun or mpirun, or {_CALL}")


def narrows_nothing(no_rank: Notice, visible: int) -> Notice:
    """The warning ``no-rank`` where ``visible`` GPUs are visible, more than one."""
    instead = f"{visible} GPUs are visible, so the mask stays"
    return replace(no_rank, message=no_rank.message.replace(_ASSUMED, instead))


# The launcher of given ranks.


def active_launcher(get: Get, ranks: Ranks) -> Launcher:
    """The launcher that started these ranks.

    Where they were given as arguments, a launcher with another count started something else: a
    shell, or one process that started the ranks itself.
    """
    if ranks.launcher is not Launcher.UNKNOWN:
        return ranks.launcher
    started = (row.launcher for row in present(get) if _has_started(get, row, ranks))
    return next(started, Launcher.UNKNOWN)


def _has_started(get: Get, row: Row, ranks: Ranks) -> bool:
    """LOCAL_RANK and LOCAL_SIZE alone prove little: scripts set them, too."""
    if row.launcher is Launcher.UNKNOWN:
        return False
    if row.local_rank == "LOCAL_RANK" and number(get(row.local_rank)) != ranks.local_rank:
        return False
    return local_size(get, row) == ranks.local_size
