"""``gpuaff check``: are processes still on their CPUs, and near their GPUs?"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from gpuaff._system import env, kernel, nvml
from gpuaff._system.kernel import Tree
from gpuaff._system.processes import caller_and_descendants
from gpuaff.allocator.model import Scope
from gpuaff.allocator.proximity import Neighbourhood
from gpuaff.cli import output
from gpuaff.cli.arguments import argument, process_id
from gpuaff.cpuset import CpuSet
from gpuaff.errors import GpuaffError, NoDriverError
from gpuaff.notices import Notice
from gpuaff.pinning.check import Check, evaluate, observe_process, render
from gpuaff.topology.model import Gpu, Topology
from gpuaff.topology.pci import device_files

CHECK_SCHEMA_VERSION = 1

_NONE: CpuSet = frozenset()

_OTHER_MACHINE = Notice(
    "other-machine", "GPUAFF_FSROOT describes another machine, so GPUs are not examined: unset it"
)

_FOREIGN = Notice(
    "pids-foreign",
    "the driver reports process ids of another PID namespace, so a process's GPUs are known from "
    "its open device files only; run it on the host",
)


def register(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    parser.description = (
        "Check the CPUs of every thread of running processes: against those of the process's "
        "other threads, and against the CPUs near the GPUs that it uses. Nothing is changed. "
        "Exit code 1 if anything is off."
    )
    parser.add_argument(
        "--pid",
        metavar="PID",
        type=argument(process_id),
        help="this process; the default is the process that called gpuaff (a shell, a job "
        "script) and all its descendants",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check the processes and show the result; returns the exit code."""
    checks = _one(args.pid) if args.pid is not None else _family()
    notices: tuple[Notice, ...] = (_OTHER_MACHINE,)
    if env.fsroot() is None:
        usage = gpu_usage()
        notices = usage.notices
        checks = [usage.complete(check, kernel.open_files(check.pid)) for check in checks]
    ok = all(check.ok for check in checks)
    if args.json:
        output.show_json(
            {
                "schema_version": CHECK_SCHEMA_VERSION,
                "ok": ok,
                "processes": [check.to_dict() for check in checks],
                "warnings": [notice.to_dict() for notice in notices],
            }
        )
    else:
        output.show_lines(render(checks, width=output.terminal_width()))
        output.show_notes(notices)
    return 0 if ok else 1


def _one(pid: int) -> list[Check]:
    """The process with this id; a thread's id means its process."""
    _require_proc()
    process = kernel.process_of(pid)
    if process is None:
        raise GpuaffError(
            f"--pid {pid}: no such process: it has ended, or /proc does not show it to this user"
        )
    seen = observe_process(process)
    if seen is None:
        raise GpuaffError(f"--pid {pid}: the process has ended")
    return [evaluate(seen)]


def _family() -> list[Check]:
    """The process that called this command, and its descendants except this one."""
    _require_proc()
    found = (observe_process(pid) for pid in caller_and_descendants())
    return [evaluate(seen) for seen in found if seen is not None]  # None has ended meanwhile


def _require_proc() -> None:
    if not kernel.can_pin():
        raise GpuaffError("this system does not report a process's CPUs (Linux does)")
    if kernel.thread_ids() is None:
        raise GpuaffError("/proc is not mounted, or is another PID namespace's: mount this one's")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUsage:
    """The processes on each GPU of a machine.

    Attributes:
        topology: the machine.
        users: the processes that the driver lists, by the index of the GPU.
        device_files: the indices of GPUs by their device files.
        notices: what is unknown.
    """

    topology: Topology
    users: Mapping[int, Collection[int]]
    device_files: Mapping[str, int]
    notices: tuple[Notice, ...] = ()

    def complete(self, check: Check, files: Collection[str]) -> Check:
        """A check with the process's GPUs and the CPUs near them.

        Args:
            check: the process.
            files: its open files. CUDA opens the device files of all visible GPUs, so they count
                only where the driver does not list the process.
        """
        listed = {index for index, pids in self.users.items() if check.pid in pids}
        opened = {self.device_files[name] for name in self.device_files.keys() & files}
        gpus = [gpu for gpu in self.topology.gpus if gpu.index in (listed or opened)]
        near, socket = self._near(gpus, Scope.NODE), self._near(gpus, Scope.SOCKET)
        # A whole socket is a choice that set_affinity offers too (scope="socket").
        far = _NONE if near is None or socket is None else check.usual - near - socket
        return replace(check, gpus=tuple(gpu.index for gpu in gpus), near=near, far=far)

    def _near(self, gpus: list[Gpu], scope: Scope) -> CpuSet | None:
        """The CPUs near any of these GPUs; None where they are unknown for one of them."""
        search = Neighbourhood(self.topology, self.topology.cpus)
        found = [search.near(gpu, scope) for gpu in gpus]
        if not found or not all(near.is_local for near in found):
            return None
        return _NONE.union(*(near.cpus for near in found))


def gpu_usage() -> GpuUsage:
    """This machine's GPUs and their processes, as far as the driver reports them."""
    topology = Topology.observe(links=False)
    try:
        with nvml.open_session() as session:
            readings = session.look()
    except NoDriverError:
        readings = ()
    users = {one.device.index: frozenset[int]() for one in readings}
    for one in readings:  # a GPU in MIG mode has one for each instance
        users[one.device.index] |= frozenset(one.compute or ())
    foreign = _are_foreign(frozenset[int]().union(*users.values()))
    return GpuUsage(
        topology=topology,
        users={} if foreign else users,
        device_files=device_files(Tree(), {gpu.pci_bus_id: gpu.index for gpu in topology.gpus}),
        notices=(_FOREIGN,) if foreign else (),
    )


def _are_foreign(pids: frozenset[int]) -> bool:
    """Whether the driver's process ids are another PID namespace's (case E15).

    An id that exists here by chance would name the wrong process, so all of them must exist.
    """
    if kernel.in_first_pid_namespace():
        return False
    return any(kernel.process_of(pid) != pid for pid in pids)
