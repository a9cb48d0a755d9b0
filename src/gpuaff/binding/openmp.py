"""OMP_NUM_THREADS, and the variables by which OpenMP runtimes and BLAS bind threads.

gpuaff never sets one of those that bind: they are the user's. They take effect when a runtime is
loaded, which is after us, and then narrow the main thread's mask (cases C4, C5, C7).
"""

from __future__ import annotations

from gpuaff.binding.process import Exported
from gpuaff.notices import Notice
from gpuaff.system import environ, kernel

_NUMBER = "OMP_NUM_THREADS"

_BINDING = frozenset({"true", "primary", "master", "close", "spread"})
"""The words of OMP_PROC_BIND that bind; a list has one for each level of nesting."""

_KMP_BINDING = frozenset({"compact", "scatter", "balanced", "explicit", "physical", "logical"})
"""The types of KMP_AFFINITY that bind; the others are ``none`` and ``disabled``."""

_FREE = ("OPENBLAS_MAIN_FREE", "GOTOBLAS_MAIN_FREE")

_RUNTIMES = ("/libgomp", "/libiomp5", "/libomp")


def remarks() -> list[Notice]:
    """One remark that names the variables that will move threads, with the remedies."""
    found = [*_openmp(), *_intel(), *_blas()]
    if not found:
        return []
    text = (
        f"{'; '.join(found)}: when the library is loaded it binds threads by itself, and the main "
        "thread loses most of the share; set_affinity() once more, after the import, gets it back"
    )
    return [Notice("omp-binding", text)]


def _openmp() -> list[str]:
    bind = _words("OMP_PROC_BIND")
    # With OMP_PROC_BIND=false places are not used. Intel's runtime heeds GOMP_CPU_AFFINITY first.
    names = ["OMP_PROC_BIND"] if _BINDING & bind else []
    names += ["OMP_PLACES"] if _words("OMP_PLACES") - {""} and bind != {"false"} else []
    names += ["GOMP_CPU_AFFINITY"] if _words("GOMP_CPU_AFFINITY") - {""} else []
    return [f"{name}={environ.get(name)} (unset it)" for name in names]


def _intel() -> list[str]:
    if not _KMP_BINDING & _words("KMP_AFFINITY"):
        return []
    value = environ.get("KMP_AFFINITY")
    remedy = "set it to disabled, which also keeps masks through a fork"
    return [f"KMP_AFFINITY={value} ({remedy})"]


def _blas() -> list[str]:
    values = {name: environ.get(name) for name in _FREE}
    if any(value is not None and _number(value) for value in values.values()):
        return []
    return [
        f"{name}={value} (OPENBLAS_MAIN_FREE=1 leaves the main thread alone)"
        for name, value in values.items()
        if value is not None and value.strip()
    ]


def _number(text: str) -> int:
    """As C's ``atoi`` reads it, which OpenBLAS uses: the digits at the beginning."""
    text = text.strip()
    digits = text[: len(text) - len(text.lstrip("0123456789"))]
    return int(digits or 0)


def _words(name: str) -> set[str]:
    return {word.strip().lower() for word in (environ.get(name) or "").split(",")}


def export(cores: int) -> tuple[Exported | None, list[Notice]]:
    """Set OMP_NUM_THREADS to the number of cores, unless somebody has set it.

    Returns:
        What was set, None when nothing was; and what is to be said.
    """
    first = environ.get(_NUMBER)
    if first is not None and first.strip():
        text = f"{_NUMBER}={first} is kept; the share has {cores} core{'s' if cores != 1 else ''}"
        return None, [Notice("omp-kept", f"{text} (torchrun sets it to 1 where nobody has)")]
    environ.put(_NUMBER, str(cores))
    return Exported(first=first, ours=str(cores)), _late()


def _late() -> list[Notice]:
    loaded = kernel.Tree().read("proc/self/maps") or ""
    if not any(runtime in loaded for runtime in _RUNTIMES):
        return []
    text = (
        f"an OpenMP runtime is loaded already and has read {_NUMBER} before it was set: call "
        "set_affinity() before importing torch, numpy and the like, or set its number of threads"
    )
    return [Notice("omp-late", text)]


def swap(now: Exported | None, then: Exported | None) -> None:
    """Put OMP_NUM_THREADS back to what it was then; not where somebody else has set it since."""
    if now is not None and now != then:
        _swap(now.ours, now.first if then is None else then.ours)
    elif then is not None and now is None:  # a call that failed had taken it away
        _swap(then.first, then.ours)


def _swap(expected: str | None, wanted: str | None) -> None:
    if environ.get(_NUMBER) == expected:
        environ.put(_NUMBER, wanted)
