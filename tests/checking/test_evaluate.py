"""The verdict on threads, case by case, without a real process."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuaff.cpuset import CpuSet, parse_cpulist
from gpuaff.pinning.check import (
    Observation,
    State,
    Thread,
    evaluate,
    most_common,
    possible_causes,
)
from gpuaff.pinning.state import Bound
from gpuaff.pinning.state import State as Process


def cpus(text: str) -> CpuSet:
    return parse_cpulist(text)


def seen(
    *masks: str,
    expected: str | None = None,
    original: str | None = None,
    cpuset: str | None = None,
    is_this: bool = True,
    by: tuple[tuple[str, str], ...] = (),
) -> Observation:
    """Process 100, whose threads 100, 101, … have these masks."""
    remembered = None
    if expected is not None:
        remembered = Process(100, cpus(original or expected), cpus(expected))
    return Observation(
        pid=100,
        threads=tuple(
            Thread(tid=100 + n, name=f"t{n}", cpus=cpus(mask)) for n, mask in enumerate(masks)
        ),
        is_this=is_this,
        remembered=remembered,
        cpuset=None if cpuset is None else cpus(cpuset),
        causes=by,
    )


def states(process: Observation) -> list[str]:
    return [str(thread.state) for thread in evaluate(process).threads]


@pytest.mark.parametrize(
    ("masks", "cpuset", "found"),
    [
        (["0-7", "0-7"], None, "ok ok"),
        (["0-7", "3", "4-5"], None, "ok bound bound"),
        (["0", "0-7", "3"], None, "narrowed ok bound"),
        (["0", "0", "3"], None, "narrowed narrowed bound"),
        (["0"], None, "narrowed"),
        (["0", "0"], "0-15", "narrowed narrowed"),
        (["0-3", "0-3"], None, "cut cut"),
        (["0-3", "0-3", "1"], "0-3,8-15", "cut cut bound"),
        (["0-3"], "0-3", "cut"),
        (["12-15"], "12-15", "cut"),
        (["12-15"], "0-15", "moved"),
        (["6-9", "0-7"], None, "moved ok"),
        (["0-15", "0-8"], None, "widened widened"),
    ],
)
def test_against_what_gpuaff_has_set(masks: list[str], cpuset: str | None, found: str) -> None:
    process = seen(*masks, expected="0-7", original="0-15", cpuset=cpuset)
    assert states(process) == found.split()
    assert evaluate(process).ok == set(found.split()).issubset({"ok", "bound"})


@pytest.mark.parametrize(
    ("masks", "most", "found"),
    [
        (["0-7"], "0-7", "ok"),
        (["0-7", "0-7", "3"], "0-7", "ok ok bound"),
        (["0", "0-7", "0-7"], "0-7", "narrowed ok ok"),
        (["0", "0-7"], "0-7", "narrowed ok"),  # one each: the larger set
        (["0-3", "0-3", "0-3", "0-7"], "0-3", "ok ok ok widened"),
        (["0-3", "0-3", "4-7"], "0-3", "ok ok moved"),
        (["0", "1", "2"], "0-2", "bound bound bound"),  # an OpenMP team, bound on purpose
    ],
)
def test_against_each_other(masks: list[str], most: str, found: str) -> None:
    assert states(seen(*masks)) == found.split()
    assert evaluate(seen(*masks)).usual == cpus(most)


def test_helper_threads_are_where_they_belong() -> None:
    """On reserved CPUs; and where somebody had bound it before, as long as it is there."""
    bound = {tid: Bound(cpus(mask), cpus(mask)) for tid, mask in ((103, "12"), (104, "14"))}
    state = Process(100, cpus("0-15"), cpus("0-5"), bound, reserved=cpus("6-7"))
    process = seen("0-5", "6", "6-7", "12", "13")._replace(remembered=state)
    assert states(process) == ["ok", "bound", "bound", "bound", "moved"]


def test_helpers_of_the_kernel_are_left_alone() -> None:
    threads = [
        Thread(tid=100, name="python", cpus=cpus("0-3")),
        Thread(tid=101, name="iou-wrk-100", cpus=cpus("0-63"), movable=False),
        Thread(tid=102, name="iou-wrk-100", cpus=cpus("0-63"), movable=False),
    ]
    found = evaluate(Observation(pid=100, threads=tuple(threads), is_this=True))
    assert [thread.state for thread in found.threads] == [State.OK, State.FIXED, State.FIXED]
    assert found.ok


def test_nothing_is_known_of_no_threads() -> None:
    found = evaluate(Observation(pid=100, threads=(), is_this=True))
    assert (found.ok, found.usual, found.name) == (True, frozenset(), "")


BY = (("an OpenMP runtime", "unset OMP_PROC_BIND"),)


def test_reasons_and_remedies() -> None:
    process = seen("0", "0", "0-15", "12", expected="0-7", original="0-15", by=BY)
    main, heir, never, moved = evaluate(process).threads
    assert main.reason == "CPUs 0, gpuaff had set 0-7: an OpenMP runtime"
    assert main.remedy == ("affinity.reapply(), on what set_affinity returned; unset OMP_PROC_BIND")
    assert "inherits" in heir.reason
    assert "had before" in never.reason
    assert "taskset" in moved.reason
    assert moved.remedy == "affinity.reapply(), on what set_affinity returned"


def test_of_another_process() -> None:
    main, other, _ = evaluate(seen("0", "9", "0-7", is_this=False)).threads
    assert main.reason.startswith("CPUs 0, most threads have 0-7: some import")
    assert main.remedy == other.remedy == "taskset -p -c 0-7 TID, or reapply() in the program"
    assert "taskset" in other.reason


def test_a_cpuset_is_told_as_one() -> None:
    (main,) = evaluate(seen("0-3", expected="0-7", cpuset="0-3")).threads
    assert "cpuset" in main.reason
    assert "plans from those that are left" in main.remedy


masks = st.frozensets(st.integers(0, 6), min_size=1)


@given(st.lists(masks, min_size=1), st.none() | masks)
def test_what_is_off_is_said_and_what_is_fine_is_not(
    threads: list[CpuSet], expected: CpuSet | None
) -> None:
    found = evaluate(
        Observation(
            pid=0,
            threads=tuple(Thread(tid=n, name="", cpus=mask) for n, mask in enumerate(threads)),
            is_this=True,
            remembered=None if expected is None else Process(0, expected, expected),
        )
    )
    should = found.usual if expected is None else expected
    for thread in found.threads:
        assert thread.ok != bool(thread.reason) == bool(thread.remedy)
        if not thread.cpus <= should:
            assert not thread.ok
        if thread.cpus == should:
            assert thread.state is State.OK
    assert found.ok == all(thread.ok for thread in found.threads)


@given(st.lists(masks, min_size=1))
def test_the_usual_set_is_the_most_frequent_or_the_larger_of_those(threads: list[CpuSet]) -> None:
    found = most_common(threads)
    often = max(threads.count(mask) for mask in threads)
    frequent = [mask for mask in threads if threads.count(mask) == often]
    largest = {mask for mask in frequent if len(mask) == max(map(len, frequent))}
    if len(largest) == 1:
        assert largest == {found}
    else:
        assert sorted(found) == sorted({cpu for mask in largest for cpu in mask})


@pytest.mark.parametrize(
    ("library", "variables", "words"),
    [
        ("libgomp-a34b3233.so.1", {"OMP_PROC_BIND": "close"}, ["GNU", "OMP_PROC_BIND=close"]),
        ("libiomp5.so", {"KMP_AFFINITY": "compact"}, ["Intel", "unset KMP_AFFINITY", "disabled"]),
        ("libomp.so.5", {"GOMP_CPU_AFFINITY": "0-3"}, ["LLVM"]),
        ("libopenblasp-r0-1.so", {}, ["OpenBLAS", "set OPENBLAS_MAIN_FREE=1"]),
    ],
)
def test_a_cause_is_named_with_its_remedy(
    library: str, variables: dict[str, str], words: list[str]
) -> None:
    [cause] = possible_causes([library], variables)
    assert [word for word in (library, *words) if word not in " ".join(cause)] == []
    assert not possible_causes([], variables)
