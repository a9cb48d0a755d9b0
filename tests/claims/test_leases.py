"""Leases, by real processes: who excludes whom, and when a lease ends."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuaff.claims.locking import leases
from gpuaff.claims.locking.leases import Holder, Lease
from gpuaff.claims.model import Device
from tests import pci_devices
from tests.claims.lockers import (
    A_USER,
    ANOTHER,
    can_lease,
    gpu,
    instance,
    locker,
    said,
    two_users,
    until,
)

GPU = "gpu(0, '0000:01:00.0')"
"""One that has a directory in sysfs."""

in_sysfs = pytest.mark.needs("mount-namespaces")

HOLD = """
lease = leased({devices})
print(isinstance(lease, Lease) or lease)
hear()
lease.release()
print("released")
hear()
"""


def hold(*devices: str) -> str:
    return HOLD.format(devices=", ".join(devices))


@pytest.fixture
def shown(tmp_path: Path) -> list[str]:
    """A prefix that makes a command see that directory."""
    return pci_devices.gpus(tmp_path, 1)


def free(device: Device) -> bool:
    lease = Lease()
    taken = lease.take([device]) is None
    lease.release()
    return taken


# ---- who excludes whom -----------------------------------------------------------------------


def test_one_device_has_one_holder_until_it_is_released(lock_folder: Path) -> None:
    with locker(hold("gpu(0)")) as one:
        assert one.heard() == "True"
        with locker(hold("gpu(0)")) as other:
            assert other.heard() == "GPU 0"
    with locker(hold("gpu(0)")) as one:
        assert one.heard() == "True"
        assert not free(gpu(0))
        one.go_on()
        assert one.heard() == "released"
        assert free(gpu(0))


@pytest.mark.case("E6")
def test_a_killed_holder_is_free_at_once(lock_folder: Path) -> None:
    with locker(hold("gpu(0)", "gpu(1)")) as one:
        one.heard()
        one.kill()
        assert free(gpu(0))
        assert free(gpu(1))


def test_all_or_none(lock_folder: Path) -> None:
    with locker(hold("gpu(2)")) as one:
        one.heard()
        lease = Lease()
        assert lease.take([gpu(1), gpu(2), gpu(3)]) == gpu(2)
        assert lease.fds == ()
        assert can_lease("gpu(1)")
        assert can_lease("gpu(3)")


def test_interrupted_is_none(lock_folder: Path) -> None:
    """The second device's file cannot be used."""
    assert free(gpu(0))
    (lock_folder / "gpu-GPU-1").mkdir()
    lease = Lease()
    with pytest.raises(OSError, match="regular file"):
        lease.take([gpu(0), gpu(1)])
    assert lease.fds == ()
    assert can_lease("gpu(0)")


@pytest.mark.parametrize(
    ("held", "wanted", "is_free"),
    [
        ("instance(1)", "instance(1)", False),
        ("instance(1)", "instance(2)", True),
        ("instance(1)", "gpu(0)", False),
        ("gpu(0)", "instance(1)", False),
        ("instance(1)", "gpu(1)", True),
        ("instance(1, of=1)", "instance(2, of=0)", True),
    ],
)
def test_instances_share_their_gpu_and_nobody_has_the_whole_of_it(
    lock_folder: Path, held: str, wanted: str, is_free: bool
) -> None:
    with locker(hold(held)) as one:
        assert one.heard() == "True"
        assert can_lease(wanted) == is_free


def test_old_names_of_instances_are_no_paths(lock_folder: Path) -> None:
    """Drivers before R470 say ``MIG-GPU-…/<gpu instance>/<compute instance>``."""
    old = Device(index=0, uuid="MIG-GPU-0/7/0", parent="GPU-0")
    lease = Lease()
    assert lease.take([old]) is None
    assert (lock_folder / "gpu-MIG-GPU-0_7_0").is_file()
    lease.release()


def test_a_file_that_was_removed_or_replaced_is_not_the_lock(lock_folder: Path) -> None:
    """Between opening and locking; afterwards nothing helps, so nobody should (case E9)."""
    assert free(gpu(0))
    script = """
        real, turns = locks.try_flock, []
        def late(handle, *, shared=False):
            if not turns:
                Path(directory.path(), "gpu-GPU-0").unlink()
            turns.append(handle)
            return real(handle, shared=shared)
        locks.try_flock = late
        lease = leased(gpu(0))
        print(len(turns), len(lease.fds), flush=True)
        hear()
    """
    with locker(script) as one:
        assert one.heard() == "2 1"
        assert not free(gpu(0))


# ---- children and programs -------------------------------------------------------------------


@pytest.mark.case("E6")
def test_a_forked_child_keeps_it_and_releasing_ends_it_for_the_child(lock_folder: Path) -> None:
    script = """
        lease = leased(gpu(0))
        child = os.fork()
        if child == 0:
            os.close(1)
            signal.pause()
        print(child)
        hear()
        lease.release()
        print("released")
        hear()
    """
    for how in "killed", "released":
        with locker(script) as one:
            child = int(one.heard())
            try:
                if how == "released":
                    one.go_on()
                    one.heard()
                    os.kill(child, 0)
                else:
                    one.kill()
                    assert not free(gpu(0))
                    os.kill(child, signal.SIGKILL)
                until(lambda: free(gpu(0)))
            finally:
                os.kill(child, signal.SIGKILL)


def test_a_child_that_abandons_leaves_it_to_its_parent(lock_folder: Path) -> None:
    script = """
        lease = leased(gpu(0))
        if os.fork() == 0:
            lease.abandon()
            os._exit(0)
        os.wait()
        print("left")
        hear()
    """
    with locker(script) as one:
        one.heard()
        assert not free(gpu(0))


@pytest.mark.parametrize("passed", [True, False])
def test_a_program_has_it_only_when_it_is_passed(lock_folder: Path, passed: bool) -> None:
    script = f"""
        lease = leased(gpu(0))
        kept = lease.fds if {passed} else ()
        program = subprocess.Popen(
            ["sleep", "60"], pass_fds=kept, close_fds=bool(kept), stdout=subprocess.DEVNULL
        )
        print(program.pid, *lease.fds)
        hear()
    """
    with locker(script) as one:
        program, handle = map(int, one.heard().split())
        assert handle >= 200
        one.kill()
        try:
            assert free(gpu(0)) == (not passed)
        finally:
            os.kill(program, signal.SIGKILL)
        until(lambda: free(gpu(0)))


def test_a_descriptor_that_is_somebody_elses_by_now_is_left_alone(
    lock_folder: Path, tmp_path: Path
) -> None:
    """Daemons close all descriptors; the number may be that of another file then."""
    lease = Lease()
    assert lease.take([gpu(0), gpu(1)]) is None
    first, second = lease.fds
    os.close(first)
    log = os.open(tmp_path / "log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, second)
    lease.release()
    assert os.write(second, b"x") == 1
    assert lease.fds == ()
    assert free(gpu(0))
    assert free(gpu(1))
    os.close(second)
    os.close(log)


# ---- directories in sysfs --------------------------------------------------------------------


LOCKS_OF = """
for device in {devices}:
    print(*leases.locks_of(device))
"""


@in_sysfs
def test_without_a_lock_directory_of_its_own_a_gpu_is_its_directory(
    shown: list[str], lock_folder: Path
) -> None:
    script = LOCKS_OF.format(devices=f"{GPU}, gpu(0, 'ffff:ff:1f.7')")
    prefix = [*shown, "env", "-u", "GPUAFF_LOCK_DIR"]
    assert said(script, prefix=prefix).splitlines() == [
        f"('{pci_devices.FIRST}', False)",
        "('/tmp/gpuaff/gpu-GPU-0', False)",
    ]


@in_sysfs
def test_with_one_it_is_the_directory_and_a_file(shown: list[str], lock_folder: Path) -> None:
    last = f"('{lock_folder}/gpu-MIG-1', False)"
    part = "Device(index=0, uuid='MIG-1', parent='GPU-0', pci_bus_id='0000:01:00.0')"
    script = LOCKS_OF.format(devices=f"{GPU}, {part}")
    assert said(script, prefix=shown).splitlines() == [
        f"('{pci_devices.FIRST}', False) ('{lock_folder}/gpu-GPU-0', False)",
        f"('{pci_devices.FIRST}', True) ('{lock_folder}/gpu-GPU-0', True) {last}",
    ]


@in_sysfs
@two_users
@pytest.mark.case("E7")
@pytest.mark.parametrize("holder", [0, A_USER])
def test_each_user_can_lease_a_directory_and_is_seen(
    open_to_users: Path, lock_folder: Path, holder: int
) -> None:
    prefix = pci_devices.gpus(open_to_users, 1)
    seen = f"print(leases.holders([{GPU}]))"
    with locker(hold(GPU), uid=holder, prefix=prefix) as one:
        assert one.heard() == "True"
        told = {"GPU-0": (Holder(pid=one.pid, shared=False),)}
        assert said(seen, prefix=prefix) == str(told)
        file = (open_to_users / pci_devices.FIRST[1:]).stat()
        inode = f":{file.st_ino} "
        assert any(f" {one.pid} " in line for line in lines("/proc/locks") if inode in line)
        assert said(f"print(leased({GPU}))", uid=ANOTHER, prefix=prefix) == "GPU 0"
    assert said(seen, prefix=prefix) == "{'GPU-0': ()}"
    assert said(f"print(leased({GPU}).release())", uid=ANOTHER, prefix=prefix) == "None"


@pytest.fixture
def open_to_users() -> Iterator[Path]:
    """A folder of which other users may read: pytest's own are closed to them."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


@in_sysfs
def test_a_private_tmp_does_not_matter_to_a_directory(shown: list[str], lock_folder: Path) -> None:
    """Another mount namespace with another lock directory; the device is the same."""
    with locker(hold(GPU), prefix=shown) as one:
        one.heard()
        prefix = [*shown, "env", f"GPUAFF_LOCK_DIR={lock_folder}2"]
        assert said(f"print(leased({GPU}))", prefix=prefix) == "GPU 0"


def test_who_holds_an_instance_is_no_holder_of_another_one(lock_folder: Path) -> None:
    one, other, whole = instance(1), instance(2), gpu(0)
    lease = Lease()
    assert lease.take([one]) is None
    me = os.getpid()
    assert leases.holders([one, other, whole]) == {
        "MIG-1": (Holder(pid=me, shared=False),),
        "MIG-2": (),
        "GPU-0": (Holder(pid=me, shared=True),),
    }
    lease.release()
