"""This process's rank, by what its launcher put into the environment.

The innermost launcher counts, even where its numbers are invalid: another's are those of another
process. Where two disagree (variables may be left over from a shell), the nearest launcher program
among this process's ancestors decides. ``docs/launchers.md`` has the rules, with examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from gpuaff._system import env, kernel
from gpuaff.launch import BY_PROGRAM, ROWS, Get, Launcher, Row, inherited, number, quoted
from gpuaff.notices import Notice

_CALL = "call set_affinity(local_rank, nproc_per_node)"


class Ranks(NamedTuple):
    """This process's place among those of its job.

    Attributes:
        local_rank: its number on this node, 0 … local_size − 1.
        local_size: the number of processes on this node.
        rank: its number in the job, of ``size``; both are None when unknown.
        node: this node's number in the job, of ``nodes``; both are None when unknown.
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
    sources: Mapping[str, str] = {}
    warnings: tuple[Notice, ...] = ()

    def __hash__(self) -> int:  # not of ``sources``, which is no hashable mapping
        return hash((self.local_rank, self.local_size, self.rank, self.size, self.launcher))

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
    return here if notice is None else here._replace(warnings=(*here.warnings, notice))


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
    rows, warnings = list(present(get)), tuple[Notice, ...]()
    others = [row for row in rows if row.launcher is not Launcher.SLURM]
    if others != rows and _is_stale(get, host, ancestors, cgroup):
        rows = others
        text = (
            f"SLURMD_NODENAME={quoted(get('SLURMD_NODENAME'))} is not this machine, {host}, and "
            "this process is in no step of Slurm, so srun's variables are ignored; unset them, "
            f"or, in a container with another host name, {_CALL}"
        )
        warnings = (Notice("ranks-stale", text),)
    report, contradictions = _settle([_report(get, row) for row in rows], ancestors)
    warnings += contradictions
    if report is None:
        alone = _with_job_numbers(ALONE, get, _PMI)
        return alone._replace(warnings=(*warnings, _no_rank(get, alone)))
    if report.rank is None or report.size is None:
        text = f"{report.problem}, so the rank on this node is invalid "
        text += f"({report.row.launcher.value}); correct the variables, or {_CALL}"
        warnings = (*warnings, Notice("bad-rank", text))
        return ALONE._replace(launcher=report.row.launcher, warnings=warnings)
    here = Ranks(
        local_rank=report.rank,
        local_size=report.size,
        launcher=report.row.launcher,
        sources={"local_rank": report.rank_variable, "local_size": report.size_variable},
        warnings=(*warnings, *report.warnings),
    )
    return _with_job_numbers(here, get, report.row)


def _is_stale(
    get: Get, host: str | None, ancestors: Callable[[], tuple[str, ...]], cgroup: Callable[[], str]
) -> bool:
    """Whether srun's variables are those of a step on another machine: ssh may hand them on.

    A node's name in Slurm may differ from its host name, so the step's daemon among the ancestors
    proves that they are right; so does the step's cgroup (``…/job_7/step_0/user/task_1``), where
    /proc hides root's processes.
    """
    node = get("SLURMD_NODENAME")
    if host is None or not node or short_name(node) == short_name(host):
        return False
    step = f"/job_{get('SLURM_JOB_ID')}/step_{get('SLURM_STEP_ID')}/"
    return step not in cgroup().replace("\n", "/") + "/" and "slurmstepd" not in ancestors()


def short_name(host: str) -> str:
    """A host's name without its domain."""
    return host.partition(".")[0].lower()


# What one launcher says.

# ``SLURM_INTERACTIVE_STEP`` of ``slurm.h``: the shell of ``salloc``, a step of one task.
_INTERACTIVE = str(0xFFFFFFFA)


class _Report(NamedTuple):
    """A launcher's numbers for this node; ``problem``: why they are no valid rank.

    ``is_partial``: the problem is that one of them is missing.
    """

    row: Row
    rank_variable: str
    rank: int | None = None  # None when it is missing or malformed
    size: int | None = None  # None when there is a problem
    size_variable: str = ""
    problem: str = ""
    is_partial: bool = False
    warnings: tuple[Notice, ...] = ()


def present(get: Get) -> Iterator[Row]:
    """The rows whose variables are set, valid or not, the innermost first.

    ``LOCAL_RANK`` belongs to the first launcher whose marks are set.
    """
    taken: set[str] = set()
    # Of ``salloc``, or of ``srun --pty``: what is started there is started by hand.
    is_shell = get("SLURM_STEP_ID") == _INTERACTIVE or bool(get("SLURM_PTY_PORT"))
    for row in ROWS:
        is_set = all(map(get, (row.local_rank, *row.marks)))
        if row.launcher is Launcher.UNKNOWN:  # one alone is an incomplete rank, which is reported
            is_set = any(map(get, (row.local_rank, row.local_size)))
        if is_shell and row.launcher is Launcher.SLURM:
            continue
        if is_set and row.local_rank not in taken:
            taken.add(row.local_rank)
            yield row


def local_size(get: Get, row: Row) -> int | None:
    """How many processes a launcher says that it started on this node; None if it does not."""
    if row.launcher is not Launcher.SLURM:
        return number(get(row.local_size))
    from gpuaff.launch import slurm  # only tasks of Slurm need it

    return slurm.tasks_here(get)


def _report(get: Get, row: Row) -> _Report:
    name, text = row.local_rank, get(row.local_rank)
    rank = number(text)
    if rank is None:
        problem = f"{name}={quoted(text)} is not a rank number"
        return _Report(row, name, problem=problem, is_partial=not text)
    if row.launcher is Launcher.TORCHRUN and rank == 0:
        rank, name = _virtual_rank(get) or (rank, name)
    if not get(row.local_size):
        return _by_job_size(get, _Report(row, name), rank)
    size, problem = local_size(get, row), ""
    given = f"{row.local_size}={quoted(get(row.local_size))}"
    if row.launcher is Launcher.SLURM:
        given += f" at SLURM_NODEID={quoted(get('SLURM_NODEID'))}"
    if not size:
        problem = f"{given} is not a number of processes on this node"
    elif rank >= size:
        problem = f"{name}={rank} is not below {size} ({given})"
    return _Report(row, name, rank, None if problem else size, row.local_size, problem)


def _by_job_size(get: Get, report: _Report, rank: int) -> _Report:
    """A job of one process has one here; Flux gives the numbers of processes and nodes only."""
    row, report = report.row, report._replace(rank=rank)
    size, nodes = number(get(row.size)), number(get(row.nodes))
    if (rank, size) == (0, 1):
        return report._replace(size=1, size_variable=row.size)
    most = -(-size // nodes) if size and nodes and not row.local_size else 0
    spread = f"{row.size}={size} spread evenly over {row.nodes}={nodes}"
    if rank >= most:
        missing = row.local_size or f"{row.size} or {row.nodes}"
        why = f"not below {most}, the most on one node with {spread}"
        problem = f"{row.local_rank}={rank} is " + (why if most else f"set, but {missing} is not")
        return report._replace(problem=problem, is_partial=True)
    text = f"{row.launcher.value} does not give the number of ranks on this node; {most} are "
    text += f"assumed ({spread}): if they are not spread evenly, {_CALL}"
    warnings = (Notice("size-assumed", text, rank=rank),) if (nodes or 1) > 1 else ()
    return report._replace(size=most, size_variable=row.size, warnings=warnings)


def _virtual_rank(get: Get) -> tuple[int, str] | None:
    """The local rank that ``torchrun --virtual-local-rank`` hides.

    It sets LOCAL_RANK=0 for every rank and shows each rank its own GPU only. RANK counts on from
    node to node, by GROUP_RANK.
    """
    names = "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"
    rank, size, here, group, groups = (number(get(name)) for name in names)
    if rank is None or not here or "," in (get("CUDA_VISIBLE_DEVICES") or ","):
        return None
    if size == here:
        group, groups = 0, 1
    if group is None or groups is None or size != groups * here:
        return None
    hidden = rank - group * here
    return (hidden, "RANK") if 0 < hidden < here else None


# Contradictions between launchers.


def _settle(
    reports: list[_Report], ancestors: Callable[[], tuple[str, ...]]
) -> tuple[_Report | None, tuple[Notice, ...]]:
    """The report that counts, and a warning where the next one contradicts it."""
    if not all(report.problem for report in reports):
        # Another launcher gives what a partial report lacks, but for torchrun and its like: they
        # start children of other ranks.
        reports = [report for report in reports if report.row.is_python or not report.is_partial]
    first = reports[0] if reports else None
    if first is None or first.row.is_python:  # launchers around torchrun are `ranks-beside`
        return first, ()
    # A launcher that started one process here may have started the other launcher.
    others = [
        report
        for report in reports[1:]
        if report.size and (report.rank, report.size) != (first.rank, first.size)
        if report.size > 1 or report.row.launcher is Launcher.UNKNOWN
    ]
    if not others:
        return first, ()
    other = others[0]
    is_unknown = other.row.launcher is Launcher.UNKNOWN
    if is_unknown and first.size == 1:
        return other, ()  # the one process of the launcher has started the ranks
    nearest = next((BY_PROGRAM[name] for name in ancestors() if name in BY_PROGRAM), None)
    used, unused = (other, first) if nearest is other.row.launcher else (first, other)
    is_proven = nearest is used.row.launcher
    if is_proven and used is first and not is_unknown:
        return first, ()
    gives = [
        f"{one.rank_variable} gives no valid rank"
        if one.problem
        else f"{one.rank_variable} and {one.size_variable} give rank {one.rank} of {one.size}"
        for one in (used, unused)
    ]
    started = "started this process" if is_proven else "usually runs inside the other"
    text = (
        f"{', but '.join(gives)}: the first is used, because {used.row.launcher.value} {started}; "
        f"unset the variables that are left over, or {_CALL}"
    )
    return used, (Notice("ranks-contradict", text, rank=used.rank),)


# Numbers in the whole job.

# Without a local rank, PMI or PMIx may give the rank in the job.
_PMI = ROWS[-1]._replace(rank="PMI_RANK", size="PMI_SIZE")


def _with_job_numbers(here: Ranks, get: Get, row: Row) -> Ranks:
    """With the numbers in the whole job; invalid ones are unknown."""
    names = {"rank": row.rank, "size": row.size, "node": row.node, "nodes": row.nodes}
    if row is _PMI and not get("PMI_RANK"):
        names["rank"] = "PMIX_RANK"
    numbers = {key: number(get(name)) for key, name in names.items()}
    rank, size, node, nodes = numbers.values()
    impossible: tuple[str, ...] = ()
    if size is not None and size < max(here.local_size, (rank or 0) + 1):
        impossible = "rank", "size"
    elif nodes is not None and nodes <= (node or 0):
        impossible = "node", "nodes"
    known: dict[str, Any] = {key: found for key, found in numbers.items() if key not in impossible}
    sources = {key: names[key] for key, found in known.items() if found is not None}
    found = here._replace(**known, sources={**here.sources, **sources})
    if not impossible:
        return found
    given = ", ".join(f"{names[key]}={get(names[key])!r}" for key in impossible if names[key])
    text = (
        f"{given} is impossible for rank {here.local_rank} of {here.local_size} on this node, so "
        "the numbers in the whole job are unknown; correct what sets them"
    )
    notice = Notice("world-unknown", text, rank=here.local_rank)
    return found._replace(warnings=(*here.warnings, notice))


# No rank.


def _no_rank(get: Get, alone: Ranks) -> Notice:
    if alone.rank is not None and alone.size != 1:
        given = f"{alone.sources['rank']}={alone.rank}"
        why = f"{given} is the rank in the whole job; that on this node is not set"
    elif get("SLURM_JOB_ID"):
        why = "a batch script or a shell of Slurm is no task of srun"
    else:
        why = (
            "no launcher has set the rank on this node (LOCAL_RANK and LOCAL_WORLD_SIZE, "
            "SLURM_LOCALID, OMPI_COMM_WORLD_LOCAL_RANK and others are unset)"
        )
    text = (
        f"{why}: rank 0 of 1 is assumed where one GPU is visible, and the mask stays where several "
        f"are; start under torchrun, srun or mpirun, or {_CALL}"
    )
    return Notice("no-rank", text)


def active_row(get: Get, ranks: Ranks) -> Row:
    """The row of the launcher that started these ranks; that of ``UNKNOWN`` where none did.

    Where they were given as arguments, a launcher with another count started something else: a
    shell, or one process that started the ranks itself.
    """
    for row in present(get):
        if row.launcher is ranks.launcher:
            return row
        # LOCAL_RANK and LOCAL_SIZE alone prove little: scripts set them, too.
        is_other = row.local_rank == "LOCAL_RANK" and number(get("LOCAL_RANK")) != ranks.local_rank
        is_of_size = local_size(get, row) == ranks.local_size
        if ranks.launcher is Launcher.UNKNOWN and is_of_size and not is_other:
            return row
    return ROWS[-1]
