"""The registry: the holders of GPUs and the waiters, for every process to read.

One file with a slot for each claimer: a ticket and a beat, and a record in JSON. A slot counts
while its writer locks one of its bytes by an open file description lock, which ends with the
writer; so no entry is ever stale. Every user can write the file, so its content only orders the
queue and explains; a forged record never gives a GPU to two claims. docs/lease-protocol.md has the
layout.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from json import dumps, loads

from gpuaff._system import descriptors, kernel, locks
from gpuaff._system.kernel import ThreadFacts
from gpuaff.claims.locking import lockdir
from gpuaff.errors import LockDirectoryError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

NAME = "registry"
VERSION = 2
SLOTS = 512
SLOT_SIZE = 4096

TICKETS = struct.Struct(f"<{SLOTS}Q")
"""At the file's start: each slot's place in the queue; the lowest is first."""

BEATS = struct.Struct(f"<{SLOTS}d")
"""Behind the tickets: when each waiter was last known to be well, by CLOCK_BOOTTIME."""

RECORDS = TICKETS.size + BEATS.size
"""The first byte of slot 0's record."""

WAITS = RECORDS + SLOTS * SLOT_SIZE
"""The byte, behind the records, that slot 0's writer locks while it waits."""

HOLDS = WAITS + SLOTS
"""The byte that it locks while it holds GPUs."""

PARTS = HOLDS + SLOTS
"""The first byte for the claims inside slot 0's claim; each slot has ``PART_COUNT``."""

PART_COUNT = 64
"""More than any claim has GPUs."""

MOST = (1 << 53) - 1
"""The largest number that counts: larger ones are not exact in other languages' JSON."""

_READS = 3
"""How often an unreadable record is read: a write may be half done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A slot whose writer lives. Values of its record that have a wrong type count as missing.

    Attributes:
        slot: its number.
        waits: whether the writer waits for GPUs; else it holds some.
        record: what it has written; empty when that is unreadable.
        ticket: its place in the queue; the lowest is first.
        beat: when it was last known to be well, in seconds since the machine started.
    """

    slot: int
    waits: bool
    record: Mapping[str, Any]
    ticket: int = 0
    beat: float = 0.0

    @property
    def pid(self) -> int | None:
        """The writer's process id, in its own PID namespace."""
        return self._whole("pid")

    @property
    def start(self) -> int | None:
        """When the writer started, in clock ticks since the machine started."""
        return self._whole("start")

    @property
    def uid(self) -> int | None:
        """The writer's user id."""
        return self._whole("uid")

    @property
    def since(self) -> float | None:
        """Since when the writer waits or holds, in seconds since 1970."""
        found = self.record.get("since")
        if isinstance(found, float):  # Python's JSON also has NaN and infinity
            return found if 0 <= found <= MOST else None
        return self._whole("since")

    @property
    def wanted(self) -> int | None:
        """How many GPUs a waiter wants."""
        return self._whole("wanted")

    @property
    def gpus(self) -> tuple[str, ...]:
        """The keys of the GPUs that it holds or would accept; a waiter without any accepts all."""
        found = self.record.get("gpus")
        return tuple(g for g in found if isinstance(g, str)) if isinstance(found, list) else ()

    @property
    def devices(self) -> tuple[str, ...]:
        """The UUIDs of these GPUs, also inside another claim, whose keys are ``3/GPU-…``."""
        return tuple(_uuid(key) for key in self.gpus)

    @property
    def inside(self) -> int | None:
        """The slot of the claim around this one."""
        slot = self.gpus[0].partition("/")[0] if self.gpus else ""
        return int(slot) if slot.isdecimal() and len(slot) < 6 else None

    def text(self, key: str) -> str:
        """A text of the record; empty when it is missing."""
        found = self.record.get(key)
        return found if isinstance(found, str) else ""

    def _whole(self, key: str) -> int | None:
        found = self.record.get(key)
        fits = isinstance(found, int) and not isinstance(found, bool) and 0 <= found <= MOST
        return found if fits else None


def _uuid(key: str) -> str:
    slot, _, rest = key.partition("/")  # drivers before R470 have slashes in UUIDs, too
    return rest if slot.isdecimal() else key


# ---- the processes behind the entries ----------------------------------------------------------


def about_me() -> dict[str, Any]:
    """What this process writes about itself."""
    pid = kernel.process_id()
    facts = kernel.thread_facts(pid, pid)
    return {
        "pid": pid,
        "start": facts.started if facts else None,
        "uid": kernel.user_id(),
        "name": kernel.name_of(pid) or "",
        "since": kernel.wall_clock(),
    }


def stopped(found: Iterable[Entry]) -> frozenset[int]:
    """The slots of visible processes that are stopped (SIGSTOP, Ctrl-Z) or exiting."""
    return frozenset(
        e.slot
        for e in found
        if (facts := _facts(e)) and (facts.stopped or (facts.exiting and is_exiting(e)))
    )


def is_exiting(entry: Entry) -> bool:
    """Whether all threads of the writer are exiting: the kernel is about to free its locks."""
    return entry.pid is not None and _facts(entry) is not None and kernel.is_exiting(entry.pid)


def ending(found: Iterable[Entry]) -> frozenset[str]:
    """The UUIDs of the GPUs that only exiting processes hold."""
    held = [(entry.devices, is_exiting(entry)) for entry in found if not entry.waits]
    stay = {uuid for devices, exits in held if not exits for uuid in devices}
    return frozenset(uuid for devices, exits in held if exits for uuid in devices) - stay


def living(found: Iterable[Entry]) -> frozenset[int]:
    """The slots of processes that are visible here and have not ended; children may keep others."""
    return frozenset(e.slot for e in found if (facts := _facts(e)) is not None and not facts.ended)


def _facts(entry: Entry) -> ThreadFacts | None:
    """What the kernel shows of the writer; None if it is gone, or its id is another process's."""
    facts = None if entry.pid is None else kernel.thread_facts(entry.pid, entry.pid)
    return facts if facts is not None and facts.started == entry.start else None


# ---- this process's slot -----------------------------------------------------------------------

_waiting: dict[int, Slot] = {}
"""Slots that hold no GPUs yet, by descriptor."""


def _forget_in_child() -> None:
    """A forked child closes its copies, so that it does not keep its parent's place alive."""
    descriptors.close(*_waiting)
    _waiting.clear()


kernel.in_forked_child(_forget_in_child)


class Slot:
    """This process's slot in the registry; :func:`take` makes them."""

    def __init__(self, handle: int) -> None:
        """Of an open registry, without a number yet."""
        self.handle, self.number = handle, -1
        self._mark = locks.mark_of(handle)
        _waiting[handle] = self

    def take(self) -> bool:
        """Lock a free slot and empty it; False when all are in use.

        A slot is also in use while a claim inside its last one lives on.
        """
        used = {at - WAITS for at in locks.locked_bytes(self.handle, WAITS, WAITS + SLOTS)}
        used |= holding(self.handle)
        first = kernel.process_id()  # so that a slot is rarely reused at once
        for number in (at % SLOTS for at in range(first, first + SLOTS)):
            if number in used or not locks.try_range(self.handle, WAITS + number):
                continue
            self.number, parts = number, PARTS + number * PART_COUNT
            held = holding(self.handle, number, number + 1)
            if not (held or locks.locked_bytes(self.handle, parts, parts + PART_COUNT)):
                self._put(b" " * SLOT_SIZE)
                self.beat(ticket=0)
                return True
            locks.free_range(self.handle, WAITS + number)
        return False

    def write(self, record: Mapping[str, Any]) -> None:
        """Write the record.

        Raises:
            LockDirectoryError: the file refuses to be written.
        """
        text = dumps({"v": VERSION, **record}).encode()
        if len(text) > SLOT_SIZE:  # about ninety MIG instances: then the waiter accepts any
            text = dumps({"v": VERSION, **record, "gpus": []}).encode()
        with lockdir.using(path()):
            self._put(text.ljust(SLOT_SIZE)[:SLOT_SIZE])

    def _put(self, record: bytes) -> None:
        locks.write_at(self.handle, RECORDS + self.number * SLOT_SIZE, record)

    def beat(self, *, ticket: int | None = None) -> None:
        """Write that this process is well, and its ticket if there is a new one.

        Raises:
            LockDirectoryError: the file refuses to be written.
        """
        with lockdir.using(path()):
            if ticket is not None:
                locks.write_at(self.handle, 8 * self.number, struct.pack("<Q", ticket))
            now = struct.pack("<d", kernel.uptime())
            locks.write_at(self.handle, TICKETS.size + 8 * self.number, now)

    def hold_begins(self) -> None:
        """Write that this process holds GPUs, and no longer waits."""
        locks.try_range(self.handle, HOLDS + self.number)
        _waiting.pop(self.handle, None)
        self.beat(ticket=0)
        locks.free_range(self.handle, WAITS + self.number)

    def withdraw(self) -> None:
        """Neither wait nor hold any longer, children that share the slot included.

        This comes before the locks are released: one that sees a free lock finds it free here, too.
        """
        if self.is_ours and self.number >= 0:
            with suppress(LockDirectoryError):
                self.beat(ticket=0)
            locks.free_range(self.handle, WAITS + self.number)
            locks.free_range(self.handle, HOLDS + self.number)

    def release(self) -> None:
        """Give the slot back; may be called again."""
        self.withdraw()
        self.abandon()

    def abandon(self) -> None:
        """Close the descriptor; in a forked child that leaves the slot to the parent."""
        _waiting.pop(self.handle, None)
        if self.is_ours:
            descriptors.close(self.handle)
        self.handle = -1

    @property
    def is_ours(self) -> bool:
        """Whether the descriptor is still this one: daemons close all that they have."""
        try:
            return self.handle >= 0 and locks.mark_of(self.handle) == self._mark
        except OSError:
            return False

    @property
    def is_current(self) -> bool:
        """Whether other processes see the slot: the file may have been removed."""
        return lockdir.still_has(NAME, self.handle)


def take() -> Slot:
    """Take a free slot, as a waiter without a record and a ticket.

    Raises:
        LockDirectoryError: the registry is unusable, or full.
    """
    slot = Slot(opened())
    try:
        with lockdir.using(path()):
            is_taken = slot.take()
    except BaseException:
        slot.release()
        raise
    if is_taken:
        return slot
    slot.release()
    why = f"all of its {SLOTS} slots are in use by claimers: see gpuaff status"
    raise LockDirectoryError(path(), why)


# ---- reading -----------------------------------------------------------------------------------


def path() -> str:
    """The registry's path."""
    return f"{lockdir.path()}/{NAME}"


def opened() -> int:
    """Open the registry, which is made if it is missing; programs do not inherit it.

    Raises:
        LockDirectoryError: it is unusable.
    """
    return lockdir.open_file(NAME, size=WAITS)


def entries(*, before: int | None = None) -> tuple[Entry, ...]:
    """All entries, by slot. Reading takes no lock.

    Args:
        before: leave out waiters with this ticket or a higher one: to read 200 takes 2 ms.

    Raises:
        LockDirectoryError: the registry is unusable.
    """
    if not lockdir.has(NAME):
        return ()
    handle = opened()
    try:
        return read(handle, before=before)
    finally:
        descriptors.close(handle)


def read(handle: int, *, before: int | None = None) -> tuple[Entry, ...]:
    """As :func:`entries`, by an open file, without that file's own slot."""
    with lockdir.using(path()):
        held = holding(handle)
        waiting = [] if before == 0 else locks.locked_bytes(handle, WAITS, WAITS + SLOTS)
        head = locks.read_at(handle, 0, RECORDS).ljust(RECORDS, b"\0")
    tickets = [ticket if ticket <= MOST else 0 for ticket in TICKETS.unpack_from(head)]
    beats = BEATS.unpack_from(head, TICKETS.size)
    slots = {at - WAITS for at in waiting}
    if before is not None:
        slots = {slot for slot in slots if tickets[slot] < before}
    return tuple(
        Entry(
            slot=slot,
            waits=slot not in held,
            record=_record(handle, slot),
            ticket=tickets[slot],
            beat=beats[slot],
        )
        for slot in sorted(held | slots)
    )


def holding(handle: int, first: int = 0, end: int = SLOTS) -> frozenset[int]:
    """The slots whose writers hold GPUs, without the open file's own."""
    found = locks.locked_bytes(handle, HOLDS + first, HOLDS + end)
    return frozenset(at - HOLDS for at in found)


def tickets(handle: int) -> bytes:
    """All tickets: they change whenever a waiter comes, is served or gives up."""
    return locks.read_at(handle, 0, TICKETS.size)


def still_waits(handle: int, entry: Entry) -> bool:
    """Whether a waiter is still there: a few microseconds, unlike :func:`read`."""
    byte, ticket = WAITS + entry.slot, struct.pack("<Q", entry.ticket)
    return locks.read_at(handle, 8 * entry.slot, 8) == ticket and bool(
        locks.locked_bytes(handle, byte, byte + 1)
    )


def beat_of(handle: int, slot: int) -> float:
    """When the writer of a slot was last known to be well."""
    data = locks.read_at(handle, TICKETS.size + 8 * slot, 8)
    return float(struct.unpack("<d", data.ljust(8, b"\0"))[0])


def _record(handle: int, slot: int) -> Mapping[str, Any]:
    for _ in range(_READS):
        data = locks.read_at(handle, RECORDS + slot * SLOT_SIZE, SLOT_SIZE)
        found = _parsed(data)
        if found is not None:
            return found
    return {}


@lru_cache(maxsize=SLOTS)  # to parse 200 records anew takes 2 ms
def _parsed(data: bytes) -> Mapping[str, Any] | None:
    """A record; None when it is unreadable."""
    if not data.strip():
        return {}
    try:
        found = loads(data.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else {}
