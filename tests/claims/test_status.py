"""Who has which GPU and who waits, from what was seen; by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import pytest

from gpuaff._system.processes import ProcessInfo
from gpuaff.claims.locking.registry import Entry
from gpuaff.claims.model import Usage
from gpuaff.claims.status import (
    FOREIGN_PIDS,
    Kind,
    LeaseStatus,
    Snapshot,
    status_of,
)
from tests.claims.lockers import written
from tests.claims.readings import CONTEXT, gpu, idle, instance, used_by

HELD = (written({"pid": 101, "name": "python", "since": 50.0, "gpus": ["GPU-0"]}, waits=False),)
"""The entry of a claimer, slot 1."""

WRITTEN = ProcessInfo(pid=101, command="python", since=50.0)
"""The claimer by what it has written."""


def process(pid: int, command: str = "train.py", user: str = "ann") -> ProcessInfo:
    return ProcessInfo(pid=pid, command=command, user=user, since=10.0)


def sight(*processes: ProcessInfo, entries: Sequence[Entry] = (), **seen: Any) -> Snapshot:
    """One idle GPU, ``GPU-0``, and what else is said; no claimer is visible."""
    readings = seen.pop("readings", (idle(),))
    found: dict[str, Any] = {
        "usages": tuple(Usage(device=reading.device) for reading in readings),
        "entries": tuple(entries),
        "living": (),
        "well": (),
        "processes": {one.pid: one for one in processes},
        "holders": {},
        "opened": {},
        "notices": (),
        **seen,
    }
    return Snapshot(readings=readings, **found)


def process_of(found: ProcessInfo) -> ProcessInfo:
    """The process alone, without what it has or does."""
    names = [field.name for field in fields(ProcessInfo)]
    return ProcessInfo(**{name: getattr(found, name) for name in names})


class TestLease:
    def lease(self, seen: Snapshot) -> LeaseStatus:
        (found,) = status_of(seen).gpus
        assert found.lease is not None
        return found.lease

    @pytest.mark.parametrize(
        ("seen", "claimer", "gone"),
        [
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
