"""``gpuaff status``: which GPUs are free, leased or in use, and the waiters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from gpuaff._system import env
from gpuaff.claims.model import Busy, DeviceReading
from gpuaff.claims.status import GpuStatus, Kind, LeaseStatus, ProcessInfo, Status, Use, Waiter
from gpuaff.cpuset import format_cpulist
from gpuaff.formatting import Line, Span, line, process_in_words, size, table

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

STATUS_SCHEMA_VERSION = 1

_HEAD = ("GPU", "name", "memory", "load", "state", "who")
_WAITING_HEAD = ("waiting", "who", "for")

_USES = {Kind.COMPUTE: "computes", Kind.GRAPHICS: "draws", Kind.OPEN: "has it open"}

_SHOWN_BELOW = (Busy.LEASED, Busy.PROCESSES)
"""The lines about the lease and the processes show more than the message."""


def register(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    parser.description = (
        "Show each GPU: whether it is free, its lease and the processes on it; then the waiters. "
        "Nothing is changed, and no lock is taken."
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Show the state of the GPUs; returns the exit code."""
    from gpuaff.claims.status import status_of, take_snapshot
    from gpuaff.cli import output
    from gpuaff.errors import GpuaffError

    if env.fsroot() is not None:
        raise GpuaffError(
            "GPUAFF_FSROOT describes another machine, whose GPUs cannot be examined: unset it"
        )
    status = status_of(take_snapshot())
    if args.json:
        output.show_json({"schema_version": STATUS_SCHEMA_VERSION, **status.to_dict()})
    else:
        output.show_lines(lines(status, width=output.terminal_width()))
        output.show_notes(status.warnings)
    return 0


def lines(status: Status, *, width: int | None = None) -> list[Line]:
    """The GPUs with their holders, then the waiters.

    Args:
        status: the state of the machine.
        width: the terminal's; None breaks no line.
    """
    rows = [row for gpu in status.gpus for row in _rows(gpu)]
    shown = table([_head(_HEAD), *rows], width=width, right=(0, 3)) if rows else []
    if not status.waiting:
        return shown
    waiting = [_waiting(place, one, status) for place, one in enumerate(status.waiting, 1)]
    below = table([_head(_WAITING_HEAD), *waiting], width=width, right=(0,))
    return [*shown, (), *below] if shown else below


def _head(titles: Sequence[str]) -> tuple[Line, ...]:
    return tuple(line(Span(title, "head")) for title in titles)


def _rows(gpu: GpuStatus) -> Iterator[tuple[Line, ...]]:
    reading = gpu.reading
    device = reading.device
    load = "" if reading.utilization is None else f"{reading.utilization} %"
    state = "free" if gpu.busy is None else "kept" if gpu.busy is Busy.KEPT else "busy"
    cells = [
        line(Span(str(device.index), "gpu")),
        line(device.uuid if device.is_mig else device.name or ""),
        line(_memory(reading)),
        line(load),
        line(state),
    ]
    for holder in list(_holders(gpu)) or [()]:
        yield (*cells, holder)
        cells = [()] * len(cells)


def _memory(reading: DeviceReading) -> str:
    parts = [size(number) for number in (reading.used, reading.total) if number is not None]
    return "/".join(parts) if reading.used is not None else ""


def _holders(gpu: GpuStatus) -> Iterator[Line]:
    if gpu.lease is not None:
        yield from _lease(gpu.lease)
    if gpu.busy is not None and gpu.busy not in _SHOWN_BELOW:
        yield line(Span(gpu.message, "" if gpu.busy is Busy.KEPT else "bad"))
    for use in gpu.uses:
        yield _use(use, gpu.lease)


def _lease(lease: LeaseStatus) -> Iterator[Line]:
    claimer = replace(lease, since=None) if lease.gone else lease
    ended = Span(", which has ended", "bad") if lease.gone else ""
    yield line(f"leased by {_process(claimer)}", ended or _exiting(claimer))
    if lease.gone is not False:
        for sharer in lease.sharers:
            yield line(f"held by {_process(sharer)}")
    for nested in lease.inside:
        yield line(f"claimed inside by {_process(nested)}")


def _use(use: Use, lease: LeaseStatus | None) -> Line:
    process = use
    if lease is not None and use.pid == lease.pid:  # shown just above
        process = replace(use, user=None, since=None)
    memory = "" if use.memory is None else f", {size(use.memory)}"
    return line(f"{_USES[use.kind]}: {_process(process)}{memory}", _exiting(process))


def _exiting(process: ProcessInfo) -> str | Span:
    return Span(", which is exiting", "bad") if process.exiting else ""


def _process(process: ProcessInfo) -> str:
    if process.command is None and process.pid is None:
        return "a process that is not visible here"
    if process.command is None:
        return f"pid {process.pid}" + (f" of {process.user}" if process.user else "")
    return process_in_words(process.command, process.pid, user=process.user, since=process.since)


def _waiting(place: int, waiter: Waiter, status: Status) -> tuple[Line, ...]:
    stuck = "" if waiter.well else Span(" (stopped or stuck: others pass)", "bad")
    return line(f"{place}."), line(_process(waiter)), line(_wanted(waiter, status), stuck)


def _wanted(waiter: Waiter, status: Status) -> str:
    """What it waits for: ``2 of GPU 0-3``."""
    indices = {gpu.reading.device.uuid: gpu.reading.device.index for gpu in status.gpus}
    count = "some" if waiter.wanted is None else str(waiter.wanted)
    named = {indices[uuid] for uuid in waiter.gpus if uuid in indices}
    return f"{count} of GPU {format_cpulist(named)}" if named else f"{count} of any"
