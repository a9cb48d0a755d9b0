"""Real processes: run a script, stop it where it says so, and look at it from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

SRC = Path(__file__).parent.parent / "src"
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
    return {**kept, "PYTHONPATH": str(SRC), **(extra or {})}


def unmeasured(env: Mapping[str, str]) -> dict[str, str]:
    """The same without coverage, which imports much, handles SIGTERM, and writes a file."""
    return {name: value for name, value in env.items() if not name.startswith("COVERAGE")}


def run(
    script: str,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
    timeout: float = 50,
) -> subprocess.CompletedProcess[str]:
    """Run a Python script to its end; the caller looks at what it printed."""
    command = [*prefix, sys.executable, "-c", textwrap.dedent(script), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env=environment(env), check=False
    )


def printed(script: str, *arguments: str, env: Mapping[str, str] | None = None) -> str:
    """What a script that must succeed printed."""
    done = run(script, *arguments, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


_FORKS = """
import json, os, sys
import pynvml
import gpuaff.allocator.plan, gpuaff.pinning.pin, gpuaff.pinning.pin, gpuaff.launch.ranks
import gpuaff.pinning.affinity, gpuaff._system.nvml_prewarm
import gpuaff.topology.live
script, environments = json.load(sys.stdin)
code = compile(script, "<script>", "exec")
for env in environments:
    if os.fork() == 0:
        os.environ.update(env)
        exec(code, {"__name__": "__main__"})
        sys.stdout.flush()
        os._exit(0)
    assert os.wait()[1] == 0, env
    print(end=chr(0), flush=True)
"""


def printed_by_each(
    script: str, environments: Sequence[Mapping[str, str]], *, env: Mapping[str, str] | None = None
) -> list[str]:
    """What a script printed in each of many environments.

    Each time it is a fork of its own, of one process that has imported what pins and called
    nothing: so it costs no start. What counts when a process starts, as LD_LIBRARY_PATH, belongs
    into ``env``.
    """
    done = subprocess.run(
        [sys.executable, "-c", _FORKS],
        input=json.dumps([textwrap.dedent(script), [dict(one) for one in environments]]),
        capture_output=True,
        text=True,
        timeout=100,
        env=environment(env),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [text.strip() for text in done.stdout.split("\0")[:-1]]


THREADS = """
import os, threading, time

def tid_bound_to(cpus):
    # The id of a thread that somebody has bound (None: nobody has).
    ready = threading.Event()
    def work():
        if cpus is not None:
            os.sched_setaffinity(0, cpus)
        ready.set()
        time.sleep(60)
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    ready.wait()
    return thread.native_id

def bound_to(cpus):
    # The same; asked again, the CPUs that it has by now.
    tid = tid_bound_to(cpus)
    return lambda: os.sched_getaffinity(tid)

def in_a_thread(work):
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]
"""
"""What a script may begin with that has threads of its own."""


class Stopped:
    """A script that waits for a line on its standard input each time it has printed one."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.pid = process.pid

    def heard(self) -> str:
        """The next line that it printed."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            assert self.process.stderr is not None
            raise AssertionError(f"the script ended: {self.process.stderr.read()}")
        return line.strip()

    def go_on(self, line: str = "") -> None:
        """Let it go on."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()


@contextmanager
def stopped(
    script: str, *, env: Mapping[str, str] | None = None, prefix: Sequence[str] = ()
) -> Iterator[Stopped]:
    """Start a script that talks with the test line by line; it is killed at the end."""
    command = [*prefix, sys.executable, "-u", "-c", textwrap.dedent(script)]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(env),
    ) as process:
        try:
            yield Stopped(process)
        finally:
            process.kill()
