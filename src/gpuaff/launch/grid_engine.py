"""How many GPUs Grid Engine has granted, where only ``qstat -j`` tells (Son of Grid Engine, SGE 6).

Without resource maps a GPU is a counted resource of the site's making (``-l gpu=2``): the job
knows neither which it got nor how many, and ``qstat -j <job>`` prints what was asked for:

    hard resource_list:         gpu=2,h_rt=3600

(``qstat(1)``; ``sge_show_re_type_list`` of its source joins ``name=value`` by commas.) In a
parallel environment a request may count for each slot (``consumable YES`` in ``complex(5)``) or
once; here it counts once, so that nobody takes more than was granted.
"""

from __future__ import annotations

import re

from gpuaff.launch.variables import number
from gpuaff.system.programs import ProgramError, output_of

SECONDS = 5.0
"""How long ``qstat`` may take: it asks a master that serves the whole cluster."""

_COUNTS = frozenset(
    {"cuda", "gpu", "gpu_card", "gpu_cards", "gpu_count", "gpucard", "gpucards", "gpus"}
    | {"n_gpu", "n_gpus", "ngpu", "ngpus", "num_gpu", "num_gpus"}
)
"""What sites call the resource. Others (``gpu_mem``, ``gpu_type``) are no counts."""

_LISTED = re.compile(r"hard[ _]resource_list:\s*(.*)")


def ask(job: str) -> tuple[int | None, str]:
    """How many GPUs a job has asked for, and so was granted; and who says so, or why nobody does.

    Args:
        job: its number.
    """
    command = f"qstat -j {job}"
    try:
        text = output_of("qstat", "-j", job, seconds=SECONDS)
    except ProgramError as error:
        return None, f"Grid Engine does not say how many GPUs were granted: {command} {error}"
    count, what = read(text, job)
    return count, f"{command}: {what}"


def read(text: str, job: str) -> tuple[int | None, str]:
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
