"""The fake driver as tests use it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from gpuaff.topology.model import Topology
from tests.fakedriver.build import build
from tests.fakedriver.play import play, put_mask
from tests.fakedriver.state import (
    CUDA,
    DOUBLES,
    FAULTS,
    NVML,
    PROCESSES,
    Action,
    Fault,
    Kind,
    Process,
    Struct,
    create,
    is_alive,
    locked,
    start_of,
)
from tests.processes import environment, usual_libraries
from tests.processes import run as run_script


class DoubleHolding(NamedTuple):
    """Two processes on one device."""

    gpu: int
    slot: int | None
    holder: int
    newcomer: int
    at: float  # monotonic, in seconds


class FakeDriver:
    """A machine with GPUs that only NVML and CUDA see.

    LD_LIBRARY_PATH counts when a process starts, so all that is to see the machine runs in a child
    (:meth:`run`). A fault that is set later acts at once.
    """

    def __init__(self, topology: Topology, folder: Path, *, builds: Path | None = None) -> None:
        """Write the state of the machine to play; the libraries are kept in ``builds``."""
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
        times: int = 0,
        pid: int = 0,
        action: Action = Action.RETURN,
        ms: int = 0,
    ) -> None:
        """Let a function return an error.

        ``function`` is its symbol (``nvmlDeviceGetCount_v2``, ``cuInit``); ``*`` is every one of
        NVML but the starts and the shutdown, ``cu*`` every one that begins so. It fails only for
        the GPU of this index; after so many calls; for so many ``times`` (0: for ever); in the
        process ``pid`` (0: in all).
        """
        with locked(self.path):
            place, which = self.state.fault_count, -1 if gpu is None else gpu
            assert place < FAULTS, "there is no room for more faults"
            fault = Fault(function.encode(), which, code, after, 0, action, ms, times, pid)
            self.state.faults[place] = fault
            self.state.fault_count = place + 1

    def hang(self, function: str, *, ms: int | None = None, **when: Any) -> None:
        """Let a function take ``ms`` before it does its work; None: it never returns."""
        if ms != 0:
            self.fail(function, 0, action=Action.HANG, ms=ms or 0, **when)

    def kill_at(self, function: str, **when: Any) -> None:
        """Let who calls a function die of SIGKILL, before it has done anything."""
        self.fail(function, 0, action=Action.KILL, **when)

    def stop_at(self, function: str, *, times: int = 1, **when: Any) -> None:
        """Let who calls a function stop (SIGSTOP); after SIGCONT the call does its work."""
        self.fail(function, 0, action=Action.STOP, times=times, **when)

    def lose_gpu(self, gpu: int, code: int = NVML.GPU_IS_LOST, *, after: int = 0) -> None:
        """Let a GPU fall off the bus: all that is asked of it fails."""
        self.fail("*", code, gpu=gpu, after=after)
        self.fail("cu*", CUDA.UNKNOWN, gpu=gpu, after=after)

    def deny(self, gpu: int) -> None:
        """Keep a GPU from all, as a device cgroup does: NVML counts it, CUDA does not."""
        self.state.gpus[gpu].denied = 1

    def refuse(self, code: int) -> None:
        """Let NVML not start."""
        self.fail("nvmlInitWithFlags", code)
        self.fail("nvmlInit_v2", code)

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

    def use(
        self,
        gpu: int,
        pid: int,
        *,
        memory: int = 500 << 20,
        slot: int | None = None,
        graphics: bool = False,
        both: bool = False,
    ) -> None:
        """Let a process have a context from now on; when it is dead, it has none any more.

        ``pid`` is that of the first PID namespace; one that is not here is taken for one of
        another namespace, and stays. ``slot`` is the MIG slot; with ``graphics`` it draws, and
        does not compute; with ``both`` it does both.
        """
        kinds = Kind(0) if graphics else Kind.COMPUTE
        if graphics or both:
            kinds |= Kind.GRAPHICS
        where = -1 if slot is None else slot
        with locked(self.path):
            place = self.state.process_count
            assert place < PROCESSES, "there is no room for more processes"
            process = Process(gpu, where, pid, kinds, memory, start_of(pid), 0, 0, 0)
            self.state.processes[place] = process
            self.state.process_count = place + 1

    def leave(self, pid: int) -> None:
        """Let a process have no context any more, on any GPU."""
        with locked(self.path):
            kept = [Process.from_buffer_copy(p) for p in self._processes() if p.pid != pid]
            for place, process in enumerate(kept):
                self.state.processes[place] = process
            self.state.process_count = len(kept)

    def _processes(self) -> list[Struct]:
        processes: list[Struct] = self.state.processes[: self.state.process_count]
        return processes

    def contexts(self, gpu: int, *, slot: int | None = None) -> set[int]:
        """The processes that live and compute on a GPU or MIG slot, hidden or not."""
        with locked(self.path) as handle:
            return {
                int(process.pid)
                for process in self._processes()
                if process.gpu == gpu
                and (slot is None or process.slot == slot)
                and process.kinds & Kind.COMPUTE
                and is_alive(process, handle)
            }

    def linger(self, ms: int) -> None:
        """Let the dead stay in the lists for so long after somebody has found them dead.

        A real driver lists them for 100 to 150 ms after their death.
        """
        self.state.linger_ms = ms

    # How the GPUs are used.

    def set_memory_used(self, gpu: int, size: int, *, slot: int | None = None) -> None:
        """Let so many bytes be in use that no process explains."""
        to = self.state.gpus[gpu]
        if slot is None:
            to.unexplained = size
        else:
            to.slots_used[slot] = size

    def set_memory_total(self, gpu: int, size: int) -> None:
        """Change how much memory a GPU has, in bytes: 80 GiB at first."""
        self.state.gpus[gpu].memory = size

    def set_utilization(self, gpu: int, percent: int | None) -> None:
        """Change how busy a GPU was lately; None is Not Supported."""
        self.state.gpus[gpu].utilization = -1 if percent is None else percent

    def set_compute_mode(self, gpu: int, mode: int | None) -> None:
        """Change who may have a context on a GPU: see :class:`Mode`. None is Not Supported."""
        self.state.gpus[gpu].compute_mode = -1 if mode is None else mode

    def set_display(self, gpu: int, active: bool | None, *, mode: bool | None = None) -> None:
        """Let a screen be on a GPU; ``mode``: whether one is attached, as ``active`` when None."""
        to = self.state.gpus[gpu]
        to.display_active = -1 if active is None else int(active)
        to.display_mode = to.display_active if mode is None else int(mode)

    def set_fastest(self, order: Sequence[int]) -> None:
        """Let CUDA number the GPUs in another order than NVML, unless it is told (case D6)."""
        self.state.fastest[: len(order)] = order
        self.state.order_differs = 1

    # What was done to it. Facts that few tests need are set in ``state``: see state.h.

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

    def contexts_made(self, gpu: int) -> int:
        """How often a process got onto a GPU, or an instance of it, through libcuda."""
        return int(self.state.gpus[gpu].contexts)

    def double_holdings(self) -> list[DoubleHolding]:
        """Each time that libcuda let a process onto a device that another one was on."""
        with locked(self.path):
            count = int(self.state.double_count)
            assert count <= DOUBLES, f"{count} double holdings, and the log has {DOUBLES} rows"
            rows = self.state.doubles[:count]
            slots = [None if row.slot < 0 else row.slot for row in rows]
            return [
                DoubleHolding(row.gpu, slot, row.holder, row.newcomer, row.at / 1e9)
                for row, slot in zip(rows, slots, strict=True)
            ]

    # Who sees it.

    def share(self) -> None:
        """Let other users use the machine, too; its folder must be open to them."""
        library = build(self._builds, without=self._without, smi=True)
        for above in (*self.path.parents, *library.parents):
            if above != self.path.parent and not above.stat().st_mode & 0o001:
                raise ValueError(f"{above} is closed to others: make the driver somewhere else")
        self.path.chmod(0o666)
        for folder in (self.path.parent, library, library / "bin"):
            folder.chmod(0o755)

    def env(self, *, smi: bool = False) -> dict[str, str]:
        """The variables that make a process see this machine; with ``smi`` PATH is one."""
        library = build(self._builds, without=self._without, smi=smi)
        older = os.environ.get("LD_LIBRARY_PATH")
        libraries = f"{library}:{older}" if older else str(library)
        if not self._without:
            usual_libraries.add(libraries)
        variables = {"LD_LIBRARY_PATH": libraries, "GPUAFF_FAKE_STATE": str(self.path)}
        if smi:
            variables["PATH"] = f"{library / 'bin'}:{os.environ.get('PATH', os.defpath)}"
        return variables

    def run(
        self,
        program: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        check: bool = True,
        timeout: float = 50,
        smi: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on this machine: see :func:`run`."""
        variables = {**self.env(smi=smi), **(env or {})}
        return run(program, env=variables, check=check, timeout=timeout)


MakeDriver: TypeAlias = Callable[[Topology], FakeDriver]


def run(
    program: str | Sequence[str],
    *,
    env: Mapping[str, str],
    check: bool = True,
    timeout: float = 50,
) -> subprocess.CompletedProcess[str]:
    """Run a program that can import what this process tests; one that fails is an error."""
    usual, before = environment()["PYTHONPATH"], env.get("PYTHONPATH")
    variables = {**env, "PYTHONPATH": f"{before}:{usual}" if before else usual}
    if isinstance(program, str):
        done = run_script(program, env=variables, timeout=timeout)
    else:
        done = subprocess.run(
            program,
            env=environment(variables),
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
        )
    if check:
        assert done.returncode == 0, f"{program}\n{done.stdout}\n{done.stderr}"
    return done
