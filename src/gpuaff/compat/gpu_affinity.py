"""NVIDIA's ``gpu_affinity``, for scripts that were written for it.

    from gpuaff.compat import gpu_affinity  # was: import gpu_affinity

is all that changes: names, arguments, enums and errors are the old ones, and so are the CPUs, core
for core (``docs/migrate-gpu-affinity.md`` tells where they are not, and why). It works through
:func:`gpuaff.set_affinity`, as a new script should.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial

from gpuaff.allocator.model import Multithreading, Scope, Word
from gpuaff.cpuset import MAX_CPU_ID, format_cpulist
from gpuaff.errors import GpuaffError, GPUAffinityError, InvalidOptionError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import TypeVar

    from gpuaff.allocator.model import Plan
    from gpuaff.pinning.affinity import Affinity

    _W = TypeVar("_W", bound=Word)

__all__ = ["GPUAffinityError", "Mode", "Multithreading", "Scope", "set_affinity"]

_NO_LIMIT = MAX_CPU_ID
"""As many cores as there are; None would let ``GPUAFF_MAX_PHYSICAL_CORES`` set a limit."""

_THEIR_NAMES = {"local_rank": "gpu_id"}
"""What gpu_affinity calls an argument of :func:`gpuaff.set_affinity`, where that differs."""


class Mode(Word):
    """Which of the near cores a process gets: the five that gpu_affinity has.

    They are equal to, and may be given for, those of :class:`gpuaff.Mode`.
    """

    ALL = "all"
    SINGLE = "single"
    SINGLE_UNIQUE = "single_unique"
    UNIQUE_INTERLEAVED = "unique_interleaved"
    UNIQUE_CONTIGUOUS = "unique_contiguous"


def set_affinity(
    gpu_id: int,
    nproc_per_node: int,
    *,
    mode: Mode = Mode.UNIQUE_CONTIGUOUS,
    scope: Scope = Scope.NODE,
    multithreading: Multithreading = Multithreading.ALL_LOGICAL,
    balanced: bool = True,
    min_physical_cores: int = 1,
    max_physical_cores: int | None = None,
) -> set[int]:
    """Put this process on its share of the cores near GPU ``gpu_id``, as gpu_affinity did.

    The CPUs are always cut among the processes of this job (``partition="job"``). Of gpuaff's
    variables those count that gpu_affinity has no argument for: ``GPUAFF=off`` leaves the mask as
    it is, ``GPUAFF_STRICT=1`` raises where there would be a warning, ``GPUAFF_CPUS`` is a border.

    Args:
        gpu_id: the visible GPU of this process, 0 … ``nproc_per_node`` − 1.
        nproc_per_node: how many processes share this node, each with a GPU of its own.
        mode: how near cores are cut.
        scope: what is near: the GPU's NUMA node or its socket.
        multithreading: all CPUs of a core, or only one.
        balanced: whether all processes get equally many cores (unique modes).
        min_physical_cores: how many cores each process must get; the single modes ignore it.
        max_physical_cores: the most cores that a process gets; the single modes ignore it.

    Returns:
        The CPUs of the calling thread, read back from the kernel.

    Raises:
        GPUAffinityError: the process could not be pinned (no driver, no such GPU, no near CPU
            allowed, too few cores), or an argument cannot be meant. All is then as it was before.
        TypeError: an argument is None that must be a number.
    """
    if None in (gpu_id, nproc_per_node):  # to gpuaff None means: ask the launcher
        raise TypeError("set_affinity() needs two numbers: gpu_id and nproc_per_node")
    from gpuaff.pinning.affinity import set_affinity as bind

    most = _NO_LIMIT if max_physical_cores is None else min(max_physical_cores, _NO_LIMIT)
    with _their_errors():
        pin = partial(
            bind,
            gpu_id,
            nproc_per_node,
            mode=_word("mode", mode, Mode),
            scope=_word("scope", scope, Scope),
            multithreading=_word("multithreading", multithreading, Multithreading),
            balanced=bool(balanced),
            partition="job",
        )
        least = max(1, min_physical_cores)
        if least > most:  # gpu_affinity counts before it trims: both can be had
            with pin(min_physical_cores=least, max_physical_cores=_NO_LIMIT):
                least = 1
        return set(_accepted(pin(min_physical_cores=least, max_physical_cores=most)))


def refusal(plan: Plan, rank: int) -> str | None:
    """Why gpu_affinity would not have gone on with a plan; None when it would have.

    gpuaff goes on where processes must share a core or a GPU, and where other CPUs must do than
    the near ones, of which none is allowed. gpu_affinity raises.

    Args:
        plan: a plan for all ranks, or for this one.
        rank: whose process asks.
    """
    from gpuaff.topology.model import Source

    share = plan.share_of(rank)
    said = {notice.code: notice.message for notice in plan.warnings if notice.rank in (None, rank)}
    if share.gpu is None:
        return "; ".join(said.values())
    if len({other.gpu for other in plan.shares}) < len(plan.shares):
        return _crowded(plan)
    if share.source in (Source.NEAREST, Source.ALL) and "near-not-allowed" in said:
        return said["near-not-allowed"]
    taken = frozenset().union(*(other.cpus for other in plan.shares if other.rank < rank))
    return said.get("too-few-cores") if share.cpus & taken else None


def _crowded(plan: Plan) -> str:
    gpus = sorted({share.gpu for share in plan.shares if share.gpu is not None})
    return (
        f"nproc_per_node={len(plan.shares)}, but only GPUs {format_cpulist(gpus)} are visible: "
        "start one process for each, or call gpuaff.set_affinity, which lets several share one"
    )


def _word(name: str, value: object, words: type[_W]) -> _W:
    """A member, or its string; gpuaff would take None for "not said"."""
    if isinstance(value, words):  # as ever; the driver is not kept waiting for an import
        return value
    from gpuaff.allocator.model import check_word

    return check_word(name, value, words)


def _accepted(affinity: Affinity) -> Affinity:
    """What was done, if gpu_affinity would have done it; else it is undone.

    Raises:
        GPUAffinityError: it would not have.
    """
    plan, rank, said = affinity.plan, affinity.rank, affinity.warnings
    if any(notice.code == "off" for notice in said):
        return affinity
    if not affinity.pinned or plan is None or rank is None:
        raise GPUAffinityError("; ".join(notice.message for notice in said))
    if why := refusal(plan, rank):
        affinity.__exit__(None, None, None)
        raise GPUAffinityError(why)
    return affinity


@contextmanager
def _their_errors() -> Iterator[None]:
    """gpu_affinity has one error, and calls things by its own names."""
    try:
        yield
    except GPUAffinityError:
        raise
    except InvalidOptionError as error:
        option = _THEIR_NAMES.get(error.option, error.option)
        text = str(InvalidOptionError(option, error.value, error.expected))
        raise GPUAffinityError(text) from error
    except GpuaffError as error:
        raise GPUAffinityError(str(error)) from error
