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
   :mod:`gpuaff.launch.grid_engine`.

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

from collections.abc import Iterable

from gpuaff.cpuset import format_cpulist
from gpuaff.launch import slurm
from gpuaff.launch.variables import Get, number
from gpuaff.notices import printable
from gpuaff.records import dataclass, replace
from gpuaff.system import environ, kernel


@dataclass(frozen=True, kw_only=True)
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
    file, host = environ.get("PBS_GPUFILE") or "", kernel.host_name()
    found = classify(
        environ.get,
        names=environ.names(_MAP),
        gpu_file=kernel.Tree().read(file.lstrip("/")) if file.startswith("/") else None,
        host=host,
    )
    job = _grid_engine_job(environ.get)
    if found.count is not None or job is None or not may_ask:
        return found
    from gpuaff.launch import grid_engine

    count, source = grid_engine.ask(job)
    return replace(found, count=count, source=source)


def classify(
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
