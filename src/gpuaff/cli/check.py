"""``gpuaff check``: are processes still on their CPUs, and near their GPUs?"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial

from gpuaff._system import env, kernel, nvml
from gpuaff._system.processes import caller_and_descendants
from gpuaff.allocator.model import Scope
from gpuaff.allocator.placement import Neighbourhood
from gpuaff.cli import output
from gpuaff.cli.dispatch import add_option
from gpuaff.errors import GpuaffError, NoDriverError
from gpuaff.notices import Notice
from gpuaff.options import count
from gpuaff.pinning.check import Check, evaluate, observe_process, render
from gpuaff.topology.model import Topology
from gpuaff.topology.sysfs import device_files

_SCOPES = Scope.NODE, Scope.SOCKET

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
    meaning = (
        "this process; the default is the process that called gpuaff (a shell, a job script) and "
        "all its descendants"
    )
    read = partial(count, most=999_999_999, text=True, expected="the number of a process")
    add_option(parser, "--pid", "PID", read, meaning)
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def run(args: argparse.Namespace) -> int:
    """Check the processes and show the result; returns the exit code."""
    checks = _check(args.pid)
    notices: tuple[Notice, ...] = (_OTHER_MACHINE,)
    if env.fsroot() is None:
        topology = Topology.observe(links=False)
        indices = {gpu.pci_bus_id: gpu.index for gpu in topology.gpus}
        devices = device_files(kernel.Tree(), indices)
        users, notices = _users()
        checks = [
            with_gpus(check, topology, users, {*kernel.open_files(check.pid).values()}, devices)
            for check in checks
        ]
    ok = all(check.ok for check in checks)
    if args.json:
        output.show_json(
            {
                "schema_version": 1,
                "ok": ok,
                "processes": [check.to_dict() for check in checks],
                "warnings": [notice.to_dict() for notice in notices],
            }
        )
    else:
        output.show(render(checks))
        output.show_notes(notices)
    return 0 if ok else 1


def _check(pid: int | None) -> list[Check]:
    """A process (a thread's id means its process); None: the caller's, and its descendants."""
    if not kernel.can_pin():
        raise GpuaffError("this system does not report a process's CPUs (Linux does)")
    if kernel.thread_ids() is None:
        raise GpuaffError("/proc is not mounted, or is another PID namespace's: mount this one's")
    process = None if pid is None else kernel.process_of(pid)
    pids = [process] if process is not None else caller_and_descendants() if pid is None else []
    found = [seen for seen in map(observe_process, pids) if seen is not None]
    if pid is not None and not found:
        raise GpuaffError(
            f"--pid {pid}: no such process: it has ended, or /proc does not show it to this user"
        )
    return [evaluate(seen) for seen in found]


def _users() -> tuple[dict[int, set[int]], tuple[Notice, ...]]:
    """The processes that compute on each GPU, by its index, as far as the driver lists them."""
    try:
        with nvml.open_session() as session:
            readings = session.look()
    except NoDriverError:
        readings = ()
    users: dict[int, set[int]] = {}
    for one in readings:  # a GPU in MIG mode has one for each instance
        users.setdefault(one.device.index, set()).update(one.compute or ())
    # An id of another PID namespace that exists here by chance would name the wrong process, so all
    # of them must exist (case E15).
    is_foreign = not kernel.in_first_pid_namespace() and any(
        kernel.process_of(pid) != pid for pids in users.values() for pid in pids
    )
    return ({}, (_FOREIGN,)) if is_foreign else (users, ())


def with_gpus(
    check: Check,
    topology: Topology,
    users: Mapping[int, Collection[int]],
    files: Collection[str],
    devices: Mapping[str, int],
) -> Check:
    """A check with the process's GPUs and the CPUs near them. Pure."""
    # They are those of which the driver lists it as a user, else those whose files it has open:
    # CUDA opens the files of all visible GPUs. Which of these it uses is not certain: it is far
    # only outside the sockets of all of them, as a whole socket is a choice that set_affinity
    # offers too.
    indices = {index for index, pids in users.items() if check.pid in pids}
    indices = indices or {devices[name] for name in devices.keys() & files}
    gpus = [gpu for gpu in topology.gpus if gpu.index in indices]
    search = Neighbourhood(topology, topology.cpus)
    near, socket = (
        frozenset[int]().union(*(near.cpus for near in found))
        if gpus and all(near.is_local for near in found)
        else None
        for found in ([search.near(gpu, scope) for gpu in gpus] for scope in _SCOPES)
    )
    far = frozenset[int]() if near is None or socket is None else check.usual - near - socket
    return replace(check, gpus=tuple(gpu.index for gpu in gpus), near=near, far=far)
