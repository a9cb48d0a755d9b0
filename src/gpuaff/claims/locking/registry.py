"""The registry: the holders of GPUs and the waiters, for every process to read.

One file with a slot for each claimer: a ticket and a beat, and a record in JSON. A slot counts
while its writer locks one of its bytes by an open file description lock, which ends with the
writer; so no entry is ever stale. Every user can write the file, so its content only orders the
queue and explains. Functions raise LockDirectoryError where it cannot be used.
"""

from __future__ import annotations

import math
import os
import struct
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from json import dumps, loads
from typing import Any, NamedTuple

from gpuaff._system import descriptors, kernel, locks
from gpuaff.claims.locking import directory
from gpuaff.errors import LockDirectoryError

# Not a file for each process: one left by a killed process would have to be recognised as stale by
# its process id, which is used again and is invisible in other namespaces, and to be removed in a
# race with the next process that takes its name.
NAME, VERSION = "registry", 2
SLOTS, SLOT_SIZE = 512, 4096

# The layout, as docs/lease-protocol.md has it: the tables of tickets and beats, apart from the
# records so that a poll reads little and parses nothing; the records; then the bytes that are
# locked, of each slot one while its writer waits, one while it holds GPUs, and 64 for the claims
# inside its claim, more than any has GPUs.
TICKETS, BEATS = struct.Struct(f"<{SLOTS}Q"), struct.Struct(f"<{SLOTS}d")
RECORDS = TICKETS.size + BEATS.size
WAITS = RECORDS + SLOTS * SLOT_SIZE
HOLDS = WAITS + SLOTS
PARTS, PART_COUNT = HOLDS + SLOTS, 64

MOST = (1 << 53) - 1  # the largest number that counts: others are not exact in all languages' JSON
_KEYS = {"pid": int, "start": int, "uid": int, "wanted": int, "since": (int, float), "name": str}


class Entry(NamedTuple):
    """A slot whose writer lives. Values of its record that are invalid count as missing."""

    slot: int
    waits: bool  # the writer waits for GPUs, in the order of ``ticket``; else it holds some
    ticket: int = 0
    beat: float = 0.0  # when it was last known to be well, in seconds since boot
    is_written: bool = True
    pid: int | None = None  # in its own PID namespace
    start: int | None = None  # in clock ticks since boot
    uid: int | None = None
    name: str = ""
    since: float | None = None  # it waits or holds, in seconds since 1970
    wanted: int | None = None
    # The keys of the GPUs that it holds or would accept; a waiter without any accepts all. Inside
    # the claim of slot 3 they are ``3/GPU-…``.
    gpus: tuple[str, ...] = ()

    @property
    def devices(self) -> tuple[str, ...]:
        """The UUIDs of these GPUs."""
        return tuple(key.rpartition("/")[2] for key in self.gpus)

    @property
    def inside(self) -> int | None:
        """The slot of the claim around this one."""
        slot = self.gpus[0].partition("/")[0] if self.gpus else ""
        return int(slot) if slot.isdecimal() and len(slot) < 6 else None


def about_me() -> dict[str, Any]:
    """What this process writes about itself."""
    pid = os.getpid()
    facts = kernel.thread_facts(pid, pid)
    start, name = (facts.started if facts else None), kernel.name_of(pid) or ""
    return {"pid": pid, "start": start, "uid": os.geteuid(), "name": name, "since": time.time()}


def living(found: Iterable[Entry]) -> frozenset[int]:
    """The slots of processes that are visible here and have not ended; children may keep others."""
    return frozenset(entry.slot for entry in found if _state(entry) not in ("gone", "ended"))


def stopped(found: Iterable[Entry]) -> frozenset[int]:
    """The slots of visible processes that are stopped (SIGSTOP, Ctrl-Z) or exiting."""
    return frozenset(entry.slot for entry in found if _state(entry) in ("stopped", "exiting"))


def ending(found: Iterable[Entry]) -> frozenset[str]:
    """The UUIDs of the GPUs that only exiting processes hold: the kernel is about to free them."""
    held = [(entry.devices, _state(entry) == "exiting") for entry in found if not entry.waits]
    stay = {uuid for devices, exits in held if not exits for uuid in devices}
    return frozenset(uuid for devices, exits in held if exits for uuid in devices) - stay


def _state(entry: Entry) -> str:
    """What the writer does; ``gone`` also where it is not visible, or its id is another's."""
    facts = None if entry.pid is None else kernel.thread_facts(entry.pid, entry.pid)
    if entry.pid is None or facts is None or facts.started != entry.start:
        return "gone"
    if facts.exiting and kernel.is_exiting(entry.pid):
        return "exiting"
    return "ended" if facts.ended else "stopped" if facts.stopped else "running"


class Slot:
    """This process's slot in the registry, locked through ``handle``."""

    def __init__(self) -> None:
        """Take a free one, as a waiter without a record and a ticket; an error where none is."""
        self.handle = opened()
        descriptors.private.add(self.handle)  # a child must not keep a waiter's place
        self._mark, self._pid = descriptors.mark_of(self.handle), os.getpid()
        try:
            with directory.lock_errors(path()):
                self.number = _lock_free_slot(self.handle)
            self._put(RECORDS + self.number * SLOT_SIZE, b" " * SLOT_SIZE)  # the last writer's
            self.beat(ticket=0)
        except BaseException:
            descriptors.close(self.handle)
            raise

    def write(self, record: Mapping[str, Any]) -> None:
        """Write the record."""
        text = dumps({"v": VERSION, **record})
        if len(text) > SLOT_SIZE:  # about ninety MIG instances: then the waiter accepts any
            text = dumps({"v": VERSION, **record, "gpus": []})
        self._put(RECORDS + self.number * SLOT_SIZE, text.encode().ljust(SLOT_SIZE)[:SLOT_SIZE])

    def beat(self, *, ticket: int | None = None) -> None:
        """Write that this process is well, and its ticket if there is a new one."""
        if ticket is not None:
            self._put(8 * self.number, struct.pack("<Q", ticket))
        self._put(TICKETS.size + 8 * self.number, struct.pack("<d", kernel.uptime()))

    def _put(self, at: int, data: bytes) -> None:
        with directory.lock_errors(path()):
            os.pwrite(self.handle, data, at)  # at once: a reader gets the old text or the new one

    def hold_begins(self) -> None:
        """Write that this process holds GPUs, and no longer waits."""
        locks.try_range(self.handle, HOLDS + self.number)
        descriptors.private.discard(self.handle)  # forked children share a claim
        self.beat(ticket=0)
        locks.free_range(self.handle, WAITS + self.number)

    def withdraw(self) -> None:
        """Neither wait nor hold any longer, children that share the slot included."""
        # Before the leases are released: one that sees a free GPU finds it free here, too
        if self.is_ours:
            with suppress(LockDirectoryError):
                self.beat(ticket=0)
            locks.free_range(self.handle, WAITS + self.number)
            locks.free_range(self.handle, HOLDS + self.number)

    def release(self) -> None:
        """Give the slot back; a forked child only closes its copy. May be called again."""
        self.withdraw()
        if descriptors.mark_of(self.handle) == self._mark:
            descriptors.close(self.handle)
        descriptors.private.discard(self.handle)
        self.handle = -1

    @property
    def is_ours(self) -> bool:
        """Whether this process has taken it and not closed it: daemons close all that they have."""
        return os.getpid() == self._pid and descriptors.mark_of(self.handle) == self._mark

    @property
    def is_current(self) -> bool:
        """Whether other processes see the slot: the file may have been removed."""
        return directory.still_has(NAME, self.handle)


def _lock_free_slot(handle: int) -> int:
    """Lock the waiting byte of a free slot; its number."""
    # One is also in use while a claim inside its last claim lives on.
    first = os.getpid()  # so that a slot is rarely reused at once
    for number in (at % SLOTS for at in range(first, first + SLOTS)):
        if locks.try_range(handle, WAITS + number):
            holds, parts = HOLDS + number, PARTS + number * PART_COUNT
            if not (
                locks.locked_bytes(handle, holds, holds + 1)
                or locks.locked_bytes(handle, parts, parts + PART_COUNT)
            ):
                return number
            locks.free_range(handle, WAITS + number)
    why = f"all of its {SLOTS} slots are in use by claimers: see gpuaff status"
    raise LockDirectoryError(path(), why)


def path() -> str:
    """The registry's path."""
    return f"{directory.path()}/{NAME}"


def opened() -> int:
    """Open the registry, which is made if it is missing; programs do not inherit it."""
    return directory.open_file(NAME, size=WAITS)


def entries() -> tuple[Entry, ...]:
    """All entries, by slot. Reading takes no lock."""
    if not directory.has(NAME):
        return ()
    handle = opened()
    try:
        return read(handle)
    finally:
        descriptors.close(handle)


def read(handle: int, *, before: float = math.inf) -> tuple[Entry, ...]:
    """The entries in an open file, except its own; only waiters ``before`` a ticket."""
    with directory.lock_errors(path()):
        held = holding(handle)
        waiting = locks.locked_bytes(handle, WAITS, WAITS + SLOTS)
        ticket, beat = tickets(handle), beats(handle)
    slots = {at - WAITS for at in waiting if ticket[at - WAITS] < before}
    return tuple(
        Entry(slot, slot not in held, ticket[slot], beat[slot], **_read_record(handle, slot))
        for slot in sorted(held | slots)
    )


def holding(handle: int) -> frozenset[int]:
    """The slots whose writers hold GPUs, without the open file's own."""
    return frozenset(at - HOLDS for at in locks.locked_bytes(handle, HOLDS, HOLDS + SLOTS))


def tickets(handle: int) -> list[int]:
    """The tickets of all slots: they change when a waiter comes or goes."""
    data = os.pread(handle, TICKETS.size, 0).ljust(TICKETS.size, b"\0")
    return [ticket if ticket <= MOST else 0 for ticket in TICKETS.unpack(data)]


def beats(handle: int) -> tuple[float, ...]:
    """When the writer of each slot has last written that it is well, since boot."""
    return BEATS.unpack(os.pread(handle, BEATS.size, TICKETS.size).ljust(BEATS.size, b"\0"))


def still_waits(handle: int, entry: Entry) -> bool:
    """Whether a waiter is still there: a few microseconds, unlike :func:`read`."""
    byte, ticket = WAITS + entry.slot, struct.pack("<Q", entry.ticket)
    is_same = os.pread(handle, 8, 8 * entry.slot) == ticket
    return is_same and bool(locks.locked_bytes(handle, byte, byte + 1))


def _read_record(handle: int, slot: int) -> Mapping[str, Any]:
    for _ in range(3):  # an unreadable one may be half written
        found = _parsed(os.pread(handle, SLOT_SIZE, RECORDS + slot * SLOT_SIZE))
        if found is not None:
            return found
    return {"is_written": False}


@lru_cache(maxsize=SLOTS)  # to parse 200 records anew takes 2 ms
def _parsed(data: bytes) -> Mapping[str, Any] | None:
    """The fields of an entry by its record; None when that is unreadable."""
    try:
        found = loads(data.decode("utf-8", "replace")) if data.strip() else {}
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return {"is_written": False}
    gpus = found.get("gpus")
    return {
        **{key: found[key] for key, kind in _KEYS.items() if _counts(found.get(key), kind)},
        "is_written": bool(found),
        "gpus": tuple(g for g in gpus if isinstance(g, str)) if isinstance(gpus, list) else (),
    }


def _counts(value: Any, kind: Any) -> bool:
    """Whether a value is valid: NaN and infinity, which Python's JSON has, are not."""
    if isinstance(value, bool) or not isinstance(value, kind):
        return False
    return isinstance(value, str) or 0 <= value <= MOST
