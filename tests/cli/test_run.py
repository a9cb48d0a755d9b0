"""``gpuaff run`` becomes the command: real processes, compared with the same started directly."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import environments
from tests.cli.calls import refused
from tests.fakedriver.driver import FakeDriver
from tests.processes import CPUS, SRC, command_line, environment, unmeasured

RUN = (sys.executable, "-m", "gpuaff", "run")
ONLY = (*RUN, "--no-claim", "--no-pin", "--")
"""Neither claims nor pins: what is left is to become the command."""

ENV = str(shutil.which("env"))
RT_SIGACTION = {"x86_64": 13, "aarch64": 134}.get(platform.machine(), -1)
"""The number of the call, from the kernel's tables."""

Done = subprocess.CompletedProcess[bytes]


def started(
    command: Sequence[str | bytes],
    *,
    env: Mapping[str, str] | None = None,
    given: bytes = b"",
    before: Callable[[], None] | None = None,
    cwd: Path | None = None,
    fresh: bool = False,
) -> Done:
    """Run a command to its end in a clean environment, or in just this one."""
    fresh = fresh or before is not None or tuple(command[: len(ONLY)]) == ONLY
    if tuple(command[: len(RUN)]) == RUN and not fresh:
        words = [str(word) for word in command[3:]]
        return command_line(*words, env=env or environment(), given=given, folder=cwd)
    return subprocess.run(
        command,
        input=given,
        capture_output=True,
        env=environment() if env is None else env,
        preexec_fn=before,
        cwd=cwd,
        check=False,
    )


def told(done: Done) -> str:
    """What is said about a failure of our own: one line and nothing else."""
    assert done.stdout == b""
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith("gpuaff: ")
    return line


def as_directly(listing: Sequence[str], **how: Any) -> bytes:
    """What a command prints, which is the same whether we have become it or not."""
    directly = started(listing, **how)
    assert started([*ONLY, *listing], **how).stdout == directly.stdout
    return directly.stdout


class TestBecomesTheCommand:
    def test_exit_codes_and_signals_that_end_it_are_its_own(self) -> None:
        for code in (0, 75, 255):
            assert started([*ONLY, "sh", "-c", f"exit {code}"]).returncode == code
        for number in (signal.SIGINT, signal.SIGKILL, signal.SIGPIPE):
            done = started([*ONLY, "sh", "-c", f"kill -{int(number)} $$"])
            assert done.returncode == -number, number

    def test_it_is_the_process_that_was_started(self) -> None:
        script = "trap 'echo caught; kill $!; exit 9' TERM; sleep 60 & echo $$; wait"
        with subprocess.Popen(
            [*ONLY, "sh", "-c", script], stdout=subprocess.PIPE, env=environment()
        ) as child:
            assert child.stdout is not None
            assert int(child.stdout.readline()) == child.pid
            child.send_signal(signal.SIGTERM)
            assert child.stdout.readline() == b"caught\n"
            assert child.wait() == 9

    def test_its_words_are_its_own(self) -> None:
        words = [b"--", b"-n", b"3", b"", b"--help", b"a b", "ü".encode(), b"\xff", b"--"]
        script = "import os, sys; print([os.fsencode(word) for word in sys.argv[1:]])"
        done = started([*map(os.fsencode, ONLY), sys.executable.encode(), b"-c", script, *words])
        assert done.stdout.decode().strip() == str(words)

    def test_name_and_standard_streams_are_its_own(self) -> None:
        text = os.urandom(100_000)
        script = "tr '\\0' ' ' < /proc/$$/cmdline >&2; cat; echo talk >&2"
        done = started([*ONLY, "sh", "-c", script], given=text)
        assert done.stdout == text
        assert done.stderr.startswith(b"sh -c ")
        assert done.stderr.endswith(b"talk\n")

    def test_no_descriptor_is_left_open(self) -> None:
        as_directly(["sh", "-c", "ls /proc/$$/fd"])

    def test_descriptors_that_were_passed_on_stay(self) -> None:
        ours, theirs = os.pipe()
        command = [*ONLY, "bash", "-c", f"echo here >&{theirs}"]
        subprocess.run(command, pass_fds=[theirs], env=environment(), check=True)
        os.close(theirs)
        with os.fdopen(ours) as stream:
            assert stream.read() == "here\n"

    @pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
    def test_closed_streams_stay_closed(self, closed: str, tmp_path: Path) -> None:
        listing = f"sh -c 'ls /proc/$$/fd > {tmp_path}/it' {closed}"
        commands = [" ".join(ONLY), ""]
        seen = []
        for before in commands:
            started(["sh", "-c", f"{before} {listing}"])
            seen.append((tmp_path / "it").read_text())
        assert seen[0] == seen[1]


PYTHONS = {signal.SIGPIPE, signal.SIGXFSZ}
"""What Python ignores for itself, and ``subprocess`` puts back."""


def ignored_signals(status: bytes) -> set[int]:
    """The signals that a /proc status file tells as ignored."""
    mask = int(re.findall(rb"SigIgn:\s*(\w+)", status)[0], 16)
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}


def ignore_signal(number: int) -> None:
    """Ignore one, by the call itself: the C library refuses those that it keeps for itself."""
    action = struct.pack("LLLL", signal.SIG_IGN, 0, 0, 0)  # struct kernel_sigaction; 0 is the mask
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.syscall(RT_SIGACTION, number, action, None, 8) == 0, ctypes.get_errno()


class TestSignals:
    """``SigIgn`` and its like of a process that we have become, and of one started directly."""

    LISTING = ("grep", "-E", "^Sig(Blk|Ign|Cgt)", "/proc/self/status")

    @pytest.mark.skipif(RT_SIGACTION < 0, reason="not here: the call's number is not known")
    @pytest.mark.parametrize(
        "ignored",
        [
            [],
            [signal.SIGHUP],  # nohup
            [signal.SIGINT, signal.SIGQUIT],  # a job in the background of a script
            [signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD],
            [32, 33],  # a strange parent: the C library keeps these for itself
        ],
    )
    def test_are_as_they_were(self, ignored: list[int]) -> None:
        def ignore() -> None:
            for number in ignored:
                ignore_signal(number)
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])

        status = as_directly(self.LISTING, before=ignore, env=unmeasured(environment()))
        # What runs the tests may ignore others: nohup SIGHUP, a container's first process 32, 33.
        before = ignored_signals(Path("/proc/self/status").read_bytes()) - PYTHONS
        assert ignored_signals(status) == before | set(ignored)

    def test_a_reader_that_goes_ends_it(self) -> None:
        """Python ignores SIGPIPE; ``yes`` would write an error and exit with 1."""
        with subprocess.Popen(
            [*ONLY, "yes"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
        ) as child:
            assert child.stdout is not None
            assert child.stderr is not None
            child.stdout.readline()
            child.stdout.close()
            assert child.wait() == -signal.SIGPIPE
            assert child.stderr.read() == b""


@pytest.mark.parametrize(
    "extra", [{}, {"LC_ALL": "C"}, {"LC_CTYPE": "C.UTF-8"}, {"LC_CTYPE": "C"}, {"ODD": "\udcff"}]
)
def test_the_environment_is_as_it_was(extra: dict[str, str]) -> None:
    """Python sets LC_CTYPE where the locale is C; the command is not to see that."""
    as_directly(["env", "-0"], env={"PATH": os.environ["PATH"], "PYTHONPATH": str(SRC), **extra})


FILES = (
    ("first/plain", 0o644, "#!/bin/sh\necho first\n"),
    ("second/plain", 0o755, "#!/bin/sh\necho second\n"),
    ("first/alone", 0o644, "#!/bin/sh\n"),
    ("second/folder", 0o755, "#!/bin/sh\necho no folder\n"),
    ("first/script", 0o755, 'echo "script $0 $1"\n'),
    ("first/orphan", 0o755, "#!/no/such/interpreter\n"),
    ("first/empty", 0o755, ""),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Things that can be executed, and things that cannot."""
    first, second = tmp_path / "first", tmp_path / "second"
    for each in (first, second, first / "folder"):
        each.mkdir()
    for name, mode, text in FILES:
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(mode)
    (first / "dangling").symlink_to("nowhere")
    (first / "loop").symlink_to("loop")
    return tmp_path


class TestFinding:
    """The oracle is ``env``: the same exit code, and the same output."""

    def compare(self, *words: str, **how: Any) -> None:
        ours, theirs = started([*ONLY, *words], **how), started([ENV, "--", *words], **how)
        assert (ours.returncode, ours.stdout) == (theirs.returncode, theirs.stdout)
        if ours.returncode in (126, 127):
            told(ours)

    @pytest.mark.parametrize(
        "command",
        [
            *("plain", "folder", "script", "alone", "orphan", "empty", "dangling", "loop"),
            *("nosuch", "first/plain", "second/plain", "./first/script", "first", "first/"),
            *("first/dangling", "first/orphan", "second/plain/x", "nosuch/x", "", "/etc"),
            "a" * 5000,
        ],
    )
    def test_as_env(self, command: str, folder: Path) -> None:
        path = f"{folder}/first:{folder}/second:{os.environ['PATH']}"
        self.compare(command, "word", env=environment({"PATH": path}), cwd=folder)

    @pytest.mark.parametrize("path", ["", ":/nowhere", "/nowhere:", None])
    @pytest.mark.parametrize("command", ["plain", "sh"])
    def test_empty_and_missing_paths(self, path: str | None, command: str, folder: Path) -> None:
        """An empty element is the current folder; without PATH there is a default."""
        env = {name: text for name, text in environment().items() if name != "PATH"}
        env |= {} if path is None else {"PATH": path}
        self.compare(command, "-c", "echo shell", env=env, cwd=folder / "second")

    @pytest.mark.needs("two-users")
    def test_a_folder_that_may_not_be_searched(self, folder: Path) -> None:
        """Directly, since another user may not read this checkout either."""
        (folder / "first").chmod(0o700)
        for parent in (folder, *folder.parents[:-1]):
            parent.chmod(parent.stat().st_mode | 0o005)
        find = f"os.setuid(65534); execute.find('{folder}/first/script')"
        script = f"import os; from gpuaff._system import execute; {find}"
        done = started([sys.executable, "-c", script])
        assert b"CommandError: " in done.stderr
        assert b"may not be searched" in done.stderr

    def test_what_is_said(self, folder: Path) -> None:
        env = environment({"PATH": f"{folder}/first"})
        said = {
            "nosuch": "gpuaff: nosuch: command not found in PATH",
            "./nosuch": "gpuaff: ./nosuch: no such file",
            "alone": f"gpuaff: alone: {folder}/first/alone may not be executed (chmod +x)",
            str(folder): f"gpuaff: {folder}: is a folder",
            "orphan": f"gpuaff: orphan: the interpreter that {folder}/first/orphan names is not "
            "there",
        }
        for command, line in said.items():
            assert told(started([*ONLY, command], env=env, cwd=folder)) == line

    def test_the_command_is_looked_for_before_anything_is_claimed(self) -> None:
        assert started([*RUN, "-n", "2", "--", "nosuch"]).returncode == 127


WRONG_USE = {
    "": "a command after --",
    "-n 2": "a command after --",
    "true": "-- before it",
    "-n 2 true x": "-- before it",
    "-n 0 -- true": "argument -n: '0': expected a number of GPUs",
    "-n -- true": "argument -n: expected one argument",
    "--gpus x -- true": "argument --gpus: 'x': expected GPUs by index",
    "--gpus=0 -n1 -- true": "not allowed with argument",
    "--wait true": "-- stands before the command",
    "--wait 5x -- true": "10m or 1h30m",
    "--dry -- true": "unrecognized arguments: --dry; see gpuaff run --help",
    "--two\\nlines\x1b[31m -- true": r"unrecognized arguments: --two\nlines\x1b[31m",
    "--no-claim -n 3 -- true": "no --no-claim beside it",
}


@pytest.mark.parametrize("words", WRONG_USE)
def test_wrong_use_is_told_in_one_line(words: str) -> None:
    told = refused("run", *(word.replace("\\n", "\n") for word in words.split()), code=2)
    assert WRONG_USE[words] in told


@pytest.mark.parametrize("words", [["--", "no-such-command"], ["-n", "0", "--", "true"]])
def test_the_code_is_the_same_where_nobody_hears(words: list[str]) -> None:
    command = [*RUN, *words]
    code = started(command).returncode
    assert code in (127, 2)
    with Path("/dev/full").open("w") as full:
        assert subprocess.run(command, stderr=full, env=environment()).returncode == code
    reader, writer = os.pipe()
    os.close(reader)
    assert subprocess.run(command, stderr=writer, env=environment()).returncode == code
    os.close(writer)


def test_little_is_imported() -> None:
    """What it imports, a user waits for."""
    command = [sys.executable, "-X", "importtime", *ONLY[1:], "true"]
    done = started(command, env=unmeasured(environment()))
    assert done.returncode == 0
    modules = set(re.findall(rb"\| +([\w.]+)$", done.stderr, re.MULTILINE))
    assert b"gpuaff.launch.ranks" in modules
    others = {b"gpuaff.cli." + name for name in (b"topo", b"plan", b"check", b"views")}
    heavy = {b"json", b"rich", b"psutil", b"pynvml", b"logging", b"gpuaff.pinning"}
    assert modules & (others | heavy) == set()


MASK = (sys.executable, "-c", "import os; print(*sorted(os.sched_getaffinity(0)))")
"""A command that tells its CPUs."""


def ranks_of(launcher: str, name: str) -> list[dict[str, str]]:
    """What a real launcher put into the environment of each rank."""
    return [dict(rank.environ) for rank in environments.started(launcher, name)]


@pytest.mark.fake_driver
@pytest.mark.needs("two-cpus")
class TestInsideOfALauncher:
    """Each GPU is near all CPUs of this machine, so two ranks get a half each."""

    def masks(self, driver: FakeDriver, ranks: list[dict[str, str]], *words: str) -> list[set[int]]:
        found = []
        for rank in ranks:
            done = started([*RUN, *words, "--", *MASK], env=environment({**driver.env(), **rank}))
            assert done.returncode == 0, done.stderr
            found.append(set(map(int, done.stdout.split())))
        return found

    @pytest.mark.parametrize("launcher", [("torchrun", "torchrun"), ("openmpi", "unbound")])
    def test_pins_the_rank(self, launcher: tuple[str, str], driver: FakeDriver) -> None:
        ranks = ranks_of(*launcher)[:2]
        first, second = self.masks(driver, ranks)
        assert first & second == set()
        assert first | second <= set(CPUS)
        assert self.masks(driver, ranks, "--no-pin") == [set(CPUS)] * 2
        off = [{**rank, "GPUAFF": "off"} for rank in ranks]
        assert self.masks(driver, off) == [set(CPUS)] * 2

    @pytest.mark.parametrize(
        ("variables", "said"),
        [
            ({"LOCAL_RANK": "1"}, "LOCAL_RANK=1 is set, but LOCAL_WORLD_SIZE is not"),
            ({"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK=2 is not below"),
            ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "PMI_RANK=1 is the rank in the whole job"),
            ({"PMI_RANK": "0", "PMI_SIZE": "1"}, ""),
            ({}, ""),
        ],
    )
    def test_a_rank_that_is_not_known_is_told_before_it_claims(
        self, variables: dict[str, str], said: str, driver: FakeDriver
    ) -> None:
        """It may be one of many, and each of them claims."""
        env = environment({**driver.env(), **variables})
        done = started([*RUN, "--dry-run", "--", "true"], env=env)
        assert done.returncode == 0
        assert said in done.stderr.decode()
        assert ("rank" in done.stderr.decode()) == bool(said)

    def test_without_a_driver_it_goes_on_unless_that_is_forbidden(self, driver: FakeDriver) -> None:
        driver.refuse(9)  # NVML_ERROR_DRIVER_NOT_LOADED
        env = environment({**driver.env(), **ranks_of("torchrun", "torchrun")[0]})
        done = started([*RUN, "--", "echo", "goes on"], env=env)
        assert (done.returncode, done.stdout) == (0, b"goes on\n")
        assert done.stderr.startswith(b"gpuaff: rank 0: the kernel module of the NVIDIA driver")
        strict = {**env, "GPUAFF_STRICT": "1"}
        assert started([*RUN, "--", "echo", "it"], env=strict).returncode == 3

    def test_a_script_that_pins_as_well_has_nothing_to_wonder_at(self, driver: FakeDriver) -> None:
        """Its mask is the share that it was pinned to, also below a shell, and no unknown border.

        A mask that is another one by then, or another rank's share, is remarked upon as ever.
        """
        rank = {**driver.env(), **ranks_of("torchrun", "torchrun")[1]}
        script = (
            "import gpuaff, os; before = os.sched_getaffinity(0); a = gpuaff.set_affinity(); "
            "print(before == set(a), {w.code for w in a.warnings} & {'mask-narrow', "
            "'mask-shrunk', 'masks-unknown'})"
        )
        python = (sys.executable, "-c", script)
        shell = ("sh", "-c", f'"$0" -c "{script}"; :', sys.executable)
        for command in (python, shell):
            done = started([*RUN, "--", *command], env=environment(rank))
            assert done.stdout == b"True set()\n", done.stderr
        forged = {**rank, "GPUAFF_PINNED": f"v1:0:2:{CPUS[0]}"}
        bound = ["taskset", "-c", str(CPUS[0])]
        done = started([*bound, *python], env=environment(forged))
        assert b"masks-unknown" in done.stdout, done.stderr


@pytest.mark.fake_driver
def test_pins_without_a_launcher(driver: FakeDriver) -> None:
    """As rank 0 of 1 on the only visible GPU; of several, any may be a rank's that it starts."""
    share = "import os; print(os.environ.get('GPUAFF_PINNED', ''), *os.sched_getaffinity(0))"
    command = [*RUN, "--no-claim", "--", sys.executable, "-c", share]
    one = started(command, env=environment({**driver.env(), "CUDA_VISIBLE_DEVICES": "1"}))
    assert one.returncode == 0, one.stderr
    assert one.stdout.startswith(b"v1:0:1:")
    several = started(command, env=environment(driver.env()))
    assert set(map(int, several.stdout.split())) == set(CPUS)
    assert several.stderr.endswith(b"[no-rank]\n")
