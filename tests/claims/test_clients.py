"""Clients in other languages: they exclude ours and are excluded, by the protocol's page alone."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpuaff.claims.locking import directory, registry
from tests import pci_devices
from tests.claims.lockers import can_lease, locker, until
from tests.fakedriver.build import compiler

pytestmark = pytest.mark.needs("compiler", "flock")

SYSFS = [False, pytest.param(True, marks=pytest.mark.needs("mount-namespaces"))]


@pytest.fixture(scope="session")
def client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """lease.c, built."""
    target = tmp_path_factory.mktemp("client") / "lease"
    source = Path(__file__).parent / "clients" / "lease.c"
    found = compiler()
    assert found is not None
    command = [found, "-O1", "-Wall", "-Wextra", "-Werror", "-o", str(target), str(source)]
    subprocess.run(command, check=True)
    return target


@contextmanager
def held(*command: str | Path) -> Iterator[subprocess.Popen[str]]:
    """A client that has what it wants."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "has it\n"
            yield process
        finally:
            process.kill()


def says(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, input="")
    return done.stdout.strip() or done.stderr


HOLD = """
lease = leased({device})
print(isinstance(lease, Lease))
hear()
"""


def device(in_sysfs: bool) -> str:
    """A GPU as other programs are told it."""
    return "gpu(0, '0000:01:00.0')" if in_sysfs else "gpu(0)"


@pytest.mark.parametrize("in_sysfs", SYSFS)
def test_c_excludes_and_is_excluded(
    lock_folder: Path, client: Path, tmp_path: Path, in_sysfs: bool
) -> None:
    os.close(directory.open_file("guard"))  # the folder itself: it has to be there
    prefix = pci_devices.gpus(tmp_path, 1) if in_sysfs else []
    extra = [pci_devices.FIRST] if in_sysfs else []
    command: list[str | Path] = [*prefix, client, lock_folder, "GPU-0", *extra]
    with held(*command) as process:
        assert not can_lease(device(in_sysfs), prefix=prefix)
        assert not can_lease()  # where sysfs is another one, as in a container
        (entry,) = registry.entries()
        assert (entry.pid, entry.gpus, entry.waits) == (process.pid, ("GPU-0",), False)
        assert entry.name == "lease.c"
        assert says(*command) == "busy"
        assert says(client, lock_folder, "GPU-1") == "has it"
    assert registry.entries() == ()
    with locker(HOLD.format(device=device(in_sysfs)), prefix=prefix) as ours:
        assert ours.heard() == "True"
        assert says(*command) == "busy"
    assert says(*command) == "has it"


def test_c_waits_for_our_guard(lock_folder: Path, client: Path) -> None:
    script = """
        with directory.guarded():
            print("has it")
            hear()
    """
    with locker(script) as one:
        one.heard()
        command = [str(client), str(lock_folder), "GPU-0"]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            until(lambda: "->" in waiting_lines(process.pid))
            one.go_on()
            assert process.stdout.read() == b"has it\n"


def waiting_lines(pid: int) -> str:
    lines = Path("/proc/locks").read_text().splitlines()
    return "\n".join(line for line in lines if f" {pid} " in line)


@pytest.mark.parametrize("in_sysfs", SYSFS)
def test_the_shells_flock_excludes_and_is_excluded(
    lock_folder: Path, tmp_path: Path, in_sysfs: bool
) -> None:
    """The lines of docs/lease-protocol.md."""
    os.close(directory.open_file("gpu-GPU-0"))
    prefix = pci_devices.gpus(tmp_path, 1) if in_sysfs else []
    path = pci_devices.FIRST if in_sysfs else str(lock_folder / "gpu-GPU-0")
    held_by_shell = 'exec 9<"$0"; flock --exclusive --nonblock 9 || exit 75; echo has it; read x'
    with held(*prefix, "sh", "-c", held_by_shell, path):
        assert not can_lease(device(in_sysfs), prefix=prefix)
    one_line = ["flock", "--exclusive", "--nonblock", "--conflict-exit-code", "75", path, "true"]
    with locker(HOLD.format(device=device(in_sysfs)), prefix=prefix) as ours:
        assert ours.heard() == "True"
        assert subprocess.run([*prefix, *one_line], check=False).returncode == 75
    assert subprocess.run([*prefix, *one_line], check=False).returncode == 0
