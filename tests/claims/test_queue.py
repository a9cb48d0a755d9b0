"""The queue: who comes first, and seeing when that one is gone."""

from __future__ import annotations

import os
import signal
import struct
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gpuaff._system import kernel
from gpuaff.claims.locking import queue, registry
from gpuaff.claims.locking.queue import TOO_LONG, Place
from gpuaff.claims.locking.registry import Entry
from tests.claims.lockers import locker, until
from tests.programs.locking import stand

NOW = 100.0


def waits(slot: int, ticket: int, *gpus: str, beat: float = NOW, **more: Any) -> Entry:
    return Entry(slot=slot, waits=True, gpus=gpus, ticket=ticket, beat=beat, **more)


def ahead(*entries: Entry, wants: str = "a") -> list[int]:
    return [entry.slot for entry in queue.ahead(entries, wants=frozenset(wants), now=NOW)]


@pytest.mark.parametrize("beat", [0.0, NOW - 10, NOW + 11, float("inf"), float("nan"), -1e300])
def test_a_beat_that_is_old_or_cannot_be_passes_a_waiter_over(beat: float) -> None:
    assert ahead(waits(1, 1, "a", beat=NOW - 9.9)) == [1]
    assert ahead(waits(1, 1, "a", beat=beat)) == []


def test_a_holder_and_an_empty_record_are_not_before_us() -> None:
    assert ahead(Entry(slot=1, waits=False, gpus=("a",), ticket=1, beat=NOW)) == []
    assert ahead(Entry(slot=1, waits=True, is_written=False, beat=NOW)) == []


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


# ---- standing in it --------------------------------------------------------------------------

STAND = """
place = stand()
print(registry.tickets(place.slot.handle)[place.slot.number])
hear()
place.slot.release()
print("left")
hear()
"""


def others(place: Place) -> list[Entry]:
    return sorted(place.entries(), key=lambda entry: entry.ticket)


def seconds(work: Callable[[], object]) -> float:
    start = time.monotonic()
    work()
    return time.monotonic() - start


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


@pytest.mark.parametrize("how", ["is stopped", "does not beat"])
def test_one_in_the_way_that_is_passed_over_is_noticed_within_a_second(
    lock_folder: Path, how: str
) -> None:
    with locker(STAND) as one:
        one.heard()
        place = stand()
        (first,) = others(place)
        if how == "is stopped":
            os.kill(one.pid, signal.SIGSTOP)
            until(lambda: registry.stopped([first]) == {first.slot})
        else:
            at = registry.TICKETS.size + 8 * first.slot
            stale = struct.pack("<d", kernel.uptime() - TOO_LONG)
            os.pwrite(place.slot.handle, stale, at)
        assert seconds(lambda: place.wait_behind([first])) < 3, "0.8 s, far from 10"
        place.slot.release()


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
    place = stand("GPU-0", "GPU-1")
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


def test_a_claim_that_does_not_wait_yet_moves_to_the_new_file_too(lock_folder: Path) -> None:
    place = queue.Place()
    (lock_folder / "registry").unlink()
    place.renew()
    assert place.slot.is_current
    reader = registry.opened()
    assert registry.beats(reader)[place.slot.number] > 0, "a new reader sees it"
    os.close(reader)
    place.slot.release()


def test_who_waits_beats(lock_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with locker(STAND) as one:
        one.heard()
        place = stand()
        (first,) = others(place)
        start = kernel.uptime()
        monkeypatch.setattr(queue, "BEAT", 0.3)
        place.wait_behind([first], 0.6)
        assert registry.beats(place.slot.handle)[place.slot.number] >= start + 0.3
        # One that sleeps for longer than that beats as soon as it wakes.
        monkeypatch.setattr(queue, "_NEAR_POLLS", 0.4)
        start = kernel.uptime()
        place.wait_behind([first], 0.4)
        assert registry.beats(place.slot.handle)[place.slot.number] >= start + 0.4
        place.slot.release()


def test_the_first_waiter_sees_a_claim_end(lock_folder: Path) -> None:
    holder, place = registry.Slot(), stand()
    holder.hold_begins()
    holding = frozenset([holder.number])
    assert seconds(lambda: place.wait_for_gpus(holding, (), 0.3)) >= 0.3
    holder.release()
    assert seconds(lambda: place.wait_for_gpus(holding, ())) < 0.5
    place.slot.release()
