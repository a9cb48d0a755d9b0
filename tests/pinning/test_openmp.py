"""OpenMP: the number of threads, and the variables that bind them; with a real runtime."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import processes
from tests.cpusets import quota
from tests.fakedriver.driver import FakeDriver, MakeDriver
from tests.fakedriver.play import this_machine
from tests.processes import CPUS, THREADS, printed, run

pytestmark = [pytest.mark.fake_driver, pytest.mark.needs("two-cpus")]

START = """
import ctypes

def number():
    # What C sees, and so OpenMP.
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    value = getenv(b"OMP_NUM_THREADS")
    assert value == (None if (here := os.environ.get("OMP_NUM_THREADS")) is None else here.encode())
    return here

def warned(affinity):
    return [notice.code for notice in affinity.warnings if "omp" in notice.code]

def runs():
    # A parallel region of a real runtime; the number of its threads.
    return ctypes.CDLL(LIBRARY).threads()
"""


def all_hold(driver: FakeDriver, script: str, library: Path | None = None, **env: str) -> None:
    """Run a script that may load an OpenMP runtime; all that it ``holds`` must."""
    start = START.replace("LIBRARY", repr(str(library)))
    processes.all_hold(start + script, env={**driver.env(), **env})


# OMP_NUM_THREADS


def test_it_is_the_number_of_cores_and_goes_again(driver: FakeDriver) -> None:
    script = """
affinity = gpuaff.set_affinity(0, 1, openmp=True)
holds(int(number()) == affinity.plan.share_of(0).cores, warned(affinity) == [])
affinity.restore()
holds(number() is None)
with gpuaff.set_affinity(0, 1, openmp=True):
    holds(number() is not None)
    with gpuaff.set_affinity(0, 1):
        holds(number() is None)
    holds(number() is not None)
holds(number() is None)
"""
    all_hold(driver, script)


def test_the_runtime_heeds_it(driver: FakeDriver, openmp_library: Path) -> None:
    script = """
gpuaff.set_affinity(0, 1, openmp=True)
second = gpuaff.set_affinity(0, 1, max_physical_cores=1, openmp=True)
holds(runs() == 1, number() == "1", warned(second) == [])
gpuaff.set_affinity(0, 1)
holds(number() is None)
"""
    all_hold(driver, script, openmp_library)


def test_what_the_user_has_set_stays(driver: FakeDriver) -> None:
    script = """
import io, logging
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=io.StringIO())
affinity = gpuaff.set_affinity(0, 2, openmp=True)
holds(warned(affinity) == ["omp-kept"], number() == "7,2")
affinity.restore()
said = logging.root.handlers[0].stream.getvalue()
kept = "INFO gpuaff: rank 0: OMP_NUM_THREADS=7,2 is kept; the share has"
holds(number() == "7,2", said.count("[omp-kept]") == 1, kept in said)
os.environ["OMP_NUM_THREADS"] = " "  # that is no value
affinity = gpuaff.set_affinity(0, 2, openmp=True)
holds(number().isdecimal(), warned(affinity) == [])
affinity.restore()
holds(number() == " ")
"""
    all_hold(driver, script, OMP_NUM_THREADS="7,2")


def test_only_what_is_ours_is_removed(driver: FakeDriver) -> None:
    script = """
affinity = gpuaff.set_affinity(0, 2, openmp=True)
holds(child(lambda: affinity.restore() and number() is None) == 0, number() is not None)
os.environ["OMP_NUM_THREADS"] = "33"
affinity.restore()
holds(number() == "33")
"""
    all_hold(driver, script)


def test_the_argument_or_the_variable(driver: FakeDriver) -> None:
    script = """
flags = [(None, "1", True), (None, "off", False), (None, "", False), (False, "1", False)]
for argument, variable, is_set in [*flags, (True, "0", True)]:
    os.environ["GPUAFF_OPENMP"] = variable
    with gpuaff.set_affinity(0, 2, openmp=argument):
        holds((number() is not None) is is_set)
neither = [(None, "2", "GPUAFF_OPENMP"), (1, "", "openmp"), ("on", "", "openmp")]
for argument, variable, option in neither:
    os.environ["GPUAFF_OPENMP"] = variable
    try:
        gpuaff.set_affinity(0, 2, openmp=argument)
    except gpuaff.InvalidOptionError as error:
        holds(str(error).startswith(f"{option}="), number() is None)
"""
    all_hold(driver, script)


def test_a_runtime_that_is_loaded_already(driver: FakeDriver, openmp_library: Path) -> None:
    script = """
runs()
holds(warned(gpuaff.set_affinity(0, 2, openmp=True)) == ["omp-late"])
holds(warned(gpuaff.set_affinity(0, 2)) == [])
"""
    all_hold(driver, script, openmp_library)


# Variables that bind. Which values do is tested in test_runtimes.py.


MESSAGES = """
import json, os, sys
import gpuaff
found = []
for variables in json.loads(sys.argv[1]):
    os.environ |= variables
    warnings = gpuaff.set_affinity(0, 2, strict="CUDA_VISIBLE_DEVICES" not in variables).warnings
    found.append([notice.message for notice in warnings if notice.code == "omp-binding"])
    for name in variables:
        del os.environ[name]
print(json.dumps(found))
"""

BINDING_VALUES = {
    "OMP_PROC_BIND": ("close", "unset it"),
    "OMP_PLACES": ("{0:4},{4:4}", "unset it"),
    "GOMP_CPU_AFFINITY": ("4-15", "unset it"),
    "KMP_AFFINITY": ("verbose,Scatter", "set it to disabled"),
    "OPENBLAS_MAIN_FREE": ("no", "OPENBLAS_MAIN_FREE=1"),
    "GOTOBLAS_MAIN_FREE": ("0", "OPENBLAS_MAIN_FREE=1"),
}
"""Variables that bind, and what to do about each."""


@pytest.mark.case("C4", "C5", "C7")
def test_variables_that_bind_are_named_in_one_warning(driver: FakeDriver) -> None:
    binding = {name: value for name, (value, _) in BINDING_VALUES.items()}
    harmless = {
        "OMP_PROC_BIND": "FALSE",
        "OMP_PLACES": "cores",
        "OPENBLAS_MAIN_FREE": "0",
        "GOTOBLAS_MAIN_FREE": "1",
    }
    environments = [binding, harmless, {**binding, "CUDA_VISIBLE_DEVICES": ""}, {}]
    found = json.loads(printed(MESSAGES, json.dumps(environments), env=driver.env()))
    (message,), *others = found
    for name, (value, remedy) in BINDING_VALUES.items():
        assert remedy in message.partition(f"{name}={value} (")[2].partition(")")[0]
    assert others == [[], [], []], "harmless; nothing is pinned; none"


# What a runtime does. Each is found to be so before it is said to be so.

BINDING = [
    {"OMP_PROC_BIND": "close", "OMP_PLACES": "threads"},
    {"OMP_PROC_BIND": "spread,close"},
    {"GOMP_CPU_AFFINITY": f"{CPUS[0]}-{CPUS[-1]}"},
]


@pytest.mark.parametrize("env", BINDING, ids=max)
@pytest.mark.case("C2", "C4", "C5", "C7", "C8")
def test_a_runtime_takes_the_share_away_and_a_call_gets_it_back(
    driver: FakeDriver, openmp_library: Path, env: dict[str, str]
) -> None:
    script = """
affinity = gpuaff.set_affinity(0, 1)
holds(warned(affinity) == ["omp-binding"], now() == affinity == before)
runs()
holds(len(now()) == 1, CALL == before)
runs()
holds(now() == before)
"""
    for call in ("affinity.reapply()", "gpuaff.set_affinity(0, 1)", "affinity.restore()"):
        all_hold(driver, script.replace("CALL", call), openmp_library, **env)
    # What a runtime did before the first call counts as a border; the program must widen it.
    script = """
runs()
left = now()
affinity = gpuaff.set_affinity(0, 1)
holds(len(left) == 1, affinity == left, warned(affinity) == ["omp-binding"])
(said,) = [notice.message for notice in affinity.warnings if notice.code == "omp-binding"]
holds("loaded already" in said, "reapply" not in said, "mask-shrunk" in codes(affinity))
"""
    all_hold(driver, script, openmp_library, **env)
    script = """
runs()
os.sched_setaffinity(0, range(os.cpu_count()))
holds(gpuaff.set_affinity(0, 1) == before)
"""
    all_hold(driver, script, openmp_library, **env)


@pytest.mark.parametrize("env", [{}, {"OMP_PROC_BIND": "false", "OMP_PLACES": "threads"}], ids=str)
def test_a_runtime_without_them_leaves_it(
    driver: FakeDriver, openmp_library: Path, env: dict[str, str]
) -> None:
    script = """
affinity = gpuaff.set_affinity(0, 1)
runs()
holds(warned(affinity) == [], now() == affinity)
"""
    all_hold(driver, script, openmp_library, **env)


def test_what_a_terminal_would_obey_is_not_logged(driver: FakeDriver) -> None:
    script = """
import logging, os, sys
import gpuaff
logging.basicConfig(stream=sys.stdout, format="%(message)s")
os.environb[b"OMP_PLACES"] = b"\\x1b[31mcores\\n\\xff"
gpuaff.set_affinity(0, 1)
"""
    assert r"OMP_PLACES=\x1b[31mcores\n\udcff (unset it)" in printed(script, env=driver.env())


@pytest.mark.case("C8")
def test_a_workers_share_outlives_a_parallel_region(
    driver: FakeDriver, openmp_library: Path
) -> None:
    script = """
gpuaff.set_affinity(0, 2)
def work():
    share = now()
    own = gpuaff.set_affinity(0, 1)
    for _ in range(3):
        runs()
    return own == share == now()
holds(child(work) == 0)
"""
    all_hold(driver, script, openmp_library)


# A quota of CPU time


@pytest.mark.needs("cpu-quotas")
@pytest.mark.parametrize(
    ("cpus", "expected"),
    [
        (2.0, f"{len(CPUS)} []" if len(CPUS) <= 2 else "2 ['omp-quota']"),
        (1.0, "1 ['omp-quota']"),
        (0.5, "1 ['omp-quota']"),
    ],
)
def test_a_quota_caps_it_and_not_the_mask(driver: FakeDriver, cpus: float, expected: str) -> None:
    script = """
affinity = gpuaff.set_affinity(0, 1, openmp=True)
print(number(), warned(affinity))
print(len(affinity))
"""
    with quota(cpus) as command:
        done = run(THREADS + START + script, env=driver.env(), prefix=command)
    assert done.stdout.splitlines() == [expected, str(len(CPUS))], done.stderr


@pytest.mark.needs("cpu-quotas")
@pytest.mark.parametrize(("inside", "expected"), [("launcher", "1"), ("rank", "2")])
def test_ranks_share_the_quota_of_their_launcher(
    fake_driver: MakeDriver, inside: str, expected: str
) -> None:
    """2 CPUs' time for two ranks; or 2 for each, where each has a container of its own."""
    script = """
affinity = gpuaff.set_affinity(0, 2, mode="all", openmp=True)
print(number(), *[notice.message for notice in affinity.warnings if notice.code == "omp-quota"])
"""
    driver = fake_driver(this_machine(2))
    with quota(2.0) as command:
        launcher = ["sh", "-c", '"$0" "$@"; exit $?']
        prefix = [*command, *launcher] if inside == "launcher" else [*launcher, *command]
        done = run(THREADS + START + script, env=driver.env(), prefix=prefix)
    said = done.stdout.strip()
    assert said.partition(" ")[0] == expected, done.stderr
    assert ("2 CPUs' time for the 2 ranks of this node" in said) == (inside == "launcher")
