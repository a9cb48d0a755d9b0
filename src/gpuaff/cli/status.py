"""``gpuaff status``: which GPUs are free, leased or in use, and the waiters."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace

from gpuaff._system import env
from gpuaff._system.processes import ProcessInfo
from gpuaff.claims.model import Busy
from gpuaff.claims.status import GpuStatus, Kind, Status, Waiter, status_of, take_snapshot
from gpuaff.cli import output
from gpuaff.cpuset import format_cpulist
from gpuaff.errors import GpuaffError
from gpuaff.formatting import Line, Row, Span, Table, line, process_in_words, size, titled

_USES = {Kind.COMPUTE: "computes", Kind.GRAPHICS: "draws", Kind.OPEN: "has it open"}


def register(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    parser.description = (
        "Show each GPU: whether it is free, its lease and the processes on it; then the waiters. "
        "Nothing is changed, and no lock is taken."
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def run(args: argparse.Namespace) -> int:
    """Show the state of the GPUs; returns the exit code."""
    if env.fsroot() is not None:
        raise GpuaffError(
            "GPUAFF_FSROOT describes another machine, whose GPUs cannot be examined: unset it"
        )
    status = status_of(take_snapshot())
    if args.json:
        output.show_json({"schema_version": 1, **status.to_dict()})
    else:
        output.show(blocks(status))
        output.show_notes(status.warnings)
    return 0


def blocks(status: Status) -> list[Line | Table]:
    """The GPUs with their holders, then the waiters."""
    gpus = [row for gpu in status.gpus for row in _rows(gpu)]
    waiting = [_waiting(place, waiter, status) for place, waiter in enumerate(status.waiting, 1)]
    shown: list[Line | Table] = []
    if gpus:
        shown.append(titled("GPU name memory load state who", gpus, right=(0, 3)))
    if gpus and waiting:
        shown.append(())
    if waiting:
        shown.append(titled("waiting who for", waiting, right=(0,)))
    return shown


def _rows(gpu: GpuStatus) -> Iterator[Row]:
    reading, device = gpu.reading, gpu.reading.device
    memory = [size(number) for number in (reading.used, reading.total) if number is not None]
    cells: list[Line | Span | str] = [
        Span(str(device.index), "gpu"),
        device.uuid if device.is_mig else device.name or "",
        "/".join(memory) if reading.used is not None else "",
        "" if reading.utilization is None else f"{reading.utilization} %",
        "free" if gpu.busy is None else "kept" if gpu.busy is Busy.KEPT else "busy",
    ]
    for holder in list(_holders(gpu)) or [()]:
        yield (*cells, holder)
        cells = [""] * len(cells)


def _holders(gpu: GpuStatus) -> Iterator[Line]:
    lease = gpu.lease
    if lease is not None:
        ended = Span(", which has ended" if lease.gone else "", "bad")
        claimer = replace(lease, since=None) if lease.gone else lease
        yield (*_process(claimer, "leased by "), ended)
        for sharer in lease.sharers if lease.gone is not False else ():
            yield _process(sharer, "held by ")
        for nested in lease.inside:
            yield _process(nested, "claimed inside by ")
    # The lines about the lease and the processes show more than the message.
    if gpu.busy not in (None, Busy.LEASED, Busy.PROCESSES):
        yield line(Span(gpu.message, "" if gpu.busy is Busy.KEPT else "bad"))
    for use in gpu.uses:
        is_claimer = lease is not None and use.pid == lease.pid  # shown just above
        process = replace(use, user=None, since=None) if is_claimer else use
        memory = "" if use.memory is None else f", {size(use.memory)}"
        yield _process(process, f"{_USES[use.kind]}: ", memory)


def _process(process: ProcessInfo, before: str = "", after: str = "") -> Line:
    if process.command is not None:
        user, since = process.user, process.since
        words = process_in_words(process.command, process.pid, user=user, since=since)
    elif process.pid is None:
        words = "a process that is not visible here"
    else:
        words = f"pid {process.pid}" + (f" of {process.user}" if process.user else "")
    exiting = Span(", which is exiting" if process.exiting else "", "bad")
    return line(f"{before}{words}{after}", exiting)


def _waiting(place: int, waiter: Waiter, status: Status) -> Row:
    indices = {gpu.reading.device.uuid: gpu.reading.device.index for gpu in status.gpus}
    named = {indices[uuid] for uuid in waiter.gpus if uuid in indices}
    count = "some" if waiter.wanted is None else str(waiter.wanted)
    wanted = f"{count} of GPU {format_cpulist(named)}" if named else f"{count} of any"
    stuck = Span("" if waiter.well else " (stopped or stuck: others pass)", "bad")
    return f"{place}.", _process(waiter), line(wanted, stuck)
