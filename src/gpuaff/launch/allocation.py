"""How many GPUs a scheduler has granted this process on this node, and which.

The first that tells anything counts, in this order:

1. **Slurm** (the manual pages of sbatch and srun; :mod:`gpuaff.launch.slurm` has what was seen
   besides). ``SLURM_STEP_GPUS`` names the GPUs of the task, or of the step where its tasks share
   them; ``SLURM_JOB_GPUS`` those of the batch script, so of the job's first node;
   ``SLURM_GPUS_ON_NODE`` counts those of the step here, or of the job.
2. **Grid Engine with resource maps** (Univa, Altair, Open Cluster Scheduler): ``SGE_HGR_<name>``
   holds the granted ids of the map ``<name>``, with blanks between them. Ids that are numbers are
   indices; names (``GPU1``, which is a manual's example for the first one) only tell how many.
3. **Torque**: ``PBS_GPUFILE`` is a file with a line ``<host>-gpu<index>`` for each GPU of the job
   (Torque's administrator guide, "Exported batch environment variables").
4. **Grid Engine without maps** (Son of Grid Engine): only ``qstat`` tells, see
   :mod:`gpuaff.launch.allocation`.

LSF and PBS Pro tell by CUDA_VISIBLE_DEVICES alone: none of the ``LSB_`` variables that IBM's
reference lists for jobs tells of GPUs (``LSB_GPU_REQ`` is the administrator's default). With
``mps=yes,nocvd`` LSF does not set it either. Where somebody has set that, the GPUs that are
visible are meant, and what a scheduler names is not needed: Slurm inside a device cgroup counts
those there from 0, and names others by ``SLURM_STEP_GPUS``. How many it has granted still counts,
as somebody may have shown more.

What is left over from another job cannot be told from what is new. Where numbers contradict each
other the indices are dropped, and where two schedulers tell different counts the first one counts;
``source`` says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from gpuaff._system import env, kernel
from gpuaff._system.subprocess import ProgramError, output_of
from gpuaff.cpuset import format_cpulist
from gpuaff.launch import inherited, masks, ranks, slurm
from gpuaff.launch.inherited import ParentClaim
from gpuaff.launch.launchers import Launcher
from gpuaff.launch.ranks import Ranks, active_launcher
from gpuaff.launch.variables import Get, number
from gpuaff.notices import printable


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """What a scheduler has granted here.

    Attributes:
        count: how many GPUs; None when nobody tells.
        indices: those that they are among, ascending, in the order of the machine's PCI addresses;
            there may be more than ``count``. None when they are not told, or ``visible``.
        source: who says so, or why nobody does, in words.
        visible: whether CUDA_VISIBLE_DEVICES is set: then those are meant that it shows, at most
            ``count`` of them.
    """

    count: int | None
    indices: tuple[int, ...] | None
    source: str
    visible: bool = False


def granted(*, may_ask: bool = True) -> Granted:
    """What this process was granted on this node.

    Args:
        may_ask: also ask ``qstat``, which takes at most 5 seconds, in a job of a Grid Engine that
            says nothing by variables. It tells only how many.
    """
    file, host = env.get("PBS_GPUFILE") or "", kernel.host_name()
    found = classify_grant(
        env.get,
        names=env.names(_MAP),
        gpu_file=kernel.Tree().read(file.lstrip("/")) if file.startswith("/") else None,
        host=host,
    )
    job = _grid_engine_job(env.get)
    if found.count is not None or job is None or not may_ask:
        return found

    count, source = ask_qstat(job)
    return replace(found, count=count, source=source)


def classify_grant(
    get: Get, *, names: Iterable[str] = (), gpu_file: str | None = None, host: str | None = None
) -> Granted:
    """:func:`granted` without ``qstat``, with an environment from anywhere.

    Args:
        get: the environment.
        names: the names of its variables that begin with ``SGE_HGR_``.
        gpu_file: what is in the file that ``PBS_GPUFILE`` names; None when it cannot be read.
        host: this machine's name.
    """
    told = [_of_slurm(get), _of_maps(get, names), _of_torque(get, gpu_file, host)]
    some = [one for one in told if one is not None]
    counts = [one for one in some if one.count is not None]
    found = (counts or some or [_told(_OF_LSF) if get("LSB_JOBID") else _NOBODY])[0]
    others = [one.source for one in counts[1:] if one.count != found.count]
    if others:
        source = f"{found.source}, and not {others[0]}: one is left over from another job"
        found = replace(found, source=source)
    if get("CUDA_VISIBLE_DEVICES") is None:
        return found
    source = "CUDA_VISIBLE_DEVICES" if found.count is None else found.source
    return replace(found, indices=None, source=source, visible=True)


_NOBODY = Granted(
    count=None,
    indices=None,
    source="no scheduler says how many GPUs were granted (SLURM_GPUS_ON_NODE, SGE_HGR_gpu, "
    "PBS_GPUFILE, CUDA_VISIBLE_DEVICES are unset)",
)


_OF_LSF = (
    "LSF says which GPUs it has granted by CUDA_VISIBLE_DEVICES alone, and that is unset: was the "
    "job submitted without -gpu, or with mps=...,nocvd?"
)


def _told(source: str, count: int | None = None, indices: Iterable[int] | None = None) -> Granted:
    listed = None if indices is None else tuple(sorted(set(indices)))
    return Granted(
        count=len(listed) if count is None and listed is not None else count,
        indices=listed,
        source=_shown(source),
    )


def _shown(source: str) -> str:
    """On one line, and cut: errors quote it, and a variable may hold 128 KB of anything."""
    line = printable(source[: _LONGEST + 1])
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 3]}..."


_LONGEST = 300


# Slurm.


def _of_slurm(get: Get) -> Granted | None:
    step, job = slurm.gpu_indices(get("SLURM_STEP_GPUS")), _of_batch_script(get)
    on_node = number(get("SLURM_GPUS_ON_NODE"))
    here = f"SLURM_GPUS_ON_NODE={on_node}"
    if step is not None:
        said = _listed("SLURM_STEP_GPUS", step)
        if job is not None and not set(step) <= set(job):
            return _contradiction(said, _listed("SLURM_JOB_GPUS", job), on_node)
        if on_node is not None and len(step) > on_node:
            return _contradiction(said, here, on_node)
        return _told(said, indices=step)
    if job is not None:
        said = _listed("SLURM_JOB_GPUS", job)
        if on_node is not None and len(job) < on_node:
            return _contradiction(said, here, on_node)
        return _told(said, count=on_node, indices=job)
    if on_node is not None:
        return _told(here, count=on_node)
    if get("SLURM_JOB_ID") is None and get("SLURM_STEP_ID") is None:
        return None
    return _told("Slurm tells of no GPUs (SLURM_GPUS_ON_NODE, SLURM_STEP_GPUS, SLURM_JOB_GPUS)")


def _listed(name: str, indices: Iterable[int]) -> str:
    return f"{name}={format_cpulist(frozenset(indices))}"


def _of_batch_script(get: Get) -> tuple[int, ...] | None:
    """The GPUs of ``SLURM_JOB_GPUS``, on the first node of the job, for which it speaks.

    A step counts its nodes by itself: its first one is the job's only where it is on all of them.
    """
    nodes = number(get("SLURM_JOB_NUM_NODES") or get("SLURM_NNODES"))
    in_step = get("SLURM_STEP_ID") is not None
    on_all = not in_step or number(get("SLURM_STEP_NUM_NODES")) == nodes
    is_first = nodes == 1 or (number(get("SLURM_NODEID")) == 0 and on_all and nodes is not None)
    return slurm.gpu_indices(get("SLURM_JOB_GPUS")) if is_first else None


def _contradiction(source: str, against: str, on_node: int | None) -> Granted:
    said = f"{source} does not fit {against} (one is left over from another job?)"
    if on_node is None:
        return _told(said)
    return _told(f"SLURM_GPUS_ON_NODE={on_node}; {said}", count=on_node)


# Grid Engine's resource maps.

_MAP = "SGE_HGR_"


def _of_maps(get: Get, names: Iterable[str]) -> Granted | None:
    """A map's own name is the site's; one of GPUs is known by ``gpu`` or ``cuda`` in it."""
    of_gpus = sorted(n for n in names if any(w in n.lower() for w in ("gpu", "cuda")))
    found = {name: (get(name) or "").replace(",", " ").split() for name in of_gpus}
    found = {name: ids for name, ids in found.items() if ids and ids != ["NONE"]}
    if not found:
        return None
    name, ids = next(iter(found.items()))
    said = f"{name}={' '.join(ids)}"
    if any(set(other) != set(ids) for other in found.values()):
        return _told(f"{' and '.join(found)} tell of different GPUs")
    indices = [number(one) for one in ids]
    if None in indices:  # names: a site may count from 0 or from 1
        return _told(said, count=len(set(ids)))
    return _told(said, indices=[index for index in indices if index is not None])


# Torque.


def _of_torque(get: Get, gpu_file: str | None, host: str | None) -> Granted | None:
    name = get("PBS_GPUFILE")
    if not name:
        return None
    if gpu_file is None:
        return _told(f"PBS_GPUFILE={name} cannot be read")
    found: set[int] = set()
    for line in gpu_file.split():
        machine, mark, text = line.rpartition("-gpu")
        index = number(text)
        if not mark or index is None:
            return _told(f"PBS_GPUFILE={name} has a line that is not <host>-gpu<index>")
        if _is_same(machine, host):
            found.add(index)
    if not found:
        return _told(f"PBS_GPUFILE={name} names no GPU of this host")
    return _told("PBS_GPUFILE", indices=found)


def _is_same(machine: str, host: str | None) -> bool:
    """Whether two names are one machine's, with its domain or without."""
    return host is not None and machine.split(".")[0].lower() == host.split(".")[0].lower()


def _grid_engine_job(get: Get) -> str | None:
    """The id of the job of a Grid Engine that this is; other programs have a JOB_ID too."""
    job = get("JOB_ID") or ""
    is_grid_engine = get("SGE_ROOT") or get("QUEUE")
    is_number = job.isascii() and job.isdecimal() and len(job) <= _DIGITS
    return job if is_grid_engine and is_number else None


_DIGITS = 20
"""No job has a longer number; it becomes an argument of ``qstat``."""


# How many GPUs Grid Engine has granted, where only ``qstat -j`` tells (Son of Grid Engine, SGE 6).
#
# Without resource maps a GPU is a counted resource of the site's making (``-l gpu=2``): the job
# knows neither which it got nor how many, and ``qstat -j <job>`` prints what was asked for:
#
#     hard resource_list:         gpu=2,h_rt=3600
#
# (``qstat(1)``; ``sge_show_re_type_list`` of its source joins ``name=value`` by commas.) In a
# parallel environment a request may count for each slot (``consumable YES`` in ``complex(5)``) or
# once; here it counts once, so that nobody takes more than was granted.


SECONDS = 5.0
"""How long ``qstat`` may take: it asks a master that serves the whole cluster."""

_COUNTS = frozenset(
    {"cuda", "gpu", "gpu_card", "gpu_cards", "gpu_count", "gpucard", "gpucards", "gpus"}
    | {"n_gpu", "n_gpus", "ngpu", "ngpus", "num_gpu", "num_gpus"}
)
"""What sites call the resource. Others (``gpu_mem``, ``gpu_type``) are no counts."""

_LISTED = re.compile(r"hard[ _]resource_list:\s*(.*)")


def ask_qstat(job: str) -> tuple[int | None, str]:
    """How many GPUs a job has asked for, and so was granted; and who says so, or why nobody does.

    Args:
        job: its number.
    """
    command = f"qstat -j {job}"
    try:
        text = output_of("qstat", "-j", job, seconds=SECONDS)
    except ProgramError as error:
        return None, f"Grid Engine does not say how many GPUs were granted: {command} {error}"
    count, what = read_qstat(text, job)
    return count, f"{command}: {what}"


def read_qstat(text: str, job: str) -> tuple[int | None, str]:
    """:func:`ask`, of what ``qstat`` has printed; what was found there, in words. Pure."""
    lines = text.splitlines()
    numbers = {line.partition(":")[2].strip() for line in lines if line.startswith("job_number:")}
    if numbers != {job}:
        return None, "this is not about the job"
    requests = [match[1] for match in map(_LISTED.fullmatch, map(str.strip, lines)) if match]
    pairs = [pair.partition("=") for text in requests for pair in text.split(",")]
    found = {(name.strip(), value.strip()) for name, _, value in pairs}
    counts = sorted((name, value) for name, value in found if name.lower() in _COUNTS)
    said = ",".join(f"{name}={value}" for name, value in counts)[:200]
    if not counts:
        return None, "among what was asked for (hard resource_list) there are no GPUs"
    if len({value for _, value in counts}) > 1:
        return None, f"{said} contradict each other"
    count = number(counts[0][1])
    return count, said if count is not None else f"{said} is no number"


# Whose GPUs: whether the launcher shows each rank GPUs of its own.
#
# One visible GPU and several ranks: all of them are on it, unless the launcher says that it has
# given each its own (case D10).


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnGpus:
    """The GPUs that this rank sees are its own; the other ranks see others.

    Indices count the machine's GPUs in the order of their PCI addresses.

    Attributes:
        named: the GPUs of all ranks; None when they are not told.
        own: those of this rank, as the launcher counts; None when they are not told.
        on_node: how many the job has on this node; None when that is not told.
        shared: whether it is told that other ranks may be on this rank's too.
        claimed: whether this rank has claimed them for itself, so that nobody else is on them.
    """

    named: tuple[int, ...] | None = None
    own: tuple[int, ...] | None = None
    on_node: int | None = None
    shared: bool = False
    claimed: bool = False


def observe_own_gpus(ranks: Ranks, *, visible: int, is_rank: bool = False) -> OwnGpus | None:
    """What the launcher says about the visible GPUs; None: all ranks see the same ones.

    Args:
        ranks: the ranks in use.
        visible: how many GPUs CUDA shows this process.
        is_rank: whether it is known that it stands for the rank itself, and is no worker.
    """
    is_worker = not is_rank and inherited.is_child()
    if ranks.local_size > 1 and visible and _has_claimed(ranks, is_worker=is_worker):
        return OwnGpus(claimed=True)
    if is_worker:
        return None  # a worker has its task's variables, whatever its number is
    return classify_own_gpus(env.get, ranks, visible=visible)


def _has_claimed(ranks: Ranks, *, is_worker: bool) -> bool:
    """Whether this rank has claimed for itself; a claim around the launcher is for all ranks.

    ``gpuaff run --per-rank`` claims, and becomes its command: Python, or a wrapper of Python
    (``sh -c``), which was started with the rank's own variables, as the launcher was not. A worker
    that a rank has started has these as well, and shares what the rank has claimed.
    """
    claim, pid = inherited.observe_parent_claim()[0], kernel.process_id()
    if claim is None:
        return False
    if claim.pid != pid:
        own = masks.own_variables(env.get, ranks)
        is_mine = bool(own) and not is_worker and masks.carries(claim.pid, own)
        if not is_mine:
            return False
    facts = kernel.thread_facts(claim.pid, claim.pid)  # ids are used again
    return facts is None or facts.started == claim.started


def classify_own_gpus(get: Get, ranks: Ranks, *, visible: int) -> OwnGpus | None:
    """:func:`observe`, with an environment from anywhere."""
    if ranks.local_size == 1 or not visible:
        return None
    if ranks.sources.get("local_rank") == "RANK":  # torchrun --virtual-local-rank
        return OwnGpus()
    if active_launcher(get, ranks) is not Launcher.SLURM:
        return None
    if number(get("SLURM_LOCALID")) != ranks.local_rank:
        return None  # a worker that a task has started, or ranks numbered otherwise
    told = slurm.gpu_indices(get("SLURM_STEP_GPUS"))
    on_node = number(get("SLURM_GPUS_ON_NODE"))
    if on_node is not None and on_node <= visible:
        return None  # all that the step has here is seen by everybody
    is_part = told is not None and on_node is not None and len(told) < on_node
    if not is_part and not slurm.binds_gpus(get):
        return None
    shared = slurm.shares_gpus(get, ranks.local_size)
    if told is not None and not is_part and len(told) > visible:
        return OwnGpus(named=told, on_node=on_node, shared=shared)
    return OwnGpus(named=_of_job(get, on_node or 0), own=told, on_node=on_node, shared=shared)


def _of_job(get: Get, on_node: int) -> tuple[int, ...] | None:
    """The batch script's GPUs: in a job of several nodes they are those of the first one only."""
    named = slurm.gpu_indices(get("SLURM_JOB_GPUS"))
    is_here = number(get("SLURM_JOB_NUM_NODES")) == 1
    return named if named is not None and is_here and len(named) >= on_node else None


# Among whom granted GPUs are to be divided: the ranks of this node, unless each has its own.


def observe_sharers(*, visible: int, claim: ParentClaim | None) -> Ranks | None:
    """The ranks that were granted the same GPUs as this process, and its place among them.

    Args:
        visible: how many GPUs come into question, by what CUDA shows and the scheduler names.
        claim: the claim in which this process runs.

    Returns:
        None where all of them are this process's:

        - it is no rank, or the only one of its node;
        - the launcher has given each rank GPUs of its own (:mod:`gpuaff.launch.allocation`);
        - it sees one: a launcher or a wrapper has shown each rank its own, as is often done. If
          all are on the same one after all, the first has it, and the others are told so;
        - the claim around it was made by the rank itself, and not before the launcher.
    """
    here = ranks.ranks()
    found = classify_sharers(env.get, here, visible=visible) if here.is_told else None
    if found is None or claim is None:
        return found
    own = masks.own_variables(env.get, found)
    return None if own and masks.carries(claim.pid, own) else found


def classify_sharers(get: Get, here: Ranks, *, visible: int) -> Ranks | None:
    """:func:`observe` without a claim, for a rank and an environment from anywhere."""
    if here.local_size == 1 or visible == 1:
        return None
    return here if classify_own_gpus(get, here, visible=visible) is None else None
