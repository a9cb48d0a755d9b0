"""``spread``: worker processes on their parts, however they are started. Real processes."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import pytest

import gpuaff
from tests import seccomp
from tests.fakedriver.driver import FakeDriver
from tests.pinning.conftest import of_script
from tests.processes import (
    CPUS,
    THREADS,
    cores_of_this_machine,
    printed,
    run,
    worker_cpus,
)

pytestmark = [pytest.mark.fake_driver, pytest.mark.timeout(120)]


CORES = cores_of_this_machine()
REST = worker_cpus()
"""What is left to workers when the main process has a core."""

START = """
import json, multiprocessing, os, sys
import gpuaff

def work(worker, workers, queue):
    affinity = gpuaff.spread(worker, workers)
    here = gpuaff.check()
    seen = sorted(os.sched_getaffinity(0))
    said = {"cpus": sorted(affinity), "seen": seen, "ok": here.ok, "pinned": affinity.pinned}
    queue.put([worker, said])

def idle():
    pass

def ask(context, workers):
    queue = context.Queue()
    started = [
        context.Process(target=work, args=(worker, workers, queue)) for worker in range(workers)
    ]
    for process in started:
        process.start()
    found = [queue.get(timeout=60) for _ in started]
    for process in started:
        process.join()
    return [said for _, said in sorted(found, key=lambda one: one[0])]

if __name__ == "__main__":
    method, early = sys.argv[1:]
    context = multiprocessing.get_context(method)
    if early == "early":  # the fork server keeps the mask that it starts with
        first = context.Process(target=idle)
        first.start()
        first.join()
    gpuaff.set_affinity(0, int(os.environ["RANKS"]))
    print(json.dumps([sorted(os.sched_getaffinity(0)), ask(context, 2)]))
"""


def workers(
    driver: FakeDriver, folder: Path, *words: str, ranks: int
) -> tuple[set[int], list[dict[str, Any]]]:
    """The CPUs of a rank, and what its two workers say."""
    ((main, found),) = of_script(folder, START, *words, env={**driver.env(), "RANKS": str(ranks)})
    assert len(found) == 2
    assert all(one["cpus"] == one["seen"] for one in found)
    return set(main), found


@pytest.mark.case("C10")
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_leave_a_core_to_the_main_process(
    driver: FakeDriver, tmp_path: Path, method: str
) -> None:
    main, (first, second) = workers(driver, tmp_path, method, "late", ranks=1)
    assert main == set(CPUS), "it is not moved"
    assert {*first["cpus"], *second["cpus"]} == REST
    assert all(one["ok"] and one["pinned"] for one in (first, second))
    if len(CORES) > 2:
        assert set(first["cpus"]).isdisjoint(second["cpus"])


@pytest.mark.case("B19")
@pytest.mark.needs("two-cpus")
@pytest.mark.parametrize(
    ("method", "early"),
    [
        ("forkserver", "early"),
        pytest.param("spawn", "early", marks=pytest.mark.slow),
        pytest.param("fork", "early", marks=pytest.mark.slow),
    ],
)
def test_workers_stay_inside_the_ranks_share(
    driver: FakeDriver, tmp_path: Path, method: str, early: str
) -> None:
    """Also where the fork server was started before the rank was pinned, with all CPUs."""
    main, found = workers(driver, tmp_path, method, early, ranks=2)
    assert main < set(CPUS)
    assert all(main.issuperset(one["cpus"]) for one in found)


def test_wrong_numbers_raise() -> None:
    for numbers in ((0, 0), (2, 2), (-1, 2), ("0", 2), (0, 1.5), (True, 2)):
        with pytest.raises(gpuaff.InvalidOptionError):
            gpuaff.spread(*numbers)


def test_it_is_logged_where_the_worker_is_and_off_leaves_it() -> None:
    script = """
import logging
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
gpuaff.spread(0, 2).restore()
os.environ["GPUAFF"] = "off"
part = gpuaff.spread(0, 2)
holds(part == before, not part.pinned, codes(part) == ["off"])
"""
    assert printed(THREADS + script).startswith("gpuaff: worker 0 of 2 -> cpus ")


@pytest.mark.parametrize("call", [203, 204])  # sched_setaffinity, sched_getaffinity on x86-64
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers are x86-64's")
def test_a_refusal_is_said_once_and_leaves_everything(call: int) -> None:
    script = """
import gpuaff
for _ in range(2):
    part = gpuaff.spread(0, 2)
    print(part.pinned, [warning.code for warning in part.warnings])
"""
    done = run(script, prefix=seccomp.refusing(1, call))
    assert done.stdout.splitlines() == ["False ['pin-failed']"] * 2, done.stderr
    assert done.stderr.count("pin-failed") == 1
    quiet = run(script.replace("spread(0, 2)", "spread(1, 2)"), prefix=seccomp.refusing(1, call))
    assert "pin-failed" in quiet.stdout
    assert quiet.stderr == "", "worker 0 says it for all"
