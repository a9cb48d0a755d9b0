"""Plays every scenario, one after the other, and writes what it found as lines of JSON."""

from __future__ import annotations

import json
import sys
import time
import traceback
from contextlib import ExitStack
from typing import Any

from tests import cpusets
from tests.fakedriver.driver import FakeDriver
from tests.numa_machine.inside.scenarios import SCENARIOS, Scenario
from tests.numa_machine.inside.world import World, all_online, make_driver


def main(wanted: list[str]) -> None:
    """Write to /dev/ttyS1: for each scenario its name, how long it took, and what it found."""
    if not cpusets.available():
        raise OSError("this kernel has no cpusets")
    driver = make_driver()
    with open("/dev/ttyS1", "w", encoding="ascii") as out:  # noqa: PTH123 - a device
        for name, scenario in SCENARIOS.items():
            if not wanted or name in wanted:
                print(json.dumps({"scenario": name, **_played(scenario, driver)}), file=out)
                out.flush()


def _played(scenario: Scenario, driver: FakeDriver) -> dict[str, Any]:
    start = time.monotonic()
    try:
        with ExitStack() as stack:
            found: dict[str, Any] = {"found": scenario(World(driver, stack))}
    except Exception:  # noqa: BLE001 - its test fails with it; the others go on
        found = {"raised": traceback.format_exc()}
    all_online()
    return {**found, "seconds": round(time.monotonic() - start, 1)}


if __name__ == "__main__":
    main(sys.argv[1:])
