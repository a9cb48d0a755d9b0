"""The GPUs that a scheduler granted this process on this node, and whether each rank has its own.

``docs/claims.md`` ("What was granted") has the order of the sources. They are described in the
manual pages of sbatch and srun, in the manuals of Univa and Altair Grid Engine (resource maps), and
in Torque's administrator guide ("Exported batch environment variables"). LSF and PBS Pro set
CUDA_VISIBLE_DEVICES only. Where that is set, the visible GPUs count rather than a scheduler's
indices: inside a device cgroup Slurm counts those there from 0, but ``SLURM_STEP_GPUS`` has
others. The granted number still counts, because more may be visible.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from gpuaff._system import env, kernel
from gpuaff._system.subprocess import ProgramError, output_of
from gpuaff.cpuset import format_cpulist
from gpuaff.formatting import printable
from gpuaff.launch import inherited, slurm
from gpuaff.launch.inherited import ParentClaim
from gpuaff.launch.launchers import Get, Launcher, number
from gpuaff.launch.masks import carries, own_variables
from gpuaff.launch.ranks import Ranks, active_launcher
from gpuaff.launch.ranks import ranks as observe_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """What a scheduler granted here.

    Attributes:
        count: how many GPUs; None when unknown.
        indices: the GPUs that they are among, ascending, in the order of the machine's PCI
            addresses; there may be more than ``count``. None when unknown, or ``visible``.
        source: where that comes from, or why it is unknown, in words.
        visible: whether CUDA_VISIBLE_DEVICES is set: then at most ``count`` of its GPUs are meant.
    """

    count: int | None
    indices: tuple[int, ...] | None
    source: str
    visible: bool = False


def granted(*, may_ask: bool = True) -> Granted:
    """What this process was granted on this node.

    Args:
        may_ask: also call ``qstat`` (at most 5 seconds) in a job of a Grid Engine without resource
            maps, whose variables say nothing. It gives the number only.
    """
    file = env.get("PBS_GPUFILE") or ""
    found = classify_grant(
        env.get,
        names=env.names(_MAP),
        gpu_file=kernel.Tree().read(file.lstrip("/")) if file.startswith("/") else None,
        host=kernel.host_name(),
    )
    job = _grid_engine_job(env.get)
    if found.count is not None or job is None or not may_ask:
        return found
    count, source = ask_qstat(job)
    return replace(found, count=count, source=source)


def classify_grant(
    get: Get, *, names: Iterable[str] = (), gpu_file: str | None = None, host: str | None = None
) -> Granted:
    """:func:`granted` without ``qstat``, for any environment. Pure.

    The first scheduler that gives a number counts. One of two that contradict each other is left
    over from another job; which one is unknown, so the source names both.

    Args:
        get: the environment.
        names: the names of its variables that begin with ``SGE_HGR_``.
        gpu_file: the text of the file that ``PBS_GPUFILE`` names; None when it is unreadable.
        host: this machine's name.
    """
    grants = (_of_slurm(get), _of_maps(get, names), _of_torque(get, gpu_file, host), _of_lsf(get))
    some = [grant for grant in grants if grant is not None]
    counts = [grant for grant in some if grant.count is not None]
    found = (counts or some or [_grant(_NO_SCHEDULER)])[0]
    others = [grant.source for grant in counts[1:] if grant.count != found.count]
    if others:
        source = f"{found.source}, but {others[0]}: one is left over from another job"
        found = replace(found, source=source)
    if get("CUDA_VISIBLE_DEVICES") is None:
        return found
    source = "CUDA_VISIBLE_DEVICES" if found.count is None else found.source
    return replace(found, indices=None, source=source, visible=True)


_NO_SCHEDULER = (
    "no scheduler has set how many GPUs were granted (SLURM_GPUS_ON_NODE, SGE_HGR_gpu, "
    "PBS_GPUFILE, CUDA_VISIBLE_DEVICES are unset)"
)
_LONGEST = 300
"""The longest source in characters: errors quote it, and a variable may hold 128 KB of anything."""


def _grant(source: str, count: int | None = None, indices: Iterable[int] | None = None) -> Granted:
    listed = None if indices is None else tuple(sorted(set(indices)))
    line = printable(source[: _LONGEST + 1])
    return Granted(
        count=len(listed) if count is None and listed is not None else count,
        indices=listed,
        source=line if len(line) <= _LONGEST else f"{line[: _LONGEST - 3]}...",
    )


def _of_lsf(get: Get) -> Granted | None:
    """No ``LSB_`` variable lists GPUs: ``LSB_GPU_REQ`` is the administrator's default."""
    if not get("LSB_JOBID"):
        return None
    return _grant(
        "LSF gives its GPUs by CUDA_VISIBLE_DEVICES alone, which is unset: was the job submitted "
        "without -gpu, or with mps=...,nocvd?"
    )


# Slurm. ``SLURM_STEP_GPUS`` lists the GPUs of the task, or of the step where its tasks share them;
# ``SLURM_JOB_GPUS`` those of the batch script; ``SLURM_GPUS_ON_NODE`` counts those of the step
# here, or of the job.


def _of_slurm(get: Get) -> Granted | None:
    step, job = slurm.gpu_indices(get("SLURM_STEP_GPUS")), _of_batch_script(get)
    on_node = number(get("SLURM_GPUS_ON_NODE"))
    here = f"SLURM_GPUS_ON_NODE={on_node}"
    if step is not None:
        source = _listed("SLURM_STEP_GPUS", step)
        if job is not None and not set(step) <= set(job):
            return _contradiction(source, _listed("SLURM_JOB_GPUS", job), on_node)
        if on_node is not None and len(step) > on_node:
            return _contradiction(source, here, on_node)
        return _grant(source, indices=step)
    if job is not None:
        source = _listed("SLURM_JOB_GPUS", job)
        if on_node is not None and len(job) < on_node:
            return _contradiction(source, here, on_node)
        return _grant(source, count=on_node, indices=job)
    if on_node is not None:
        return _grant(here, count=on_node)
    if get("SLURM_JOB_ID") is None and get("SLURM_STEP_ID") is None:
        return None
    return _grant(
        "Slurm granted no GPUs (SLURM_GPUS_ON_NODE, SLURM_STEP_GPUS, SLURM_JOB_GPUS are unset)"
    )


def _listed(name: str, indices: Iterable[int]) -> str:
    return f"{name}={format_cpulist(frozenset(indices))}"


def _of_batch_script(get: Get) -> tuple[int, ...] | None:
    """The GPUs of ``SLURM_JOB_GPUS`` on the job's first node, the only one that it is about.

    A step counts its nodes by itself: its first one is the job's only where it is on all of them.
    """
    nodes = number(get("SLURM_JOB_NUM_NODES") or get("SLURM_NNODES"))
    is_on_all = get("SLURM_STEP_ID") is None or number(get("SLURM_STEP_NUM_NODES")) == nodes
    is_first = number(get("SLURM_NODEID")) == 0 and is_on_all and nodes is not None
    return slurm.gpu_indices(get("SLURM_JOB_GPUS")) if nodes == 1 or is_first else None


def _contradiction(source: str, against: str, on_node: int | None) -> Granted:
    source = f"{source} contradicts {against} (is one left over from another job?)"
    if on_node is None:
        return _grant(source)
    return _grant(f"SLURM_GPUS_ON_NODE={on_node}; {source}", count=on_node)


# Grid Engine with resource maps: ``SGE_HGR_<map>`` has the granted ids of the map, separated by
# blanks. The map's name is the site's choice.

_MAP = "SGE_HGR_"


def _of_maps(get: Get, names: Iterable[str]) -> Granted | None:
    of_gpus = sorted(n for n in names if any(word in n.lower() for word in ("gpu", "cuda")))
    found = {name: (get(name) or "").replace(",", " ").split() for name in of_gpus}
    found = {name: ids for name, ids in found.items() if ids and ids != ["NONE"]}
    if not found:
        return None
    name, ids = next(iter(found.items()))
    if any(set(other) != set(ids) for other in found.values()):
        return _grant(f"{' and '.join(found)} list different GPUs")
    numbers = [index for index in map(number, ids) if index is not None]
    source = f"{name}={' '.join(ids)}"
    if len(numbers) < len(ids):  # names, which a site may count from 0 or from 1
        return _grant(source, count=len(set(ids)))
    return _grant(source, indices=numbers)


# Torque: PBS_GPUFILE is a file with a line ``<host>-gpu<index>`` for each GPU of the job.


def _of_torque(get: Get, gpu_file: str | None, host: str | None) -> Granted | None:
    name = get("PBS_GPUFILE")
    if not name:
        return None
    if gpu_file is None:
        return _grant(f"PBS_GPUFILE={name} is unreadable")
    found: set[int] = set()
    for line in gpu_file.split():
        machine, mark, text = line.rpartition("-gpu")
        index = number(text)
        if not mark or index is None:
            return _grant(f"PBS_GPUFILE={name} has a line that is not <host>-gpu<index>")
        if _short(machine) == _short(host or ""):
            found.add(index)
    if not found:
        return _grant(f"PBS_GPUFILE={name} names no GPU of this host")
    return _grant("PBS_GPUFILE", indices=found)


def _short(host: str) -> str:
    return host.partition(".")[0].lower()


# Grid Engine without resource maps (Son of Grid Engine, SGE 6): a GPU is a counted resource of the
# site's making (``-l gpu=2``), and only ``qstat -j <job>`` prints the request:
#
#     hard resource_list:         gpu=2,h_rt=3600
#
# (``qstat(1)``; ``sge_show_re_type_list`` of its source.) In a parallel environment a request may
# count per slot (``consumable YES`` in ``complex(5)``) or once; here it counts once, so that no
# more than the granted GPUs are taken.

SECONDS = 5.0
"""How long ``qstat`` may take: it asks a master that serves the whole cluster."""

_COUNTS = frozenset(
    {"cuda", "gpu", "gpu_card", "gpu_cards", "gpu_count", "gpucard", "gpucards", "gpus"}
    | {"n_gpu", "n_gpus", "ngpu", "ngpus", "num_gpu", "num_gpus"}
)
"""What sites call the resource. Others (``gpu_mem``, ``gpu_type``) are no counts."""

_REQUEST = re.compile(r"\s*hard[ _]resource_list:\s*(.*?)\s*")


def _grid_engine_job(get: Get) -> str | None:
    """The job's id; other programs set JOB_ID, too. It becomes an argument of ``qstat``."""
    job = get("JOB_ID") or ""
    is_grid_engine = get("SGE_ROOT") or get("QUEUE")
    is_number = job.isascii() and job.isdecimal() and len(job) <= 20
    return job if is_grid_engine and is_number else None


def ask_qstat(job: str) -> tuple[int | None, str]:
    """How many GPUs a job requested, and so was granted; and the source, or why it is unknown."""
    command = f"qstat -j {job}"
    try:
        text = output_of("qstat", "-j", job, seconds=SECONDS)
    except ProgramError as error:
        return None, f"the number of GPUs that Grid Engine granted is unknown: {command} {error}"
    count, found = parse_qstat(text, job)
    return count, f"{command}: {found}"


def parse_qstat(text: str, job: str) -> tuple[int | None, str]:
    """The number of GPUs in what ``qstat -j`` printed, and what was found there, in words. Pure."""
    lines = text.splitlines()
    numbers = {line.partition(":")[2].strip() for line in lines if line.startswith("job_number:")}
    if numbers != {job}:
        return None, "this is not about the job"
    requests = [match[1] for match in map(_REQUEST.fullmatch, lines) if match]
    pairs = [pair.partition("=") for request in requests for pair in request.split(",")]
    found = {(name.strip(), value.strip()) for name, _, value in pairs}
    counts = sorted((name, value) for name, value in found if name.lower() in _COUNTS)
    if not counts:
        return None, "the request (hard resource_list) has no GPUs"
    listed = ",".join(f"{name}={value}" for name, value in counts)[:200]
    if len({value for _, value in counts}) > 1:
        return None, f"{listed} contradict each other"
    count = number(counts[0][1])
    return count, listed if count is not None else f"{listed} is not a number"


# Whether each rank has GPUs of its own. One visible GPU and several ranks: all are on it, unless
# the launcher says otherwise, or the rank has claimed it.


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnGpus:
    """The GPUs that this rank sees are its own; the other ranks see others.

    Indices count the machine's GPUs in the order of their PCI addresses.

    Attributes:
        named: the GPUs of all ranks; None when unknown.
        own: those of this rank, as the launcher counts; None when unknown.
        on_node: how many the job has on this node; None when unknown.
        shared: whether other ranks may be on this rank's GPUs, too.
        claimed: whether this rank claimed them for itself, so that no other is on them.
    """

    named: tuple[int, ...] | None = None
    own: tuple[int, ...] | None = None
    on_node: int | None = None
    shared: bool = False
    claimed: bool = False


def observe_own_gpus(ranks: Ranks, *, visible: int, is_rank: bool = False) -> OwnGpus | None:
    """What makes the visible GPUs this rank's own; None: all ranks see the same ones.

    Args:
        ranks: the ranks in use.
        visible: how many GPUs CUDA shows this process.
        is_rank: whether this process is known to be the rank itself, and no worker of it.
    """
    is_worker = not is_rank and inherited.is_child()
    if ranks.local_size > 1 and visible and _has_claimed(ranks, is_worker=is_worker):
        return OwnGpus(claimed=True)
    if is_worker:
        return None  # a worker has its task's variables, whatever its number is
    return classify_own_gpus(env.get, ranks, visible=visible)


def _has_claimed(ranks: Ranks, *, is_worker: bool) -> bool:
    """Whether this rank claimed for itself; a claim around the launcher is for all ranks.

    ``gpuaff run --per-rank`` claims, and becomes its command: Python, or a wrapper of Python
    (``sh -c``), which was started with the rank's own variables, as the launcher was not. A worker
    that a rank started has them, too, and shares what the rank claimed.
    """
    claim, _ = inherited.observe_parent_claim()
    if claim is None:
        return False
    if claim.pid != kernel.process_id() and (is_worker or not _is_of_rank(claim, ranks)):
        return False
    facts = kernel.thread_facts(claim.pid, claim.pid)  # ids are used again
    return facts is None or facts.started == claim.started


def _is_of_rank(claim: ParentClaim, ranks: Ranks) -> bool:
    own = own_variables(env.get, ranks)
    return bool(own) and carries(claim.pid, own)


def classify_own_gpus(get: Get, ranks: Ranks, *, visible: int) -> OwnGpus | None:
    """:func:`observe_own_gpus` for any environment, without claims. Pure."""
    if ranks.local_size == 1 or not visible:
        return None
    if ranks.sources.get("local_rank") == "RANK":  # torchrun --virtual-local-rank
        return OwnGpus()
    if active_launcher(get, ranks) is not Launcher.SLURM:
        return None
    if number(get("SLURM_LOCALID")) != ranks.local_rank:
        return None  # a worker that a task started, or ranks numbered differently
    return _of_task(get, ranks, visible)


def _of_task(get: Get, ranks: Ranks, visible: int) -> OwnGpus | None:
    step, on_node = slurm.gpu_indices(get("SLURM_STEP_GPUS")), number(get("SLURM_GPUS_ON_NODE"))
    if on_node is not None and on_node <= visible:
        return None  # every task sees all that the step has here
    is_part = step is not None and on_node is not None and len(step) < on_node
    if not is_part and not slurm.binds_gpus(get):
        return None
    own = OwnGpus(on_node=on_node, shared=slurm.shares_gpus(get, ranks.local_size))
    if step is not None and not is_part and len(step) > visible:
        return replace(own, named=step)
    # The batch script's GPUs: in a job of several nodes they are the first one's only.
    job = slurm.gpu_indices(get("SLURM_JOB_GPUS"))
    is_here = number(get("SLURM_JOB_NUM_NODES")) == 1 and len(job or ()) >= (on_node or 0)
    return replace(own, named=job if is_here else None, own=step)


# The ranks among which granted GPUs are divided: those of this node, unless each has its own.


def observe_sharers(*, visible: int, claim: ParentClaim | None) -> Ranks | None:
    """The ranks that were granted the same GPUs as this process, and its place among them.

    Args:
        visible: how many GPUs are candidates, by what CUDA shows and the scheduler lists.
        claim: the claim in which this process runs.

    Returns:
        None where all of them are this process's:

        - it is no rank, or the only one of its node;
        - the launcher gave each rank GPUs of its own (:func:`observe_own_gpus`);
        - it sees one: usually a launcher or a wrapper shows each rank its own. If all are on the
          same one after all, the first gets it, and the others an error that says so;
        - the rank itself made the claim around it, not its launcher's parent.
    """
    here = observe_ranks()
    found = classify_sharers(env.get, here, visible=visible) if here.is_told else None
    if found is None or claim is None:
        return found
    return None if _is_of_rank(claim, found) else found


def classify_sharers(get: Get, here: Ranks, *, visible: int) -> Ranks | None:
    """:func:`observe_sharers` for any environment, without a claim. Pure."""
    if here.local_size == 1 or visible == 1:
        return None
    return here if classify_own_gpus(get, here, visible=visible) is None else None
