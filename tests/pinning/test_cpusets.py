"""Real cpusets: the border that the kernel draws, also when it moves."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import cpusets
from tests.fakedriver.driver import FakeDriver
from tests.processes import CPUS, THREADS, Program, masks, run, stopped

pytestmark = [
    pytest.mark.fake_driver,
    pytest.mark.needs("cpusets", "two-cpus"),
    pytest.mark.xdist_group("cpusets"),
]

OBEYS = (Path(__file__).parents[1] / "programs/obeys.py").read_text("utf-8")

Do = Callable[[str], Any]
Everywhere = Callable[[], set[frozenset[int]]]


@contextmanager
def inside(
    driver: FakeDriver, cpus: Iterable[int] = CPUS
) -> Iterator[tuple[cpusets.Cpuset, Do, Everywhere, Program]]:
    """A process with a second thread in a cpuset: what makes it do something, and its masks."""
    with (
        cpusets.cpuset(cpus) as box,
        stopped(OBEYS, env=driver.env(), prefix=box.join_command()) as process,
    ):

        def do(order: str) -> Any:
            process.go_on(order)
            return json.loads(process.heard())

        yield box, do, lambda: set(masks(process.pid).values()), process


@pytest.mark.case("A5", "A6", "A16", "A18")
def test_a_cpuset_is_a_border(driver: FakeDriver) -> None:
    with inside(driver, CPUS[1:]) as (_, do, _, _):
        assert do("found = gpuaff.set_affinity(0, 1)") == CPUS[1:]
        assert do("found = gpuaff.Topology.observe().allowed") == CPUS[1:]
        assert set(CPUS) <= set(do("found = gpuaff.Topology.observe().cpus"))


@pytest.mark.case("A17")
def test_a_cpuset_that_shrinks_and_grows_under_the_process(driver: FakeDriver) -> None:
    with inside(driver) as (box, do, everywhere, _):
        for call, left in (("(0, 1)", CPUS[1:]), ("(0, 2)", CPUS[-1:])):
            do(f"gpuaff.set_affinity{call}")
            box.set(left)  # the kernel moves all threads there
            assert do("found = last = gpuaff.set_affinity(0, 1)") == left, "of what is granted"
            box.set(CPUS)  # and gives them back what they requested last
            assert do("found = last.restore()") == CPUS, "the original mask is back"
            assert everywhere() == {frozenset(CPUS)}


def test_threads_that_a_cpuset_has_moved_meanwhile(driver: FakeDriver) -> None:
    with inside(driver) as (box, do, everywhere, _):
        do("gpuaff.set_affinity(0, 2)")
        box.set(CPUS[-1:])  # the kernel moves all threads there
        do("second = gpuaff.set_affinity(0, 1)")
        box.set(CPUS)  # and gives them back what they asked for last
        do("second.restore()")
        assert everywhere() == {frozenset(CPUS)}


# The cpuset changes after the machine was read and before the mask is set.
BETWEEN = """
    import json, sys
    import gpuaff
    from gpuaff.pinning import pin

    def observe(*, observed=pin.observe, **asked):
        seen = observed(**asked)
        if changes:
            with open(sys.argv[1] + "/cpuset.cpus", "w") as file:
                file.write(changes.pop(0))
        return seen

    pin.observe, ranks, changes = observe, int(sys.argv[2]), sys.argv[3:]
    affinity = gpuaff.set_affinity(0, ranks)
    codes = [warning.code for warning in affinity.warnings]
    print(json.dumps([sorted(affinity), affinity.pinned, codes]))
"""

FIRST, LAST = CPUS[0], CPUS[-1]


@pytest.mark.case("A17", "G4")
@pytest.mark.parametrize(
    ("ranks", "changes", "cpus", "is_pinned", "code"),
    [
        pytest.param(2, [LAST], [LAST], True, None, id="refused once it plans again"),
        pytest.param(1, [LAST], [LAST], True, "mask-cut", id="a share that is cut"),
        pytest.param(2, [LAST, FIRST], [FIRST], False, "pin-failed", id="refused twice"),
    ],
)
def test_a_cpuset_that_changes_during_a_call(
    driver: FakeDriver,
    ranks: int,
    changes: list[int],
    cpus: list[int],
    is_pinned: bool,
    code: str | None,
) -> None:
    with cpusets.cpuset(CPUS) as box:
        words = [str(box.folder), str(ranks), *map(str, changes)]
        done = run(BETWEEN, *words, env=driver.env(), prefix=box.join_command())
    assert done.returncode == 0, done.stderr
    found, pinned, codes = json.loads(done.stdout)
    assert (found, pinned) == (cpus, is_pinned)
    assert {"mask-cut", "pin-failed"} & set(codes) == ({code} if code else set())


FAILS = [
    "gpuaff.set_affinity(0, 2, memory='bind:900')",
    "pin.plan_for_rank = lambda *_: 1 / 0; gpuaff.set_affinity(0, 2, strict=True)",
]


@pytest.mark.parametrize("order", FAILS)
@pytest.mark.case("A17", "G4")
def test_a_call_that_fails_while_a_cpuset_has_taken_the_share_away(
    driver: FakeDriver, order: str
) -> None:
    """Every thread has then asked for what it had asked for before."""
    with inside(driver) as (box, do, everywhere, _):
        share = do("found = gpuaff.set_affinity(1, 2)")
        box.set(sorted(set(CPUS) - set(share)))
        do(f"import os; from gpuaff.pinning import pin; {order}")
        box.set(CPUS)
        assert everywhere() == {frozenset(share)}


@pytest.mark.parametrize("grown", [True, False], ids=["grown", "still away"])
@pytest.mark.parametrize("order", ["affinity.restore()", "affinity.__exit__(None, None, None)"])
@pytest.mark.case("A17", "G4")
def test_restore_while_a_cpuset_has_taken_the_share_away(
    driver: FakeDriver, order: str, grown: bool
) -> None:
    with inside(driver) as (box, do, everywhere, _):
        share = do("found = affinity = gpuaff.set_affinity(1, 2)")
        box.set(sorted(set(CPUS) - set(share)))
        if grown:
            box.set(CPUS)
        do(order)
        box.set(CPUS)
        assert everywhere() == {frozenset(CPUS)}


def test_restore_that_has_to_wait_for_the_cpuset(driver: FakeDriver) -> None:
    """While not one CPU of the original mask can be had it is not undone, and can be later."""
    with inside(driver, CPUS[-1:]) as (box, do, everywhere, _):
        share = do("found = affinity = gpuaff.set_affinity(1, 2)")
        box.set(CPUS[:1])
        assert do("affinity.restore(); found = gpuaff.check().expected") == share
        box.set(CPUS[-1:])
        assert do("affinity.restore(); found = gpuaff.check().expected") is None
        assert everywhere() == {frozenset(CPUS[-1:])}


@pytest.mark.case("C10", "G4")
def test_reapply_inside_a_cpuset_that_shrank(driver: FakeDriver) -> None:
    with inside(driver) as (box, do, _, process):
        do("affinity = gpuaff.set_affinity(0, 1)")
        box.set(CPUS[:1])
        assert do("found = affinity.reapply()") == CPUS[:1]
        process.kill()
        assert "mask-cut" in process.errors()


def test_reapply_inside_a_cpuset_that_has_none_of_it_left(driver: FakeDriver) -> None:
    with inside(driver) as (box, do, _, process):
        share = do("found = affinity = gpuaff.set_affinity(0, 2)")
        left = sorted(set(CPUS) - set(share))
        box.set(left)
        assert do("found = affinity.reapply()") == left, "it stays where the kernel has put it"
        box.set(CPUS)
        assert do("found = affinity.reapply()") == share
        process.kill()
        assert "pin-failed" in process.errors()


REFUSED = """
tid, first = tid_bound_to(None), gpuaff.set_affinity(0, 2)
print(json.dumps([tid, sorted(first)]))
sys.stdin.readline()
second = gpuaff.set_affinity(1, 2)
print(json.dumps([sorted(second), codes(second)]))
sys.stdin.readline()
"""


@pytest.mark.skipif(not cpusets.V1, reason="not here: threads have cpusets in version 1 alone")
def test_a_thread_that_a_cpuset_of_its_own_holds_is_told(driver: FakeDriver) -> None:
    with stopped(THREADS + REFUSED, env=driver.env()) as process:
        tid, first = json.loads(process.heard())
        with cpusets.cpuset(first) as box:
            (box.folder / "tasks").write_text(str(tid))
            process.go_on()
            second, codes = json.loads(process.heard())
            assert masks(process.pid)[tid] == frozenset(first)
        assert not set(first) & set(second)
        assert codes == ["threads-refused"]
