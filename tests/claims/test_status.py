"""Who has which GPU and who waits, from what was seen; by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import pytest

from gpuaff._system.processes import ProcessInfo
from gpuaff.claims.devices.probe import writer_of
from gpuaff.claims.locking.registry import Entry
from gpuaff.claims.model import Busy, Usage
from gpuaff.claims.status import (
    FOREIGN_PIDS,
    Kind,
    LeaseStatus,
    Snapshot,
    Status,
    Writer,
    status_of,
)
from gpuaff.cli.status import blocks
from gpuaff.formatting import plain
from tests.claims.lockers import written
from tests.claims.readings import CONTEXT, gpu, idle, instance, used_by

ALICE, BOB = 1000, 1001
NAMES = {ALICE: "ann", BOB: "bob"}


def entry(slot: int, *gpus: str, waits: bool = False, ticket: int = 0, **record: Any) -> Entry:
    told = {"pid": 100 + slot, "uid": ALICE, "name": "python", "since": 50.0, "gpus": list(gpus)}
    return written({**told, **record}, slot=slot, waits=waits, ticket=ticket)


def process(pid: int, command: str = "train.py", user: str = "ann") -> ProcessInfo:
    return ProcessInfo(pid=pid, command=command, user=user, since=10.0)


def sight(*processes: ProcessInfo, entries: Sequence[Entry] = (), **seen: Any) -> Snapshot:
    """One idle GPU, ``GPU-0``, and what else is said."""
    readings = seen.pop("readings", (idle(),))
    usages = seen.pop("usages", tuple(Usage(device=reading.device) for reading in readings))
    known = {one.pid: one for one in processes if one.pid is not None}
    living, stuck = seen.pop("living", ()), seen.pop("stuck", ())
    writers = []
    for one in entries:
        lives = one.slot in living
        found = known.get(one.pid or 0) if lives else None
        process = writer_of(one, found, NAMES.get(one.uid or 0))
        writers.append(Writer(one, process, lives, well=one.slot not in stuck))
    return Snapshot(
        readings=readings,
        usages=usages,
        processes=known,
        writers=tuple(writers),
        **{"holders": {}, "opened": {}, "notices": (), **seen},
    )


def process_of(found: ProcessInfo) -> ProcessInfo:
    """The process alone, without what it has or does."""
    names = [field.name for field in fields(ProcessInfo)]
    return ProcessInfo(**{name: getattr(found, name) for name in names})


def text(status: Status) -> list[str]:
    return "\n".join(map(plain, blocks(status))).splitlines()


CLAIMER = ProcessInfo(pid=101, command="train.py", user="ann", since=50.0)
"""The process of slot 1, where it is visible."""

WRITTEN = replace(CLAIMER, command="python")
"""The same by what it has written."""

HELD = (entry(1, "GPU-0"),)


class TestLease:
    def lease(self, seen: Snapshot) -> LeaseStatus:
        (found,) = status_of(seen).gpus
        assert found.busy is Busy.LEASED
        assert found.lease is not None
        return found.lease

    @pytest.mark.parametrize(
        ("seen", "claimer", "gone"),
        [
            (
                sight(process(101), entries=HELD, living={1}, holders={"GPU-0": (101,)}),
                CLAIMER,
                False,
            ),
            # In another container: its locks are not visible, and its number is another process's.
            (sight(process(101, "innocent"), entries=HELD), WRITTEN, None),
            # The registry does not have it; then the process's age is not the lease's.
            (
                sight(process(9, "other"), holders={"GPU-0": (9,)}),
                ProcessInfo(pid=9, command="other", user="ann"),
                False,
            ),
            (sight(holders={"GPU-0": (9,)}), ProcessInfo(pid=9), True),
            (sight(holders={"GPU-0": (None,)}), ProcessInfo(), None),
            # A forged record.
            (
                sight(
                    entries=(written({"pid": "x", "uid": [], "gpus": ["GPU-0", 3]}, waits=False),)
                ),
                ProcessInfo(),
                None,
            ),
        ],
    )
    def test_the_claimer(self, seen: Snapshot, claimer: ProcessInfo, gone: bool | None) -> None:
        lease = self.lease(seen)
        assert process_of(lease) == claimer
        assert lease.gone is gone

    def test_whose_claimer_has_ended(self) -> None:
        """Its number may be another process's by now, which may hold the lease, too."""
        others = process(101, "innocent"), process(7, "loader.py")
        lease = self.lease(sight(*others, entries=HELD, holders={"GPU-0": (101, 101, 7)}))
        assert process_of(lease) == WRITTEN
        assert lease.gone is True
        assert [one.command for one in lease.sharers] == ["loader.py", "innocent"]


class TestProcesses:
    def test_what_they_do(self) -> None:
        reading = idle(compute={1: CONTEXT, 2: 5}, graphics={2: 7, 3: None})
        seen = sight(process(1), process(2, "both"), readings=(reading,), opened={0: {1, 4}})
        uses = status_of(seen).gpus[0].uses
        told = [(use.pid, use.command, use.kind, use.memory) for use in uses]
        assert told == [
            (1, "train.py", Kind.COMPUTE, CONTEXT),
            (2, "both", Kind.GRAPHICS, 7),
            (3, None, Kind.GRAPHICS, None),
            (4, None, Kind.OPEN, None),
        ]

    def test_one_that_is_listed_elsewhere_is_not_here(self) -> None:
        """CUDA opens the device files of all GPUs that it sees."""
        readings = (used_by(1, device=gpu(0)), idle(gpu(1)))
        seen = sight(readings=readings, opened={0: {1}, 1: {1}})
        assert [len(found.uses) for found in status_of(seen).gpus] == [1, 0]

    def test_numbers_that_are_not_ours(self) -> None:
        seen = sight(process(1, "innocent"), readings=(used_by(1),), notices=(FOREIGN_PIDS,))
        (use,) = status_of(seen).gpus[0].uses
        assert process_of(use) == ProcessInfo(pid=1)

    def test_a_device_file_is_the_whole_gpus(self) -> None:
        seen = sight(readings=(idle(instance(1)),), opened={0: {4}})
        assert status_of(seen).gpus[0].uses == ()


class TestWaiting:
    def test_in_their_order(self) -> None:
        waiting = (
            entry(1, "GPU-0", waits=True, ticket=7, wanted=2),
            entry(2, waits=True, ticket=3, wanted=1, uid=BOB),
            entry(3, "4/GPU-0", "4/MIG-GPU-1/2/0", waits=True, ticket=8, wanted=None),
        )
        found = status_of(sight(process(101), entries=waiting, living={1}, stuck={2})).waiting
        told = [(one.pid, one.wanted, one.gpus, one.well) for one in found]
        assert told == [
            (102, 1, (), False),
            (101, 2, ("GPU-0",), True),
            (103, None, ("GPU-0", "MIG-GPU-1/2/0"), True),
        ]
        assert process_of(found[0]) == replace(WRITTEN, pid=102, user="bob")
        assert found[1].command == "train.py"


class TestText:
    def test_all_of_it(self) -> None:
        """Without times: nobody here tells since when."""
        leased = used_by(1, device=gpu(0), utilization=97)
        readings = (leased, idle(gpu(1), used=None), idle(gpu(2)), idle(gpu(3)))
        usages = (
            Usage(device=gpu(0), busy=Busy.LEASED, message="GPU 0: leased by train.py"),
            Usage(device=gpu(1), busy=Busy.MEMORY, message="GPU 1: memory is in use"),
            Usage(device=gpu(2)),
            Usage(device=gpu(3)),
        )
        entries = (
            entry(1, "GPU-0", since=None, name="it", pid=1),
            entry(2, "GPU-0", "GPU-3", waits=True, ticket=1, wanted=2, since=None, uid=BOB),
            entry(3, waits=True, ticket=2, wanted=1, since=None, name=""),
        )
        seen = sight(
            readings=readings,
            usages=usages,
            entries=entries,
            stuck={3},
            holders={"GPU-0": (1, 5)},
            opened={2: {8}},
            notices=(FOREIGN_PIDS,),
        )
        assert text(status_of(seen)) == [
            "GPU  name  memory          load  state  who",
            "  0  H100  521 MiB/80 GiB  97 %  busy   leased by it (pid 1) of ann, which has ended",
            "                                        held by pid 5",
            "                                        computes: pid 1, 518 MiB",
            "  1  H100                        busy   memory is in use",
            "  2  H100  3 MiB/80 GiB          free   has it open: pid 8",
            "  3  H100  3 MiB/80 GiB          kept   kept for python (pid 102) of bob",
            "",
            "waiting  who                      for",
            "     1.  python (pid 102) of bob  2 of GPU 0,3",
            "     2.  pid 103 of ann           1 of any (stopped or stuck: others pass)",
        ]
