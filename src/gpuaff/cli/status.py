"""``gpuaff status``: who has which GPU, and who waits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from gpuaff._system import env
from gpuaff.claims.model import Busy, DeviceReading
from gpuaff.claims.status import GpuStatus, Kind, LeaseStatus, ProcessInfo, Status, Use, Waiter
from gpuaff.cpuset import format_cpulist
from gpuaff.formatting import Line, Span, line, size, table
from gpuaff.formatting import person as in_words

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse

STATUS_SCHEMA_VERSION = 1


def register(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    parser.description = (
        "Show each GPU: whether it is free, who has leased it, which processes are on it; and who "
        "waits for GPUs. Nothing is changed, and no lock is taken to look."
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Look, and show what was found; returns the exit code."""
    from gpuaff.claims.status import status_of, take_snapshot
    from gpuaff.cli import output
    from gpuaff.errors import GpuaffError

    if env.fsroot() is not None:
        raise GpuaffError(
            "GPUAFF_FSROOT describes another machine, whose GPUs cannot be seen: unset it"
        )
    status = status_of(take_snapshot())
    if args.json:
        output.show_json({"schema_version": STATUS_SCHEMA_VERSION, **status.to_dict()})
    else:
        output.show_lines(lines(status, width=output.terminal_width()))
        output.show_notes(status.warnings)
    return 0


# Who has which GPU and who waits, as lines of text.


_HEAD = ("GPU", "name", "memory", "load", "state", "who")
_WAITING_HEAD = ("waiting", "who", "for")

_DOES = {Kind.COMPUTE: "computes", Kind.GRAPHICS: "draws", Kind.OPEN: "has it open"}

_TOLD_BELOW = (Busy.LEASED, Busy.PROCESSES)
"""What the lines about the lease and the processes tell better."""


def lines(status: Status, *, width: int | None = None) -> list[Line]:
    """The whole text: the GPUs with who is on them, then those who wait.

    Args:
        status: what was seen.
        width: the terminal's; None when the text must not be broken.
    """
    rows = [row for gpu in status.gpus for row in _rows(gpu)]
    shown = table([_head(_HEAD), *rows], width=width, right=(0, 3)) if rows else []
    if not status.waiting:
        return shown
    waiting = [_waiting(place, one, status) for place, one in enumerate(status.waiting, 1)]
    below = table([_head(_WAITING_HEAD), *waiting], width=width, right=(0,))
    return [*shown, (), *below] if shown else below


def _head(words: Sequence[str]) -> tuple[Line, ...]:
    return tuple(line(Span(word, "head")) for word in words)


def _rows(gpu: GpuStatus) -> Iterator[tuple[Line, ...]]:
    reading = gpu.reading
    device = reading.device
    load = "" if reading.utilization is None else f"{reading.utilization} %"
    cells = [
        line(Span(str(device.index), "gpu")),
        line(device.uuid if device.is_mig else device.name or ""),
        line(_memory(reading)),
        line(load),
        line(_state(gpu)),
    ]
    for words in list(_who(gpu)) or [()]:
        yield (*cells, words)
        cells = [()] * len(cells)


def _state(gpu: GpuStatus) -> str:
    if gpu.busy is None:
        return "free"
    return "kept" if gpu.busy is Busy.KEPT else "busy"


def _memory(reading: DeviceReading) -> str:
    parts = [size(number) for number in (reading.used, reading.total) if number is not None]
    return "/".join(parts) if reading.used is not None else ""


def _who(gpu: GpuStatus) -> Iterator[Line]:
    if gpu.lease is not None:
        yield from _lease(gpu.lease)
    if gpu.busy is not None and gpu.busy not in _TOLD_BELOW:
        yield line(Span(gpu.message, "" if gpu.busy is Busy.KEPT else "bad"))
    for use in gpu.uses:
        yield _use(use, gpu.lease)


def _lease(lease: LeaseStatus) -> Iterator[Line]:
    claimer = replace(lease.claimer, since=None) if lease.gone else lease.claimer
    ended = Span(", which has ended", "bad") if lease.gone else ""
    yield line(f"leased by {_person(claimer)}", ended or _exiting(claimer))
    if lease.gone is not False:
        for person in lease.sharers:
            yield line(f"held by {_person(person)}")
    for person in lease.inside:
        yield line(f"claimed inside by {_person(person)}")


def _use(use: Use, lease: LeaseStatus | None) -> Line:
    person = use.process
    if lease is not None and person.pid == lease.claimer.pid:  # told just above
        person = replace(person, user=None, since=None)
    memory = "" if use.memory is None else f", {size(use.memory)}"
    return line(f"{_DOES[use.kind]}: {_person(person)}{memory}", _exiting(person))


def _exiting(person: ProcessInfo) -> str | Span:
    return Span(", which is exiting", "bad") if person.exiting else ""


def _person(person: ProcessInfo) -> str:
    """Somebody in words."""
    if person.command is None and person.pid is None:
        return "a process that is not visible here"
    if person.command is None:
        return f"pid {person.pid}" + (f" of {person.user}" if person.user else "")
    return in_words(person.command, person.pid, user=person.user, since=person.since)


def _waiting(place: int, waiter: Waiter, status: Status) -> tuple[Line, ...]:
    lame = "" if waiter.well else Span(" (stopped or stuck: others pass)", "bad")
    return line(f"{place}."), line(_person(waiter.process)), line(_wish(waiter, status), lame)


def _wish(waiter: Waiter, status: Status) -> str:
    """What somebody waits for: ``2 of GPU 0-3``."""
    places = {gpu.reading.device.uuid: gpu.reading.device.index for gpu in status.gpus}
    wanted = "some" if waiter.wanted is None else str(waiter.wanted)
    indices = {places[uuid] for uuid in waiter.gpus if uuid in places}
    return f"{wanted} of GPU {format_cpulist(indices)}" if indices else f"{wanted} of any"
