"""What all tests share: the options, and the machines that they run on."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from shutil import copy, rmtree, which

import pytest
from hypothesis import HealthCheck, Phase, settings

from gpuaff.topology.model import Topology
from tests import cpusets, mempolicies, openmp_region, pci_devices, powers
from tests.fakedriver.build import compiler
from tests.fakedriver.driver import FakeDriver, MakeDriver
from tests.fakedriver.play import this_machine
from tests.numa_machine import machine

# These machines are shared: how long an example takes says nothing.
settings.register_profile(
    "thorough", max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("gpuaff", settings.get_profile("thorough"), max_examples=20)
# What differs from one Python to another shows in few examples.
settings.register_profile("quick", settings.get_profile("gpuaff"), max_examples=4)
# Mutation tests ask only whether anything fails, thousands of times.
settings.register_profile(
    "mutation",
    settings.get_profile("gpuaff"),
    max_examples=25,
    database=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
)
settings.load_profile("gpuaff")


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--slow``."""
    parser.addoption("--slow", action="store_true", help="run the slow tests as well")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: many tests wait for processes that wait."""
    return len(os.sched_getaffinity(0)) + 1


def pytest_configure(config: pytest.Config) -> None:
    """With ``--slow`` properties are tried on more examples."""
    if config.getoption("--slow"):
        settings.load_profile("thorough")
    # Else each worker and each program compiles anew what it imports: half of all CPU time.
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    _hear_signals()


_STAY_IGNORED = {signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ}
"""nohup's, for a run that outlives its terminal, and those that Python ignores for itself."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests beside other packages are slow: these import for seconds, and are not needed here."""
    for item in items:
        if not _OTHER_PACKAGES.isdisjoint(_needed(item)):
            item.add_marker(pytest.mark.slow)


def _hear_signals() -> None:
    """Let signals do what they do, however we were started: all programs of the tests inherit that.

    A job in the background of a script ignores SIGINT, and a service may ignore or block others.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in signal.valid_signals() - _STAY_IGNORED:
        if signal.getsignal(number) is signal.SIG_IGN:
            is_ctrl_c = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_ctrl_c else signal.SIG_DFL)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave out what was not asked for, and what cannot run here: but in CI all must run."""
    if item.get_closest_marker("slow") and not item.config.getoption("--slow"):
        pytest.skip("slow: ask for it with --slow")
    for what in _lacking(item):
        allowed = os.environ.get("GPUAFF_CI_ALLOW_MISSING", "").split(",")
        if os.environ.get("GPUAFF_CI") == "1" and what not in allowed:
            pytest.fail(f"needs {what}, and in CI it must be there", pytrace=False)
        pytest.skip(f"needs {what}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI no test may be skipped on its own account, but where that is as it should be."""
    report = yield
    if os.environ.get("GPUAFF_CI") == "1" and report.skipped and not hasattr(report, "wasxfail"):
        told = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
        why = told.removeprefix("Skipped: ")
        allowed = os.environ.get("GPUAFF_CI_ALLOW_MISSING", "").split(",")
        if not why.startswith(AS_IT_SHOULD_BE) and why.removeprefix("needs ") not in allowed:
            report.outcome = "failed"
            report.longrepr = f"skipped, and in CI it must run: {why}"
    return report


AS_IT_SHOULD_BE = ("slow: ", "not here: ")
"""How the reasons of those tests begin that were not asked for, or try what is elsewhere."""


def _lacking(item: pytest.Item) -> list[str]:
    """What this machine lacks for a test."""
    needed = _needed(item)
    if item.get_closest_marker("fake_driver"):
        needed.append("compiler")
    return [thing for thing in needed if not (_HAS[thing]() if thing in _HAS else which(thing))]


def _needed(item: pytest.Item) -> list[str]:
    return [str(thing) for mark in item.iter_markers("needs") for thing in mark.args]


def _is_installed(package: str) -> bool:
    return find_spec(package) is not None


_OTHER_PACKAGES = frozenset({"matplotlib", "mpi4py", "safe_gpu", "sklearn", "torch"})

_HAS: dict[str, Callable[[], bool]] = {
    **{name: partial(_is_installed, name) for name in (*_OTHER_PACKAGES, "gpu_affinity")},
    "compiler": lambda: compiler() is not None,
    "cpu-quotas": partial(cpusets.available, "cpu"),
    "cpusets": cpusets.available,
    "memory-policies": mempolicies.available,
    "grid-engine": lambda: which("sge_qmaster") is not None,
    "mount-namespaces": pci_devices.available,
    "mounts": powers.mounts,
    "numa-machine": machine.available,
    "pid-namespaces": powers.pid_namespaces,
    "protected-regular": powers.protected_regular,
    "root": lambda: os.geteuid() == 0,
    "two-cpus": lambda: len(os.sched_getaffinity(0)) > 1,
    "two-users": powers.two_users,
}
"""What a test may need besides programs. The compiler is for the fake driver, and on Linux only;
gpu_affinity is NVIDIA's package, safe_gpu is BUT Speech@FIT's; torch must be this Python's own; the
emulated machine is made by tests/numa_machine/machine.sh."""


@pytest.fixture(autouse=True)
def _the_system_stays(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A few tests change the whole system: alone."""
    with powers.beside_others(_of_all_workers(tmp_path_factory) / "all"):
        yield


@pytest.fixture(scope="session")
def driver_builds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the builds of the fake driver are kept, for all workers."""
    folder = _of_all_workers(tmp_path_factory) / "fakedriver"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def real_trees(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the trees of real machines are unpacked, for all workers; nobody writes to them."""
    folder = _of_all_workers(tmp_path_factory) / "trees"
    folder.mkdir(exist_ok=True)
    return folder


def _of_all_workers(factory: pytest.TempPathFactory) -> Path:
    base = factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture
def fake_driver(tmp_path: Path, driver_builds: Path) -> MakeDriver:
    """Makes a fake driver that plays a topology; its test is marked ``fake_driver``."""

    def make(topology: Topology) -> FakeDriver:
        return FakeDriver(topology, tmp_path / "driver", builds=driver_builds)

    return make


@pytest.fixture
def driver(fake_driver: MakeDriver) -> FakeDriver:
    """The machine that pinning is tried on: this one's CPUs, with two GPUs of the fake driver."""
    return fake_driver(this_machine(2))


@pytest.fixture
def lock_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The lock directory of a test: not there yet, where every user may make it, as in /tmp."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o1777)
        monkeypatch.setenv("GPUAFF_LOCK_DIR", f"{folder}/gpuaff")
        yield Path(folder, "gpuaff")


@pytest.fixture(scope="session")
def open_builds(driver_builds: Path) -> Iterator[Path]:
    """The same where other users may come."""
    folder = Path(tempfile.mkdtemp(prefix="gpuaff-"))
    folder.chmod(0o755)
    for compiled in driver_builds.glob("*.o"):
        copy(compiled, folder)
    yield folder
    rmtree(folder)


@pytest.fixture
def shared_driver(open_builds: Path) -> Iterator[MakeDriver]:
    """Makes a fake driver that other users can use, too; beside it is a folder for everyone."""
    folders = []

    def make(topology: Topology) -> FakeDriver:
        folder = Path(tempfile.mkdtemp(prefix="gpuaff-"))
        folders.append(folder)
        folder.chmod(0o1777)
        driver = FakeDriver(topology, folder / "driver", builds=open_builds)
        driver.share()
        return driver

    yield make
    for folder in folders:
        rmtree(folder)


@pytest.fixture(scope="session")
def openmp_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that uses GNU's OpenMP runtime, as numpy and torch do."""
    return openmp_region.build(tmp_path_factory.mktemp("openmp"))
