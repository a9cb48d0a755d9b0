"""``spread``: worker processes on their parts, however they are started. Real processes."""

from __future__ import annotations

import json
import os
import platform
import sys
from pathlib import Path

import pytest

import gpuaff
from gpuaff.pinning.state import Process, State

import seccomp
from fakedriver.driver import FakeDriver
from processes import (
    CPUS,
    SRC,
    THREADS,
    cores_of_this_machine,
    environment,
    masks,
    printed,
    run,
    stopped,
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
    queue.put([sorted(affinity), sorted(os.sched_getaffinity(0)), here.ok, affinity.pinned])

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
    return sorted(found)

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


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A file: what is spawned imports it again."""
    file = tmp_path / "start.py"
    file.write_text(START)
    return file


def found(
    driver: FakeDriver, script: Path, *arguments: str, ranks: int
) -> tuple[set[int], list[tuple[set[int], set[int], bool, bool]]]:
    env = {**environment(), **driver.env(), "RANKS": str(ranks)}
    done = driver.run([sys.executable, str(script), *arguments], env=env, timeout=100)
    assert done.returncode == 0, done.stderr
    main, workers = json.loads(done.stdout)
    return set(main), [(set(got), set(seen), ok, pinned) for got, seen, ok, pinned in workers]


@pytest.mark.case("C10")
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_leave_a_core_to_the_main_process(
    driver: FakeDriver, script: Path, method: str
) -> None:
    main, workers = found(driver, script, method, "late", ranks=1)
    assert main == set(CPUS), "it is not moved"
    assert len(workers) == 2
    assert frozenset().union(*(seen for _, seen, _, _ in workers)) == REST
    for got, seen, ok, pinned in workers:
        assert (got, ok, pinned) == (seen, True, True)
    if len(CORES) > 2:
        assert workers[0][1].isdisjoint(workers[1][1])


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
    driver: FakeDriver, script: Path, method: str, early: str
) -> None:
    """Also where the fork server was started before the rank was pinned, with all CPUs."""
    main, workers = found(driver, script, method, early, ranks=2)
    assert main < set(CPUS)
    for _, seen, _, _ in workers:
        assert seen <= main


IN_THIS_PROCESS = f"""
{THREADS}
import gpuaff
CPUS = os.sched_getaffinity(0)
"""


@pytest.mark.needs("two-cpus")
def test_all_threads_move_and_go_back() -> None:
    script = """
thread = bound_to(None)
part = gpuaff.spread(0, 1)
print(thread() == os.sched_getaffinity(0) == part, part < CPUS or len(CPUS) == 1)
print(part.restore() == CPUS == thread() == os.sched_getaffinity(0))
with gpuaff.spread(0, 1):
    print(thread() == part)
print(thread() == CPUS)
"""
    lines = printed(IN_THIS_PROCESS + script).splitlines()
    apart = len(CORES) > 1
    assert lines == [f"True {apart}", "True", "True", "True"]


@pytest.mark.needs("two-cpus")
def test_a_thread_that_was_bound_elsewhere_moves_and_goes_back() -> None:
    script = """
first = {min(CPUS)}
thread = bound_to(first)
part = gpuaff.spread(0, 1)
print(thread() == part or thread() == first < part)
part.restore()
print(thread() == first)
"""
    assert printed(IN_THIS_PROCESS + script).splitlines() == ["True", "True"]


@pytest.mark.needs("two-cpus")
def test_a_bound_thread_that_calls_it_goes_back() -> None:
    script = """
first = {min(CPUS)}
def work():
    os.sched_setaffinity(0, first)
    part = gpuaff.spread(0, 1)
    print(os.sched_getaffinity(0) == part)
    part.restore()
    print(os.sched_getaffinity(0) == first)
in_a_thread(work)
"""
    assert printed(IN_THIS_PROCESS + script).splitlines() == ["True", "True"]


@pytest.mark.case("C4")
@pytest.mark.needs("two-cpus")
def test_heirs_of_a_narrowed_main_thread_go_back_to_the_ranks_share(driver: FakeDriver) -> None:
    """An import has narrowed a worker; nobody has bound what it started since."""
    script = """
affinity = gpuaff.set_affinity(0, 1)
if not os.fork():
    os.sched_setaffinity(0, {min(CPUS)})
    heir = bound_to(None)
    part = gpuaff.spread(0, 1)
    print(heir() == part == os.sched_getaffinity(0), flush=True)
    print(part.restore() == affinity == heir(), flush=True)
    os._exit(0)
os.wait()
"""
    found = printed(IN_THIS_PROCESS + script, env=driver.env()).splitlines()
    assert found == ["True", "True"]


def test_twice_is_the_same_as_once(driver: FakeDriver) -> None:
    script = """
affinity = gpuaff.set_affinity(0, 1)
one = gpuaff.spread(1, 2)
two = gpuaff.spread(1, 2)
print(one == two == os.sched_getaffinity(0))
other = gpuaff.spread(0, 2)
print(len(one | other))
affinity.reapply()
print(os.sched_getaffinity(0) == affinity, gpuaff.spread(1, 2) == one)
gpuaff.set_affinity(0, 1)
print(os.sched_getaffinity(0) == affinity, gpuaff.spread(1, 2) == one)
with gpuaff.set_affinity(0, 1, cpus=[max(CPUS)]):
    print(sorted(gpuaff.spread(0, 1)) == [max(CPUS)], gpuaff.spread(0, 1).restore() == CPUS)
"""
    found = printed(IN_THIS_PROCESS + script, env=driver.env()).splitlines()
    assert found == ["True", str(len(REST)), "True True", "True True", "True True"]


def test_what_is_cut() -> None:
    """By hand, as it shows only where a rank has three cores or more."""
    everything, share, part = (frozenset(range(size)) for size in (8, 4, 2))
    first = State(pid=1, original=everything)
    assert first.undivided == everything
    shared = first._replace(share=share)
    assert shared.undivided == share
    spread = first._replace(share=part, whole=share)
    assert spread.undivided == share
    process = Process(spread._replace(share=share, whole=None))
    process.recall(spread)
    assert process.state.undivided == share


def test_what_is_cut_is_forgotten_with_the_part(driver: FakeDriver) -> None:
    script = """
from gpuaff.pinning.state import remembered
def whole():
    return remembered().whole
affinity = gpuaff.set_affinity(0, 1)
print(whole())
part = gpuaff.spread(0, 1)
print(whole() == affinity)
part.reapply()
print(whole() == affinity)
gpuaff.set_affinity(0, 1)
print(whole())
with gpuaff.spread(0, 1):
    print(whole() == affinity)
print(whole())
"""
    found = printed(IN_THIS_PROCESS + script, env=driver.env()).splitlines()
    assert found == ["None", "True", "True", "None", "True", "None"]


@pytest.mark.needs("two-cpus")
def test_reapply_of_the_ranks_share_forgets_the_part(driver: FakeDriver) -> None:
    script = """
from gpuaff.pinning.state import remembered
affinity = gpuaff.set_affinity(0, 1)
part = gpuaff.spread(0, 1)
affinity.reapply()
print(remembered().whole if part != affinity else None)
"""
    assert printed(IN_THIS_PROCESS + script, env=driver.env()) == "None"


@pytest.mark.case("C1")
@pytest.mark.needs("two-cpus")
def test_a_forked_worker_cuts_the_share_and_not_a_narrowed_mask(driver: FakeDriver) -> None:
    script = """
affinity = gpuaff.set_affinity(0, 1)
os.sched_setaffinity(0, {min(CPUS)})  # as an import does
if not os.fork():
    part = gpuaff.spread(0, 1)
    print(*sorted(part), flush=True)
    print(part.restore() == affinity, flush=True)
    os._exit(0)
os.wait()
"""
    found = printed(IN_THIS_PROCESS + script, env=driver.env()).splitlines()
    assert found == [" ".join(map(str, sorted(REST))), "True"]


@pytest.mark.needs("two-cpus")
def test_the_end_of_a_block_gives_the_ranks_share_back(driver: FakeDriver) -> None:
    script = """
share = gpuaff.set_affinity(0, 2)
with gpuaff.spread(0, 1) as part:
    print(part <= share, gpuaff.check().ok)
print(os.sched_getaffinity(0) == share, gpuaff.check().expected == share)
print(share.restore() == CPUS)
"""
    found = printed(IN_THIS_PROCESS + script, env=driver.env()).splitlines()
    assert found == ["True True", "True True", "True"]


@pytest.mark.needs("two-cpus")
def test_a_mask_of_one_cpu_is_not_widened() -> None:
    script = f"""
os.sched_setaffinity(0, {{{CPUS[0]}}})
print(sorted(gpuaff.spread(1, 3)), gpuaff.spread(2, 3).pinned)
"""
    assert printed(IN_THIS_PROCESS + script) == f"[{CPUS[0]}] True"


@pytest.mark.parametrize("numbers", [(0, 0), (2, 2), (-1, 2), ("0", 2), (0, 1.5), (True, 2)])
def test_wrong_numbers_raise(numbers: tuple[int, int]) -> None:
    with pytest.raises(gpuaff.InvalidOptionError):
        gpuaff.spread(*numbers)


def test_off_leaves_everything_and_says_so() -> None:
    script = """
part = gpuaff.spread(0, 2)
print(part == CPUS, part.pinned, [warning.code for warning in part.warnings])
"""
    assert printed(IN_THIS_PROCESS + script, env={"GPUAFF": "off"}) == "True False ['off']"


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


@pytest.mark.needs("two-cpus")
def test_it_tells_where_the_worker_is() -> None:
    script = """
import logging
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
import sys
gpuaff.spread(0, 2)
"""
    said = printed("import sys\n" + IN_THIS_PROCESS + script)
    assert said.startswith("gpuaff: worker 0 of 2 -> cpus ")


def test_from_outside(driver: FakeDriver) -> None:
    """`/proc` says the same, of every thread."""
    script = """
import os, sys
import gpuaff
affinity = gpuaff.set_affinity(0, 1)
child = os.fork()
if not child:
    gpuaff.spread(0, 1)
    print(os.getpid(), flush=True)
    sys.stdin.readline()
    os._exit(0)
os.waitpid(child, 0)
"""
    with stopped(script, env={**driver.env(), "PYTHONPATH": str(SRC)}) as process:
        pid = int(process.heard())
        assert set(masks(pid).values()) == {REST}
        assert masks(process.pid)[process.pid] == frozenset(CPUS)
        process.go_on()
    assert os.getpid() != pid
