"""A shared library that uses OpenMP, as numpy's or torch's do: loaded late, by the process."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.fakedriver.build import compiler
from tests.processes import CPUS

NARROWING = (
    {"GOMP_CPU_AFFINITY": str(CPUS[0])},
    {"OMP_PROC_BIND": "close", "OMP_PLACES": f"{{{CPUS[0]}}},{{{CPUS[-1]}}}"},
)
"""Variables with which GNU's runtime narrows the main thread when it is loaded."""

_SOURCE = """
#include <omp.h>
int threads(void)
{
    int count = 0;
    #pragma omp parallel reduction(+ : count)
    count += 1;
    return count;
}
int sum(void)
{
    int total = 0;
    #pragma omp parallel for reduction(+ : total)
    for (int i = 0; i < 1000; i++) total += i;
    return total;
}
"""


def build(folder: Path) -> Path:
    """Compile it: in a parallel region ``threads()`` counts who takes part, ``sum()`` adds."""
    source, library = folder / "region.c", folder / "libregion.so"
    source.write_text(_SOURCE)
    command = [str(compiler()), "-shared", "-fPIC", "-fopenmp", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    return library
