"""``gpuaff check``: is everybody still where they should be?"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gpuaff._system import env, kernel, nvml
from gpuaff._system.kernel import Tree
from gpuaff._system.processes import caller_and_descendants
from gpuaff.allocator.model import Scope
from gpuaff.allocator.proximity import Neighbourhood
from gpuaff.cli import options
from gpuaff.cpuset import CpuSet
from gpuaff.errors import GpuaffError, NoDriverError
from gpuaff.notices import Notice
from gpuaff.pinning.check import Check, evaluate, observe_process
from gpuaff.topology.model import Gpu, Topology
from gpuaff.topology.pci import indices_by_minor, minors_of

if TYPE_CHECKING:
    from gpuaff.pinning.check import Check

CHECK_SCHEMA_VERSION = 1

_OTHER_MACHINE = Notice(
    "other-machine", "GPUAFF_FSROOT describes another machine, so GPUs are not looked at: unset it"
)


def register(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    parser.description = (
        "Check the CPUs of every thread of running processes: against those of the process's "
        "other threads, and against the CPUs near the GPUs that it is on. Nothing is changed. "
        "Exit code 1 if anything is off."
    )
    parser.add_argument(
        "--pid",
        metavar="PID",
        type=options.argument(options.process_id),
        help="this process; the default is the process that called gpuaff (a shell, a job "
        "script) and all that it has started",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Look, and show what was found; returns the exit code."""
    found = one(args.pid) if args.pid is not None else family()
    checks, notices = _with_gpus(found)
    _show(checks, notices, json=args.json)
    return 0 if all(check.ok for check in checks) else 1


def _with_gpus(checks: list[Check]) -> tuple[list[Check], tuple[Notice, ...]]:
    if env.fsroot() is not None:
        return checks, (_OTHER_MACHINE,)
    from gpuaff._system import kernel

    seen = look()
    return [seen.of(check, kernel.open_files(check.pid)) for check in checks], seen.notices


def _show(checks: list[Check], notices: tuple[Notice, ...], *, json: bool) -> None:
    from gpuaff.cli import output
    from gpuaff.pinning.check import render

    if json:
        output.show_json(_as_json(checks, notices))
        return
    output.show_lines(render(checks, width=output.terminal_width()))
    output.show_notes(notices)


def _as_json(checks: list[Check], notices: tuple[Notice, ...]) -> dict[str, Any]:
    """``docs/check-json.md`` tells the schema."""
    return {
        "schema_version": CHECK_SCHEMA_VERSION,
        "ok": all(check.ok for check in checks),
        "processes": [check.to_dict() for check in checks],
        "warnings": [notice.to_dict() for notice in notices],
    }


# Which processes ``gpuaff check`` looks at.


def one(pid: int) -> list[Check]:
    """The process of this id; a thread's id means the process that it belongs to.

    Raises:
        GpuaffError: there is none, or it cannot be seen.
    """
    _refuse_blindness()
    process = kernel.process_of(pid)
    if process is None:
        raise GpuaffError(
            f"--pid {pid}: no such process: it has ended, or /proc does not show it to this user"
        )
    seen = observe_process(process)
    if seen is None:
        raise GpuaffError(f"--pid {pid}: the process has ended")
    return [evaluate(seen)]


def family() -> list[Check]:
    """The process that has called this command, and all that it has started, but this one.

    Raises:
        GpuaffError: it cannot be seen.
    """
    _refuse_blindness()
    found = (observe_process(pid) for pid in caller_and_descendants())
    return [evaluate(seen) for seen in found if seen is not None]  # None has ended meanwhile


def _refuse_blindness() -> None:
    if not kernel.can_pin():
        raise GpuaffError("this system does not tell which CPUs a process may use (Linux does)")
    if kernel.thread_ids() is None:
        raise GpuaffError("/proc is not mounted, or is another PID namespace's: mount this one's")


# Which GPUs processes are on, and whether their CPUs are near those.


_NONE: CpuSet = frozenset()

_FOREIGN = Notice(
    "pids-foreign",
    "the driver tells processes by numbers that are not those of this container: which GPUs a "
    "process is on is known from its open device files only; look from the host",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Who is on which GPU of a machine.

    Attributes:
        topology: the machine.
        users: the processes that the driver names, by the index of the GPU.
        minors: the indices of GPUs by the numbers of their device files.
        notices: what could not be told.
    """

    topology: Topology
    users: Mapping[int, Collection[int]]
    minors: Mapping[int, int]
    notices: tuple[Notice, ...] = ()

    def of(self, check: Check, files: Collection[str]) -> Check:
        """A process, completed by its GPUs and what is near them.

        Args:
            check: the process.
            files: what it has open. CUDA opens the device files of all GPUs that it may see, so
                they count only where the driver does not name the process.
        """
        told = {index for index, pids in self.users.items() if check.pid in pids}
        opened = {self.minors.get(minor) for minor in minors_of(files)}
        gpus = [gpu for gpu in self.topology.gpus if gpu.index in (told or opened)]
        near, socket = self._near(gpus, Scope.NODE), self._near(gpus, Scope.SOCKET)
        # A whole socket is a choice that set_affinity offers too (scope="socket").
        far = _NONE if near is None or socket is None else check.usual - near - socket
        return replace(check, gpus=tuple(gpu.index for gpu in gpus), near=near, far=far)

    def _near(self, gpus: list[Gpu], scope: Scope) -> CpuSet | None:
        """The CPUs near any of some GPUs; None where one of them does not tell."""
        search = Neighbourhood(self.topology, self.topology.cpus)
        found = [search.near(gpu, scope) for gpu in gpus]
        if not found or not all(near.is_local for near in found):
            return None
        return _NONE.union(*(near.cpus for near in found))


def look() -> Placement:
    """Look at this machine's GPUs and who is on them; best effort, as all that concerns GPUs."""
    topology = Topology.observe(links=False)
    try:
        with nvml.open_session() as session:
            readings = session.look()
    except NoDriverError:
        readings = ()
    told = {one.device.index: frozenset[int]() for one in readings}
    for one in readings:  # a GPU in MIG mode has one for each instance
        told[one.device.index] |= frozenset(one.compute or ())
    foreign = _are_foreign(frozenset[int]().union(*told.values()))
    return Placement(
        topology=topology,
        users={} if foreign else told,
        minors=indices_by_minor(Tree(), {gpu.pci_bus_id: gpu.index for gpu in topology.gpus}),
        notices=(_FOREIGN,) if foreign else (),
    )


def _are_foreign(pids: frozenset[int]) -> bool:
    """Whether the driver counts in another PID namespace than we do (case E15).

    Numbers that happen to be here as well would be taken for processes of this one: so all of them
    must be here, and one that ends meanwhile is a reason to say nothing.
    """
    if kernel.in_first_pid_namespace():
        return False
    return any(kernel.process_of(pid) != pid for pid in pids)
