"""The queue: who comes first, and being woken when that one is gone."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuaff.claims.locking import queue, registry
from gpuaff.claims.locking.queue import join
from gpuaff.claims.locking.registry import MOST, Entry

from claims.lockers import locker, until

NOW = 100.0


def waits(slot: int, ticket: int, *gpus: str, beat: Any = NOW, **more: Any) -> Entry:
    record = {"ticket": ticket, "beat": beat, "gpus": list(gpus), **more}
    return Entry(slot=slot, waits=True, record=record)


def ahead(*entries: Entry, wants: str = "a", ticket: int | None = None, **more: Any) -> list[int]:
    found = queue.ahead(
        entries, wants=frozenset(wants), now=NOW, ticket=ticket, stopped=more.get("stopped", ())
    )
    return [entry.slot for entry in found]


def test_the_lower_ticket_is_first() -> None:
    line = waits(1, 7, "a"), waits(2, 5, "a"), waits(3, 9, "a")
    assert ahead(*line) == [2, 1, 3]
    assert ahead(*line, ticket=9) == [2, 1]
    assert ahead(*line, ticket=5) == []


def test_who_wants_others_is_not_before_us() -> None:
    assert ahead(waits(1, 1, "b")) == []
    assert ahead(waits(1, 1, "b", "a")) == [1]
    assert ahead(waits(1, 1)) == [1]  # any of them


def test_who_holds_does_not_wait() -> None:
    holder = Entry(slot=1, waits=False, record={"ticket": 1, "beat": NOW, "gpus": ["a"]})
    assert ahead(holder) == []


def test_the_stopped_and_the_stuck_are_passed_over() -> None:
    assert ahead(waits(1, 1, "a"), stopped={1}) == []
    assert ahead(waits(1, 1, "a", beat=NOW - 9.9)) == [1]
    assert ahead(waits(1, 1, "a", beat=NOW - 10)) == []


@pytest.mark.parametrize("beat", [None, "now", NOW + 11, float("inf"), float("nan"), 10**400, True])
def test_a_beat_that_cannot_be_is_none(beat: object) -> None:
    assert ahead(waits(1, 1, "a", beat=beat)) == []


def test_an_empty_record_is_not_before_us() -> None:
    assert ahead(Entry(slot=1, waits=True, record={})) == []


def test_the_next_number() -> None:
    assert queue.next_ticket([]) == 1
    holder = Entry(slot=3, waits=False, record={"ticket": 40})
    assert queue.next_ticket([waits(1, 4), waits(2, 2), holder]) == 5
    assert queue.next_ticket([waits(1, MOST)]) == MOST
    assert queue.next_ticket([waits(1, MOST + 1)]) == 1


def test_a_gpu_is_kept_for_the_first_waiter_that_may_choose_it() -> None:
    one, two, any_of_them = waits(1, 1, "a"), waits(2, 2, "a", "b"), waits(3, 3)
    assert queue.kept_for([one, two], "a") is one
    assert queue.kept_for([one, two], "b") is two
    assert queue.kept_for([one, two], "c") is None
    assert queue.kept_for([one, two, any_of_them], "c") is any_of_them


def in_the_way(*entries: Entry, wants: str, count: int = 1) -> list[int]:
    return [e.slot for e in queue.in_the_way(entries, wants=frozenset(wants), count=count)]


def test_in_the_way_are_those_that_must_leave_before_there_are_enough_to_choose_from() -> None:
    line = waits(1, 1, "a"), waits(2, 2, "b"), waits(3, 3, "c")
    assert in_the_way(*line, wants="abcd") == []
    assert in_the_way(*line, wants="abcd", count=2) == [1], "then a and d are left"
    assert in_the_way(*line, wants="abcd", count=4) == [1, 2, 3]
    assert in_the_way(*line, wants="ab") == [1], "then a is left"
    assert in_the_way(*line, wants="b") == [1, 2]
    assert in_the_way(waits(1, 1), waits(2, 2, "a"), wants="ab") == [1], "one waits for any"
    assert in_the_way(wants="a") == []


GPUS = st.sets(st.sampled_from("abcd"), min_size=1)
LINES = st.lists(st.tuples(GPUS, st.booleans(), st.floats(0, 20)), min_size=1, max_size=8).flatmap(
    lambda people: st.permutations(list(enumerate(people, 1)))
)


@given(LINES, st.data())
def test_somebody_is_always_first_and_nobody_waits_for_the_stuck(
    people: list[tuple[int, tuple[set[str], bool, float]]], data: st.DataObject
) -> None:
    """For each: exactly those who are well, came earlier and want any of the same."""
    entries = {
        ticket: waits(ticket, ticket, *sorted(gpus), beat=NOW - age)
        for ticket, (gpus, _, age) in people
    }
    stopped = {ticket for ticket, (_, is_stopped, _) in people if is_stopped}
    well = {t for t, (_, is_stopped, age) in people if not is_stopped and age < 10}
    firsts = set()
    for ticket, (gpus, _, _) in people:
        others = [entry for number, entry in entries.items() if number != ticket]
        found = ahead(*others, wants="".join(gpus), ticket=ticket, stopped=stopped)
        assert found == sorted(
            other
            for other, (wanted, _, _) in people
            if other in well and other < ticket and wanted & gpus
        )
        if not found:
            firsts.add(ticket)
    assert min(t for t, _ in people) in firsts


# ---- standing in it --------------------------------------------------------------------------

STAND = """
place = queue.join(registry.about_me(), wanted=1, gpus=frozenset(["GPU-0"]))
print(place.ticket)
hear()
place.leave()
print("left")
hear()
"""

BEHIND = """
place = queue.join(registry.about_me(), wanted=1, gpus=frozenset(["GPU-0"]))
(first,) = registry.read(place.slot.handle)
print("asleep")
start, used = time.monotonic(), time.process_time()
gone = place.sleep_behind(first, 30)
print(gone, time.clock_gettime(time.CLOCK_MONOTONIC), time.process_time() - used < 0.05)
"""


@pytest.mark.parametrize("how", ["leaves", "is killed", "is served"])
def test_the_kernel_wakes_who_stands_behind(lock_folder: Path, how: str) -> None:
    served = STAND.replace("place.leave()", "place.slot.hold_begins()")
    with locker(served if how == "is served" else STAND) as one:
        assert one.heard() == "1"
        with locker(BEHIND) as other:
            assert other.heard() == "asleep"
            time.sleep(0.1)
            then = time.clock_gettime(time.CLOCK_MONOTONIC)
            if how == "is killed":
                one.process.kill()
            else:
                one.go_on()
            gone, woken, was_cheap = other.heard().split()
            assert gone == "True"
            assert float(woken) - then < 5  # far from 30: these machines are shared
            assert was_cheap == "True"


def test_sleeping_ends_when_time_is_up_and_wakes_the_next_time(lock_folder: Path) -> None:
    with locker(STAND) as one:
        one.heard()
        place = join(registry.about_me(), wanted=1, gpus=frozenset(["GPU-0"]))
        (first,) = registry.read(place.slot.handle)
        assert not place.sleep_behind(first, 0.01)
        assert place.is_behind(first)
        one.go_on()
        one.heard()
        assert place.sleep_behind(first, 20)
        assert not place.is_behind(first)
        place.leave()
    assert registry.entries() == ()


def test_one_who_is_stopped_is_not_stood_behind(lock_folder: Path) -> None:
    with locker(STAND) as one:
        one.heard()
        place = join(registry.about_me(), wanted=1, gpus=frozenset(["GPU-0"]))
        (first,) = registry.read(place.slot.handle)
        assert place.is_behind(first)
        os.kill(one.pid, signal.SIGSTOP)
        until(lambda: not place.is_behind(first))
        place.leave()


def test_a_slot_that_somebody_else_has_by_now_is_not_stood_behind(lock_folder: Path) -> None:
    one = join(registry.about_me(), wanted=1, gpus=frozenset(["GPU-0"]))
    two = join(registry.about_me(), wanted=1, gpus=frozenset(["GPU-0"]))
    first = next(entry for entry in registry.entries() if entry.ticket == one.ticket)
    one.leave()
    again = join(registry.about_me(), wanted=1, gpus=frozenset(["GPU-0"]))
    assert again.slot.number == first.slot
    assert not two.is_behind(first)
    two.leave()
    again.leave()


@pytest.mark.parametrize("replaced", [False, True])
def test_who_waits_comes_back_when_the_board_is_removed(lock_folder: Path, replaced: bool) -> None:
    place = join(registry.about_me(), wanted=3, gpus=frozenset(["GPU-0", "GPU-1"]))
    (before,) = registry.entries()
    (lock_folder / "board").unlink()
    if replaced:
        os.close(registry.opened())
    assert registry.entries() == ()
    place.beat()
    (entry,) = registry.entries()
    assert (entry.ticket, entry.gpus) == (before.ticket, ("GPU-0", "GPU-1"))
    assert entry.beat is not None
    assert before.beat is not None
    assert entry.beat > before.beat
    place.leave()
    assert registry.entries() == ()


def test_a_spoiled_board_wakes_nobody_and_says_nothing_of_its_own(lock_folder: Path) -> None:
    """The thread that sleeps cannot be told; whoever looks next gets the error."""
    place = join(registry.about_me(), wanted=1, gpus=frozenset(["GPU-0"]))
    (lock_folder / "board").unlink()
    (lock_folder / "board").mkdir()
    gone = Entry(slot=(place.slot.number + 1) % registry.SLOTS, waits=True, record={"ticket": 1})
    assert not place.sleep_behind(gone, 0.1)
    with pytest.raises(OSError, match="a folder stands in its place"):
        place.beat()
    place.leave()


def test_numbers_are_given_in_turn(lock_folder: Path) -> None:
    places = [join(registry.about_me(), wanted=1, gpus=frozenset(["GPU-0"])) for _ in range(5)]
    assert [place.ticket for place in places] == [1, 2, 3, 4, 5]
    for place in places:
        place.leave()
