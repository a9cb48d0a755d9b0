"""Leases, by real processes: who excludes whom, and when a lease ends."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuaff._system import locks
from gpuaff.claims.locking import leases
from gpuaff.claims.locking.leases import Lease
from gpuaff.claims.model import Device
from tests import pci_devices
from tests.claims.lockers import A_USER, ANOTHER, locker, said, two_users, until
from tests.programs.locking import free, gpu, instance, leased

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


# ---- what excludes what ----------------------------------------------------------------------


@pytest.mark.case("E6")
@pytest.mark.parametrize("how", ["released", "killed"])
def test_a_device_has_one_holder_until_it_releases_or_dies(lock_folder: Path, how: str) -> None:
    with locker(hold("gpu(0)", "gpu(1)")) as one:
        assert one.heard() == "True"
        assert not free(gpu(0))
        with locker(hold("gpu(0)")) as other:
            assert other.heard() == "GPU 0"
        if how == "killed":
            one.kill()
        else:
            one.go_on()
            assert one.heard() == "released"
        assert free(gpu(0))
        assert free(gpu(1))


def test_all_or_none(lock_folder: Path) -> None:
    one, lease = leased(gpu(2)), Lease()
    assert isinstance(one, Lease)
    assert lease.take([gpu(1), gpu(2), gpu(3)]) == gpu(2)
    assert lease.fds == ()
    assert free(gpu(1))
    (lock_folder / "gpu-GPU-4").mkdir()
    with pytest.raises(OSError, match="regular file"):
        lease.take([gpu(1), gpu(4)])
    assert lease.fds == ()
    assert free(gpu(1))
    one.release()


@pytest.mark.parametrize(
    ("held", "wanted", "is_free"),
    [
        (instance(1), instance(1), False),
        (instance(1), instance(2), True),
        (instance(1), gpu(0), False),
        (gpu(0), instance(1), False),
        (instance(1), gpu(1), True),
        (instance(1, of=1), instance(2, of=0), True),
    ],
)
def test_instances_share_their_gpu_and_exclude_a_lease_of_the_whole(
    lock_folder: Path, held: Device, wanted: Device, is_free: bool
) -> None:
    lease = leased(held)
    assert isinstance(lease, Lease)
    assert free(wanted) == is_free
    lease.release()


def test_a_file_that_was_removed_before_it_was_locked_is_not_the_lock(
    lock_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Afterwards nothing helps, so no process should remove one (case E9)."""
    real, tries = locks.try_flock, list[int]()

    def late(handle: int, *, shared: bool = False) -> bool:
        if not tries:
            (lock_folder / "gpu-GPU-0").unlink()
        tries.append(handle)
        return real(handle, shared=shared)

    monkeypatch.setattr(locks, "try_flock", late)
    lease = leased(gpu(0))
    assert isinstance(lease, Lease)
    assert (len(tries), len(lease.fds)) == (2, 1)
    assert not free(gpu(0))
    lease.release()


# ---- children and programs -------------------------------------------------------------------

FORKS = """
lease = leased(gpu(0))
child = os.fork()
if child == 0:
    os.close(1)
    signal.pause()
if os.fork() == 0:
    lease.release()
    os._exit(0)
os.waitpid(-1, 0)
print(child)
hear()
lease.release()
print("released")
hear()
"""


@pytest.mark.case("E6")
@pytest.mark.parametrize("how", ["killed", "released"])
def test_a_forked_child_keeps_it_and_releasing_ends_it_for_the_child(
    lock_folder: Path, how: str
) -> None:
    """Another child gives it back, which leaves it to its parent."""
    with locker(FORKS) as one:
        child = int(one.heard())
        assert not free(gpu(0))
        try:
            if how == "released":
                one.go_on()
                assert one.heard() == "released"
                os.kill(child, 0)
            else:
                one.kill()
                assert not free(gpu(0))
                os.kill(child, signal.SIGKILL)
            until(lambda: free(gpu(0)))
        finally:
            os.kill(child, signal.SIGKILL)


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


LOCKS_OF = f"""
part = Device(index=0, uuid='MIG-1', parent='GPU-0', pci_bus_id='0000:01:00.0')
for device in {GPU}, gpu(0, 'ffff:ff:1f.7'), part:
    print(*leases.locks_of(device))
"""


@in_sysfs
@pytest.mark.parametrize("has_own", [False, True], ids=["", "GPUAFF_LOCK_DIR"])
def test_a_gpu_is_its_directory_and_with_a_lock_directory_of_its_own_a_file_too(
    shown: list[str], lock_folder: Path, has_own: bool
) -> None:
    folder = lock_folder if has_own else "/tmp/gpuaff"
    prefix = shown if has_own else [*shown, "env", "-u", "GPUAFF_LOCK_DIR"]

    def lock(path: object, shared: bool) -> str:
        return f"('{path}', {shared})"

    both = [pci_devices.FIRST, f"{folder}/gpu-GPU-0"][: 1 + has_own]
    assert said(LOCKS_OF, prefix=prefix).splitlines() == [
        " ".join(lock(path, shared=False) for path in both),
        lock(f"{folder}/gpu-GPU-0", shared=False),
        " ".join(
            [*(lock(path, shared=True) for path in both), lock(f"{folder}/gpu-MIG-1", shared=False)]
        ),
    ]


@in_sysfs
@two_users
@pytest.mark.case("E7")
def test_each_user_can_lease_a_directory_and_is_seen(
    open_to_users: Path, lock_folder: Path
) -> None:
    prefix = pci_devices.gpus(open_to_users, 1)
    seen = f"print(leases.holders([{GPU}]))"
    with locker(hold(GPU), uid=A_USER, prefix=prefix) as one:
        assert one.heard() == "True"
        assert said(seen, prefix=prefix) == str({"GPU-0": one.pid})
        assert said(f"print(leased({GPU}))", uid=ANOTHER, prefix=prefix) == "GPU 0"
    assert said(seen, prefix=prefix) == "{}"
    assert said(f"print(leased({GPU}).release())", uid=ANOTHER, prefix=prefix) == "None"


@pytest.fixture
def open_to_users() -> Iterator[Path]:
    """A folder of which other users may read: pytest's own are closed to them."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_who_holds_an_instance_is_no_holder_of_another_one(lock_folder: Path) -> None:
    one, other, whole = instance(1), instance(2), gpu(0)
    lease = Lease()
    assert lease.take([one]) is None
    me = os.getpid()
    assert leases.holders([one, other, whole]) == {"MIG-1": me, "GPU-0": me}
    lease.release()
