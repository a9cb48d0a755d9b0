"""Libraries that bind threads by themselves: their files, and the variables that they heed. Pure.

An OpenMP runtime binds the thread that loads it when a variable tells it to; OpenBLAS, built with
affinity, does so unless it is told not to (cases C1, C2, C4, C5, C7).

Sources: OpenMP 5.2, 21.1 (OMP_PROC_BIND, OMP_PLACES); the manual of GNU's runtime
(OMP_PROC_BIND=false goes before GOMP_CPU_AFFINITY); that of Intel's, from which LLVM's comes
(KMP_AFFINITY goes before GOMP_CPU_AFFINITY, and that before OMP_PROC_BIND); OpenBLAS'
driver/others/init.c.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from gpuaff.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias

    Get: TypeAlias = Callable[[str], str | None]
    """Looks up a variable."""

PROC_BIND, PLACES = "OMP_PROC_BIND", "OMP_PLACES"
KMP, GOMP = "KMP_AFFINITY", "GOMP_CPU_AFFINITY"
MAIN_FREE = ("OPENBLAS_MAIN_FREE", "GOTOBLAS_MAIN_FREE")

VARIABLES = (PROC_BIND, PLACES, KMP, GOMP, *MAIN_FREE)
"""All that this module asks for."""

_BINDING = frozenset({"true", "primary", "master", "close", "spread"})
"""The words of OMP_PROC_BIND that bind; a list has one for each level of nesting."""

_KMP_BINDING = frozenset({"compact", "scatter", "balanced", "explicit", "physical", "logical"})
"""The types of KMP_AFFINITY that bind; the others are ``none`` and ``disabled``."""


@dataclass(frozen=True)
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
