"""The queue: first come, first served, among those who want the same GPUs. Pure.

A ticket is a number on the board that grows. A claim may take any free GPU but those from which an
earlier waiter may choose: so a waiter for four of all GPUs is not starved by many who want one,
and a waiter for one GPU keeps no other one. To keep only as many as the earlier waiters need would
be wrong: which ones they choose is not known before. One who is stopped, or has not said for a
while that it is well, is passed over; the dead are not on the board at all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from gpuaff.claims.entries import MOST, Entry

BEAT = 2.0
"""How often one who waits says that it is well, in seconds."""

TOO_LONG = 10.0
"""Who has not said so for that long, in seconds, is stuck."""


def ahead(
    entries: Iterable[Entry],
    *,
    wants: frozenset[str],
    now: float,
    stopped: Collection[int],
    ticket: int | None = None,
) -> tuple[Entry, ...]:
    """Those who come first, in their order.

    Args:
        entries: what stands on the board, without one's own.
        wants: the GPUs that are wanted, by UUID.
        now: seconds since the machine started.
        stopped: the slots of those who are stopped.
        ticket: one's own number; None for one who has only just come.
    """
    waiting = [
        entry
        for entry in entries
        if entry.waits
        and (ticket is None or entry.ticket < ticket)
        and (not entry.gpus or not wants.isdisjoint(entry.gpus))
        and entry.slot not in stopped
        and is_well(entry, now)
    ]
    return tuple(sorted(waiting, key=lambda entry: (entry.ticket, entry.slot)))


def kept_for(ahead: Iterable[Entry], gpu: str) -> Entry | None:
    """The first waiter that may choose a GPU, and so keeps it from those behind.

    Args:
        ahead: the waiters that come first, in their order.
        gpu: what the board calls the GPU.
    """
    return next((entry for entry in ahead if not entry.gpus or gpu in entry.gpus), None)


def in_the_way(ahead: Sequence[Entry], *, wants: frozenset[str], count: int) -> tuple[Entry, ...]:
    """The waiters that must leave, in their order, before enough GPUs are left to choose from.

    Args:
        ahead: the waiters that come first, in their order.
        wants: the GPUs that are wanted, as the board calls them.
        count: how many of them.

    Returns:
        None of them where enough GPUs are wanted by no waiter that comes first.
    """
    left = set(wants)
    for place in reversed(range(len(ahead))):
        left = left.difference(ahead[place].gpus) if ahead[place].gpus else set()
        if len(left) < count:
            return tuple(ahead[: place + 1])
    return ()


def is_well(entry: Entry, now: float) -> bool:
    """Whether somebody who waits has said lately that it is well."""
    if not entry.record:  # it is about to write its record, or somebody has spoiled it
        return False
    return entry.beat is not None and abs(now - entry.beat) < TOO_LONG


def next_ticket(entries: Sequence[Entry]) -> int:
    """The number after all that are in use."""
    last = max((entry.ticket for entry in entries if entry.waits), default=0)
    return min(1 + last, MOST)


def who(entry: Entry) -> str:
    """Whose entry it is, for one line."""
    from gpuaff.notices import printable  # anybody may have written it

    name = printable(entry.text("name")[:40]) or "an unknown program"
    return f"{name} (pid {entry.pid})" if entry.pid is not None else name
