"""The machine that pinning is tried on: this one's CPUs, with two GPUs of the fake driver."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuaff import Topology

from fakedriver.build import compiler
from fakedriver.driver import FakeDriver
from fakedriver.play import this_machine


@pytest.fixture
def driver(fake_driver: Callable[[Topology], FakeDriver]) -> FakeDriver:
    return fake_driver(this_machine(2))


OPENMP = """
int sum(void) {
    int total = 0;
#pragma omp parallel for reduction(+ : total)
    for (int i = 0; i < 1000; i++) total += i;
    return total;
}
"""


@pytest.fixture(scope="session")
def openmp_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that uses GNU's OpenMP runtime, as numpy and torch do; ``sum()`` is parallel."""
    found, folder = compiler(), tmp_path_factory.mktemp("openmp")
    assert found is not None
    (folder / "sum.c").write_text(OPENMP)
    library = folder / "libsum.so"
    command = [found, "-fopenmp", "-shared", "-fPIC", "-o", str(library), str(folder / "sum.c")]
    subprocess.run(command, check=True)
    return library
