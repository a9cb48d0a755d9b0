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
from gpuaff.claims.devices import conflicts
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
from tests.claims.lockers import A_USER, ANOTHER, locker, said, two_users, until

STAND = """
slot = registry.take()
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


def stand(*, holds: bool = False) -> str:
    return STAND % holds


def test_the_layout_is_what_the_page_says() -> None:
    """Other languages have it from docs/lease-protocol.md."""
    assert (SLOTS, SLOT_SIZE) == (512, 4096)
    assert (TICKETS.size, BEATS.size, RECORDS) == (4096, 4096, 8192)
    assert (WAITS, HOLDS, PARTS, PART_COUNT) == (2105344, 2105856, 2106368, 64)
    assert registry.VERSION == 2


@pytest.mark.parametrize("holds", [False, True])
@pytest.mark.parametrize("how", ["released", "killed"])
def test_a_record_is_there_for_as_long_as_its_writer(
    lock_folder: Path, holds: bool, how: str
) -> None:
    assert registry.entries() == ()
    with locker(stand(holds=holds)) as one:
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


@two_users
@pytest.mark.case("E7")
def test_two_users_see_each_other(lock_folder: Path) -> None:
    with locker(stand(), uid=A_USER) as one, locker(stand(holds=True), uid=ANOTHER) as other:
        one.heard()
        other.heard()
        found = {(entry.pid, entry.uid, entry.waits) for entry in registry.entries()}
        assert found == {(one.pid, A_USER, True), (other.pid, ANOTHER, False)}


def test_one_that_waits_becomes_one_that_holds(lock_folder: Path) -> None:
    slot = registry.take()
    assert [entry.waits for entry in registry.entries()] == [True]
    slot.hold_begins()
    assert [entry.waits for entry in registry.entries()] == [False]
    assert registry.read(slot.handle) == ()  # one's own is not among them
    slot.release()
    slot.release()
    assert registry.entries() == ()


def test_children_do_not_keep_a_slot_that_is_released(lock_folder: Path) -> None:
    slot = registry.take()
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
            slots.append(registry.take())
            stack.callback(slots[-1].release)
        assert sorted(slot.number for slot in slots) == list(range(SLOTS))
        with pytest.raises(LockDirectoryError, match="all of its 512 slots are in use"):
            registry.take()
        slots[7].release()
        last = registry.take()
        assert last.number == slots[7].number
        last.release()


def test_a_used_slot_has_nothing_of_its_last_writer(lock_folder: Path) -> None:
    first = registry.take()
    first.write({"pid": 7, "gpus": ["GPU-7"]})
    number = first.number
    first.release()
    second = registry.take()
    assert second.number == number
    (entry,) = registry.entries()
    assert not entry.is_written
    assert (entry.pid, entry.gpus) == (None, ())
    second.release()


def test_the_slot_of_a_claim_that_ended_before_its_ranks_is_not_given_on(lock_folder: Path) -> None:
    """Its parts would count as those of the next claim."""
    first = registry.take()
    number = first.number
    rank = registry.opened()
    assert locks.try_range(rank, PARTS + number * PART_COUNT + 3)
    first.release()
    second = registry.take()
    assert second.number == (number + 1) % SLOTS
    second.release()
    os.close(rank)
    third = registry.take()
    assert third.number == number
    third.release()


def test_a_record_of_a_hundred_instances_still_has_its_place(lock_folder: Path) -> None:
    """It is too long for a slot; then it wants any."""
    slot, other = registry.take(), registry.take()
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


def test_whether_others_see_it(lock_folder: Path) -> None:
    slot = registry.take()
    seen = [slot.is_current]
    (lock_folder / "registry").unlink()
    seen.append(slot.is_current)
    second = registry.take()
    seen += [second.is_current, slot.is_current]
    assert seen == [True, False, True, False]
    slot.release()
    second.release()


def test_a_descriptor_that_is_somebody_elses_by_now_is_left_alone(
    lock_folder: Path, tmp_path: Path
) -> None:
    slot = registry.take()
    log = os.open(tmp_path / "log", os.O_CREAT | os.O_WRONLY)
    number = slot.handle
    os.dup2(log, number)
    slot.release()
    assert os.write(number, b"x") == 1
    os.close(number)
    os.close(log)


def test_looking_makes_no_file(lock_folder: Path) -> None:
    assert registry.entries() == ()
    assert not lock_folder.exists()


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
    bad, mine = registry.take(), registry.take()
    try:
        record = data[:SLOT_SIZE].ljust(SLOT_SIZE)
        locks.write_at(bad.handle, RECORDS + bad.number * SLOT_SIZE, record)
        for at in 8 * bad.number, TICKETS.size + 8 * bad.number:
            locks.write_at(bad.handle, at, data[:8])
        (entry,) = registry.read(mine.handle)
        assert all(isinstance(uuid, str) for uuid in entry.gpus)
        ticket = queue.next_ticket([entry])
        assert 1 <= ticket <= MOST
        found = queue.ahead([entry], wants=frozenset(["GPU-0"]), now=5.0, stopped=(), ticket=ticket)
        assert found in ((), (entry,))
        assert str(describe(entry.pid, entry)).isprintable()
        for number in (entry.since, entry.ticket, entry.wanted, entry.uid):
            assert number is None or 0 <= number <= MOST
        registry.stopped([entry])
        mine.beat(ticket=ticket)
        assert mine.is_current
    finally:
        bad.release()
        mine.release()


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
    with locker(stand()) as one:
        one.heard()
        (entry,) = registry.entries()
        assert registry.stopped([entry]) == frozenset()
        os.kill(one.pid, signal.SIGSTOP)
        until(lambda: registry.stopped([entry]) == {entry.slot})
        forged = entry._replace(start=1)
        assert registry.stopped([forged]) == frozenset()


def test_a_loss_is_remembered_for_its_user_and_told_by_no_other_error(lock_folder: Path) -> None:
    conflicts.back_off()  # none yet: no wait, and no file
    assert not lock_folder.exists()
    conflicts.remember_loss()
    assert (lock_folder / f"lost-{os.geteuid()}").stat().st_size == 8
    (lock_folder / f"lost-{os.geteuid()}").unlink()
    (lock_folder / f"lost-{os.geteuid()}").mkdir()
    conflicts.remember_loss()
    conflicts.back_off()  # nobody is kept from claiming by what stands in its place
    assert said("print(registry.entries())") == "()"
