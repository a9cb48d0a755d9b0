"""The GPUs that a scheduler granted this process on this node.

``docs/claims.md`` ("What was granted") has the order of the sources. Where CUDA_VISIBLE_DEVICES is
set, the visible GPUs count rather than a scheduler's indices: inside a device cgroup Slurm counts
those there from 0, but ``SLURM_STEP_GPUS`` has others. The granted number still counts, because
more may be visible.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from gpuaff._system import env, kernel
from gpuaff.formatting import one_line
from gpuaff.launch import Get, number, slurm
from gpuaff.launch.ranks import short_name
from gpuaff.options import natural

_NO_SCHEDULER = (
    "no scheduler has set how many GPUs were granted (SLURM_GPUS_ON_NODE, SGE_HGR_gpu, "
    "PBS_GPUFILE, CUDA_VISIBLE_DEVICES are unset)"
)
_NO_LSF = (
    "LSF gives its GPUs by CUDA_VISIBLE_DEVICES alone, which is unset: was the job submitted "
    "without -gpu, or with mps=...,nocvd?"
)
_NO_SLURM = "Slurm granted no GPUs (SLURM_GPUS_ON_NODE, SLURM_STEP_GPUS, SLURM_JOB_GPUS are unset)"

_LONGEST = 300  # the longest source in characters: a variable may hold 128 KB of anything

_MAP = "SGE_HGR_"


@dataclass(frozen=True, slots=True)
class Granted:
    """What a scheduler granted here: how many GPUs, and among which; None when unknown.

    ``indices`` ascend by PCI address; there may be more than ``count``. Where CUDA_VISIBLE_DEVICES
    is set they are None, and at most ``count`` of its GPUs are meant. ``source`` says where that
    comes from, or why it is unknown.
    """

    count: int | None
    indices: tuple[int, ...] | None
    source: str


def granted(*, may_ask: bool = True) -> Granted:
    """What this process was granted on this node.

    In a job of a Grid Engine without resource maps, whose variables say nothing, ``qstat`` is
    called, if that is allowed (at most 5 seconds). It gives the number only.
    """
    file = env.get("PBS_GPUFILE") or ""
    found = classify_grant(
        env.get,
        names=env.names(_MAP),
        gpu_file=kernel.Tree().read(file.lstrip("/")) if file.startswith("/") else None,
        host=kernel.host_name(),
    )
    job = natural(env.get("JOB_ID"))  # other programs set it, too
    is_grid_engine = job is not None and (env.get("SGE_ROOT") or env.get("QUEUE"))
    if found.count is not None or not is_grid_engine or not may_ask:
        return found
    from gpuaff._system.subprocess import ProgramError, output_of  # hardly any claim needs it

    command = f"qstat -j {job}"
    try:
        count, request = parse_qstat(output_of(*command.split(), seconds=SECONDS))
    except ProgramError as error:
        source = f"the number of GPUs that Grid Engine granted is unknown: {command} {error}"
        return replace(found, source=source)
    return replace(found, count=count, source=f"{command}: {request}")


def classify_grant(
    get: Get, *, names: Iterable[str] = (), gpu_file: str | None = None, host: str | None = None
) -> Granted:
    """:func:`granted` without ``qstat``, for any environment. Pure.

    The first scheduler that gives a number counts. ``names`` are those of the variables that begin
    with ``SGE_HGR_``; ``gpu_file`` is the text of ``PBS_GPUFILE``.
    """
    # No LSB_ variable lists GPUs: LSB_GPU_REQ is the administrator's default.
    lsf = _grant(_NO_LSF) if get("LSB_JOBID") else None
    grants = (_of_slurm(get), _of_maps(get, names), _of_torque(get, gpu_file, host), lsf)
    some = [grant for grant in grants if grant is not None]
    counts = [grant for grant in some if grant.count is not None]
    found = (counts or some or [_grant(_NO_SCHEDULER)])[0]
    if get("CUDA_VISIBLE_DEVICES") is None:
        return found
    source = "CUDA_VISIBLE_DEVICES" if found.count is None else found.source
    return Granted(found.count, None, source)


def _grant(source: str, count: int | None = None, indices: Iterable[int] | None = None) -> Granted:
    listed = None if indices is None else tuple(sorted(set(indices)))
    if count is None and listed is not None:
        count = len(listed)
    return Granted(count, listed, one_line(source[: _LONGEST + 1], _LONGEST, end="..."))


# Slurm. ``SLURM_STEP_GPUS`` lists the GPUs of the task, or of the step where its tasks share them;
# ``SLURM_JOB_GPUS`` those of the batch script; ``SLURM_GPUS_ON_NODE`` counts those of the step
# here, or of the job.
_OF_SLURM = "SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "SLURM_GPUS_ON_NODE"


def _of_slurm(get: Get) -> Granted | None:
    step, job = slurm.gpu_indices(get("SLURM_STEP_GPUS")), _of_batch_script(get)
    count = number(get("SLURM_GPUS_ON_NODE"))
    if count is None and step is None and job is None:
        is_job = get("SLURM_JOB_ID") is not None or get("SLURM_STEP_ID") is not None
        return _grant(_NO_SLURM) if is_job else None
    given = {name: f"{name}={get(name)}" for name in _OF_SLURM if get(name)}
    is_of_job = step is None or job is None or set(step) <= set(job)
    is_short = count is not None and job is not None and step is None and len(job) < count
    is_long = count is not None and step is not None and len(step) > count
    if not is_of_job or is_short or is_long:
        listed = ", ".join(given.values())
        return _grant(f"{listed} contradict each other: is one left over from another job?", count)
    if step is not None:
        return _grant(given["SLURM_STEP_GPUS"], indices=step)
    return _grant(given["SLURM_JOB_GPUS" if job else "SLURM_GPUS_ON_NODE"], count, job)


def _of_batch_script(get: Get) -> tuple[int, ...] | None:
    """The GPUs of ``SLURM_JOB_GPUS`` on the job's first node, the only one that it is about.

    A step counts its nodes by itself: its first one is the job's only where it is on all of them.
    """
    nodes = number(get("SLURM_JOB_NUM_NODES") or get("SLURM_NNODES"))
    is_on_all = get("SLURM_STEP_ID") is None or number(get("SLURM_STEP_NUM_NODES")) == nodes
    is_first = number(get("SLURM_NODEID")) == 0 and is_on_all and nodes is not None
    return slurm.gpu_indices(get("SLURM_JOB_GPUS")) if nodes == 1 or is_first else None


# Grid Engine with resource maps: ``SGE_HGR_<map>`` has the granted ids of the map, separated by
# blanks. The map's name is the site's choice.


def _of_maps(get: Get, names: Iterable[str]) -> Granted | None:
    for name in sorted(names):
        ids = (get(name) or "").replace(",", " ").split()
        if not ids or ids == ["NONE"] or not any(word in name.lower() for word in ("gpu", "cuda")):
            continue
        numbers = [index for index in map(number, ids) if index is not None]
        source = f"{name}={' '.join(ids)}"
        if len(numbers) < len(ids):  # names, which a site may count from 0 or from 1
            return _grant(source, count=len(set(ids)))
        return _grant(source, indices=numbers)
    return None


# Torque: PBS_GPUFILE is a file with a line ``<host>-gpu<index>`` for each GPU of the job.

_OF_TORQUE = re.compile("(.*)-gpu([0-9]{1,5})")


def _of_torque(get: Get, gpu_file: str | None, host: str | None) -> Granted | None:
    name = get("PBS_GPUFILE")
    if not name:
        return None
    lines = [_OF_TORQUE.fullmatch(line) for line in (gpu_file or "").split()]
    here = short_name(host or "")
    found = [number(line[2]) for line in lines if line and short_name(line[1]) == here]
    indices = [index for index in found if index is not None]
    if None in lines or not indices:
        return _grant(f"PBS_GPUFILE={name} has no line <host>-gpu<index> of this host, or others")
    return _grant("PBS_GPUFILE", indices=indices)


# Grid Engine without resource maps (Son of Grid Engine, SGE 6): a GPU is a counted resource of the
# site's making (``-l gpu=2``), and only ``qstat -j <job>`` prints the request:
#
#     hard resource_list:         gpu=2,h_rt=3600
#
# In a parallel environment a request may count per slot (``consumable YES`` in ``complex(5)``) or
# once; here it counts once, so that no more than the granted GPUs are taken.

SECONDS = 5.0  # how long ``qstat`` may take: it asks a master that serves the whole cluster

# What sites call the resource. Others (``gpu_mem``, ``gpu_type``) are no counts.
_COUNT = re.compile(r"\s*(cuda|(n|n_|num_)?gpus?|gpu_?cards?|gpu_count)\s*", re.IGNORECASE)

_REQUEST = re.compile(r"\s*hard[ _]resource_list:\s*(.*?)\s*")


def parse_qstat(text: str) -> tuple[int | None, str]:
    """The number of GPUs in what ``qstat -j`` printed, and what was found there, in words. Pure."""
    requests = [match[1] for match in map(_REQUEST.fullmatch, text.splitlines()) if match]
    pairs = [pair.partition("=") for request in requests for pair in request.split(",")]
    counts = {name.strip(): value.strip() for name, _, value in pairs if _COUNT.fullmatch(name)}
    if not counts:
        return None, "no request (hard resource_list) for GPUs"
    listed = ",".join(f"{name}={value}" for name, value in counts.items())[:200]
    values = set(map(number, counts.values()))
    count = values.pop() if len(values) == 1 else None
    return count, listed if count is not None else f"{listed} is no single number"
