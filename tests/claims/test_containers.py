"""Claimers in containers, played by namespaces: what they still share keeps them apart."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests import pci_devices
from tests.fakedriver.driver import FakeDriver, MakeDriver
from tests.fakedriver.play import this_machine
from tests.processes import SRC, Program, stopped

pytestmark = [
    pytest.mark.fake_driver,
    pytest.mark.needs("mount-namespaces"),
]

CLAIM = """
import sys
import gpuaff
from gpuaff.errors import GpusBusyError
for line in sys.stdin:
    try:
        print(gpuaff.claim_gpus(1).gpus[0].index)
    except GpusBusyError as error:
        print(repr(str(error)))
"""


def private_tmp(*shown: Path) -> Sequence[str]:
    """A prefix that gives a command a /tmp of its own, with a few folders of the real one."""
    names = {path.parts[2] for path in shown if path.parts[:2] == ("/", "tmp")}
    script = """
set -e
real=$1; names=$2; shift 2
mount --rbind /tmp "$real"
mount -t tmpfs tmpfs /tmp
for name in $names; do mkdir "/tmp/$name"; mount --rbind "$real/$name" "/tmp/$name"; done
exec "$@"
"""
    return ["unshare", "-m", "sh", "-c", script, "sh", "/mnt", " ".join(sorted(names))]


NETWORK = ["unshare", "-n", "-m", "sh", "-c", 'mount -t sysfs none /sys && exec "$@"', "sh"]
"""A container with a network of its own has a sysfs of its own, too."""


def said(claimer: Program) -> str:
    claimer.go_on()
    return claimer.heard()


@contextmanager
def two(
    driver: FakeDriver, locks: Path, *prefixes: Sequence[str]
) -> Iterator[tuple[Program, Program]]:
    """Two claimers, each behind its prefix, on a machine with one GPU."""
    env = {**driver.env(), "GPUAFF_SAFE_GPU": "off", "GPUAFF_LOCK_DIR": str(locks)}
    with ExitStack() as ends:
        one, other = (ends.enter_context(stopped(CLAIM, env=env, prefix=p)) for p in prefixes)
        yield one, other
    assert driver.double_holdings() == []


@pytest.mark.case("E5")
def test_two_containers_that_share_nothing_but_sysfs(shared_driver: MakeDriver) -> None:
    """Each has its own lock directory in its own /tmp; the lease in sysfs is one for both."""
    driver = shared_driver(this_machine(1))
    folder = driver.path.parent.parent
    library = Path(driver.env()["LD_LIBRARY_PATH"].split(":")[0])
    needed = [*map(Path, (sys.prefix, sys.base_prefix)), SRC, folder, library]
    prefix = [*pci_devices.gpus(folder / "pci", 1), *private_tmp(*needed)]
    with two(driver, Path("/tmp/own"), prefix, prefix) as (one, other):
        assert said(one) == "0"
        refused = said(other)
        assert refused.startswith("'requested 1 GPU; none is free\\n  to queue: ")
        assert "\\n  GPU 0: leased by" in refused
    assert not Path("/tmp/own").exists()


@pytest.mark.case("E5")
def test_two_containers_with_networks_of_their_own(shared_driver: MakeDriver) -> None:
    """Each has its own sysfs, where a lock means nothing to others; GPUAFF_LOCK_DIR is for them."""
    driver = shared_driver(this_machine(1))
    folder = driver.path.parent.parent
    prefixes = [[*NETWORK, *pci_devices.gpus(folder / name, 1)] for name in ("one", "other")]
    with two(driver, folder / "gpuaff", *prefixes) as (one, other):
        assert said(one) == "0"
        assert "GPU 0: leased by" in said(other)


@pytest.mark.case("E5")
def test_containers_without_devices_in_sysfs(fake_driver: MakeDriver, tmp_path: Path) -> None:
    """The file in the shared lock directory keeps them apart by itself."""
    driver = fake_driver(this_machine(1))
    with two(driver, tmp_path / "gpuaff", NETWORK, []) as (one, other):
        assert said(one) == "0"
        assert f"(pid {one.pid})" in said(other) or os.getpid() == 1
