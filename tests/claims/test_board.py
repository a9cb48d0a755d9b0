"""The registry, by real processes: who stands there, and what may stand there."""

from __future__ import annotations

import json
import os
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuaff._system import kernel, locks
from gpuaff.claims.devices.probe import describe
from gpuaff.claims.locking import queue, registry
from gpuaff.claims.locking.registry import (
    BEATS,
    HOLDS,
    MOST,
    PART_COUNT,
    PARTS,
    RECORDS,
    SLOT_SIZE,
    SLOTS,
    TICKETS,
    WAITS,
)
from gpuaff.errors import LockDirectoryError
from tests.claims.lockers import locker, until

STAND = """
slot = registry.Slot()
slot.beat(ticket=1)
slot.write({**registry.about_me(), "gpus": ["GPU-0"]})
if %r:
    slot.hold_begins()
print(slot.number)
hear()
slot.release()
print("released")
hear()
"""


def test_the_layout_is_what_the_page_says() -> None:
    """Other languages have it from docs/lease-protocol.md."""
    assert (SLOTS, SLOT_SIZE) == (512, 4096)
    assert (TICKETS.size, BEATS.size, RECORDS) == (4096, 4096, 8192)
    assert (WAITS, HOLDS, PARTS, PART_COUNT) == (2105344, 2105856, 2106368, 64)
    assert registry.VERSION == 2


@pytest.mark.parametrize(("holds", "how"), [(False, "killed"), (True, "released")])
def test_a_record_is_there_for_as_long_as_its_writer(
    lock_folder: Path, holds: bool, how: str
) -> None:
    assert registry.entries() == ()
    assert not lock_folder.exists(), "looking makes no file"
    with locker(STAND % holds) as one:
        number = int(one.heard())
        (entry,) = registry.entries()
        assert (entry.slot, entry.waits, entry.pid) == (number, not holds, one.pid)
        assert (entry.ticket, entry.gpus) == (0 if holds else 1, ("GPU-0",))
        assert entry.uid == os.geteuid()
        stat = Path(f"/proc/{one.pid}/stat").read_text()
        assert entry.start == int(stat.rpartition(")")[2].split()[19])
        assert entry.name == Path(f"/proc/{one.pid}/comm").read_text().strip()
        if how == "killed":
            one.kill()
        else:
            one.go_on()
            one.heard()
        assert registry.entries() == ()


def test_one_that_waits_becomes_one_that_holds(lock_folder: Path) -> None:
    slot = registry.Slot()
    assert [entry.waits for entry in registry.entries()] == [True]
    slot.hold_begins()
    assert [entry.waits for entry in registry.entries()] == [False]
    assert registry.read(slot.handle) == ()  # one's own is not among them
    slot.release()
    slot.release()
    assert registry.entries() == ()


def test_children_do_not_keep_a_slot_that_is_released(lock_folder: Path) -> None:
    slot = registry.Slot()
    child = os.fork()
    if child == 0:
        signal.pause()
    slot.release()
    assert registry.entries() == ()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_a_full_board_is_an_error_and_one_who_leaves_makes_room(lock_folder: Path) -> None:
    with ExitStack() as stack:
        slots = []
        for _ in range(SLOTS):
            slots.append(registry.Slot())
            stack.callback(slots[-1].release)
        assert sorted(slot.number for slot in slots) == list(range(SLOTS))
        with pytest.raises(LockDirectoryError, match="all of its 512 slots are in use"):
            registry.Slot()
        slots[7].release()
        last = registry.Slot()
        assert last.number == slots[7].number
        last.release()


def test_a_slot_is_given_on_empty_and_only_when_no_rank_of_its_claim_lives(
    lock_folder: Path,
) -> None:
    """The parts of the ranks would count as those of the next claim."""
    first = registry.Slot()
    first.write({"pid": 7, "gpus": ["GPU-7"]})
    number = first.number
    rank = registry.opened()
    assert locks.try_range(rank, PARTS + number * PART_COUNT + 3)
    first.release()
    second = registry.Slot()
    assert second.number == (number + 1) % SLOTS
    second.release()
    os.close(rank)
    third = registry.Slot()
    assert third.number == number
    (entry,) = registry.entries()
    assert not entry.is_written
    assert (entry.pid, entry.gpus) == (None, ())
    third.release()


def test_a_record_of_a_hundred_instances_still_has_its_place(lock_folder: Path) -> None:
    """It is too long for a slot; then it wants any."""
    slot, other = registry.Slot(), registry.Slot()
    uuids = [f"MIG-00000000-0000-4000-8000-{number:012}" for number in range(112)]
    record = {**registry.about_me(), "wanted": 2, "gpus": uuids}
    slot.beat(ticket=5)
    slot.write(record)
    (entry,) = registry.read(other.handle)
    assert (entry.ticket, entry.gpus, entry.pid) == (5, (), os.getpid())
    assert queue.is_well(entry, kernel.uptime())
    slot.write({"name": "x" * 5000})
    (entry,) = registry.read(other.handle)
    assert not entry.is_written
    slot.release()
    other.release()


# ---- what others may have written ------------------------------------------------------------

NUMBERS = st.one_of(
    st.integers(),
    st.floats(),
    st.sampled_from([10**4000, -(10**4000), MOST, MOST + 1, float("inf"), True]),
)
VALUES = st.one_of(NUMBERS, st.text(), st.none(), st.lists(st.one_of(st.text(), NUMBERS)))
WRITTEN = st.dictionaries(
    st.sampled_from(["pid", "start", "uid", "since", "gpus", "name", "wanted", "v"]),
    VALUES,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.one_of(
        st.binary(max_size=300),
        WRITTEN.map(lambda record: json.dumps(record).encode()),
        st.sampled_from(
            [b"[" * SLOT_SIZE, b'{"a":' * 800, b"\0" * SLOT_SIZE, b'{"name": "\\ud800\\u001b[2J"}']
        ),
    )
)
def test_garbage_harms_nobody(lock_folder: Path, data: bytes) -> None:
    bad, mine = registry.Slot(), queue.Place()
    try:
        record = data[:SLOT_SIZE].ljust(SLOT_SIZE)
        os.pwrite(bad.handle, record, RECORDS + bad.number * SLOT_SIZE)
        for at in 8 * bad.number, TICKETS.size + 8 * bad.number:
            os.pwrite(bad.handle, data[:8], at)
        (entry,) = mine.entries()
        assert all(isinstance(uuid, str) for uuid in entry.gpus)
        found = queue.ahead([entry], wants=frozenset(["GPU-0"]), now=5.0)
        assert found in ((), (entry,))
        assert str(describe(entry.pid, entry)).isprintable()
        for number in (entry.since, entry.ticket, entry.wanted, entry.uid):
            assert number is None or 0 <= number <= MOST
        registry.stopped([entry])
        mine.join([entry], wanted=1, gpus=frozenset(["GPU-0"]))
        tickets = registry.tickets(bad.handle)
        assert tickets[mine.slot.number] == min(1 + entry.ticket, MOST)
        assert mine.slot.is_current
    finally:
        bad.release()
        mine.slot.release()


@given(st.binary(max_size=64))
def test_a_file_of_any_length_is_a_board(data: bytes) -> None:
    handle = os.memfd_create("registry")
    os.write(handle, data)
    other = os.open(f"/proc/self/fd/{handle}", os.O_RDWR)
    locks.try_range(other, HOLDS + 1)
    locks.try_range(other, WAITS + 0)
    slots = [(entry.slot, entry.waits) for entry in registry.read(handle)]
    assert slots == [(0, True), (1, False)]
    os.close(handle)
    os.close(other)


def test_a_forged_process_is_not_taken_for_a_stopped_one(lock_folder: Path) -> None:
    with locker(STAND % False) as one:
        one.heard()
        (entry,) = registry.entries()
        assert registry.stopped([entry]) == frozenset()
        os.kill(one.pid, signal.SIGSTOP)
        until(lambda: registry.stopped([entry]) == {entry.slot})
        forged = entry._replace(start=1)
        assert registry.stopped([forged]) == frozenset()
