"""What each launcher's variables say about this process's place on its node. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from gpuaff.launch import slurm
from gpuaff.launch.launchers import ROWS, Get, Launcher, Row, number
from gpuaff.notices import Notice


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherReport:
    """What one launcher says.

    Attributes:
        row: the launcher and its variables.
        local_rank: this process's number on its node; None when it is missing or malformed.
        local_size: the number of ranks on this node; None when there is a ``problem``.
        rank_variable: where ``local_rank`` comes from.
        size_variable: where ``local_size`` comes from.
        problem: why the numbers are no valid rank; empty when they are.
        is_partial: whether the problem is only that one of the numbers is missing.
        warnings: what is assumed.
    """

    row: Row
    local_rank: int | None = None
    local_size: int | None = None
    rank_variable: str
    size_variable: str = ""
    problem: str = ""
    is_partial: bool = False
    warnings: tuple[Notice, ...] = ()

    @property
    def launcher(self) -> Launcher:
        """The launcher."""
        return self.row.launcher

    @property
    def place(self) -> tuple[int | None, int | None]:
        """The rank and the number of ranks, if they are valid."""
        return (None, None) if self.problem else (self.local_rank, self.local_size)


def launcher_reports(get: Get) -> list[LauncherReport]:
    """The reports of the launchers whose variables are set, the innermost first."""
    return [_report(get, row) for row in present(get)]


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


def _report(get: Get, row: Row) -> LauncherReport:
    text, name = get(row.local_rank), row.local_rank
    rank = number(text)
    if rank is None:
        problem = f"{name}={quoted(text)} is not a rank number"
        return LauncherReport(row=row, rank_variable=name, problem=problem, is_partial=not text)
    if row.launcher is Launcher.TORCHRUN and rank == 0:
        rank, name = _virtual_rank(get) or (rank, name)
    report = LauncherReport(row=row, local_rank=rank, rank_variable=name)
    if not get(row.local_size):
        return _by_job_size(get, report, rank)
    is_slurm, size = row.launcher is Launcher.SLURM, local_size(get, row)
    given = f"{row.local_size}={quoted(get(row.local_size))}"
    if not size:
        at = f" at SLURM_NODEID={quoted(get('SLURM_NODEID'))}" if is_slurm else ""
        return replace(report, problem=f"{given}{at} is not a number of processes on this node")
    if rank >= size:
        here = f" ({size} on this node)" if is_slurm else ""
        return replace(report, problem=f"{name}={rank} is not below {given}{here}")
    return replace(report, local_size=size, size_variable=row.local_size)


def _by_job_size(get: Get, report: LauncherReport, rank: int) -> LauncherReport:
    """A job of one process has one here.

    Flux gives the numbers of processes and nodes only; it spreads the processes evenly.
    """
    row = report.row
    size, nodes = number(get(row.size)), number(get(row.nodes))
    if (rank, size) == (0, 1):
        return replace(report, local_size=1, size_variable=row.size)
    if row.local_size or not size or not nodes:
        missing = row.local_size or f"{row.size} or {row.nodes}"
        problem = f"{row.local_rank}={rank} is set, but {missing} is not"
        return replace(report, problem=problem, is_partial=True)
    most = -(-size // nodes)
    if rank >= most:
        problem = (
            f"{row.local_rank}={rank} is not below {most}, the most processes per node when "
            f"{row.size}={size} are spread evenly over {row.nodes}={nodes}"
        )
        return replace(report, problem=problem, is_partial=True)
    assumed = Notice(
        "size-assumed",
        f"{row.launcher.value} does not give the number of ranks on this node; {most} are assumed "
        f"({size} spread evenly over {nodes} nodes): if they are not spread evenly, call "
        "set_affinity(local_rank, nproc_per_node)",
        rank=rank,
    )
    warnings = (assumed,) if nodes > 1 else ()
    return replace(report, local_size=most, size_variable=row.size, warnings=warnings)


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


def quoted(text: str | None, *, most: int = 40) -> str:
    """A variable's value as a message quotes it; a long one is cut."""
    if text is None:
        return "(unset)"
    return repr(text if len(text) <= most else f"{text[: most - 3]}...")
