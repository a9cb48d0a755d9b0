"""When a device is busy, and what is said then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuaff.claims.devices.occupancy import UNEXPLAINED, ListedProcesses, evaluate, listed
from gpuaff.claims.model import Busy, ComputeMode, Demand, DeviceReading, Usage
from tests.claims.readings import CONTEXT, GIB, IDLE, MIB, gpu, idle, instance, used_by

HOST = ListedProcesses()
CONTAINER = ListedProcesses(first_namespace=False)
ALICE = "python train.py (pid 42) of alice, for 3 h 10 min"


def own(*pids: int, **more: Any) -> ListedProcesses:
    return ListedProcesses(own=set(pids), **more)


def one(
    reading: DeviceReading,
    *,
    processes: ListedProcesses = HOST,
    names: Mapping[int, str] | None = None,
    **more: Any,
) -> Usage:
    """What is found of a machine's only device."""
    named = processes._replace(names=names or {})
    [usage] = evaluate([reading], processes=named, **{"leased": {}, **more})
    return usage


def row(
    expected: str, reading: DeviceReading, *, why: str = "", case: tuple[str, ...] = (), **more: Any
) -> Any:
    """A device, and what is found of it as :func:`in_words` has it; ``why`` it is free."""
    return pytest.param(reading, more, expected, id=why or expected, marks=pytest.mark.case(*case))


def in_words(usage: Usage) -> str:
    flags = [flag for flag in ("leaving", "exiting", "lasting") if getattr(usage, flag)]
    found = " ".join([usage.busy.value if usage.busy else "free", *flags, *map(str, usage.pids)])
    return f"{found}: {usage.message.removeprefix('GPU 0: ')}" if usage.message else found


DRAWS: dict[str, Any] = {"graphics": {42: CONTEXT, 50: 20 * MIB}, "used": IDLE + CONTEXT + 20 * MIB}
SCREEN = idle(display=True, graphics={7: 90 * MIB}, used=2 * GIB)
EXPLAINED = CONTEXT + 300 * MIB
NO_NUMBER = idle(graphics={7: None, 8: 40 * MIB}, used=GIB)
BOTH_LISTS = idle(compute={7: None}, graphics={7: GIB}, used=GIB)


# fmt: off
DEVICES_AND_WHAT_IS_FOUND = [
    row("free", idle(), why="idle"),
    row("leased 4242: leased by train.py (pid 4242) of alice",
        used_by(4242, 4240), leased={"GPU-0": "train.py (pid 4242) of alice"},
        processes=own(4240)),
    row(f"leased leaving exiting: leased by {ALICE}, which is exiting",
        idle(), leased={"GPU-0": ALICE}, ending={"GPU-0"}),
    row("leased leaving exiting: MIG instance MIG-1: its GPU 0 is leased by x (pid 1), which "
        "is exiting",
        idle(instance(1)), leased={"GPU-0": "x (pid 1)"}, ending={"GPU-0"}),
    row("leased: leased by an unknown process", idle(), leased={"GPU-0": ""}),
    row("leased: leased by a\\nb\\x1b[2J", idle(), leased={"GPU-0": "a\nb\x1b[2J"}),
    row("free", idle(), why="another GPU is leased", leased={"GPU-1": "x"}),
    row(f"processes 42: in use by {ALICE}", used_by(42), names={42: ALICE}, case=("E4", "E11")),
    row("processes 5 6 7 8 9: in use by pid 5, a (pid 6), pid 7 and 2 more",
        used_by(9, 8, 7, 6, 5), names={6: "a (pid 6)"}),
    row("free", used_by(42, 43), why="own are free", processes=own(42, 43), case=("E12",)),
    row("processes 43: in use by pid 43", used_by(42, 43), processes=own(42), case=("E12",)),
    row("free",
        used_by(42, **DRAWS), why="one that also draws is a screen's; its memory counts once"),
    row(f"processes leaving 42 43: still listed by the driver, though ended: {ALICE} and pid 43",
        used_by(42, 43), processes=ListedProcesses(ended={42, 43, 44}), names={42: ALICE}),
    row("processes 42 43: in use by pid 43 and pid 42",
        used_by(42, 43), processes=ListedProcesses(ended={42})),
    row("processes leaving exiting 42 43: still listed by the driver, though exiting: "
        f"{ALICE} and pid 43",
        used_by(42, 43), processes=ListedProcesses(ended={43}, exiting={42}), names={42: ALICE}),
    row("processes 42 43: in use by pid 43 and pid 42",
        used_by(42, 43), processes=ListedProcesses(exiting={42})),
    row("processes leaving 43: still listed by the driver, though ended: pid 43",
        used_by(42, 43), processes=own(42, ended={43})),
    row("processes 42: in use by what the driver calls pid 42",
        used_by(42), processes=CONTAINER, case=("E15",)),
    row("memory: 817 MiB are in use that no visible process explains (another container?)",
        idle(used=IDLE + 814 * MIB), processes=CONTAINER, case=("E15",)),
    row("memory: 1.5 GiB are in use that no visible process explains (a process that is "
        "ending?)",
        idle(used=1536 * MIB)),
    row("free", idle(used=64 * MIB), why="up to the threshold"),
    row("free",
        used_by(42, graphics={50: 300 * MIB}, used=EXPLAINED + UNEXPLAINED),
        why="what listed processes have is explained", processes=own(42, first_namespace=False)),
    row("memory: 65 MiB are in use that no visible process explains (another container?)",
        used_by(42, graphics={50: 300 * MIB}, used=EXPLAINED + 65 * MIB),
        processes=own(42, first_namespace=False)),
    row("free",
        used_by(42, used=IDLE), why="they may have more than is in use", processes=own(42)),
    row("free", SCREEN, why="a screen needs memory", processes=CONTAINER),
    row("memory: 65 MiB are in use that no visible process explains (a process that is "
        "ending?)",
        SCREEN._replace(display=None, used=91 * MIB + UNEXPLAINED)),
    row("processes 42: in use by pid 42", SCREEN._replace(compute={42: MIB})),
    row("free", NO_NUMBER, why="the lists show all processes, though not their memory"),
    row("unreadable: 984 MiB are in use, and the driver does not report how much what the "
        "driver calls pid 7 uses of it",
        NO_NUMBER, processes=CONTAINER),
    row("free", BOTH_LISTS, why="one list has the memory", processes=CONTAINER),
    row("free",
        BOTH_LISTS._replace(compute={7: MIB}), why="the larger number counts",
        processes=CONTAINER),
    row("unreadable: the driver reports neither the memory in use nor the compute processes: "
        "its processes: Unknown Error (f)",
        idle(compute=None, used=None, problems=("its processes: Unknown Error (f)", "x"))),
    row("free", idle(used=None), why="no memory, as where the GPU uses the host's (GB10)"),
    row("unreadable: the driver reports neither the memory in use nor the processes outside "
        "of this container",
        idle(used=None), processes=CONTAINER),
    row("free",
        idle(used=None, display=True), why="no memory, and a screen", processes=CONTAINER),
    row("free", idle(compute=None), why="no processes, and less memory than a context has"),
    row("memory: 1 GiB are in use, and the driver does not list compute processes",
        idle(compute=None, used=GIB)),
    row("unreadable: 1 GiB are in use, and the driver does not list compute processes",
        idle(compute=None, used=GIB, display=True)),
    row("free", idle(graphics=None), why="no graphics processes"),
    row("free",
        idle(free=None, total=None, display=None, compute_mode=None, utilization=None),
        why="nothing else"),
    row("lost lasting: the driver has lost it: its processes: GPU is lost (f)",
        used_by(42, lost=True, problems=("its processes: GPU is lost (f)",)),
        leased={"GPU-0": "x"}),
    row("prohibited lasting: its compute mode (prohibited) allows no process",
        idle(compute_mode=ComputeMode.PROHIBITED), case=("E13", "E16")),
    row("small lasting: has 80 GiB in total; 81 GiB free were requested",
        used_by(42), demand=Demand(min_free_memory=81 * GIB)),
    row("unreadable lasting: MIG instance MIG-1: the driver does not report the utilization "
        "of MIG instances (max_utilization)",
        idle(instance(1)), demand=Demand(max_utilization=100)),
    row("free", idle(free=9), why="just enough memory", demand=Demand(min_free_memory=9)),
    row("memory_low: only 20 GiB are free; 20 GiB were requested",
        used_by(42, free=20 * GIB - 1), processes=own(42), demand=Demand(min_free_memory=20 * GIB),
        case=("E11",)),
    row("processes 42: in use by pid 42", used_by(42), demand=Demand(min_free_memory=80 * GIB)),
    row("free", idle(utilization=57), why="not too busy", demand=Demand(max_utilization=57)),
    row("working: its utilization, 57 %, exceeds max_utilization (56 %)",
        idle(utilization=57), demand=Demand(max_utilization=56), case=("E11",)),
    row("unreadable: the driver does not report the free memory (min_free_memory)",
        idle(free=None, total=None), demand=Demand(min_free_memory=1)),
    row("unreadable: the driver does not report the utilization (max_utilization)",
        idle(), demand=Demand(max_utilization=100)),
]
# fmt: on


@pytest.mark.parametrize(("reading", "more", "expected"), DEVICES_AND_WHAT_IS_FOUND)
def test_a_device_is_busy_for_the_first_reason_that_holds(
    reading: DeviceReading, more: dict[str, Any], expected: str
) -> None:
    assert in_words(one(reading, **more)) == expected


@pytest.mark.case("E13", "E16")
@pytest.mark.parametrize("mode", [ComputeMode.EXCLUSIVE_PROCESS, ComputeMode.EXCLUSIVE_THREAD])
def test_an_exclusive_mode_allows_one_process(mode: ComputeMode) -> None:
    usage = one(used_by(42, compute_mode=mode), names={42: ALICE})
    assert (usage.busy, usage.pids, usage.lasting) == (Busy.EXCLUSIVE, (42,), False)
    assert usage.message == f"GPU 0: in {mode.value.replace('_', ' ')} mode and used by {ALICE}"
    assert one(idle(compute_mode=mode)).busy is None
    mine = own(42, 43, me=43)
    assert one(used_by(42, compute_mode=mode), processes=mine).busy is Busy.EXCLUSIVE
    assert one(used_by(43, compute_mode=mode), processes=mine).busy is None, "this very process"
    none = ListedProcesses(me=43)
    assert one(used_by(43, compute_mode=mode), processes=none).busy is Busy.EXCLUSIVE, "own_is_free"
    draws = used_by(42, graphics={42: CONTEXT}, compute_mode=mode)
    assert one(draws).busy is Busy.EXCLUSIVE, "it has a context"
    assert one(idle(graphics={42: MIB}, compute_mode=mode)).busy is None
    ended = one(used_by(42, compute_mode=mode), processes=ListedProcesses(ended={42}))
    assert (ended.busy, ended.leaving) == (Busy.EXCLUSIVE, True)


@pytest.mark.case("E4")
def test_each_device_is_judged_for_itself() -> None:
    readings = [used_by(42), idle(gpu(1)), used_by(43, device=gpu(2)), idle(gpu(3))]
    found = evaluate(readings, processes=HOST, leased={"GPU-3": "x"})
    assert {usage.device.index: usage.busy for usage in found} == {
        0: Busy.PROCESSES,
        1: None,
        2: Busy.PROCESSES,
        3: Busy.LEASED,
    }
    both = [idle(instance(1)), idle(instance(2))]
    found = evaluate(both, processes=HOST, leased={"MIG-2": "x"})
    assert [usage.busy for usage in found] == [None, Busy.LEASED]


def test_only_parts_of_one_gpu_instance_share_its_memory() -> None:
    used = IDLE + CONTEXT
    readings = [
        used_by(42, device=instance(1, part=5)),
        idle(instance(2, part=5), used=used),
        idle(instance(3, part=6), used=used),
        idle(instance(4, part=5, index=1), used=used),
        idle(gpu(2), used=used),
    ]
    found = evaluate(readings, processes=HOST, leased={})
    busy = [usage.busy for usage in found]
    assert busy == [Busy.PROCESSES, None, Busy.MEMORY, Busy.MEMORY, Busy.MEMORY]


PIDS = st.integers(1, 6)
BYTES = st.none() | st.integers(0, 2 * GIB)
MEMORY = st.none() | st.dictionaries(PIDS, BYTES, max_size=4)
DEVICES = [gpu(0), gpu(1), instance(1, index=2), instance(2, index=2, part=1), gpu(3)]


READINGS = st.tuples(
    *(
        st.builds(
            DeviceReading,
            device=st.just(device),
            compute=MEMORY,
            graphics=MEMORY,
            used=st.none() | st.integers(0, 4 * GIB),
            free=st.none() | st.integers(0, 4 * GIB),
            total=st.sampled_from([None, 4 * GIB]),
            utilization=st.none() | st.integers(0, 100),
            compute_mode=st.sampled_from([None, *ComputeMode]),
            display=st.sampled_from([None, False, True]),
            lost=st.sampled_from([False] * 5 + [True]),
            problems=st.just(()),
        )
        for device in DEVICES
    )
)
PEOPLE = st.builds(
    ListedProcesses,
    own=st.frozensets(PIDS),
    ended=st.frozensets(PIDS),
    exiting=st.just(frozenset()),
    names=st.just({}),
    me=st.none() | PIDS,
    first_namespace=st.booleans(),
)
LEASED = st.dictionaries(
    st.sampled_from([*(d.uuid for d in DEVICES), "GPU-2"]), st.text("a ü\n\r\x1b\u2028", max_size=5)
)
DEMANDS = st.none() | st.builds(
    Demand,
    min_free_memory=st.none() | st.integers(0, 5 * GIB),
    max_utilization=st.none() | st.integers(0, 100),
)


@given(READINGS, PEOPLE, LEASED, DEMANDS)
def test_laws(
    told: tuple[DeviceReading, ...],
    people: ListedProcesses,
    leased: dict[str, str],
    demand: Demand | None,
) -> None:
    found = evaluate(told, processes=people, leased=leased, demand=demand)
    assert [usage.device for usage in found] == DEVICES
    for reading, usage in zip(told, found, strict=True):
        assert (usage.busy is None) == (usage.message == "")
        assert "\n" not in usage.message
        assert set(usage.pids) <= listed(told)
        assert not usage.leaving or set(usage.pids) <= people.leaving
        if usage.busy is not None:
            assert usage.message.startswith(f"{reading.device}: ")
            continue
        assert not reading.lost
        assert not {reading.device.uuid, reading.device.parent} & set(leased)
        drawing = set(reading.graphics or ())
        assert set(reading.compute or ()) - drawing <= set(people.own)
        if demand is not None and demand.min_free_memory is not None:
            assert reading.free is not None
            assert reading.free >= demand.min_free_memory
