"""OMP_NUM_THREADS, and the variables by which OpenMP runtimes and BLAS bind threads.

gpuaff never sets one of those that bind: they are the user's. They take effect when a runtime is
loaded, which is after us, and then narrow the main thread's mask (cases C4, C5, C7).
"""

from __future__ import annotations

from gpuaff.binding.process import Exported
from gpuaff.notices import Notice
from gpuaff.runtimes import BLAS, KMP, MAIN_FREE, OPENMP, loaded, spares_the_main_thread, that_bind
from gpuaff.system import environ, kernel

NUMBER = "OMP_NUM_THREADS"


def remarks() -> list[Notice]:
    """One remark that names the variables that move threads, with the remedies."""
    found = [*_told(), *_blas()]
    if not found:
        return []
    what = _LOADED if _is_loaded() else _NOT_YET
    return [Notice("omp-binding", f"{'; '.join(found)}: {what}")]


_NOT_YET = (
    "when the library is loaded it binds threads by itself, and the main thread loses most of the "
    "share; Affinity.reapply(), after the import, gets it back"
)

_LOADED = (
    "the library is loaded already. If it has narrowed this process before gpuaff was first "
    "called, that counts as a border and is not widened: call gpuaff before importing it; or, "
    "where no scheduler drew a border, os.sched_setaffinity(0, range(os.cpu_count())) before the "
    "first call"
)


def _is_loaded() -> bool:
    """Whether a library that heeds one of the variables is there."""
    files = kernel.mapped_files(kernel.process_id())
    heed = (one.prefixes for one in OPENMP if that_bind(environ.get, one.heeds))
    return any(loaded(prefixes, files) for prefixes in (*heed, *([BLAS] if _blas() else [])))


def _told() -> list[str]:
    """The variables that make some runtime bind, each with its remedy."""
    return [f"{name}={environ.get(name)} ({_remedy(name)})" for name in that_bind(environ.get)]


def _remedy(name: str) -> str:
    if name == KMP:
        return "set it to disabled, which also keeps masks through a fork"
    return "unset it"


def _blas() -> list[str]:
    if spares_the_main_thread(environ.get):
        return []
    values = {name: environ.get(name) for name in MAIN_FREE}
    return [
        f"{name}={value} ({MAIN_FREE[0]}=1 leaves the main thread alone)"
        for name, value in values.items()
        if value is not None and value.strip()
    ]


def export(cores: int, ranks: int) -> tuple[Exported | None, list[Notice]]:
    """Set OMP_NUM_THREADS to the number of cores, unless somebody has set it.

    No more than a quota of CPU time lets run at the same time: threads beyond it stop all others.

    Args:
        cores: those in the share.
        ranks: how many ranks of the job are on this node.

    Returns:
        What was set, None when nothing was; and what is to be said.
    """
    first = environ.get(NUMBER)
    if first is not None and first.strip():
        text = f"{NUMBER}={first} is kept; the share has {cores} core{'s' if cores != 1 else ''}"
        return None, [Notice("omp-kept", f"{text} (torchrun sets it to 1 where nobody has)")]
    threads, capped = _under_quota(cores, ranks)
    environ.put(NUMBER, str(threads))
    return Exported(first=first, ours=str(threads)), [*capped, *_late()]


def _under_quota(cores: int, ranks: int) -> tuple[int, list[Notice]]:
    """As many threads as may run all the time; a limit that holds for our parent, too, is shared.

    Ranks that each have a container are each limited for themselves.
    """
    from gpuaff.topology.quota import quotas

    tree, parent = kernel.machine_tree(), kernel.parent_id()
    above = {} if parent is None else quotas(tree, parent)
    limits = [
        (limit / ranks, limit, folder in above) if folder in above else (limit, limit, False)
        for folder, limit in quotas(tree).items()
    ]
    if not limits or min(limits)[0] >= cores:
        return cores, []
    own, limit, is_shared = min(limits)
    threads = max(1, int(own))
    among = f" for the {ranks} ranks of this node" if is_shared and ranks > 1 else ""
    text = (
        f"the cgroup grants {limit:.3g} CPUs' time{among} (cpu.max, cpu.cfs_quota_us): "
        f"{NUMBER}={threads}, and the share has {cores} core{'s' if cores != 1 else ''}"
    )
    return threads, [Notice("omp-quota", text)]


def _late() -> list[Notice]:
    files = kernel.mapped_files(kernel.process_id())
    if not any(loaded(runtime.prefixes, files) for runtime in OPENMP):
        return []
    text = (
        f"an OpenMP runtime is loaded already and has read {NUMBER} before it was set: call "
        "set_affinity() before importing torch, numpy and the like, or set its number of threads"
    )
    return [Notice("omp-late", text)]
