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


def busy(reading: DeviceReading, **more: Any) -> Busy | None:
    return one(reading, **more).busy


class TestFree:
    def test_an_idle_gpu(self) -> None:
        assert one(idle()) == Usage(device=gpu())

    @pytest.mark.case("E4")
    def test_each_device_is_judged_for_itself(self) -> None:
        readings = [used_by(42), idle(gpu(1)), used_by(43, device=gpu(2)), idle(gpu(3))]
        found = evaluate(readings, processes=HOST, leased={"GPU-3": "somebody"})
        assert [usage.busy for usage in found] == [
            Busy.PROCESSES,
            None,
            Busy.PROCESSES,
            Busy.LEASED,
        ]
        assert [usage.device.index for usage in found] == [0, 1, 2, 3]


class TestLeases:
    def test_who_holds_it_is_said(self) -> None:
        who = "train.py (pid 4242) of alice since 10:32"
        usage = one(
            used_by(4242, 4240), leased={"GPU-0": who}, processes=ListedProcesses(own={4240})
        )
        assert usage == Usage(
            device=gpu(),
            busy=Busy.LEASED,
            pids=(4242,),
            message="GPU 0: leased by train.py (pid 4242) of alice since 10:32",
        )

    def test_its_holder_is_exiting(self) -> None:
        usage = one(used_by(42), leased={"GPU-0": ALICE}, ending={"GPU-0"})
        assert (usage.busy, usage.leaving, usage.exiting) == (Busy.LEASED, True, True)
        assert usage.message == f"GPU 0: leased by {ALICE}, which is exiting"

    def test_the_holder_of_its_gpu_is_exiting(self) -> None:
        usage = one(idle(instance(1)), leased={"GPU-0": "x (pid 1)"}, ending={"GPU-0"})
        assert (usage.leaving, usage.exiting) == (True, True)
        assert usage.message == (
            "MIG instance MIG-1: its GPU 0 is leased by x (pid 1), which is exiting"
        )

    def test_nobody_knows_who(self) -> None:
        assert one(idle(), leased={"GPU-0": ""}).message == ("GPU 0: leased by an unknown process")

    def test_what_others_wrote_is_made_printable(self) -> None:
        assert one(idle(), leased={"GPU-0": "a\nb\x1b[2J"}).message == (
            "GPU 0: leased by a\\nb\\x1b[2J"
        )

    def test_another_gpu_is_leased(self) -> None:
        assert busy(idle(), leased={"GPU-1": "x"}) is None

    def test_the_lease_of_a_gpu_is_that_of_its_instances(self) -> None:
        usage = one(idle(instance(1)), leased={"GPU-0": "x (pid 1) of bob"})
        assert usage.busy is Busy.LEASED
        assert usage.message == "MIG instance MIG-1: its GPU 0 is leased by x (pid 1) of bob"

    def test_the_lease_of_an_instance_is_not_that_of_another(self) -> None:
        both = [idle(instance(1)), idle(instance(2))]
        found = evaluate(both, processes=HOST, leased={"MIG-2": "x"})
        assert [usage.busy for usage in found] == [None, Busy.LEASED]


class TestProcesses:
    @pytest.mark.case("E4", "E11")
    def test_others_compute(self) -> None:
        usage = one(used_by(42), names={42: ALICE})
        assert usage == Usage(
            device=gpu(), busy=Busy.PROCESSES, pids=(42,), message=f"GPU 0: in use by {ALICE}"
        )

    def test_many_are_counted(self) -> None:
        usage = one(used_by(9, 8, 7, 6, 5), names={6: "a (pid 6)"})
        assert usage.pids == (5, 6, 7, 8, 9)
        assert usage.message == "GPU 0: in use by pid 5, a (pid 6), pid 7 and 2 more"

    def test_two(self) -> None:
        assert one(used_by(9, 8)).message == "GPU 0: in use by pid 8 and pid 9"

    @pytest.mark.case("E12")
    def test_own_are_free(self) -> None:
        assert busy(used_by(42, 43), processes=ListedProcesses(own={42, 43})) is None
        usage = one(used_by(42, 43), processes=ListedProcesses(own={42}))
        assert (usage.busy, usage.pids) == (Busy.PROCESSES, (43,))

    def test_one_that_draws_as_well_is_a_screens(self) -> None:
        drawing: dict[str, Any] = {
            "graphics": {42: CONTEXT, 50: 20 * MIB},
            "used": IDLE + CONTEXT + 20 * MIB,
        }
        assert busy(used_by(42, **drawing)) is None, "its memory is counted once"
        usage = one(used_by(42, 43, **drawing))
        assert (usage.busy, usage.pids) == (Busy.PROCESSES, (43,))

    def test_all_have_ended(self) -> None:
        usage = one(
            used_by(42, 43), processes=ListedProcesses(ended={42, 43, 44}), names={42: ALICE}
        )
        assert (usage.busy, usage.pids, usage.leaving) == (Busy.PROCESSES, (42, 43), True)
        assert usage.message == (
            f"GPU 0: still listed by the driver, though ended: {ALICE} and pid 43"
        )

    def test_some_have_ended(self) -> None:
        usage = one(used_by(42, 43), processes=ListedProcesses(ended={42}))
        assert (usage.pids, usage.leaving) == ((42, 43), False)
        assert usage.message == "GPU 0: in use by pid 43 and pid 42", "who runs comes first"

    def test_all_are_exiting(self) -> None:
        usage = one(
            used_by(42, 43), processes=ListedProcesses(ended={43}, exiting={42}), names={42: ALICE}
        )
        assert (usage.busy, usage.leaving, usage.exiting) == (Busy.PROCESSES, True, True)
        assert usage.message == (
            f"GPU 0: still listed by the driver, though exiting: {ALICE} and pid 43"
        )

    def test_some_are_exiting(self) -> None:
        usage = one(used_by(42, 43), processes=ListedProcesses(exiting={42}))
        assert (usage.leaving, usage.exiting) == (False, False)
        assert usage.message == "GPU 0: in use by pid 43 and pid 42", "who runs comes first"

    def test_own_that_run_on_keep_nobody(self) -> None:
        assert one(used_by(42, 43), processes=ListedProcesses(own={42}, ended={43})).leaving

    @pytest.mark.case("E15")
    def test_a_number_of_the_hosts_is_said_to_be_the_drivers(self) -> None:
        message = one(used_by(42), processes=CONTAINER).message
        assert message == "GPU 0: in use by what the driver calls pid 42"


class TestMemory:
    @pytest.mark.case("E15")
    def test_a_container_that_is_not_listed(self) -> None:
        usage = one(idle(used=IDLE + 814 * MIB), processes=CONTAINER)
        assert usage == Usage(
            device=gpu(),
            busy=Busy.MEMORY,
            message="GPU 0: 817 MiB are in use that no visible process explains "
            "(another container?)",
        )

    def test_in_the_first_namespace_everybody_is_listed(self) -> None:
        assert one(idle(used=1536 * MIB)).message == (
            "GPU 0: 1.5 GiB are in use that no visible process explains (a process that is ending?)"
        )

    def test_the_threshold(self) -> None:
        assert UNEXPLAINED == 64 * MIB
        assert busy(idle(used=64 * MIB)) is None
        assert busy(idle(used=64 * MIB + 1)) is Busy.MEMORY

    def test_only_what_is_not_explained_counts(self) -> None:
        mine = ListedProcesses(own={42}, first_namespace=False)
        drawn: dict[str, Any] = {"graphics": {50: 300 * MIB}}
        assert busy(used_by(42, **drawn, used=CONTEXT + 364 * MIB), processes=mine) is None
        more = used_by(42, **drawn, used=CONTEXT + 365 * MIB)
        assert busy(more, processes=mine) is Busy.MEMORY
        assert "65 MiB" in one(more, processes=mine).message

    def test_processes_may_have_more_than_is_in_use(self) -> None:
        assert busy(used_by(42, used=IDLE), processes=ListedProcesses(own={42})) is None

    def test_a_screen_needs_memory(self) -> None:
        screen = idle(display=True, graphics={7: 90 * MIB}, used=2 * GIB)
        assert busy(screen) is None
        assert busy(screen, processes=CONTAINER) is None
        assert busy(screen._replace(display=False)) is Busy.MEMORY
        assert busy(screen._replace(display=None)) is Busy.MEMORY
        assert busy(screen._replace(compute={42: MIB})) is Busy.PROCESSES
        assert busy(screen._replace(compute={42: MIB}), processes=ListedProcesses(own={42})) is None

    def test_one_of_whom_it_is_not_told(self) -> None:
        """A driver without it (WDDM, some virtual GPUs) gives None to each."""
        drawn = idle(graphics={7: None, 8: 40 * MIB}, used=GIB)
        assert busy(drawn) is None, "in the first namespace the lists show everybody"
        usage = one(drawn, processes=CONTAINER)
        assert usage.busy is Busy.UNREADABLE
        assert usage.message == (
            "GPU 0: 984 MiB are in use, and the driver does not report how much "
            "what the driver calls pid 7 uses of it"
        )
        assert busy(drawn._replace(used=64 * MIB), processes=CONTAINER) is None

    def test_one_list_tells_and_the_other_does_not(self) -> None:
        both = idle(compute={7: None}, graphics={7: GIB}, used=GIB)
        assert busy(both, processes=CONTAINER) is None
        assert busy(both._replace(compute={7: MIB}), processes=CONTAINER) is None, "the larger one"

    def test_gpus_share_nothing(self) -> None:
        readings = [used_by(42), idle(gpu(1), used=IDLE + CONTEXT)]
        found = evaluate(readings, processes=ListedProcesses(own={42}), leased={})
        assert [usage.busy for usage in found] == [None, Busy.MEMORY]

    def test_parts_of_a_gpu_instance_share_its_memory(self) -> None:
        used = IDLE + CONTEXT
        first = used_by(42, device=instance(1, part=5))
        second = idle(instance(2, part=5), used=used)
        apart = idle(instance(3, part=6), used=used)
        elsewhere = idle(instance(4, part=5, index=1), used=used)
        readings = [first, second, apart, elsewhere]
        found = evaluate(readings, processes=HOST, leased={})
        assert [usage.busy for usage in found] == [Busy.PROCESSES, None, Busy.MEMORY, Busy.MEMORY]


class TestNotTold:
    def test_neither_processes_nor_memory(self) -> None:
        blind = idle(compute=None, used=None, problems=("its processes: Unknown Error (f)", "x"))
        usage = one(blind)
        assert (usage.busy, usage.lasting) == (Busy.UNREADABLE, False)
        assert usage.message == (
            "GPU 0: the driver reports neither the memory in use nor the compute processes: "
            "its processes: Unknown Error (f)"
        )

    def test_no_memory(self) -> None:
        """Machines whose GPU uses the host's memory (GB10) do not tell."""
        assert busy(idle(used=None)) is None
        assert busy(idle(used=None), processes=CONTAINER) is Busy.UNREADABLE
        assert "outside of this container" in one(idle(used=None), processes=CONTAINER).message
        assert busy(idle(used=None, display=True), processes=CONTAINER) is None
        assert busy(used_by(42, used=None)) is Busy.PROCESSES

    def test_no_processes(self) -> None:
        assert busy(idle(compute=None)) is None, "a context has more than that"
        usage = one(idle(compute=None, used=GIB))
        assert usage.busy is Busy.MEMORY
        assert (
            usage.message
            == "GPU 0: 1 GiB are in use, and the driver does not list compute processes"
        )
        screen = idle(compute=None, used=GIB, display=True)
        assert busy(screen) is Busy.UNREADABLE, "either of them may have it"
        assert busy(screen._replace(used=MIB)) is None

    def test_no_graphics(self) -> None:
        assert busy(idle(graphics=None)) is None
        assert busy(idle(graphics=None, used=GIB)) is Busy.MEMORY
        assert busy(used_by(42, graphics=None)) is Busy.PROCESSES

    def test_nothing_else(self) -> None:
        nothing = idle(free=None, total=None, display=None, compute_mode=None, utilization=None)
        assert busy(nothing) is None


EXCLUSIVE = [ComputeMode.EXCLUSIVE_PROCESS, ComputeMode.EXCLUSIVE_THREAD]


class TestComputeModes:
    @pytest.mark.case("E13", "E16")
    def test_prohibited_is_never(self) -> None:
        usage = one(idle(compute_mode=ComputeMode.PROHIBITED))
        assert (usage.busy, usage.lasting) == (Busy.PROHIBITED, True)
        assert usage.message == "GPU 0: its compute mode (prohibited) allows no process"

    @pytest.mark.case("E13", "E16")
    @pytest.mark.parametrize("mode", EXCLUSIVE)
    def test_one_process_is_there(self, mode: ComputeMode) -> None:
        usage = one(used_by(42, compute_mode=mode), names={42: ALICE})
        assert (usage.busy, usage.pids, usage.lasting) == (Busy.EXCLUSIVE, (42,), False)
        name = mode.value.replace("_", " ")
        assert usage.message == (f"GPU 0: in {name} mode and used by {ALICE}")

    @pytest.mark.case("E13")
    @pytest.mark.parametrize("mode", EXCLUSIVE)
    def test_nobody_is_there(self, mode: ComputeMode) -> None:
        assert busy(idle(compute_mode=mode)) is None

    @pytest.mark.case("E13")
    @pytest.mark.parametrize("mode", EXCLUSIVE)
    def test_our_own_keeps_us_out_too(self, mode: ComputeMode) -> None:
        mine = ListedProcesses(own={42, 43}, me=43)
        assert busy(used_by(42, compute_mode=mode), processes=mine) is Busy.EXCLUSIVE
        assert busy(used_by(43, compute_mode=mode), processes=mine) is None
        none = ListedProcesses(me=43)
        assert busy(used_by(43, compute_mode=mode), processes=none) is Busy.EXCLUSIVE, "own_is_free"

    @pytest.mark.case("E13")
    def test_one_that_draws_has_a_context(self) -> None:
        both = used_by(42, graphics={42: CONTEXT})
        assert busy(both) is None
        exclusive = both._replace(compute_mode=ComputeMode.EXCLUSIVE_PROCESS)
        assert busy(exclusive) is Busy.EXCLUSIVE
        draws = idle(graphics={42: MIB}, compute_mode=ComputeMode.EXCLUSIVE_PROCESS)
        assert busy(draws) is None

    def test_the_one_process_has_ended(self) -> None:
        reading = used_by(42, compute_mode=ComputeMode.EXCLUSIVE_PROCESS)
        usage = one(reading, processes=ListedProcesses(ended={42}))
        assert (usage.busy, usage.leaving) == (Busy.EXCLUSIVE, True)

    def test_the_default_lets_everybody_in(self) -> None:
        reading = used_by(42, compute_mode=ComputeMode.DEFAULT)
        assert busy(reading, processes=ListedProcesses(own={42})) is None


class TestNever:
    def test_lost(self) -> None:
        usage = one(idle(lost=True, problems=("its processes: GPU is lost (f)",)))
        assert (usage.busy, usage.lasting) == (Busy.LOST, True)
        assert usage.message == "GPU 0: the driver has lost it: its processes: GPU is lost (f)"

    def test_it_is_said_before_who_has_it(self) -> None:
        assert busy(used_by(42, lost=True), leased={"GPU-0": "x"}) is Busy.LOST


def asked(**about: Any) -> Demand:
    return Demand(**about)


class TestDemands:
    def test_nothing_in_particular(self) -> None:
        assert busy(idle(free=None, total=None), demand=asked()) is None

    def test_less_memory_in_all(self) -> None:
        usage = one(used_by(42), demand=asked(min_free_memory=81 * GIB))
        assert (usage.busy, usage.lasting) == (Busy.SMALL, True)
        assert usage.message == "GPU 0: has 80 GiB in total; 81 GiB free were requested"
        assert busy(idle(free=80 * GIB), demand=asked(min_free_memory=80 * GIB)) is None

    @pytest.mark.case("E11")
    def test_less_memory_free(self) -> None:
        mine = ListedProcesses(own={42})
        reading = used_by(42, free=20 * GIB - 1)
        usage = one(reading, processes=mine, demand=asked(min_free_memory=20 * GIB))
        assert (usage.busy, usage.lasting, usage.pids) == (Busy.MEMORY_LOW, False, ())
        assert usage.message == "GPU 0: only 20 GiB are free; 20 GiB were requested"
        enough = reading._replace(free=20 * GIB)
        assert busy(enough, processes=mine, demand=asked(min_free_memory=20 * GIB)) is None

    def test_who_has_it_is_said_before(self) -> None:
        assert busy(used_by(42), demand=asked(min_free_memory=80 * GIB)) is Busy.PROCESSES

    @pytest.mark.case("E11")
    def test_works_too_hard(self) -> None:
        usage = one(idle(utilization=57), demand=asked(max_utilization=56))
        assert (usage.busy, usage.lasting) == (Busy.WORKING, False)
        assert usage.message == "GPU 0: its utilization, 57 %, exceeds max_utilization (56 %)"
        assert busy(idle(utilization=57), demand=asked(max_utilization=57)) is None
        assert busy(idle(utilization=0), demand=asked(max_utilization=0)) is None

    def test_what_is_not_told_does_not_fit(self) -> None:
        usage = one(idle(free=None, total=None), demand=asked(min_free_memory=1))
        assert (usage.busy, usage.lasting) == (Busy.UNREADABLE, False)
        assert "min_free_memory" in usage.message
        usage = one(idle(), demand=asked(max_utilization=100))
        assert (usage.busy, usage.lasting) == (Busy.UNREADABLE, False)
        assert "max_utilization" in usage.message

    def test_of_an_instance_it_is_never_told(self) -> None:
        usage = one(idle(instance(1)), demand=asked(max_utilization=100))
        assert (usage.busy, usage.lasting) == (Busy.UNREADABLE, True)


PIDS = st.integers(1, 6)
BYTES = st.none() | st.integers(0, 2 * GIB)
MEMORY = st.none() | st.dictionaries(PIDS, BYTES, max_size=4)
DEVICES = [gpu(0), gpu(1), instance(1, index=2), instance(2, index=2, part=1), gpu(3)]


@st.composite
def readings(draw: st.DrawFn) -> list[DeviceReading]:
    return [
        DeviceReading(
            device=device,
            compute=draw(MEMORY),
            graphics=draw(MEMORY),
            used=draw(st.none() | st.integers(0, 4 * GIB)),
            free=draw(st.none() | st.integers(0, 4 * GIB)),
            total=draw(st.none() | st.just(4 * GIB)),
            utilization=draw(st.none() | st.integers(0, 100)),
            compute_mode=draw(st.none() | st.sampled_from(ComputeMode)),
            display=draw(st.none() | st.booleans()),
            lost=draw(st.integers(0, 5)) == 0,
        )
        for device in DEVICES
    ]


PEOPLE = st.builds(
    ListedProcesses,
    own=st.frozensets(PIDS),
    ended=st.frozensets(PIDS),
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


@given(readings(), PEOPLE, LEASED, DEMANDS)
def test_laws(
    told: list[DeviceReading],
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
        assert not (usage.leaving and not set(usage.pids) <= set(people.ended))
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


@given(readings(), PEOPLE, LEASED, st.sets(PIDS), st.sampled_from(DEVICES))
def test_what_is_busy_stays_so_when_there_is_more_of_it(
    told: list[DeviceReading],
    people: ListedProcesses,
    leased: dict[str, str],
    fewer: set[int],
    device: Any,
) -> None:
    """One more lease, or one less of ours, frees nothing; and nothing is asked in vain."""
    before = evaluate(told, processes=people, leased=leased)
    strict = people._replace(own=frozenset(people.own) - fewer)
    after = evaluate(told, processes=strict, leased={**leased, device.uuid: "x"})
    for old, new in zip(before, after, strict=True):
        assert old.busy is None or new.busy is not None
