"""Claimers in containers, played by namespaces: what they still share keeps them apart."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
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


class Host:
    """A machine with one GPU."""

    def __init__(self, driver: FakeDriver, ends: ExitStack) -> None:
        self.driver, self._ends = driver, ends
        self.folder = driver.path.parent.parent
        self.env = {**driver.env(), "GPUAFF_SAFE_GPU": "off"}

    def sysfs(self, name: str) -> Sequence[str]:
        """A prefix that shows a command the GPU's directory, the same one for the same name."""
        return pci_devices.gpus(self.folder / name, 1)

    def claimer(self, *, locks: Path, prefix: Sequence[str] = ()) -> Program:
        env = {**self.env, "GPUAFF_LOCK_DIR": str(locks)}
        return self._ends.enter_context(stopped(CLAIM, env=env, prefix=prefix))

    @property
    def needed(self) -> list[Path]:
        """What a claimer must see of /tmp."""
        library = Path(self.env["LD_LIBRARY_PATH"].split(":")[0])
        pythons = map(Path, (sys.prefix, sys.base_prefix))
        return [*pythons, SRC, self.folder, library]


def said(claimer: Program) -> str:
    claimer.go_on()
    return claimer.heard()


@pytest.fixture
def host(shared_driver: MakeDriver) -> Iterator[Host]:
    driver = shared_driver(this_machine(1))
    with ExitStack() as ends:
        yield Host(driver, ends)
    assert driver.double_holdings() == []


@pytest.mark.case("E5")
def test_two_containers_that_share_nothing_but_sysfs(host: Host) -> None:
    """Each has its own lock directory in its own /tmp; the lease in sysfs is one for both."""
    prefix = [*host.sysfs("pci"), *private_tmp(*host.needed)]
    one, other = (host.claimer(locks=Path("/tmp/own"), prefix=prefix) for _ in range(2))
    assert said(one) == "0"
    told = said(other)
    assert told.startswith("'requested 1 GPU; none is free\\n  to queue: "), told
    assert "\\n  GPU 0: leased by" in told, told
    assert not Path("/tmp/own").exists()


@pytest.mark.case("E5")
def test_two_containers_with_networks_of_their_own(host: Host) -> None:
    """Each has its own sysfs, where a lock means nothing to others; GPUAFF_LOCK_DIR is for them."""
    locks = host.folder / "gpuaff"
    prefixes = [[*NETWORK, *host.sysfs(name)] for name in ("one", "other")]
    one, other = (host.claimer(locks=locks, prefix=prefix) for prefix in prefixes)
    assert said(one) == "0"
    assert "GPU 0: leased by" in said(other)


@pytest.mark.case("E5")
def test_containers_without_devices_in_sysfs(fake_driver: MakeDriver, tmp_path: Path) -> None:
    """The file in the shared lock directory keeps them apart by itself."""
    driver = fake_driver(this_machine(1))
    env = {
        **driver.env(),
        "GPUAFF_LOCK_DIR": str(tmp_path / "gpuaff"),
        "GPUAFF_SAFE_GPU": "off",
    }
    with stopped(CLAIM, env=env, prefix=NETWORK) as one, stopped(CLAIM, env=env) as other:
        assert said(one) == "0"
        assert f"(pid {one.pid})" in said(other) or os.getpid() == 1
