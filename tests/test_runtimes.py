"""Which variables make a runtime bind threads: what warnings and checks both go by."""

from __future__ import annotations

import pytest

from gpuaff.pinning.check import possible_causes
from gpuaff.pinning.openmp import OPENMP, binding_variables, is_main_thread_free, loaded

pytestmark = pytest.mark.case("C4", "C5")


@pytest.mark.parametrize(
    ("variables", "binding"),
    [
        ({}, []),
        ({"OMP_PROC_BIND": "close"}, ["OMP_PROC_BIND"]),
        ({"OMP_PROC_BIND": " TRUE "}, ["OMP_PROC_BIND"]),
        ({"OMP_PROC_BIND": "spread,close"}, ["OMP_PROC_BIND"]),
        ({"OMP_PROC_BIND": "false,close"}, []),
        ({"OMP_PROC_BIND": "0"}, []),
        ({"OMP_PLACES": "cores"}, ["OMP_PLACES"]),
        ({"OMP_PLACES": " "}, []),
        ({"OMP_PLACES": "cores", "OMP_PROC_BIND": "false"}, []),
        ({"KMP_AFFINITY": "granularity=fine,compact,1,0"}, ["KMP_AFFINITY"]),
        ({"KMP_AFFINITY": "verbose,none"}, []),
        ({"KMP_AFFINITY": "disabled"}, []),
        ({"GOMP_CPU_AFFINITY": "0-3"}, ["GOMP_CPU_AFFINITY"]),
        # Intel's runtime goes by GOMP_CPU_AFFINITY first, GNU's by OMP_PROC_BIND.
        ({"GOMP_CPU_AFFINITY": "0-3", "OMP_PROC_BIND": "false"}, ["GOMP_CPU_AFFINITY"]),
    ],
)
def test_what_binds(variables: dict[str, str], binding: list[str]) -> None:
    assert binding_variables(variables.get) == binding
    accused = possible_causes({"libiomp5.so"}, variables)
    assert bool(accused) == bool(binding)
    assert all(name in accused[0][0] for name in binding)


def test_what_gnus_runtime_heeds() -> None:
    assert not possible_causes({"libgomp.so.1"}, {"KMP_AFFINITY": "compact"})
    assert not possible_causes(
        {"libgomp.so.1"}, {"GOMP_CPU_AFFINITY": "0", "OMP_PROC_BIND": "FALSE"}
    )
    assert possible_causes({"libgomp-a34b3233.so.1.0.0"}, {"GOMP_CPU_AFFINITY": "0"})


@pytest.mark.case("C7")
@pytest.mark.parametrize(
    ("variables", "spared"),
    [
        ({}, False),
        ({"OPENBLAS_MAIN_FREE": "1"}, True),
        ({"GOTOBLAS_MAIN_FREE": "1"}, True),
        ({"OPENBLAS_MAIN_FREE": "0"}, False),
        ({"OPENBLAS_MAIN_FREE": "0", "GOTOBLAS_MAIN_FREE": " 2x"}, True),
        ({"OPENBLAS_MAIN_FREE": "yes"}, False),
    ],
)
def test_openblas(variables: dict[str, str], spared: bool) -> None:
    assert is_main_thread_free(variables.get) == spared
    assert bool(possible_causes({"libscipy_openblas64_-ff651d7f.so"}, variables)) != spared


def test_other_libraries_of_like_names() -> None:
    files = {"libompi.so.40", "libompitrace.so.40", "libgompertz.so", "libiomp.so"}
    assert [loaded(prefixes, files) for prefixes, _ in OPENMP.values()] == [None, None, None]
