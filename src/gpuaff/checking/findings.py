"""What was found of processes and their threads, as lines of text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gpuaff.checking.check import Check, ThreadCheck
from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.text import Line, Span, counted, cpulist, line, listed, table

_MOST_NAMES = 8
"""The most names of threads that are listed where nothing is wrong with them."""

Row = tuple[Line, Line, Line, Line, Line, Line]

_HEAD: Row = tuple(
    line(Span(word, "head")) for word in ("process", "GPU", "threads", "CPUs", "state", "names")
)  # type: ignore[assignment]  # six of them


def lines(checks: Iterable[Check], *, width: int | None = None) -> list[Line]:
    """The whole text: threads with the same CPUs in one row, then what is off.

    Args:
        checks: the processes.
        width: the terminal's; None when the text must not be broken.
    """
    found = list(checks)
    rows = [row for check in found for row in _rows(check)]
    remarks = [remark for check in found for remark in _remarks(check)]
    return [*table([_HEAD, *rows], width=width, right=(2,)), *remarks]


def _rows(check: Check) -> Iterator[Row]:
    name = line(f"{check.pid} {check.name}".strip())
    gpus = line(Span(",".join(map(str, check.gpus or ())), "gpu"))
    for group in _groups(check):
        first = group[0]
        state = line(Span(str(first.state), "" if first.ok else "bad"))
        yield name, gpus, line(str(len(group))), cpulist(first.cpus), state, _names(group)
        name = gpus = ()


def _groups(check: Check) -> list[list[ThreadCheck]]:
    """Threads of the same CPUs and state: the usual ones first, those that are off last."""
    groups: dict[tuple[object, CpuSet], list[ThreadCheck]] = {}
    for thread in check.threads:
        groups.setdefault((thread.state, thread.cpus), []).append(thread)
    return sorted(groups.values(), key=lambda group: (not group[0].ok, -len(group), group[0].tid))


def _names(group: list[ThreadCheck]) -> Line:
    if not group[0].ok:
        return listed([f"{thread.name} {thread.tid}".strip() for thread in group], ", ")
    names = list(dict.fromkeys(thread.name for thread in group))
    rest = len(names) - _MOST_NAMES
    return listed([*names[:_MOST_NAMES], f"{rest} more" if rest > 0 else ""], ", ")


def _remarks(check: Check) -> Iterator[Line]:
    who = line(Span(f"{check.pid} {check.name}".strip(), "head"))
    said = dict.fromkeys((str(t.state), t.reason, t.remedy) for t in check.threads if not t.ok)
    for state, reason, remedy in said:
        yield (*who, *line(": ", Span(state, "bad"), f": {reason}"))
        yield line(f"    try: {remedy}")
    if check.far:
        yield (*who, *line(": ", Span("far", "bad"), f": {_far(check)}"))
        yield line("    try: gpuaff.set_affinity() at the top of the program")


def _far(check: Check) -> str:
    gpus = ",".join(map(str, check.gpus or ()))
    near = format_cpulist(check.near or ())
    return (
        f"{counted(len(check.far), 'CPU')} of {format_cpulist(check.usual)} outside of the socket "
        f"of GPU {gpus}; near are {near}"
    )
