"""The queue: who comes first, and seeing when that one is gone."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuaff._system import kernel, locks
from gpuaff.claims.locking import queue, registry
from gpuaff.claims.locking.queue import TOO_LONG, Place, join
from gpuaff.claims.locking.registry import MOST, Entry
from gpuaff.errors import LockDirectoryError
from tests.claims.lockers import locker, until

NOW = 100.0


def waits(slot: int, ticket: int, *gpus: str, beat: float = NOW, **more: Any) -> Entry:
    return Entry(slot=slot, waits=True, gpus=gpus, ticket=ticket, beat=beat, **more)


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
    holder = Entry(slot=1, waits=False, gpus=("a",), ticket=1, beat=NOW)
    assert ahead(holder) == []


def test_the_stopped_and_the_stuck_are_passed_over() -> None:
    assert ahead(waits(1, 1, "a"), stopped={1}) == []
    assert ahead(waits(1, 1, "a", beat=NOW - 9.9)) == [1]
    assert ahead(waits(1, 1, "a", beat=NOW - 10)) == []


@pytest.mark.parametrize("beat", [0.0, NOW + 11, float("inf"), float("nan"), -1e300])
def test_a_beat_that_cannot_be_counts_as_none(beat: float) -> None:
    assert ahead(waits(1, 1, "a", beat=beat)) == []


def test_an_empty_record_is_not_before_us() -> None:
    assert ahead(Entry(slot=1, waits=True, is_written=False, beat=NOW)) == []


def test_the_next_number() -> None:
    assert queue.next_ticket([]) == 1
    holder = Entry(slot=3, waits=False, name="a", ticket=40)
    assert queue.next_ticket([waits(1, 4), waits(2, 2), holder]) == 5
    assert queue.next_ticket([waits(1, MOST)]) == MOST


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
place.slot.release()
print("left")
hear()
"""

BEHIND = """
place = queue.join(registry.about_me(), wanted=1, gpus=frozenset(["GPU-0"]))
(first,) = place.entries()
print("waits")
used = time.process_time()
place.wait_behind([first])
print(registry.still_waits(place.slot.handle, first), time.clock_gettime(time.CLOCK_MONOTONIC))
print(time.process_time() - used)
"""


def stand() -> Place:
    return join(registry.about_me(), wanted=1, gpus=frozenset(["GPU-0"]))


def others(place: Place) -> list[Entry]:
    return sorted(place.entries(), key=lambda entry: entry.ticket)


def seconds(work: Callable[[], object]) -> float:
    start = time.monotonic()
    work()
    return time.monotonic() - start


@pytest.mark.parametrize("how", ["leaves", "is killed", "is served"])
def test_a_waiter_sees_that_the_one_before_has_gone(lock_folder: Path, how: str) -> None:
    served = STAND.replace("place.slot.release()", "place.slot.hold_begins()")
    with locker(served if how == "is served" else STAND) as one:
        assert one.heard() == "1"
        with locker(BEHIND) as other:
            assert other.heard() == "waits"
            time.sleep(0.1)
            then = time.clock_gettime(time.CLOCK_MONOTONIC)
            if how == "is killed":
                one.kill()
            else:
                one.go_on()
            still_waits, seen = other.heard().split()
            assert still_waits == "False"
            assert float(seen) - then < 3, "0.2 s, and these machines are shared"
            assert float(other.heard()) < 0.05, "seconds of CPU"


def test_waiting_ends_when_time_is_up_and_at_once_the_next_time(lock_folder: Path) -> None:
    with locker(STAND) as one:
        one.heard()
        place = stand()
        (first,) = others(place)
        assert 0.3 <= seconds(lambda: place.wait_behind([first], 0.3)) < 3
        assert registry.still_waits(place.slot.handle, first)
        one.go_on()
        one.heard()
        assert seconds(lambda: place.wait_behind([first])) < 3
        assert not registry.still_waits(place.slot.handle, first)
        place.slot.release()
    assert registry.entries() == ()


def test_one_who_is_stopped_is_noticed_within_a_second(lock_folder: Path) -> None:
    with locker(STAND) as one:
        one.heard()
        place = stand()
        (first,) = others(place)
        os.kill(one.pid, signal.SIGSTOP)
        until(lambda: registry.stopped([first]) == {first.slot})
        assert seconds(lambda: place.wait_behind([first])) < 3, "0.8 s, far from 10"
        place.slot.release()


def test_one_who_has_not_beaten_for_long_is_noticed(lock_folder: Path) -> None:
    one, two = stand(), stand()
    (first,) = others(two)
    at = registry.TICKETS.size + 8 * one.slot.number
    locks.write_at(one.slot.handle, at, struct.pack("<d", kernel.uptime() - TOO_LONG))
    assert seconds(lambda: two.wait_behind([first])) < 3, "0.8 s, far from 10"
    one.slot.release()
    two.slot.release()


def test_one_far_back_looks_again_when_the_one_half_way_has_left(lock_folder: Path) -> None:
    places = [stand() for _ in range(12)]
    last = places.pop()
    before = others(last)
    assert [entry.ticket for entry in before] == list(range(1, 12))
    places[0].slot.release()
    assert seconds(lambda: last.wait_behind(before, 1.5)) >= 1.5, "the half way one is there"
    places[5].slot.release()
    assert seconds(lambda: last.wait_behind(before, 15)) < 5, "1.1 s"
    for place in [*places, last]:
        place.slot.release()


def test_after_a_change_a_near_waiter_polls_fast(lock_folder: Path) -> None:
    """So of eight GPUs that are freed at once, the last goes to the eighth within 0.5 s."""
    places = [stand() for _ in range(8)]
    last = places.pop()
    before = others(last)
    chain = 0.0
    for place in places:
        place.slot.release()
        chain += seconds(partial(last.wait_behind, before))
        before = others(last)
    assert before == []
    last.slot.release()
    assert chain < 1, "0.2 s for the first change and 0.01 s for each of six"


def test_a_waiter_sees_that_one_has_gone_that_is_not_in_its_way(lock_folder: Path) -> None:
    """It wanted what an earlier one waits for, too: now its other GPU may be had."""
    one, two, three = stand(), stand(), stand()
    first, _ = others(three)
    two.slot.release()
    assert seconds(lambda: three.wait_behind([first])) < 3, "0.2 s, far from 10"
    one.slot.release()
    three.slot.release()


def test_a_slot_that_another_has_by_now_is_not_waited_for(lock_folder: Path) -> None:
    one, two = stand(), stand()
    (first,) = others(two)
    one.slot.release()
    again = stand()
    assert again.slot.number == first.slot
    assert not registry.still_waits(two.slot.handle, first)
    two.slot.release()
    again.slot.release()


@pytest.mark.parametrize("replaced", [False, True])
def test_who_waits_comes_back_when_the_file_is_removed(lock_folder: Path, replaced: bool) -> None:
    place = join(registry.about_me(), wanted=3, gpus=frozenset(["GPU-0", "GPU-1"]))
    (before,) = registry.entries()
    (lock_folder / "registry").unlink()
    if replaced:
        os.close(registry.opened())
    assert registry.entries() == ()
    place.beat()
    (entry,) = registry.entries()
    assert (entry.ticket, entry.gpus) == (before.ticket, ("GPU-0", "GPU-1"))
    assert entry.beat > before.beat
    place.slot.release()
    assert registry.entries() == ()


def test_a_spoiled_registry_is_an_error_at_the_next_beat(lock_folder: Path) -> None:
    place = stand()
    (lock_folder / "registry").unlink()
    (lock_folder / "registry").mkdir()
    with pytest.raises(LockDirectoryError, match="a folder stands in its place"):
        place.beat()
    place.slot.release()


def test_who_waits_beats(lock_folder: Path) -> None:
    with locker(STAND) as one:
        one.heard()
        place = stand()
        (first,) = others(place)
        start = kernel.uptime()
        place.wait_behind([first], queue.BEAT + 0.5)
        assert registry.tables(place.slot.handle)[1][place.slot.number] >= start + queue.BEAT
        place.slot.release()


def test_the_first_waiter_sees_a_claim_end(lock_folder: Path) -> None:
    holder, place = registry.take(), stand()
    holder.hold_begins()
    holding = frozenset([holder.number])
    assert seconds(lambda: place.wait_for_gpus(holding, (), 0.3)) >= 0.3
    holder.release()
    assert seconds(lambda: place.wait_for_gpus(holding, ())) < 0.5
    place.slot.release()


def test_the_first_waiter_sees_a_process_end(lock_folder: Path) -> None:
    place, other = stand(), subprocess.Popen(["sleep", "60"])

    def end() -> None:
        other.kill()
        other.wait()

    threading.Timer(0.2, end).start()
    assert 0.2 <= seconds(lambda: place.wait_for_gpus(frozenset(), [other.pid])) < 0.8
    assert seconds(lambda: place.wait_for_gpus(frozenset(), [other.pid], 0.02)) >= 0.02
    place.slot.release()


def test_numbers_are_given_in_turn(lock_folder: Path) -> None:
    places = [stand() for _ in range(5)]
    assert [place.ticket for place in places] == [1, 2, 3, 4, 5]
    for place in places:
        place.slot.release()
