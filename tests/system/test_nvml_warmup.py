"""Waking the driver only saves time: where it cannot be done, pinning goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakedriver.driver import FakeDriver
from tests.fakedriver.play import this_machine
from tests.processes import run

pytestmark = pytest.mark.fake_driver

PIN = "import gpuaff; print(gpuaff.set_affinity(0, 1).pinned)"


@pytest.fixture
def driver(tmp_path: Path, driver_builds: Path) -> FakeDriver:
    return FakeDriver(this_machine(1), tmp_path, builds=driver_builds)


@pytest.mark.parametrize("allowed", [(), ("gpuaff-nvml",)], ids=["none", "the first"])
def test_no_thread_can_be_started(driver: FakeDriver, allowed: tuple[str, ...]) -> None:
    """A limit of processes or threads (ulimit -u, a pids cgroup) is no reason not to pin."""
    script = f"""
        import threading
        start = threading.Thread.start
        def refuse(self):
            if self.name not in {allowed}:
                raise RuntimeError("can't start new thread")
            start(self)
        threading.Thread.start = refuse
        {PIN}
    """
    done = run(script, env=driver.env())
    assert done.stdout.strip() == "True", done.stderr
    assert "Traceback" not in done.stderr
    assert driver.inits == driver.shutdowns


def test_python_without_ctypes(driver: FakeDriver) -> None:
    done = run(f"import sys; sys.modules['_ctypes'] = None; {PIN}", env=driver.env(), fresh=True)
    assert done.stdout.strip() == "False", done.stderr
    assert "no-driver" in done.stderr


def test_interrupted_while_the_thread_starts(driver: FakeDriver) -> None:
    """Ctrl-C comes once the thread runs, and before whoever starts it has gone on."""
    script = """
        import threading, time
        start = threading.Thread.start
        def interrupted(self):
            start(self)
            if self.name == "gpuaff-nvml":
                raise KeyboardInterrupt
        threading.Thread.start = interrupted
        import gpuaff
        try:
            gpuaff.set_affinity(0, 1)
        except KeyboardInterrupt:
            for thread in threading.enumerate():
                if thread.name == "gpuaff-nvml":
                    thread.join(5)
            print(threading.active_count())
    """
    assert run(script, env=driver.env()).stdout.strip() == "1"
    assert driver.inits == driver.shutdowns
