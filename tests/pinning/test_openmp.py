"""OpenMP: the number of threads, and the variables that bind them; with a real runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.cpu_quotas import quota
from tests.fakedriver.driver import FakeDriver, MakeDriver
from tests.fakedriver.play import this_machine
from tests.processes import CPUS, printed, run

pytestmark = [pytest.mark.fake_driver, pytest.mark.needs("two-cpus")]

START = """
import ctypes, os, sys
import gpuaff

def number():
    # What C sees, and so OpenMP.
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    value = getenv(b"OMP_NUM_THREADS")
    assert value == (None if (here := os.environ.get("OMP_NUM_THREADS")) is None else here.encode())
    return here

def codes(affinity):
    return [notice.code for notice in affinity.warnings if "omp" in notice.code]
"""


def said(driver: FakeDriver, script: str, **env: str) -> list[str]:
    """What a script printed, line by line."""
    return printed(START + script, env={**driver.env(), **env}).splitlines()


MESSAGES = """
import gpuaff
for notice in gpuaff.set_affinity(0, 2, strict=True).warnings:
    if notice.code == "omp-binding":
        print(notice.message)
"""


# OMP_NUM_THREADS


def test_it_is_the_number_of_cores_and_goes_again(driver: FakeDriver) -> None:
    script = """
affinity = gpuaff.set_affinity(0, 1, openmp=True)
print(int(number()) == affinity.plan.share_of(0).cores, codes(affinity))
affinity.restore()
print(number())
with gpuaff.set_affinity(0, 1, openmp=True):
    print(number() is None)
print(number())
"""
    assert said(driver, script) == ["True []", "None", "False", "None"]


def test_the_runtime_heeds_it(driver: FakeDriver, openmp_library: Path) -> None:
    script = f"""
affinity = gpuaff.set_affinity(0, 1, max_physical_cores=1, openmp=True)
print(ctypes.CDLL({str(openmp_library)!r}).threads(), number())
"""
    assert said(driver, script) == ["1 1"]


@pytest.mark.parametrize("value", ["1", "7,2"])
def test_what_somebody_has_set_stays(driver: FakeDriver, value: str) -> None:
    script = """
import logging
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stdout)
affinity = gpuaff.set_affinity(0, 2, openmp=True)
print(number(), codes(affinity))
affinity.restore()
print(number())
"""
    lines = said(driver, script, OMP_NUM_THREADS=value)
    assert lines[-2:] == [f"{value} ['omp-kept']", value]
    (note,) = [line for line in lines if line.endswith("[omp-kept]")]
    assert note.startswith(f"INFO gpuaff: rank 0: OMP_NUM_THREADS={value} is kept; the share has")


def test_a_blank_value_is_nobodys_and_comes_back(driver: FakeDriver) -> None:
    script = """
affinity = gpuaff.set_affinity(0, 2, openmp=True)
print(number().isdecimal(), codes(affinity))
affinity.restore()
print(repr(number()))
"""
    assert said(driver, script, OMP_NUM_THREADS=" ") == ["True []", "' '"]


def test_only_what_is_ours_is_removed(driver: FakeDriver) -> None:
    script = """
affinity = gpuaff.set_affinity(0, 2, openmp=True)
os.environ["OMP_NUM_THREADS"] = "33"
affinity.restore()
print(number())
"""
    assert said(driver, script) == ["33"]


def test_twice_is_the_same_as_once(driver: FakeDriver) -> None:
    script = """
first = gpuaff.set_affinity(0, 1, openmp=True)
second = gpuaff.set_affinity(0, 1, max_physical_cores=1, openmp=True)
print(number(), codes(second))
gpuaff.set_affinity(0, 1)
print(number())
with gpuaff.set_affinity(0, 1, openmp=True):
    with gpuaff.set_affinity(0, 1):
        print(number())
    print(number() is None)
print(number())
"""
    assert said(driver, script) == ["1 []", "None", "None", "False", "None"]


def test_a_failure_changes_nothing(driver: FakeDriver) -> None:
    script = """
first = gpuaff.set_affinity(0, 1, openmp=True)
before = number()
for arguments in ({"memory": "bind:999"}, {"min_physical_cores": 5000}):
    try:
        gpuaff.set_affinity(0, 1, max_physical_cores=1, openmp=True, **arguments)
    except gpuaff.GpuaffError:
        print(number() == before)
first.restore()
print(number())
os.environ["CUDA_VISIBLE_DEVICES"] = ""
print(gpuaff.set_affinity(0, 1, openmp=True).pinned, number())
"""
    assert said(driver, script) == ["True", "True" , "None", "False None"]  # fmt: skip


def test_a_forked_child_removes_it_for_itself(driver: FakeDriver) -> None:
    script = """
affinity = gpuaff.set_affinity(0, 2, openmp=True)
if not (child := os.fork()):
    affinity.restore()
    os._exit(number() is not None)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), number() is None)
"""
    assert said(driver, script) == ["0 False"]


@pytest.mark.parametrize(
    ("argument", "variable", "is_set"),
    [("None", "1", True), ("None", "off", False), ("None", "", False), ("False", "1", False),
     ("True", "0", True)],
)  # fmt: skip
def test_the_argument_or_the_variable(
    driver: FakeDriver, argument: str, variable: str, is_set: bool
) -> None:
    script = f"gpuaff.set_affinity(0, 2, openmp={argument}); print(number() is not None)"
    assert said(driver, script, GPUAFF_OPENMP=variable) == [str(is_set)]


@pytest.mark.parametrize(
    ("argument", "variable", "option"),
    [("None", "2", "GPUAFF_OPENMP"), ("1", "", "openmp"), ("'on'", "", "openmp")],
)
def test_neither_yes_nor_no_raises(
    driver: FakeDriver, argument: str, variable: str, option: str
) -> None:
    env = {**driver.env(), "GPUAFF_OPENMP": variable}
    done = run(f"import gpuaff; gpuaff.set_affinity(0, 2, openmp={argument})", env=env)
    assert f"InvalidOptionError: {option}=" in done.stderr


def test_a_runtime_that_is_loaded_already(driver: FakeDriver, openmp_library: Path) -> None:
    script = f"""
ctypes.CDLL({str(openmp_library)!r})
print(codes(gpuaff.set_affinity(0, 2, openmp=True)), codes(gpuaff.set_affinity(0, 2)))
"""
    assert said(driver, script) == ["['omp-late'] []"]


# Variables that bind


NAMED = [
    ("OMP_PROC_BIND", "true", "unset it"),
    ("OMP_PROC_BIND", "close", "unset it"),
    ("OMP_PROC_BIND", "CLOSE", "unset it"),
    ("OMP_PROC_BIND", "close,spread", "unset it"),
    ("OMP_PROC_BIND", " Primary , master", "unset it"),
    ("OMP_PLACES", "cores", "unset it"),
    ("OMP_PLACES", "{0:4},{4:4}", "unset it"),
    ("GOMP_CPU_AFFINITY", "4-15", "unset it"),
    ("KMP_AFFINITY", "compact", "set it to disabled"),
    ("KMP_AFFINITY", "granularity=fine,compact,1,0", "set it to disabled"),
    ("KMP_AFFINITY", "verbose,Scatter", "set it to disabled"),
    ("KMP_AFFINITY", "explicit,proclist=[0,1-3]", "set it to disabled"),
    ("OPENBLAS_MAIN_FREE", "0", "OPENBLAS_MAIN_FREE=1"),
    ("GOTOBLAS_MAIN_FREE", "0", "OPENBLAS_MAIN_FREE=1"),
    ("OPENBLAS_MAIN_FREE", "no", "OPENBLAS_MAIN_FREE=1"),
]
"""Variables that bind, and what is told to do about each."""

HARMLESS: list[dict[str, str]] = [
    {},
    {"OMP_PROC_BIND": "false"},
    {"OMP_PROC_BIND": "FALSE", "OMP_PLACES": "cores"},
    {"OMP_PROC_BIND": "", "OMP_PLACES": " ", "GOMP_CPU_AFFINITY": ""},
    {"OMP_PROC_BIND": "closed"},
    {"KMP_AFFINITY": "disabled"},
    {"KMP_AFFINITY": "none"},
    {"KMP_AFFINITY": "verbose,none"},
    {"KMP_AFFINITY": "granularity=core"},
    {"OPENBLAS_MAIN_FREE": "1"},
    {"OPENBLAS_MAIN_FREE": "0", "GOTOBLAS_MAIN_FREE": "1"},
    {"OMP_NUM_THREADS": "4"},
]


@pytest.fixture(scope="module")
def told(
    tmp_path_factory: pytest.TempPathFactory, driver_builds: Path
) -> Callable[[Mapping[str, str]], list[str]]:
    """The messages about variables that bind, for each of the environments above."""
    driver = FakeDriver(this_machine(2), tmp_path_factory.mktemp("named"), builds=driver_builds)
    environments = [*({name: value} for name, value, _ in NAMED), *HARMLESS]
    found = [printed(MESSAGES, env={**driver.env(), **one}) for one in environments]
    assert len(found) == len(environments)
    return lambda env: found[environments.index(dict(env))].splitlines()


@pytest.mark.parametrize(("name", "value", "remedy"), NAMED)
@pytest.mark.case("C4", "C5", "C7")
def test_a_variable_that_binds_is_named(
    told: Callable[[Mapping[str, str]], list[str]], name: str, value: str, remedy: str
) -> None:
    (message,) = told({name: value})
    assert f"{name}={value} (" in message
    assert remedy in message


@pytest.mark.parametrize("env", HARMLESS)
def test_a_harmless_value_is_not_named(
    told: Callable[[Mapping[str, str]], list[str]], env: dict[str, str]
) -> None:
    assert told(env) == []


@pytest.mark.case("C4")
def test_several_are_named_in_one_warning(driver: FakeDriver) -> None:
    env = {
        "OMP_PROC_BIND": "close",
        "OMP_PLACES": "cores",
        "GOMP_CPU_AFFINITY": "0",
        "KMP_AFFINITY": "compact",
        "OPENBLAS_MAIN_FREE": "0",
    }
    (message,) = said(driver, MESSAGES, **env)
    assert all(f"{name}={value} (" in message for name, value in env.items())


def test_where_nothing_is_pinned_nothing_is_said(driver: FakeDriver) -> None:
    script = "print(codes(gpuaff.set_affinity(0, 2)))"
    env = {"OMP_PROC_BIND": "close", "CUDA_VISIBLE_DEVICES": ""}
    assert said(driver, script, **env) == ["[]"]


# What a runtime does. Each is found to be so before it is said to be so.

BINDING = [
    {"OMP_PROC_BIND": "close"},
    {"OMP_PROC_BIND": "close", "OMP_PLACES": "threads"},
    {"OMP_PLACES": "threads"},
    {"GOMP_CPU_AFFINITY": f"{CPUS[0]}-{CPUS[-1]}"},
    {"OMP_PROC_BIND": "spread,close"},
]


@pytest.mark.parametrize("env", BINDING, ids=lambda env: " ".join(env))
@pytest.mark.case("C2", "C4", "C5")
def test_a_runtime_takes_the_share_away_and_a_second_call_gets_it_back(
    driver: FakeDriver, openmp_library: Path, env: dict[str, str]
) -> None:
    script = f"""
before = os.sched_getaffinity(0)
affinity = gpuaff.set_affinity(0, 1)
print(codes(affinity), os.sched_getaffinity(0) == affinity == before)
runtime = ctypes.CDLL({str(openmp_library)!r})
runtime.threads()
print(len(os.sched_getaffinity(0)))
print(gpuaff.set_affinity(0, 1) == before)
runtime.threads()
print(os.sched_getaffinity(0) == before)
"""
    assert said(driver, script, **env) == ["['omp-binding'] True", "1", "True", "True"]


@pytest.mark.case("C5")
def test_restore_gets_back_what_a_runtime_took(driver: FakeDriver, openmp_library: Path) -> None:
    script = f"""
before = os.sched_getaffinity(0)
affinity = gpuaff.set_affinity(0, 1)
ctypes.CDLL({str(openmp_library)!r}).threads()
print(len(os.sched_getaffinity(0)), affinity.restore() == before)
"""
    assert said(driver, script, OMP_PROC_BIND="close") == ["1 True"]


@pytest.mark.parametrize(
    "env",
    [{}, {"OMP_PROC_BIND": "false"}, {"OMP_PROC_BIND": "false", "OMP_PLACES": "threads"}],
    ids=["none", "false", "false with places"],
)
def test_a_runtime_without_them_leaves_it(
    driver: FakeDriver, openmp_library: Path, env: dict[str, str]
) -> None:
    script = f"""
affinity = gpuaff.set_affinity(0, 1)
ctypes.CDLL({str(openmp_library)!r}).threads()
print(codes(affinity), os.sched_getaffinity(0) == affinity)
"""
    assert said(driver, script, **env) == ["[] True"]


@pytest.mark.parametrize("env", BINDING, ids=lambda env: " ".join(env))
@pytest.mark.case("C5", "C7")
def test_called_afterwards_the_mask_stays_narrow(
    driver: FakeDriver, openmp_library: Path, env: dict[str, str]
) -> None:
    script = f"""
ctypes.CDLL({str(openmp_library)!r}).threads()
left = os.sched_getaffinity(0)
affinity = gpuaff.set_affinity(0, 1)
print(len(left), affinity == left, codes(affinity))
print([n.code for n in affinity.warnings if n.code == "mask-shrunk"])
"""
    assert said(driver, script, **env) == ["1 True ['omp-binding']", "['mask-shrunk']"]


@pytest.mark.case("C7")
def test_called_afterwards_reapply_is_not_promised(
    driver: FakeDriver, openmp_library: Path
) -> None:
    """What a runtime did before the first call counts as a border; somebody else must widen it."""
    script = f"""
ctypes.CDLL({str(openmp_library)!r}).threads()
(notice,) = [n for n in gpuaff.set_affinity(0, 1).warnings if n.code == "omp-binding"]
print("loaded already" in notice.message, "reapply" in notice.message)
"""
    env = {"GOMP_CPU_AFFINITY": str(CPUS[0])}
    assert said(driver, script, **env) == ["True False"]
    script = """
os.sched_setaffinity(0, range(os.cpu_count()))
print(sorted(gpuaff.set_affinity(0, 1)))
"""
    script = f"ctypes.CDLL({str(openmp_library)!r}).threads()\n{script}"
    assert said(driver, script, **env) == [str(CPUS)]


def test_what_a_terminal_would_obey_is_not_logged(driver: FakeDriver) -> None:
    script = """
import logging, sys
logging.basicConfig(stream=sys.stdout, format="%(message)s")
os.environb[b"OMP_PLACES"] = b"\\x1b[31mcores\\n\\xff"
gpuaff.set_affinity(0, 1)
"""
    (line,) = said(driver, script)
    assert r"OMP_PLACES=\x1b[31mcores\n\udcff (unset it)" in line


@pytest.mark.case("C8")
def test_a_workers_share_outlives_a_parallel_region(
    driver: FakeDriver, openmp_library: Path
) -> None:
    script = f"""
runtime = ctypes.CDLL({str(openmp_library)!r})
gpuaff.set_affinity(0, 2)
if not (child := os.fork()):
    share = os.sched_getaffinity(0)
    own = gpuaff.set_affinity(0, 1)
    for _ in range(3):
        runtime.threads()
    os._exit(not own == share == os.sched_getaffinity(0))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert said(driver, script) == ["0"]


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
print(number(), codes(affinity))
print(len(affinity))
"""
    with quota(cpus) as command:
        done = run(START + script, env=driver.env(), prefix=command)
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
        done = run(START + script, env=driver.env(), prefix=prefix)
    said = done.stdout.strip()
    assert said.partition(" ")[0] == expected, done.stderr
    assert ("2 CPUs' time for the 2 ranks of this node" in said) == (inside == "launcher")
