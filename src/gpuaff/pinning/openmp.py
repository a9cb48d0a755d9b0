"""OMP_NUM_THREADS, and the variables by which OpenMP runtimes and BLAS bind threads.

gpuaff never sets one of those that bind: they are the user's. They take effect when a runtime is
loaded, which is after us, and then narrow the main thread's mask (cases C4, C5, C7).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from gpuaff._system import env, kernel
from gpuaff.notices import Notice
from gpuaff.pinning.state import Exported

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias

    Get: TypeAlias = Callable[[str], str | None]
    """Looks up a variable."""

# Libraries that bind threads by themselves: their files, and the variables that they heed. Pure.
#
# An OpenMP runtime binds the thread that loads it when a variable tells it to; OpenBLAS, built with
# affinity, does so unless it is told not to (cases C1, C2, C4, C5, C7).
#
# Sources: OpenMP 5.2, 21.1 (OMP_PROC_BIND, OMP_PLACES); the manual of GNU's runtime
# (OMP_PROC_BIND=false goes before GOMP_CPU_AFFINITY); that of Intel's, from which LLVM's comes
# (KMP_AFFINITY goes before GOMP_CPU_AFFINITY, and that before OMP_PROC_BIND); OpenBLAS'
# driver/others/init.c.


PROC_BIND, PLACES = "OMP_PROC_BIND", "OMP_PLACES"
KMP, GOMP = "KMP_AFFINITY", "GOMP_CPU_AFFINITY"
MAIN_FREE = ("OPENBLAS_MAIN_FREE", "GOTOBLAS_MAIN_FREE")

VARIABLES = (PROC_BIND, PLACES, KMP, GOMP, *MAIN_FREE)
"""All that this module asks for."""

_BINDING = frozenset({"true", "primary", "master", "close", "spread"})
"""The words of OMP_PROC_BIND that bind; a list has one for each level of nesting."""

_KMP_BINDING = frozenset({"compact", "scatter", "balanced", "explicit", "physical", "logical"})
"""The types of KMP_AFFINITY that bind; the others are ``none`` and ``disabled``."""


@dataclass(frozen=True, slots=True)
class Runtime:
    """An OpenMP runtime.

    Attributes:
        name: what to call it.
        prefixes: how the names of its files begin (in wheels ``libgomp-a34b3233.so.1``).
        heeds: the variables that make it bind.
    """

    name: str
    prefixes: tuple[str, ...]
    heeds: tuple[str, ...]


_LLVM = (KMP, GOMP, PROC_BIND, PLACES)

OPENMP = (
    Runtime("Intel's OpenMP runtime", ("libiomp5.", "libiomp5-"), _LLVM),
    Runtime("LLVM's OpenMP runtime", ("libomp.", "libomp-"), _LLVM),
    Runtime("GNU's OpenMP runtime", ("libgomp.", "libgomp-"), (GOMP, PROC_BIND, PLACES)),
)

BLAS = ("libopenblas", "libscipy_openblas")
"""How the names of OpenBLAS' files begin."""


def loaded(prefixes: tuple[str, ...], files: Collection[str]) -> str | None:
    """A library's file among those that a process has mapped; None when it is not there."""
    return min((file for file in files if file.startswith(prefixes)), default=None)


def that_bind(get: Get, heeded: Collection[str] = _LLVM) -> list[str]:
    """Those of the variables that make a runtime bind threads, by their values.

    Args:
        get: looks up a variable.
        heeded: the variables that the runtime heeds; by default what any runtime does.
    """
    return [name for name in (PROC_BIND, PLACES, GOMP, KMP) if name in heeded and _binds(name, get)]


def _binds(name: str, get: Get) -> bool:
    words = _words(get(name))
    is_off = _words(get(PROC_BIND))[:1] == ["false"]
    if name == PROC_BIND:
        return not is_off and not _BINDING.isdisjoint(words)
    if name == KMP:
        return not _KMP_BINDING.isdisjoint(words)
    if name == PLACES:
        return bool(words) and not is_off
    return bool(words)


def _words(text: str | None) -> list[str]:
    return [word for word in (part.strip().lower() for part in (text or "").split(",")) if word]


def spares_the_main_thread(get: Get) -> bool:
    """Whether OpenBLAS is told to leave the main thread alone."""
    return any(_number(get(name) or "") for name in MAIN_FREE)


def _number(text: str) -> int:
    """As C's ``atoi`` reads it, which OpenBLAS uses: the digits at the beginning."""
    text = text.strip()
    digits = text[: len(text) - len(text.lstrip("0123456789"))]
    return int(digits or 0)


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
    heed = (one.prefixes for one in OPENMP if that_bind(env.get, one.heeds))
    return any(loaded(prefixes, files) for prefixes in (*heed, *([BLAS] if _blas() else [])))


def _told() -> list[str]:
    """The variables that make some runtime bind, each with its remedy."""
    return [f"{name}={env.get(name)} ({_remedy(name)})" for name in that_bind(env.get)]


def _remedy(name: str) -> str:
    if name == KMP:
        return "set it to disabled, which also keeps masks through a fork"
    return "unset it"


def _blas() -> list[str]:
    if spares_the_main_thread(env.get):
        return []
    values = {name: env.get(name) for name in MAIN_FREE}
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
    first = env.get(NUMBER)
    if first is not None and first.strip():
        text = f"{NUMBER}={first} is kept; the share has {cores} core{'s' if cores != 1 else ''}"
        return None, [Notice("omp-kept", f"{text} (torchrun sets it to 1 where nobody has)")]
    threads, capped = _under_quota(cores, ranks)
    env.put(NUMBER, str(threads))
    return Exported(first=first, ours=str(threads)), [*capped, *_late()]


def _under_quota(cores: int, ranks: int) -> tuple[int, list[Notice]]:
    """As many threads as may run all the time; a limit that holds for our parent, too, is shared.

    Ranks that each have a container are each limited for themselves.
    """
    from gpuaff.topology.cgroup import quotas

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
