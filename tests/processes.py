"""Real processes: run a script, stop it where it says so, and look at it from outside."""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src"
CPUS = sorted(os.sched_getaffinity(0))
"""What the tests may use of this machine."""


def cpus_of(status: str) -> frozenset[int]:
    """The CPUs in a /proc status file; a second reader, so that the first can be wrong."""
    line = next(line for line in status.splitlines() if line.startswith("Cpus_allowed_list:"))
    found: set[int] = set()
    for part in line.split(":")[1].strip().split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def masks(pid: int) -> dict[int, frozenset[int]]:
    """Each thread's CPUs, read from outside."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            found[int(task.name)] = cpus_of((task / "status").read_text())
        except OSError:  # it ended meanwhile
            continue
    return found


def cores_of_this_machine() -> list[frozenset[int]]:
    """Those that the tests may use; read by core ids, where gpuaff reads lists of siblings."""
    found: dict[tuple[str, str], set[int]] = {}
    for cpu in CPUS:
        folder = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        package, core = ((folder / name).read_text() for name in ("physical_package_id", "core_id"))
        found.setdefault((package, core), set()).add(cpu)
    return sorted((frozenset(core) for core in found.values()), key=min)


def worker_cpus() -> frozenset[int]:
    """What is left to the workers of the only rank, when the main process has kept a core."""
    cores = cores_of_this_machine()
    return frozenset().union(*(cores[1:] or cores))


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """A clean environment: no rank, no CUDA, no gpuaff option of whoever runs the tests."""
    launchers = ("LOCAL_", "MPI_", "OMPI_", "PMIX_", "PRTE_", "SLURM_", "TORCHELASTIC_")
    schedulers = ("JOB_ID", "PBS_", "QUEUE", "SGE_")
    runtimes = ("CUDA_", "OMP_", "KMP_", "GOMP_", "OPENBLAS_", "GOTOBLAS_", "LD_LIBRARY_PATH")
    ours = ("GPUAFF", *runtimes, *launchers, *schedulers)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    return {**kept, "PYTHONPATH": f"{SRC}:{ROOT}", **(extra or {})}


def unmeasured(env: Mapping[str, str]) -> dict[str, str]:
    """The same without coverage, which imports much, handles SIGTERM, and writes a file."""
    return {name: value for name, value in env.items() if not name.startswith("COVERAGE")}


_NURSERY = Path(__file__).parent / "programs/nursery.py"
_COUNTS_AT_START = ("LD_PRELOAD", "MALLOC_", "PYTHON")
"""The beginnings of variables that count when a process starts: a fork would be without them. Only
the folders of PYTHONPATH it has, for what is not imported yet."""
usual_libraries: set[str] = set()
"""Each LD_LIBRARY_PATH for which a nursery pays: that of complete fake drivers."""


class _Pipes:
    """The pipes of a program: the first one is what it reads."""

    def __init__(self, count: int) -> None:
        pipes = [os.pipe() for _ in range(count)]
        self.theirs = [pipes[0][0], *(pipe[1] for pipe in pipes[1:])]
        self.ours = [pipes[0][1], *(pipe[0] for pipe in pipes[1:])]

    def started(self) -> None:
        """The program has its ends by now."""
        for handle in self.theirs:
            os.close(handle)


def _status_of(handle: int) -> Callable[[float], int]:
    """A wait for the exit status of a fork, which the nursery writes."""
    found: list[int] = []

    def wait(timeout: float) -> int:
        if not found:
            assert select.select([handle], [], [], timeout)[0], "it goes on"
            found.append(int(os.read(handle, 10)))
            os.close(handle)
        return found[0]

    return wait


class Program:
    """A program that runs: it talks by lines on its standard streams."""

    def __init__(
        self, pid: int, watch: int, streams: Sequence[int], wait: Callable[[float], int]
    ) -> None:
        self.pid = pid
        self.out = os.fdopen(streams[1])
        self._watch = watch
        self._in = os.fdopen(streams[0], "w")
        self._err = os.fdopen(streams[2])
        self._wait = wait

    def heard(self) -> str:
        """The next line that it prints."""
        line = self.out.readline()
        assert line, f"it has ended: {self._err.read()}"
        return line.strip()

    def go_on(self, line: str = "") -> None:
        """Let it go on."""
        self._in.write(f"{line}\n")
        self._in.flush()

    def end_of_input(self) -> None:
        """Close its standard input, which children that it has left behind may have as well."""
        self._in.close()

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send it a signal; after SIGKILL it is gone."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._watch, number)
        if number == signal.SIGKILL:
            self.wait()

    def wait(self, timeout: float = 50) -> int:
        """Until it has ended: its exit status, negative when a signal ended it."""
        return self._wait(timeout)

    def is_running(self) -> bool:
        """Whether it has not ended."""
        return not select.select([self._watch], [], [], 0)[0]

    def errors(self) -> str:
        """What it wrote to its standard error; until its end."""
        return self._err.read()

    def end(self) -> str:
        """Let it come to its end, which must be a good one; what else it printed."""
        self._in.close()
        printed = self.out.read()
        assert self.wait() == 0, f"{printed}\n{self._err.read()}"
        return printed

    def talk(self, given: bytes, timeout: float) -> tuple[int, bytes, bytes]:
        """Give it all that it reads; its exit status, and what it printed."""
        end = time.monotonic() + timeout
        texts = {self.out.fileno(): b"", self._err.fileno(): b""}
        reading, writing = list(texts), [self._in.fileno()]
        os.set_blocking(writing[0], False)
        while reading:
            ready, room, _ = select.select(reading, writing, [], max(0, end - time.monotonic()))
            assert ready or room, f"it goes on after {timeout} s: {texts}"
            if room:
                with suppress(BrokenPipeError):
                    given = given[os.write(writing[0], given) :] if given else given
                if not given or ready:
                    self._in.close()
                    writing = []
            for handle in ready:
                piece = os.read(handle, 1 << 16)
                texts[handle] += piece
                if not piece:
                    reading.remove(handle)
        out, err = texts.values()
        return self.wait(max(0, end - time.monotonic())), out, err

    def close(self) -> None:
        """Kill it, if it lives."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._watch, signal.SIGKILL)
        for stream in (self._in, self.out, self._err):
            with suppress(BrokenPipeError):
                stream.close()
        os.close(self._watch)
        with suppress(AssertionError):
            self._wait(5)


class Nursery:
    """The process of which programs are forked: see programs/nursery.py."""

    def __init__(
        self, libraries: str, prefix: Sequence[str] = (), modules: Sequence[str] = ()
    ) -> None:
        """Start it, with this LD_LIBRARY_PATH, these words before the command, and more modules."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [*prefix, sys.executable, str(_NURSERY), str(theirs.fileno()), *modules],
            env=environment({"LD_LIBRARY_PATH": libraries}),
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        atexit.register(self.close)

    def start(
        self,
        code: str,
        *arguments: str,
        env: Mapping[str, str],
        folder: Path | None = None,
        by_lines: bool = True,
    ) -> Program:
        """Start a program."""
        about = {"env": dict(env), "folder": str(folder or Path.cwd()), "by_lines": by_lines}
        about["cpus"] = sorted(os.sched_getaffinity(0))
        message = json.dumps({"code": code, "arguments": arguments, **about}).encode()
        pipes = _Pipes(4)
        socket.send_fds(self._socket, [message], pipes.theirs)
        pipes.started()
        pid, watches, _, _ = socket.recv_fds(self._socket, 100, 1)
        return Program(int(pid), watches[0], pipes.ours, _status_of(pipes.ours[3]))

    def run(
        self,
        code: str,
        *arguments: str,
        env: Mapping[str, str],
        given: bytes = b"",
        folder: Path | None = None,
        timeout: float = 50,
    ) -> subprocess.CompletedProcess[bytes]:
        """Run a program to its end."""
        program = self.start(code, *arguments, env=env, folder=folder, by_lines=False)
        try:
            returncode, out, err = program.talk(given, timeout)
        finally:
            program.close()
        command = ["python", "-c", code, *arguments]
        return subprocess.CompletedProcess(command, returncode, out, err)

    def close(self) -> None:
        """End it; programs that still run go on."""
        self._socket.close()
        self._process.wait(20)


@cache
def nursery(libraries: str, inside: tuple[str, ...] = (), modules: tuple[str, ...] = ()) -> Nursery:
    """This process's nursery for programs with this LD_LIBRARY_PATH, inside of a namespace."""
    return Nursery(libraries, inside, modules)


def is_forkable(env: Mapping[str, str]) -> bool:
    """Whether a fork can have these variables: some count when a process starts."""
    counts = any(name.startswith(_COUNTS_AT_START) for name in env.keys() - {"PYTHONPATH"})
    return not counts and env.get("LD_LIBRARY_PATH") in (None, *usual_libraries)


def as_text(done: subprocess.CompletedProcess[bytes]) -> subprocess.CompletedProcess[str]:
    """The same with texts."""
    texts = done.stdout.decode(), done.stderr.decode()
    return subprocess.CompletedProcess(done.args, done.returncode, *texts)


def run(
    script: str,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
    inside: tuple[str, ...] = (),
    timeout: float = 50,
    fresh: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a Python script to its end; the caller looks at what it printed.

    It is a fork of the nursery; but not where it is ``fresh``, has a prefix, or a variable that
    counts at the start. A prefix ``inside``, of several scripts, is their nursery's.
    """
    script = textwrap.dedent(script)
    variables = environment(env)
    if is_forkable(env or {}) and not (fresh or prefix):
        forks = nursery(variables.get("LD_LIBRARY_PATH", ""), inside)
        return as_text(forks.run(script, *arguments, env=variables, timeout=timeout))
    return subprocess.run(
        [*prefix, *inside, sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=variables,
        check=False,
    )


def printed(
    script: str, *arguments: str, env: Mapping[str, str] | None = None, fresh: bool = False
) -> str:
    """What a script that must succeed printed."""
    done = run(script, *arguments, env=env, fresh=fresh)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


THREADS = (Path(__file__).parent / "programs/threads.py").read_text("utf-8")
"""What a script may begin with that has threads of its own."""


def all_hold(script: str, *, env: Mapping[str, str], inside: tuple[str, ...] = ()) -> None:
    """Run a script that begins with :data:`THREADS`; all that it ``holds`` must, up to its end."""
    done = run(f"{THREADS}{script}\nprint('the end')\n", env=env, inside=inside)
    assert done.stdout.endswith("the end\n"), done.stdout + done.stderr


def perform(
    program: Callable[[], None], *, env: Mapping[str, str], inside: tuple[str, ...] = ()
) -> None:
    """Run a function of a module in tests/programs in a process of its own, up to its end."""
    load = f"from {program.__module__} import {program.__name__} as program"
    done = run(f"{load}\nprogram()\nprint('the end')", env=env, inside=inside)
    assert done.stdout.endswith("the end\n"), done.stdout + done.stderr


_COMMAND = "import runpy; runpy.run_module('gpuaff', run_name='__main__', alter_sys=True)"


def command_line(
    *words: str, env: Mapping[str, str], given: bytes = b"", folder: Path | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run ``gpuaff`` in a fork that has exactly these variables."""
    forks = nursery(env.get("LD_LIBRARY_PATH", ""))
    return forks.run(_COMMAND, *words, env=env, given=given, folder=folder)


@contextmanager
def stopped(
    script: str,
    *,
    env: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
    fresh: bool = False,
) -> Iterator[Program]:
    """Start a script that talks with the test line by line, as :func:`run` does; it is killed."""
    program = _started(textwrap.dedent(script), env or {}, prefix, fresh=fresh)
    try:
        yield program
    finally:
        program.close()


def _started(script: str, env: Mapping[str, str], prefix: Sequence[str], *, fresh: bool) -> Program:
    variables = environment(env)
    if is_forkable(env) and not (fresh or prefix):
        return nursery(variables.get("LD_LIBRARY_PATH", "")).start(script, env=variables)
    pipes = _Pipes(3)
    command = [*prefix, sys.executable, "-u", "-c", script]
    process = subprocess.Popen(
        command,
        stdin=pipes.theirs[0],
        stdout=pipes.theirs[1],
        stderr=pipes.theirs[2],
        env=variables,
    )
    pipes.started()
    return Program(process.pid, os.pidfd_open(process.pid), pipes.ours, process.wait)
