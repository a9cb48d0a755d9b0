"""The lock directory: several users, planted things, full and read-only disks."""

from __future__ import annotations

import errno
import os
import platform
import shutil
import socket
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuaff.claims.locking import directory
from gpuaff.errors import LockDirectoryError
from tests import powers, seccomp
from tests.claims.lockers import A_USER, ANOTHER, said, two_users

USE = """
def use():
    with directory.guarded(limit=0.2):
        slot = registry.Slot()
    slot.write({"pid": 1})
    return leased(gpu(0)).release()
print(refused(use))
"""
"""All that a claim does in the lock directory."""

FLOCK = {"x86_64": 73, "aarch64": 32}.get(platform.machine(), 0)


# ---- how it is made --------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
@pytest.mark.case("E7")
def test_what_is_made_is_for_everyone_whatever_the_umask(lock_folder: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        for name, size in ("guard", 0), ("registry", 4096), ("gpu-1", 0):
            os.close(directory.open_file(name, size=size))
    finally:
        os.umask(before)
    assert stat.S_IMODE(lock_folder.stat().st_mode) == 0o1777
    made = {path.name: stat.S_IMODE(path.stat().st_mode) for path in lock_folder.iterdir()}
    assert made == dict.fromkeys(("guard", "registry", "gpu-1", "README"), 0o1666)
    assert [path.name for path in lock_folder.parent.iterdir()] == ["gpuaff"]


@pytest.mark.case("E9")
@pytest.mark.needs("systemd-tmpfiles")
def test_what_cleans_tmp_leaves_it_alone(lock_folder: Path, tmp_path: Path) -> None:
    os.close(directory.open_file("registry", size=4096))
    (lock_folder / "somebodys").touch()
    for path in lock_folder.iterdir():
        os.utime(path, (0, 0))
    rule = tmp_path / "rule.conf"
    rule.write_text(f"d {lock_folder.parent} 1777 - - 1us\n")
    subprocess.run(["systemd-tmpfiles", "--clean", rule], check=True)
    assert {path.name for path in lock_folder.iterdir()} == {"registry", "README"}


def test_its_path_is_absolute_and_the_folder_above_is_there(
    lock_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUAFF_LOCK_DIR", "locks")
    with pytest.raises(LockDirectoryError, match="a whole path"):
        directory.open_file("guard")
    monkeypatch.setenv("GPUAFF_LOCK_DIR", f"{lock_folder}/a/b")
    with pytest.raises(LockDirectoryError, match="the folder above it is missing") as refused:
        directory.open_file("guard")
    assert "remove it" not in str(refused.value)
    assert (refused.value.errno, refused.value.filename) == (errno.ENOENT, f"{lock_folder}/a/b")
    monkeypatch.setenv("GPUAFF_LOCK_DIR", f" {lock_folder}// ")
    os.close(directory.open_file("guard"))
    assert directory.path() == str(lock_folder)


# ---- several users ---------------------------------------------------------------------------


@two_users
@pytest.mark.case("E7")
@pytest.mark.parametrize("first", [0, A_USER])
def test_each_user_can_use_what_another_one_has_made(lock_folder: Path, first: int) -> None:
    for uid in first, ANOTHER, A_USER, 0:
        assert said(f"os.umask(0o077)\n{USE}", uid=uid) == "not refused"
    assert {path.stat().st_uid for path in lock_folder.iterdir()} == {first}


@two_users
@pytest.mark.needs("protected-regular")
@pytest.mark.case("E7")
@pytest.mark.parametrize("level", [0, 1, 2])
def test_each_level_of_fs_protected_regular(lock_folder: Path, level: int) -> None:
    """It forbids O_CREAT for a file of others in a folder such as /tmp, to root as well."""
    with powers.protected(level):
        for uid in A_USER, ANOTHER, 0:
            assert said(USE, uid=uid) == "not refused"


@two_users
@pytest.mark.case("E7")
def test_two_users_make_the_folder_at_the_same_moment(lock_folder: Path) -> None:
    script = f"""
been = []
def other_is_first(event, _):
    if event == "os.mkdir" and not been:
        been.append(1)
        child = os.fork()
        if child == 0:
            os.seteuid(0)
            os.setuid({ANOTHER})
            os.close(directory.open_file("guard"))
            os._exit(0)
        os.waitpid(child, 0)
os.setgroups([])
sys.addaudithook(other_is_first)
os.seteuid({A_USER})
print(refused(lambda: os.close(directory.open_file("guard"))), been)
"""
    assert said(script) == "not refused [1]"
    assert lock_folder.stat().st_uid == ANOTHER
    assert len(list(lock_folder.parent.iterdir())) == 1


@two_users
@pytest.mark.case("E7")
@pytest.mark.parametrize("made_before", [0, 2], ids=["the folder", "a file"])
def test_a_second_user_waits_until_the_first_one_has_given_everyone_rights(
    lock_folder: Path, made_before: int
) -> None:
    script = f"""
import time
changes = []
def other_comes(event, _):
    if event == "os.chmod":
        changes.append(os.fork() if len(changes) == {made_before} else None)
        if changes[-1] == 0:
            os.seteuid(0)
            os.setuid({ANOTHER})
            os.close(directory.open_file("guard"))
            os._exit(0)
        time.sleep(0.03)
os.setgroups([])
os.umask(0o077)
sys.addaudithook(other_comes)
os.seteuid({A_USER})
os.close(directory.open_file("guard"))
print(os.waitpid(changes[{made_before}], 0)[1])
"""
    assert said(script) == "0"


# ---- what may stand in a file's place --------------------------------------------------------


def precious(path: Path) -> Path:
    """A file of a victim."""
    victim = path.parent.parent / "victim"
    victim.write_text("precious")
    victim.chmod(0o666)
    return victim


def a_fifo(path: Path) -> None:
    os.mkfifo(path)
    path.chmod(0o666)


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
    path.chmod(0o666)


PLANTED: dict[str, tuple[Callable[[Path], object], str]] = {
    "a link": (lambda path: path.symlink_to(precious(path)), "a link stands in its place"),
    "a link to nothing": (
        lambda path: path.symlink_to(path.parent.parent / "nothing"),
        "a link stands in its place",
    ),
    "a hard link": (lambda path: path.hardlink_to(precious(path)), "another name elsewhere"),
    "a FIFO": (a_fifo, "no regular file"),
    "a socket": (a_socket, "something that is no file stands in its place"),
    "a folder": (lambda path: path.mkdir(mode=0o777), "a folder|no regular file"),
    "a file for its owner": (lambda path: path.touch(0o600), "Permission denied"),
    "a file for no user": (lambda path: path.touch(0), "Permission denied"),
}


@two_users
@pytest.mark.case("E7")
@pytest.mark.parametrize("planted", PLANTED)
def test_what_is_planted_is_named_and_not_touched(lock_folder: Path, planted: str) -> None:
    plant, words = PLANTED[planted]
    lock_folder.mkdir()
    lock_folder.chmod(0o1777)
    for name in "guard", "registry", "gpu-GPU-0":
        path = lock_folder / name
        plant(path)
        for made in lock_folder.parent.rglob("*"):
            if made != lock_folder:
                os.chown(made, A_USER, A_USER, follow_symlinks=False)
        error = said(USE, uid=ANOTHER)
        assert str(path) in error
        assert any(word in error for word in words.split("|")), error
        assert "set GPUAFF_LOCK_DIR" in error
        victim = lock_folder.parent / "victim"
        assert not victim.exists() or victim.read_text() == "precious"
        assert not (lock_folder.parent / "nothing").exists()
        for made in lock_folder.iterdir():
            if made.name.startswith((name, f".{name}")):
                shutil.rmtree(made) if made.is_dir() else made.unlink()
    assert said(USE, uid=ANOTHER) == "not refused"


@two_users
@pytest.mark.case("E7")
def test_a_file_that_others_may_only_read_can_be_locked_and_not_written(lock_folder: Path) -> None:
    """As ``touch`` makes one with the usual umask. The board is written, so it says so."""
    lock_folder.mkdir()
    lock_folder.chmod(0o1777)
    for name in "guard", "gpu-GPU-0":
        (lock_folder / name).touch(0o644)
    assert said(USE, uid=A_USER) == "not refused"
    (lock_folder / "registry").chmod(0o644)
    assert "registry: Permission denied" in said(USE, uid=ANOTHER)


FOLDERS: dict[Callable[[Path], object], str] = {
    lambda path: path.mkdir(0o700): "Permission denied",
    lambda path: path.mkdir(0o755): "Permission denied",
    lambda path: path.touch(0o666): "a folder is expected",
    lambda path: os.mkfifo(path, 0o666): "a folder is expected",
    lambda path: path.symlink_to("/tmp"): "a folder is expected",
    lambda path: path.symlink_to("nothing"): "a folder is expected",
}


@two_users
@pytest.mark.case("E7")
@pytest.mark.parametrize("plant", FOLDERS)
def test_what_is_planted_in_the_folders_place(
    lock_folder: Path, plant: Callable[[Path], object]
) -> None:
    plant(lock_folder)
    before = sorted(Path("/tmp").glob("guard"))
    error = said(USE, uid=A_USER)
    assert str(lock_folder) in error
    assert FOLDERS[plant] in error
    assert "GPUAFF_LOCK_DIR" in error
    assert sorted(Path("/tmp").glob("guard")) == before
    assert [path.name for path in lock_folder.parent.iterdir()] == ["gpuaff"]


# ---- disks -----------------------------------------------------------------------------------


@pytest.mark.needs("mounts")
@pytest.mark.parametrize(
    ("options", "words"),
    [("size=16k,mode=1777", "No space left on device"), ("ro", "Read-only file system")],
)
def test_a_disk_that_takes_no_more(lock_folder: Path, options: str, words: str) -> None:
    above = lock_folder.parent
    error = said(USE, prefix=powers.mounted(options, above))
    assert words in error
    assert "GPUAFF_LOCK_DIR" in error


@pytest.mark.case("E9")
@pytest.mark.skipif(not FLOCK, reason="the call's number is not known")
@pytest.mark.parametrize("error", [errno.ENOLCK, errno.EBADF, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_never_taken_for_unlocked(
    lock_folder: Path, error: int
) -> None:
    """NFS without a lock daemon, or which wants a file open for writing to lock it."""
    for work in "directory.guarded().__enter__()", "leased(gpu(0))":
        found = said(f"print(refused(lambda: {work}))", prefix=seccomp.refusing(error, FLOCK))
        assert "network file systems cannot" in found
        assert str(lock_folder) in found


def test_too_many_open_files_are_told_as_that(lock_folder: Path) -> None:
    os.close(directory.open_file("guard"))
    script = """
        resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
        kept = []
        try:
            while True:
                kept.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            pass
        print(refused(lambda: leased(gpu(0, "0000:00:00.0"))))
    """
    assert "Too many open files: close some" in said(script)
