"""The fake driver as tests use it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import gpuaff
from gpuaff.topology.model import Topology

from fakedriver.build import build
from fakedriver.play import play, put_mask
from fakedriver.state import FAULTS, NVML, PROCESSES, Fault, Process, create, locked

_SOURCE = Path(str(gpuaff.__path__[0])).parent
"""Where the package is that this process tests: its children are to test it as well."""

_OURS = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "GPUAFF_")
"""The beginnings of variables that would tell a child of another machine than the fake one."""


class FakeDriver:
    """A machine with GPUs that only NVML sees.

    NVML is found through LD_LIBRARY_PATH, which counts when a process starts: so all that is
    to see the machine runs in a child (:meth:`run`). A fault that is set later acts at once.
    """

    def __init__(self, topology: Topology, folder: Path, *, builds: Path | None = None) -> None:
        """Write the machine's state.

        Args:
            topology: the machine to play.
            folder: where the state file goes.
            builds: where the builds of the library are kept; ``folder`` when None.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder.resolve() / "state"
        self._builds = (builds or folder).resolve()
        self._without: frozenset[str] = frozenset()
        self.state = create(self.path)
        play(self.state, topology)

    # What goes wrong.

    def fail(
        self,
        function: str,
        code: int = NVML.NOT_SUPPORTED,
        *,
        gpu: int | None = None,
        after: int = 0,
    ) -> None:
        """Let a function return an error.

        Args:
            function: its symbol (``nvmlDeviceGetCount_v2``); ``*`` is every function but the
                starts and the shutdown.
            code: what it returns.
            gpu: only when it is asked about the GPU of this index.
            after: so many calls are served before.
        """
        with locked(self.path):
            place = self.state.fault_count
            if place == FAULTS:
                raise ValueError(f"the fake driver has room for {FAULTS} faults")
            self.state.faults[place] = Fault(
                function.encode(), -1 if gpu is None else gpu, code, after, 0
            )
            self.state.fault_count = place + 1

    def lose_gpu(self, gpu: int, code: int = NVML.GPU_IS_LOST, *, after: int = 0) -> None:
        """Let a GPU fall off the bus: all that is asked of it fails."""
        self.fail("*", code, gpu=gpu, after=after)

    def refuse(self, code: int) -> None:
        """Let NVML not start."""
        self.fail("nvmlInitWithFlags", code)
        self.fail("nvmlInit_v2", code)

    def be_stub(self) -> None:
        """Behave as the library of the CUDA toolkit that is only for linking (case F3)."""
        self.state.stub = 1

    def omit(self, *functions: str) -> None:
        """Take functions out of the library, as older drivers lack them."""
        self._without |= frozenset(functions)

    def heal(self) -> None:
        """Undo all faults."""
        with locked(self.path):
            self.state.fault_count = self.state.stub = 0
        self._without = frozenset()

    # What the GPUs say.

    def set_cpus(
        self, gpu: int, *, node: Iterable[int] | None = None, socket: Iterable[int] | None = None
    ) -> None:
        """Change the CPUs near a GPU: None is Not Supported, no CPUs are an empty mask."""
        to = self.state.gpus[gpu]
        to.node_code = put_mask(to.node_cpus, node)
        to.socket_code = put_mask(to.socket_cpus, socket)

    def set_memory(self, gpu: int, nodes: Iterable[int] | None) -> None:
        """Change the NUMA nodes whose memory is near a GPU; None is Not Supported."""
        to = self.state.gpus[gpu]
        to.memory_code = put_mask(to.memory_nodes, nodes)

    # Who uses them.

    def use(self, gpu: int, pid: int, *, memory: int = 500 << 20, slot: int | None = None) -> None:
        """Let a process have a CUDA context from now on.

        Args:
            gpu: on the GPU of this index.
            pid: its id, as the driver tells it: the first PID namespace's.
            memory: how much it has in use, in bytes.
            slot: the MIG slot that it is on; None is the whole GPU.
        """
        with locked(self.path):
            place = self.state.process_count
            if place == PROCESSES:
                raise ValueError(f"the fake driver has room for {PROCESSES} processes")
            self.state.processes[place] = Process(gpu, -1 if slot is None else slot, pid, memory)
            self.state.process_count = place + 1

    def leave(self, pid: int) -> None:
        """Let a process have no CUDA context any more, on any GPU."""
        with locked(self.path):
            used = self.state.processes[: self.state.process_count]
            kept = [(p.gpu, p.slot, p.pid, p.memory) for p in used if p.pid != pid]
            for place, process in enumerate(kept):
                self.state.processes[place] = Process(*process)
            self.state.process_count = len(kept)

    def hide_processes(self) -> None:
        """Let GPUs with MIG tell their processes by instance only, as they do without root."""
        self.state.unprivileged = 1

    # What was done to it.

    @property
    def inits(self) -> int:
        """How often NVML was started, by all processes together."""
        return int(self.state.inits)

    @property
    def shutdowns(self) -> int:
        """How often NVML was shut down, by all processes together."""
        return int(self.state.shutdowns)

    def watch(self, *functions: str) -> None:
        """Count the calls of functions from now on."""
        for function in functions:
            self.fail(function, NVML.SUCCESS)

    def calls(self, function: str) -> int:
        """How often a function was called since it was watched or made to fail."""
        faults = self.state.faults[: self.state.fault_count]
        return max(int(fault.calls) for fault in faults if fault.function == function.encode())

    # Who sees it.

    def env(self) -> dict[str, str]:
        """The variables that make a process see this machine."""
        library = build(self._builds, without=self._without)
        older = os.environ.get("LD_LIBRARY_PATH")
        return {
            "LD_LIBRARY_PATH": f"{library}:{older}" if older else str(library),
            "GPUAFF_FAKE_STATE": str(self.path),
        }

    def run(
        self,
        program: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        check: bool = True,
        timeout: float = 50,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on this machine: see :func:`run`."""
        return run(program, env={**self.env(), **(env or {})}, check=check, timeout=timeout)


MakeDriver: TypeAlias = Callable[[Topology], FakeDriver]
"""The type of the fixture ``fake_driver``."""


def run(
    program: str | Sequence[str],
    *,
    env: Mapping[str, str],
    check: bool = True,
    timeout: float = 50,
) -> subprocess.CompletedProcess[str]:
    """Run a program that can import what this process tests.

    Args:
        program: Python source, or a command with its arguments.
        env: further variables. Those that tell which GPUs a process may see, and our own
            options, are not inherited.
        check: whether a program that fails is an error.
        timeout: how long it may take, in seconds.

    Raises:
        AssertionError: it failed, with what it said.
    """
    command = [sys.executable, "-c", program] if isinstance(program, str) else list(program)
    variables = {k: v for k, v in os.environ.items() if not k.startswith(_OURS)}
    paths = (env.get("PYTHONPATH"), str(_SOURCE), variables.get("PYTHONPATH"))
    variables |= {**env, "PYTHONPATH": ":".join(path for path in paths if path)}
    done = subprocess.run(
        command, env=variables, capture_output=True, text=True, check=False, timeout=timeout
    )
    if check:
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done
