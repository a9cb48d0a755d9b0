"""Who has probably bound a process's main thread: what it has loaded, and its variables. Pure.

An OpenMP runtime binds the thread that loads it when a variable tells it to; OpenBLAS, built with
affinity, does so unless it is told not to (cases C1, C2, C4, C5, C7).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from gpuaff.records import dataclass


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """A library that may have done it.

    Attributes:
        reason: what speaks against it.
        remedy: what keeps it from doing it again.
    """

    reason: str
    remedy: str


_BINDING = ("OMP_PROC_BIND", "OMP_PLACES")
"""What every OpenMP runtime heeds."""

_LLVM = ("KMP_AFFINITY", "GOMP_CPU_AFFINITY", *_BINDING)

_RUNTIMES = (
    ("Intel's OpenMP runtime", re.compile(r"libiomp5[-.].*"), _LLVM),
    ("LLVM's OpenMP runtime", re.compile(r"libomp[-.].*"), _LLVM),
    ("GNU's OpenMP runtime", re.compile(r"libgomp[-.].*"), ("GOMP_CPU_AFFINITY", *_BINDING)),
)
"""Runtimes by their files' names (those in wheels are ``libgomp-a34b3233.so.1``), and the variables
that make them bind."""

_BLAS = re.compile(r"lib(scipy_)?openblas.*")

_NO = frozenset({"", "false", "disabled", "none"})


def culprits(files: Collection[str], variables: Mapping[str, str]) -> tuple[Culprit, ...]:
    """Who may have bound the main thread, the likeliest first.

    Args:
        files: the names of the files that the process has mapped.
        variables: the variables that it was started with, or has now.
    """
    return (*_runtimes(files, variables), *_blas(files, variables))


def _runtimes(files: Collection[str], variables: Mapping[str, str]) -> Iterator[Culprit]:
    for name, pattern, heeded in _RUNTIMES:
        file = _loaded(pattern, files)
        told = [word for word in heeded if _says_yes(word, variables)]
        if file and told:
            said = " and ".join(f"{word}={variables[word]}" for word in told)
            also = " or set KMP_AFFINITY=disabled" if heeded is _LLVM else ""
            yield Culprit(
                reason=f"{name} ({file}) binds it, as {said} tells it to",
                remedy=f"unset {', '.join(told)}{also}",
            )


def _says_yes(word: str, variables: Mapping[str, str]) -> bool:
    # OMP_PROC_BIND=false goes before the others (OpenMP 5.2, 21.1.7; manual of GNU's runtime).
    off = variables.get("OMP_PROC_BIND", "").lower() == "false"
    said = set(variables.get(word, "").lower().split(","))
    return not said & _NO and not (off and word != "KMP_AFFINITY")


def _blas(files: Collection[str], variables: Mapping[str, str]) -> Iterator[Culprit]:
    file = _loaded(_BLAS, files)
    if file and "OPENBLAS_MAIN_FREE" not in variables:
        yield Culprit(
            reason=f"OpenBLAS ({file}) binds it on import in some builds",
            remedy="set OPENBLAS_MAIN_FREE=1",
        )


def _loaded(pattern: re.Pattern[str], files: Collection[str]) -> str | None:
    """The file of a library; None when it is not there."""
    return min(filter(pattern.fullmatch, files), default=None)
