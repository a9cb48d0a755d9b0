"""The board: who holds and who waits for GPUs, for everyone to read.

One file of the lock directory, with a slot for each claimer. A slot has a record in JSON, and is
in use for as long as somebody holds one of its bytes by an OFD lock: one byte says that its writer
waits, another that it holds GPUs. The kernel frees them when the writer is gone, so nothing stale
is ever there, nothing is removed, and nobody's death needs cleaning up.

Anybody may write into the file, so records are told to people and order the queue, and no more: a
forged one can make others wait, but never gives a GPU to two (that is for leases). The page
lease-protocol.md has the layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from json import dumps, loads

from gpuaff._system import descriptors, kernel, lock_files, locks
from gpuaff._system.kernel import ThreadFacts
from gpuaff.claims.locking import lockdir
from gpuaff.errors import LockDirectoryError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# What stands on the board: a claimer's record, and whether its writer is still there.
#
# Anybody may have written it, so nothing in it is taken for what it should be.


MOST = (1 << 53) - 1
"""The largest number in a record that counts: other languages' JSON has no larger ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What stands in a slot whose writer lives.

    Attributes:
        slot: its number.
        waits: whether the writer waits, else it holds GPUs.
        record: what it has written; empty when that cannot be read.
    """

    slot: int
    waits: bool
    record: Mapping[str, Any]

    @property
    def pid(self) -> int | None:
        """The writer's process id, in its own PID namespace."""
        return self._number("pid")

    @property
    def start(self) -> int | None:
        """When the writer started, in clock ticks since the machine did."""
        return self._number("start")

    @property
    def uid(self) -> int | None:
        """The number of the user for whom the writer acts."""
        return self._number("uid")

    @property
    def since(self) -> float | None:
        """Since when the writer waits, or holds, in seconds since 1970."""
        return self._time("since")

    @property
    def wanted(self) -> int | None:
        """How many GPUs one who waits wants."""
        return self._number("wanted")

    @property
    def ticket(self) -> int:
        """The writer's place in the line; the lower is the first."""
        return self._number("ticket") or 0

    @property
    def beat(self) -> float | None:
        """When the writer last told that it is well, in seconds since the machine started."""
        return self._time("beat")

    @property
    def gpus(self) -> tuple[str, ...]:
        """What it holds, or would take, by UUID; of one that waits, empty is any."""
        found = self.record.get("gpus")
        return tuple(g for g in found if isinstance(g, str)) if isinstance(found, list) else ()

    @property
    def devices(self) -> tuple[str, ...]:
        """The UUIDs among :attr:`gpus`, of a claim inside a claim too (``3/GPU-…``)."""
        return tuple(_uuid(key) for key in self.gpus)

    @property
    def inside(self) -> int | None:
        """The slot of the claim that this one is inside of; None when it is inside of none."""
        slot = self.gpus[0].partition("/")[0] if self.gpus else ""
        return int(slot) if slot.isdecimal() and len(slot) < 6 else None

    def text(self, key: str) -> str:
        """A text of the record; empty when there is none."""
        found = self.record.get(key)
        return found if isinstance(found, str) else ""

    def _time(self, key: str) -> float | None:
        found = self.record.get(key)
        if isinstance(found, float):  # NaN and infinity, which Python's JSON has, do not fit
            return found if 0 <= found <= MOST else None
        return self._number(key)

    def _number(self, key: str) -> int | None:
        found = self.record.get(key)
        fits = isinstance(found, int) and not isinstance(found, bool) and 0 <= found <= MOST
        return found if fits else None


def _uuid(key: str) -> str:
    slot, _, rest = key.partition("/")  # old names of MIG instances have slashes, too
    return rest if slot.isdecimal() else key


def stopped(found: Iterable[Entry]) -> frozenset[int]:
    """The slots whose writers are stopped (SIGSTOP, Ctrl-Z) or exiting, as far as can be seen."""
    return frozenset(
        e.slot
        for e in found
        if is_exiting(e) or ((facts := _facts(e)) is not None and facts.stopped)
    )


def ending(found: Iterable[Entry]) -> frozenset[str]:
    """The devices, by UUID, of those that hold them, if all of these are exiting."""
    held = [(entry.devices, is_exiting(entry)) for entry in found if not entry.waits]
    stay = {uuid for devices, exits in held if not exits for uuid in devices}
    return frozenset(uuid for devices, exits in held if exits for uuid in devices) - stay


def is_exiting(entry: Entry) -> bool:
    """Whether the writer is exiting: soon the kernel gives back all that it holds."""
    return entry.pid is not None and _facts(entry) is not None and kernel.is_exiting(entry.pid)


def living(found: Iterable[Entry]) -> frozenset[int]:
    """The slots whose writers live and can be seen: their ids are those of this PID namespace.

    Others have ended, and children keep their slot, or are elsewhere.
    """
    return frozenset(e.slot for e in found if (facts := _facts(e)) is not None and not facts.ended)


def _facts(entry: Entry) -> ThreadFacts | None:
    """What the kernel tells of a writer; None when there is none, or another process."""
    if entry.pid is None:
        return None
    facts = kernel.thread_facts(entry.pid, entry.pid)
    return facts if facts is not None and facts.started == entry.start else None


def about_me() -> dict[str, Any]:
    """What a record says of its writer."""
    pid = kernel.process_id()
    facts = kernel.thread_facts(pid, pid)
    return {
        "pid": pid,
        "start": facts.started if facts else None,
        "uid": kernel.user_id(),
        "name": kernel.name_of(pid) or "",
        "since": kernel.wall_clock(),
        "beat": kernel.uptime(),
    }


NAME = "board"
SLOTS = 512
SLOT_SIZE = 4096
VERSION = 1

WAITS = SLOTS * SLOT_SIZE
"""The byte that is locked while the writer of slot 0 waits; slot 1's is the next one, and so on.
These bytes lie behind the records: locks may."""

HOLDS = WAITS + SLOTS
"""Likewise while it holds GPUs."""

PARTS = HOLDS + SLOTS
"""The first byte of slot 0 for claims inside its claim; each slot has :data:`PART_COUNT`."""

PART_COUNT = 64
"""More than any claim has GPUs."""


_unheld: dict[int, int] = {}
"""The descriptors of slots that hold no GPUs yet, and their numbers; −1 while that is not known."""


def _forget_in_child() -> None:
    """A forked child must not keep its parent's place in the queue alive, so it closes its copy."""
    descriptors.close(*_unheld)
    _unheld.clear()


kernel.in_forked_child(_forget_in_child)


def leave() -> None:
    """Give back what this process has on the board without holding GPUs; may be called again.

    Ctrl-C may come between any two steps, so not every such slot has a :class:`Slot`.
    """
    for handle, number in tuple(_unheld.items()):
        if number >= 0:  # closing is not enough: a child that is being forked has a copy
            locks.free_range(handle, WAITS + number)
        _unheld.pop(handle, None)
        descriptors.close(handle)


class Slot:
    """This process's slot on the board."""

    def __init__(self, handle: int, number: int) -> None:
        """Only :func:`take` makes them."""
        self.handle = handle
        self.number = number
        self._mark = lock_files.mark_of(handle)

    def write(self, record: Mapping[str, Any]) -> None:
        """Put a record into the slot.

        Raises:
            LockDirectoryError: it cannot be written.
        """
        text = dumps({"v": VERSION, **record}, ensure_ascii=True).encode()
        if len(text) > SLOT_SIZE:  # some ninety MIG instances: then any of them is wanted
            text = dumps({"v": VERSION, **record, "gpus": []}, ensure_ascii=True).encode()
        with lockdir.using(path()):
            lock_files.write_at(
                self.handle, self.number * SLOT_SIZE, text.ljust(SLOT_SIZE)[:SLOT_SIZE]
            )

    def hold_begins(self) -> None:
        """Say that this process holds GPUs, and waits no more."""
        locks.try_range(self.handle, HOLDS + self.number)
        _unheld.pop(self.handle, None)
        locks.free_range(self.handle, WAITS + self.number)

    def release(self) -> None:
        """Give the slot back, also for children that share it; may be called again."""
        self.withdraw()
        self.abandon()

    def withdraw(self) -> None:
        """Say that this process neither waits nor holds GPUs any more: before it gives them back.

        So whoever is woken by that finds them free on the board as well.
        """
        if self.is_ours:
            locks.free_range(self.handle, WAITS + self.number)
            locks.free_range(self.handle, HOLDS + self.number)

    def abandon(self) -> None:
        """In a forked child: close the copy, and leave the slot to the parent."""
        _unheld.pop(self.handle, None)
        if self.is_ours:  # first: Ctrl-C may come as soon as it is forgotten
            descriptors.close(self.handle)
        self.handle = -1

    @property
    def is_ours(self) -> bool:
        """Whether the descriptor is open still, and not somebody else's: daemons close all."""
        try:
            return self.handle >= 0 and lock_files.mark_of(self.handle) == self._mark
        except OSError:
            return False

    @property
    def file(self) -> tuple[int, int]:
        """The device number and inode of the board that it is on."""
        return self._mark[:2]

    @property
    def is_current(self) -> bool:
        """Whether others see it: the file may have been removed by somebody."""
        return lockdir.still_has(NAME, self.handle)


def path() -> str:
    """Where it is."""
    return f"{lockdir.path()}/{NAME}"


def opened() -> int:
    """The board's file, opened anew; programs do not inherit it.

    Raises:
        LockDirectoryError: it cannot be used.
    """
    return lockdir.open_file(NAME, size=SLOTS * SLOT_SIZE)


def take() -> Slot:
    """Take a free slot, for one that waits at first. Its record is not written yet.

    Raises:
        LockDirectoryError: the board cannot be used, or all slots are taken.
    """
    handle = opened()
    _unheld[handle] = -1
    try:
        with lockdir.using(path()):
            number = _free_slot(handle)
    except BaseException:
        _drop(handle)
        raise
    if number is not None:
        return Slot(handle, number)
    _drop(handle)
    raise LockDirectoryError(
        path(),
        f"all of its {SLOTS} slots are in use by claimers: see gpuaff status",
    )


def _free_slot(handle: int) -> int | None:
    """Take the byte of a slot whose other bytes nobody has; its old record is gone then.

    Those inside a claim may outlive it: then its slot is in use.
    """
    used = {at - HOLDS for at in locks.locked_bytes(handle, HOLDS, HOLDS + SLOTS)}
    used |= {at - WAITS for at in locks.locked_bytes(handle, WAITS, WAITS + SLOTS)}
    first = kernel.process_id()  # a slot is not used again at once: its followers are waking
    for number in (at % SLOTS for at in range(first, first + SLOTS)):
        if number in used or not locks.try_range(handle, WAITS + number):
            continue
        _unheld[handle] = number
        parts = PARTS + number * PART_COUNT
        if not (
            locks.locked_bytes(handle, HOLDS + number, HOLDS + number + 1)
            or locks.locked_bytes(handle, parts, parts + PART_COUNT)
        ):
            lock_files.write_at(handle, number * SLOT_SIZE, b" " * SLOT_SIZE)
            return number
        locks.free_range(handle, WAITS + number)
    return None


def _drop(handle: int) -> None:
    _unheld.pop(handle, None)
    descriptors.close(handle)


def entries() -> tuple[Entry, ...]:
    """What stands on the board, by slot. No lock is taken to look.

    Raises:
        LockDirectoryError: the board cannot be used.
    """
    if not lockdir.has(NAME):
        return ()
    handle = opened()
    try:
        return read(handle)
    finally:
        descriptors.close(handle)


def read(handle: int) -> tuple[Entry, ...]:
    """As :func:`entries`, through an open file, whose own slot is not among them."""
    with lockdir.using(path()):
        holding = locks.locked_bytes(handle, HOLDS, HOLDS + SLOTS)
        waiting = locks.locked_bytes(handle, WAITS, WAITS + SLOTS)
    found = {at - WAITS: True for at in waiting} | {at - HOLDS: False for at in holding}
    return tuple(
        Entry(slot=number, waits=found[number], record=_record(handle, number))
        for number in sorted(found)
    )


def holding(handle: int) -> frozenset[int]:
    """The slots of those who hold GPUs; the open file's own is not among them."""
    return frozenset(at - HOLDS for at in locks.locked_bytes(handle, HOLDS, HOLDS + SLOTS))


def _record(handle: int, number: int) -> Mapping[str, Any]:
    for _ in range(_READS):
        data = lock_files.read_at(handle, number * SLOT_SIZE, SLOT_SIZE)
        if not data.strip():
            break
        try:
            found = loads(data.decode("utf-8", "replace"))
        except (ValueError, RecursionError):
            continue
        return found if isinstance(found, dict) else {}
    return {}


_READS = 3
"""How often an unreadable record is read: the kernel may show one that is half written."""


def entry_at(handle: int, slot: int) -> Entry | None:
    """What stands in one slot; None when nobody waits there."""
    byte = WAITS + slot
    if not locks.locked_bytes(handle, byte, byte + 1):
        return None
    return Entry(slot=slot, waits=True, record=_record(handle, slot))
