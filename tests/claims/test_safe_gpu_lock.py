"""safe_gpu's lock: its users and ours as real processes, the kernel's own locks."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from gpuaff._system import descriptors
from gpuaff.claims.locking import safe_gpu
from gpuaff.claims.locking.safe_gpu import DEFAULT, holding
from gpuaff.errors import ClaimTimeoutError, GpusBusyError, InvalidOptionError
from gpuaff.pinning import state
from tests.fakedriver.driver import FakeDriver
from tests.processes import printed, stopped
from tests.safe_gpu_users import OURS, THEIRS, begin, end, get, our_user, their_user

as_root = pytest.mark.needs("two-users")


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the lock file will be: there is nothing yet."""
    path = tmp_path / "safe_gpu" / "the-lock"
    monkeypatch.setenv("GPUAFF_SAFE_GPU", str(path))
    monkeypatch.setattr(state, "_logged", set())
    safe_gpu._log_wait.cache_clear()
    yield path
    assert not descriptors.private


def is_free(path: Path) -> bool:
    """Whether a safe_gpu user could have the lock now."""
    with path.open("a") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True


def is_listed(pid: int, *, waiting: bool) -> bool:
    """Whether /proc/locks tells of a classic lock of this process."""
    return any(
        ("->" in line) == waiting and " POSIX " in line and f" {pid} " in line
        for line in Path("/proc/locks").read_text().splitlines()
    )


def until(happened: Callable[[], bool]) -> None:
    """Wait for something that is about to happen."""
    end = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.005)


# ---- where it is -----------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["off", "no", "0", "false", "OFF", " off "])
def test_who_has_no_safe_gpu_users_can_say_so(lock: Path, word: str) -> None:
    os.environ["GPUAFF_SAFE_GPU"] = word
    with holding() as said:
        assert said == ()
    assert not lock.parent.exists()


def test_the_path_is_safe_gpus_own_or_the_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    for word in "", "on", "1", "yes", "true":
        monkeypatch.setenv("GPUAFF_SAFE_GPU", word)
        assert safe_gpu.path() == DEFAULT
    monkeypatch.setenv("GPUAFF_SAFE_GPU", "/shared/locks/gpus")
    assert safe_gpu.path() == "/shared/locks/gpus"
    for word in "of", "gpu-lock", "./gpu-lock", "/tmp/":
        monkeypatch.setenv("GPUAFF_SAFE_GPU", word)
        with pytest.raises(InvalidOptionError, match="GPUAFF_SAFE_GPU"):
            safe_gpu.path()


# ---- it excludes, both ways ------------------------------------------------------------------


def test_the_first_one_makes_it_for_everybody(lock: Path) -> None:
    before = os.umask(0o077)
    try:
        with holding() as said:
            assert said == ()
    finally:
        os.umask(before)
    assert stat.S_IMODE(lock.parent.stat().st_mode) == 0o777
    assert stat.S_IMODE(lock.stat().st_mode) == 0o666
    assert [path.name for path in lock.parent.iterdir()] == [lock.name]
    assert [path.name for path in lock.parent.parent.iterdir()] == ["safe_gpu"]


def test_their_users_wait_for_us_and_we_for_them(lock: Path) -> None:
    for _ in range(2):
        with holding():
            assert not is_free(lock)
        assert is_free(lock)
    with their_user(lock) as theirs, our_user(lock) as ours:
        get(theirs)
        begin(ours)
        time.sleep(0.1)
        end(theirs)
        assert ours.heard() == "has it"
        assert not is_free(lock)
        with holding():  # claims do not wait for each other
            end(ours)
            assert not is_free(lock)
        assert is_free(lock)


def test_it_is_kept_while_others_in_the_process_open_the_file(lock: Path) -> None:
    """Closing it would end a classic lock of this process."""
    with holding():
        lock.read_bytes()
        with lock.open("w"):
            pass
        assert not is_free(lock)


@pytest.mark.parametrize("how", ["given back", "killed"])
def test_children_do_not_keep_it(lock: Path, how: str) -> None:
    """A forked child closes its copy, also when it leaves the block; a program does not get one."""
    script = f"""
{OURS}
import subprocess
with ExitStack() as stack:
    stack.enter_context(holding())
    program = subprocess.Popen(["sleep", "60"], close_fds=False, stdout=subprocess.DEVNULL)
    child = os.fork()
    if child == 0:
        os.close(1)
        stack.close()
        time.sleep(60)
    print(child, program.pid)
    sys.stdin.readline()
print("over")
sys.stdin.readline()
"""
    with stopped(script, env={"GPUAFF_SAFE_GPU": str(lock)}) as ours:
        children = [int(pid) for pid in ours.heard().split()]
        time.sleep(0.05)
        assert not is_free(lock)
        if how == "killed":
            ours.kill()
        else:
            ours.go_on()
            assert ours.heard() == "over"
        assert is_free(lock)
        for child in children:  # they are there, and not merely gone
            os.kill(child, signal.SIGKILL)


@pytest.fixture
def everybodys() -> Iterator[Path]:
    """A folder like /tmp, that other users may enter, too."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        path.chmod(0o1777)
        yield path


@as_root
@pytest.mark.case("E7")
@pytest.mark.parametrize("first", ["theirs", "ours", "a file of its owner"])
def test_two_users(everybodys: Path, first: str) -> None:
    path = everybodys / "safe_gpu" / "lock"
    makes = f"{THEIRS}\nos.umask(0o077)\nlocked({str(path)!r})"
    if first == "ours":
        makes = f"{OURS}\nos.umask(0o077)\nwith holding(): pass"
    env = {"GPUAFF_SAFE_GPU": str(path)}
    printed(makes, env=env)
    if first != "ours":  # as with the usual umask: with this one no other user can use it
        path.parent.chmod(0o755)
    if first == "a file of its owner":
        path.chmod(0o600)
    other = f"""
import logging  # as nobody it may be out of reach
{OURS}
{THEIRS}
become_nobody()
with holding() as said:
    print(*(notice.message for notice in said), is_free({str(path)!r}) if not said else "")
"""
    said = printed(other, env=env)
    assert "Permission denied" in said if first == "a file of its owner" else said == "False"


# ---- what may stand there --------------------------------------------------------------------


@pytest.mark.case("E7")
@pytest.mark.parametrize("words", ["a link stands in its place", "hard link"])
def test_what_was_planted_is_left_alone_and_a_claim_warns_once(
    lock: Path, caplog: pytest.LogCaptureFixture, words: str
) -> None:
    victim = lock.parent.parent / "victim"
    victim.write_text("precious")
    lock.parent.mkdir()
    lock.hardlink_to(victim) if words == "hard link" else lock.symlink_to(victim)
    before = victim.stat()
    for _ in range(2):
        with holding() as said:
            (notice,) = said
    assert notice.code == "safe-gpu-unlocked"
    assert words in notice.message
    assert str(lock) in notice.message
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "[safe-gpu-unlocked]" in caplog.text
    assert (victim.read_text(), victim.stat()) == ("precious", before)


# ---- nobody starves --------------------------------------------------------------------------


def test_claimers_that_keep_coming_keep_nobody_out(lock: Path) -> None:
    """Without standing back the shared lock would never be free."""
    script = f"""
{OURS}
import random
with holding():
    print("begun")
    sys.stdin.readline()
while True:
    with holding():
        time.sleep(random.uniform(0.02, 0.06))
"""
    with ExitStack() as stack:
        env = {"GPUAFF_SAFE_GPU": str(lock)}
        for user in [stack.enter_context(stopped(script, env=env)) for _ in range(5)]:
            user.heard()
            user.go_on()
        with their_user(lock) as theirs:
            for _ in range(5):
                started = time.monotonic()
                get(theirs)
                assert time.monotonic() - started < 5
                end(theirs)


def test_their_users_that_keep_coming_keep_us_not_out(lock: Path) -> None:
    """Whoever only tried again and again would never find the lock free."""
    script = f"""
{THEIRS}
print("begun")
while True:
    handle = locked({str(lock)!r})
    time.sleep(0.05)
    os.close(handle)
"""
    with ExitStack() as stack:
        for user in [stack.enter_context(stopped(script)) for _ in range(4)]:
            user.heard()
        with our_user(lock) as ours:
            started = time.monotonic()
            for _ in range(5):
                get(ours)
                end(ours)
            assert time.monotonic() - started < 20, "1 s: four are before us, each time"


def test_a_claimer_that_is_stopped_does_not_stop_the_others(
    lock: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A safe_gpu user waits for it; ours go on together with it, after a while."""
    monkeypatch.setattr(safe_gpu, "STAND_BACK", 0.3)
    monkeypatch.setattr(safe_gpu, "_LOG_AFTER", 0.1)
    caplog.set_level(logging.INFO)
    with our_user(lock) as stuck, their_user(lock) as theirs:
        get(stuck)
        begin(theirs)
        until(lambda: is_listed(theirs.pid, waiting=True))
        started = time.monotonic()
        with holding() as said:
            assert said == ()
        assert 0.3 <= time.monotonic() - started < 5
        (line,) = caplog.messages
        assert line.startswith("gpuaff: waiting for python")
        assert f"(pid {theirs.pid})" in line
        end(stuck)
        assert theirs.heard() == "has it"


def test_a_second_lock_of_one_process_does_not_wait_for_those_who_wait_for_the_first(
    lock: Path,
) -> None:
    with their_user(lock) as theirs, ExitStack() as stack:
        stack.enter_context(holding())
        begin(theirs)
        until(lambda: is_listed(theirs.pid, waiting=True))
        started = time.monotonic()
        with holding():
            assert time.monotonic() - started < 5
        stack.close()
        assert theirs.heard() == "has it"


# ---- somebody has it for too long ------------------------------------------------------------


def test_the_error_names_who_has_it(lock: Path, caplog: pytest.LogCaptureFixture) -> None:
    with their_user(lock) as theirs:
        get(theirs)
        for _ in range(2):
            with pytest.raises(ClaimTimeoutError) as raised, holding(2, limit=0.2):
                pass
        assert raised.value.waited >= 0.2
        busy = raised.value.busy
        assert isinstance(busy, GpusBusyError)
        assert (busy.wanted, busy.free) == (2, 0)
        assert f"(pid {theirs.pid})" in str(raised.value)
        assert str(lock) in str(raised.value)
        end(theirs)
        # The threads that still stood in the line have it now, one after the other, for a moment.
        until(lambda: "gpuaff-safe-gpu" not in {thread.name for thread in threading.enumerate()})
        assert is_free(lock)
        with holding():
            assert not is_free(lock)
    assert not caplog.records


def test_a_wait_is_told_and_can_be_interrupted(lock: Path) -> None:
    script = f"""
{OURS}
import logging, signal
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
safe_gpu._LOG_AFTER = 0.1
try:
    with holding(limit=float("inf")):
        print("has it")
except KeyboardInterrupt:
    print("interrupted")
sys.stdin.readline()
"""
    with their_user(lock) as theirs:
        get(theirs)
        with stopped(script, env={"GPUAFF_SAFE_GPU": str(lock)}) as ours:
            assert f"(pid {theirs.pid}) to choose GPUs" in ours.heard()
            ours.kill(2)
            assert ours.heard() == "interrupted"
            end(theirs)
            until(lambda: is_free(lock))  # its thread gets the lock for a moment
            get(theirs)


@pytest.mark.fake_driver
def test_a_claim_without_the_lock_says_so(driver: FakeDriver, tmp_path: Path) -> None:
    script = """
import gpuaff
print([notice.code for notice in gpuaff.claim_gpus().warnings])
"""
    env = {
        "GPUAFF_LOCK_DIR": str(tmp_path / "locks"),
        "GPUAFF_SAFE_GPU": str(tmp_path / "none" / "none" / "lock"),
    }
    done = driver.run(script, env=env)
    assert done.stdout == "['safe-gpu-unlocked']\n"
    assert done.stderr.count("[safe-gpu-unlocked]") == 1
