"""Who has probably bound a process's main thread: what it has loaded, and its variables. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from gpuaff.records import dataclass
from gpuaff.runtimes import (
    BLAS,
    KMP,
    OPENMP,
    PROC_BIND,
    Runtime,
    loaded,
    spares_the_main_thread,
    that_bind,
)


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """A library that may have done it.

    Attributes:
        reason: what speaks against it.
        remedy: what keeps it from doing it again.
    """

    reason: str
    remedy: str


def culprits(files: Collection[str], variables: Mapping[str, str]) -> tuple[Culprit, ...]:
    """Who may have bound the main thread, the likeliest first.

    Args:
        files: the names of the files that the process has mapped.
        variables: the variables that it was started with, or has now.
    """
    return (*_runtimes(files, variables), *_blas(files, variables))


def _runtimes(files: Collection[str], variables: Mapping[str, str]) -> Iterator[Culprit]:
    for runtime in OPENMP:
        file = loaded(runtime.prefixes, files)
        told = _that_told(runtime, variables)
        if file and told:
            said = " and ".join(f"{name}={variables[name]}" for name in told)
            also = " or set KMP_AFFINITY=disabled" if KMP in runtime.heeds else ""
            yield Culprit(
                reason=f"{runtime.name} ({file}) binds it, as {said} tells it to",
                remedy=f"unset {', '.join(told)}{also}",
            )


def _that_told(runtime: Runtime, variables: Mapping[str, str]) -> list[str]:
    told = that_bind(variables.get, runtime.heeds)
    # To GNU's runtime OMP_PROC_BIND=false goes before GOMP_CPU_AFFINITY, to the others after.
    is_off = variables.get(PROC_BIND, "").strip().lower() == "false"
    return [name for name in told if not (is_off and KMP not in runtime.heeds)]


def _blas(files: Collection[str], variables: Mapping[str, str]) -> Iterator[Culprit]:
    file = loaded(BLAS, files)
    if file and not spares_the_main_thread(variables.get):
        yield Culprit(
            reason=f"OpenBLAS ({file}) binds it on import in some builds",
            remedy="set OPENBLAS_MAIN_FREE=1",
        )
