"""OMP_NUM_THREADS, and the variables by which OpenMP runtimes and OpenBLAS bind threads.

gpuaff never sets a variable that binds: they are the user's. They narrow the main thread's mask
when a runtime is loaded, which is after gpuaff is called (cases C1, C2, C4, C5, C7).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection

from gpuaff._system import env, kernel
from gpuaff.formatting import counted
from gpuaff.notices import Notice
from gpuaff.pinning.state import OMP_NUM_THREADS, Process
from gpuaff.topology.sysfs import quotas

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias

    Get: TypeAlias = Callable[[str], str | None]  # looks up a variable

# Sources: OpenMP 5.2, 21.1; the manual of GNU's runtime (OMP_PROC_BIND=false overrides
# GOMP_CPU_AFFINITY); that of Intel's, from which LLVM's comes (KMP_AFFINITY overrides
# GOMP_CPU_AFFINITY, and that OMP_PROC_BIND); OpenBLAS' driver/others/init.c.
PROC_BIND, PLACES = "OMP_PROC_BIND", "OMP_PLACES"
KMP, GOMP = "KMP_AFFINITY", "GOMP_CPU_AFFINITY"
MAIN_FREE = ("OPENBLAS_MAIN_FREE", "GOTOBLAS_MAIN_FREE")

VARIABLES = (PROC_BIND, PLACES, KMP, GOMP, *MAIN_FREE)

# The words that bind: of OMP_PROC_BIND, a list with one for each level of nesting; the types of
# KMP_AFFINITY, whose others are ``none`` and ``disabled``.
_BINDING = frozenset({"true", "primary", "master", "close", "spread"})
_KMP_BINDING = frozenset({"compact", "scatter", "balanced", "explicit", "physical", "logical"})

_LLVM = (KMP, GOMP, PROC_BIND, PLACES)

OPENMP = {
    "Intel's OpenMP runtime": (("libiomp5.", "libiomp5-"), _LLVM),
    "LLVM's OpenMP runtime": (("libomp.", "libomp-"), _LLVM),
    "GNU's OpenMP runtime": (("libgomp.", "libgomp-"), (GOMP, PROC_BIND, PLACES)),
}
"""How the names of each runtime's files begin, and the variables that make it bind."""

BLAS = ("libopenblas", "libscipy_openblas")
"""How the names of OpenBLAS' files begin."""


def loaded(prefixes: tuple[str, ...], files: Collection[str]) -> str | None:
    """A library's file among those that a process has mapped; None when it is not there."""
    return min((file for file in files if file.startswith(prefixes)), default=None)


def binding_variables(get: Get, variables: Collection[str] = _LLVM) -> list[str]:
    """Those of a runtime's variables that make it bind threads, by their values."""
    is_off = _words(get(PROC_BIND))[:1] == ["false"]
    binds = {
        PROC_BIND: not is_off and not _BINDING.isdisjoint(_words(get(PROC_BIND))),
        PLACES: not is_off and _words(get(PLACES)),
        GOMP: not (is_off and KMP not in variables) and _words(get(GOMP)),
        KMP: not _KMP_BINDING.isdisjoint(_words(get(KMP))),
    }
    return [name for name, does_bind in binds.items() if does_bind and name in variables]


def _words(text: str | None) -> list[str]:
    return [word for word in (part.strip().lower() for part in (text or "").split(",")) if word]


def is_main_thread_free(get: Get) -> bool:
    """Whether OpenBLAS is configured to leave the main thread alone."""
    # It reads a number by C's ``atoi``: the digits at the beginning.
    return any((get(name) or "").strip().lstrip("0")[:1].isdecimal() for name in MAIN_FREE)


def binding_notices() -> list[Notice]:
    """One warning that names the variables that will move threads, with the remedies."""
    remedies = dict.fromkeys(binding_variables(env.get), "unset it")
    if KMP in remedies:
        remedies[KMP] = "set it to disabled, which also keeps masks through a fork"
    for name in () if is_main_thread_free(env.get) else MAIN_FREE:
        if (env.get(name) or "").strip():
            remedies[name] = f"{MAIN_FREE[0]}=1 leaves the main thread alone"
    if not remedies:
        return []
    files = kernel.mapped_files(os.getpid())
    used = [prefixes for prefixes, names in OPENMP.values() if binding_variables(env.get, names)]
    used += [BLAS] if not remedies.keys().isdisjoint(MAIN_FREE) else []
    effect = (
        "when the library is loaded it binds threads by itself, and the main thread loses most of "
        "the share; Affinity.reapply(), after the import, restores it"
    )
    if any(loaded(prefixes, files) for prefixes in used):
        effect = (
            "the library is loaded already. A mask that it narrowed before gpuaff was first called "
            "is not widened: call gpuaff before importing it; or, where no scheduler has set a "
            "mask, os.sched_setaffinity(0, range(os.cpu_count())) before the first call"
        )
    found = "; ".join(f"{name}={env.get(name)} ({remedy})" for name, remedy in remedies.items())
    return [Notice("omp-binding", f"{found}: {effect}")]


def set_thread_count(process: Process, cores: int, ranks: int) -> list[Notice]:
    """Set OMP_NUM_THREADS to the share's number of cores, unless it is set."""
    value = env.get(OMP_NUM_THREADS)
    if value is not None and value.strip():
        text = f"{OMP_NUM_THREADS}={value} is kept; the share has {counted(cores, 'core')}"
        return [Notice("omp-kept", f"{text} (torchrun sets it to 1 where it is unset)")]
    threads, notices = _within_quota(cores, ranks)
    process.set_variable(OMP_NUM_THREADS, str(threads))
    files = kernel.mapped_files(os.getpid())
    if any(loaded(prefixes, files) for prefixes, _ in OPENMP.values()):
        text = (
            f"an OpenMP runtime is loaded already and read {OMP_NUM_THREADS} before it was set: "
            "call set_affinity() before importing torch, numpy and the like, or set its number of "
            "threads"
        )
        notices.append(Notice("omp-late", text))
    return notices


def _within_quota(cores: int, ranks: int) -> tuple[int, list[Notice]]:
    """As many threads as may run all the time: those beyond a quota stop all others."""
    # The ranks share a limit that holds for their parent, too; a container of a rank's own has one
    # for this rank alone.
    tree, parent = kernel.machine_tree(), next(kernel.ancestors(), None)
    above = {} if parent is None else quotas(tree, parent)
    limits = [
        (limit / ranks, limit, True) if folder in above else (limit, limit, False)
        for folder, limit in quotas(tree).items()
    ]
    if not limits or min(limits)[0] >= cores:
        return cores, []
    own, limit, is_shared = min(limits)
    threads = max(1, int(own))
    among = f" for the {ranks} ranks of this node" if is_shared and ranks > 1 else ""
    text = (
        f"the cgroup grants {limit:.3g} CPUs' time{among} (cpu.max, cpu.cfs_quota_us): "
        f"{OMP_NUM_THREADS}={threads}, and the share has {counted(cores, 'core')}"
    )
    return threads, [Notice("omp-quota", text)]
