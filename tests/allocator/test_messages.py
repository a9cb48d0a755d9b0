"""What people read: the whole line of each warning of a plan and of each refusal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpuaff.allocator.model import Plan
from gpuaff.allocator.plan import plan
from gpuaff.errors import GPUAffinityError
from gpuaff.topology.model import Gpu, NumaNode, Package, Source, Topology
from tests.allocator.described import bare, box, cpus, dgx_a100, one_node, spread_cores
from tests.allocator.special_machines import on_the_bus

EIGHT = one_node(spread_cores(8, smt=1), gpus=2)
THREE_ON_TWO = one_node(spread_cores(2), gpus=3)
NO_GPU = one_node(spread_cores(4), gpus=0)
NO_CPUS = Topology(gpus=(Gpu(index=0),), visible=(0,))
FAR = box(spread_cores(8, smt=1), nodes=[range(4), range(4, 8)], sockets=[[0], [1]], gpus=[0, 1])


def line(found: Plan, code: str) -> str:
    """The one warning with this code."""
    (message,) = [warning.message for warning in found.warnings if warning.code == code]
    return message


def refusal(topology: Topology, nproc: int, **asked: Any) -> str:
    with pytest.raises(GPUAffinityError) as caught:
        plan(topology, nproc, **asked)
    return str(caught.value)


class TestNoGpu:
    def test_everyone_keeps_the_same(self) -> None:
        assert line(plan(NO_GPU.with_allowed(cpus("0-5")), 2), "no-gpu") == (
            "no GPU is visible, so every rank keeps the CPUs 0-5; "
            "check CUDA_VISIBLE_DEVICES and the driver"
        )

    def test_everyone_keeps_its_own(self) -> None:
        assert line(plan(NO_GPU, 2, rank_allowed=["0-2", "3-7"]), "no-gpu") == (
            "no GPU is visible, so every rank keeps the CPUs that it may use; "
            "check CUDA_VISIBLE_DEVICES and the driver"
        )

    def test_nobody_knows_what_that_is(self) -> None:
        assert line(plan(Topology(), 1), "no-gpu") == (
            "no GPU is visible, so every rank keeps all its CPUs; "
            "check CUDA_VISIBLE_DEVICES and the driver"
        )

    def test_nor_is_anything_reserved(self) -> None:
        assert line(plan(NO_GPU, 2, reserve=1), "no-gpu") == (
            "no GPU is visible, so every rank keeps the CPUs 0-7, and no core is reserved; "
            "check CUDA_VISIBLE_DEVICES and the driver"
        )


class TestLittleIsKnown:
    def test_cpus(self) -> None:
        assert line(plan(NO_CPUS, 1), "cpus-unknown") == (
            "the topology has no CPUs, so there is nothing to share out; "
            "add the output of `lscpu -p`, or observe the machine itself"
        )

    def test_cores(self) -> None:
        assert line(plan(replace(EIGHT, cores=None), 2), "cores-unknown") == (
            "the topology does not show which CPUs are siblings (hyperthreads), so each CPU counts "
            "as a core; add the output of `lscpu -p`, or observe the machine itself"
        )

    def test_core_complexes(self) -> None:
        assert line(plan(EIGHT, 2, mode="core_complex"), "complex-unknown") == (
            "the topology does not show which cores share an L3 cache, so the cores are cut as by "
            "mode unique_contiguous; add the output of `lscpu -p`, or observe the machine itself"
        )

    def test_what_is_near(self) -> None:
        machine = replace(FAR, gpus=(Gpu(index=0), Gpu(index=1)))
        assert line(plan(machine, 2), "near-unknown") == (
            "neither the driver nor sysfs reports which CPUs are near GPUs 0-1, "
            "so all allowed CPUs count as near; on a virtual machine, request its NUMA layout"
        )


class TestNearNotAllowed:
    CODE = "near-not-allowed"

    def test_the_nearest_are_taken(self) -> None:
        found = plan(dgx_a100(visible=[0, 1], allowed="0-9,128-137"), 2)
        assert line(found, self.CODE) == (
            "no local CPU available: none of the CPUs near GPUs 0-1 (48-63,176-191) is allowed "
            "by the CPU mask, so the nearest allowed CPUs are used; allow some of these"
        )

    def test_nothing_is_nearest(self) -> None:
        gpu = Gpu(index=0, node_cpus=cpus("4-7"), source=Source.GIVEN)
        assert line(plan(bare("0-7", gpu, allowed="0-3"), 1), self.CODE) == (
            "no local CPU available: none of the CPUs near GPU 0 (4-7) is allowed by the CPU mask, "
            "so all allowed CPUs count as near; allow some of these"
        )

    def test_by_choice(self) -> None:
        assert line(plan(FAR, 1, cpus="6-7"), self.CODE) == (
            "no local CPU available: none of the CPUs near GPU 0 (0-3) is in cpus=6-7, "
            "so the nearest allowed CPUs are used; allow some of these"
        )

    def test_by_the_rank_own_mask(self) -> None:
        found = plan(FAR, 2, rank_allowed=["6-7", "4-5"])
        assert line(found, self.CODE) == (
            "no local CPU available: none of the CPUs near GPU 0 (0-3) is allowed for rank 0, "
            "so the nearest allowed CPUs are used; allow some of these"
        )

    def test_by_the_border(self) -> None:
        """sysfs puts GPU 0 next to 0-3, and so its border; the driver says 4-7."""
        shown = on_the_bus(FAR)
        mistaken = (replace(shown.gpus[0], node_cpus=cpus("4-7"), numa_node=1), shown.gpus[1])
        found = plan(replace(shown, gpus=mistaken), 1, partition="machine")
        assert line(found, self.CODE) == (
            "no local CPU available: none of the CPUs near GPU 0 (4-7) is in the GPU's domain, "
            "so the nearest allowed CPUs are used; allow some of these"
        )

    def test_by_socket_it_tells_what_the_driver_said_of_the_socket(self) -> None:
        """Not what it said of the node, nor the whole package of that."""
        nodes = (
            NumaNode(id=0, cpus=cpus("0-3"), distances=(10, 20)),
            NumaNode(id=1, cpus=cpus("4-11"), distances=(20, 10)),
        )
        gpu = Gpu(index=0, socket_cpus=cpus("4-9"), numa_node=1, source=Source.NVML)
        machine = replace(
            bare("0-11", gpu, allowed="0-3"),
            numa_nodes=nodes,
            packages=(Package(id=0, cpus=cpus("0-3")), Package(id=1, cpus=cpus("4-11"))),
        )
        assert line(plan(machine, 1, scope="socket"), self.CODE) == (
            "no local CPU available: none of the CPUs near GPU 0 (4-9) is allowed by the CPU mask, "
            "so the nearest allowed CPUs are used; allow some of these"
        )
        silent = replace(machine, gpus=(Gpu(index=0, numa_node=1),), packages=None)
        assert "available: none of the CPUs near GPU 0 (4-11) is" in line(
            plan(silent, 1, scope="socket"), self.CODE
        )


class TestMaskNarrow:
    def test_for_several(self) -> None:
        found = plan(dgx_a100(allowed="0-50,64-178,192-255"), 8)
        assert line(found, "mask-narrow") == (
            "the CPU mask allows only 48-50,176-178 of the CPUs near GPUs 0-1 (48-63,176-191), "
            "and the plan stays inside it; if an OpenMP runtime has narrowed the mask, "
            "call gpuaff before importing it"
        )

    def test_for_one_its_rank_is_told(self) -> None:
        (warning,) = plan(FAR.with_allowed(cpus("0-5")), 2).warnings
        assert (warning.code, warning.rank) == ("mask-narrow", 1)
        assert warning.message == (
            "the CPU mask allows only 4-5 of the CPUs near GPU 1 (4-7), "
            "and the plan stays inside it; if an OpenMP runtime has narrowed the mask, "
            "call gpuaff before importing it"
        )

    def test_by_socket(self) -> None:
        gpu = Gpu(index=0, node_cpus=cpus("0-3"), socket_cpus=cpus("0-7"), source=Source.NVML)
        found = plan(bare("0-15", gpu, allowed="0-5"), 1, scope="socket")
        assert line(found, "mask-narrow") == (
            "the CPU mask allows only 0-5 of the CPUs near GPU 0 (0-7), "
            "and the plan stays inside it; if an OpenMP runtime has narrowed the mask, "
            "call gpuaff before importing it"
        )

    def test_where_nobody_tells_what_is_online(self) -> None:
        gpu = Gpu(index=0, node_cpus=cpus("0-7"), source=Source.GIVEN)
        machine = Topology(gpus=(gpu,), visible=(0,), allowed=cpus("0-3"))
        assert line(plan(machine, 1), "mask-narrow") == (
            "the CPU mask allows only 0-3 of the CPUs near GPU 0 (0-7), "
            "and the plan stays inside it; if an OpenMP runtime has narrowed the mask, "
            "call gpuaff before importing it"
        )


class TestTooFewCores:
    def test_for_all(self) -> None:
        assert line(plan(THREE_ON_TWO, 3), "too-few-cores") == (
            "ranks 0-2 must share cores: there are more ranks than cores near GPUs 0-2 (CPUs 0-3); "
            "start fewer processes or allow more CPUs"
        )

    def test_only_those_that_lack_one_are_named(self) -> None:
        """Core 0 is near the GPUs 0 and 1, the other four are near GPU 2."""
        machine = box(
            spread_cores(5, smt=1), nodes=[[0], range(1, 5)], sockets=[[0], [1]], gpus=[0, 0, 1]
        )
        assert line(plan(machine, 3), "too-few-cores") == (
            "ranks 0-1 must share cores: there are more ranks than cores near GPUs 0-1 (CPUs 0); "
            "start fewer processes or allow more CPUs"
        )


def test_scope_hint() -> None:
    assert line(plan(dgx_a100(), 2), "scope-hint") == (
        "the CPUs 0-15,32-47,128-143,160-175 are on the same sockets as the GPUs but on no "
        'GPU\'s NUMA node, so no rank gets them; scope="socket" shares them out too'
    )


class TestBorderUnused:
    """What is cut then is what the ranks may use, all of it."""

    def line(self, topology: Topology, visible: str) -> str:
        found = plan(topology.with_visible_devices(visible), 1, partition="machine")
        return line(found, "border-unused")

    def test_not_the_whole_border(self) -> None:
        narrow = dgx_a100().with_allowed(cpus("48-63,176-190"))
        assert self.line(narrow, "0") == (
            'partition="machine" has no effect: of the domain of GPU 0, CPUs '
            "0-7,48-55,128-135,176-183, the CPUs 0-7,128-135 are not allowed here; the CPUs "
            "48-63,176-190 are cut among the ranks of this job only, and another job may get the "
            "same ones"
        )

    def test_sysfs_does_not_show_the_gpu(self) -> None:
        assert self.line(replace(EIGHT, accelerators=()), "0") == (
            'partition="machine" has no effect: GPU 0 is missing from sysfs, so its domain is '
            "unknown; the CPUs 0-7 are cut among the ranks of this job only, and another job may "
            "get the same ones"
        )

    def test_more_gpus_than_cores(self) -> None:
        assert self.line(THREE_ON_TWO, "2") == (
            'partition="machine" has no effect: GPU 2 has no domain, as there are more '
            "accelerators than cores near them; the CPUs 0-3 are cut among the ranks of this job "
            "only, and another job may get the same ones"
        )


def test_nothing_of_the_border_was_chosen() -> None:
    assert refusal(EIGHT, 2, partition="machine", cpus="4-5") == (
        'partition="machine" keeps rank 0 in the domain of GPU 0, CPUs 0-3, but cpus= names only '
        '4-5; add CPUs of the domain, leave cpus= out, or use partition="job"'
    )


class TestTooMuchWasAsked:
    def test_by_node(self) -> None:
        assert refusal(EIGHT, 2, min_physical_cores=5) == (
            "requested min_physical_cores=5, but rank 0 on GPU 0 can have 4: 8 cores near its GPU "
            "are allowed (of the CPUs 0-7), and ranks near the same cores share them; "
            'request fewer, start fewer processes, allow more CPUs, or try scope="socket"'
        )

    def test_by_socket_beside_a_reserve(self) -> None:
        assert refusal(EIGHT, 2, min_physical_cores=4, reserve=1, scope="socket") == (
            "requested min_physical_cores=4, but rank 0 on GPU 0 can have 3 besides the 1 to "
            "reserve: 8 cores near its GPU are allowed (of the CPUs 0-7), and ranks near the "
            "same cores share them; request fewer, start fewer processes, allow more CPUs"
        )

    def test_without_a_gpu(self) -> None:
        assert refusal(NO_GPU, 2, min_physical_cores=5) == (
            "requested min_physical_cores=5, but a rank would keep 4 cores: no GPU is visible, so "
            "every rank keeps the CPUs 0-7; check CUDA_VISIBLE_DEVICES and the driver"
        )
        assert refusal(Topology(), 1, min_physical_cores=1) == (
            "requested min_physical_cores=1, but a rank would keep 0 cores: no GPU is visible, so "
            "every rank keeps all its CPUs; check CUDA_VISIBLE_DEVICES and the driver"
        )

    def test_without_cpus(self) -> None:
        assert refusal(NO_CPUS, 1, min_physical_cores=1) == (
            "requested min_physical_cores=1, but a rank would keep 0 cores: the topology has no "
            "CPUs, so there is nothing to share out; add the output of `lscpu -p`, or observe the "
            "machine itself"
        )


class TestReservedTooMuch:
    def test_of_a_part(self) -> None:
        assert refusal(EIGHT, 2, reserve=4) == (
            "requested reserve=4, but rank 0 on GPU 0 would have no core left (4 of the 8 cores "
            "near its GPU); reserve fewer, start fewer processes or allow more CPUs"
        )

    def test_of_a_list(self) -> None:
        assert refusal(EIGHT, 2, reserve=8, mode="all") == (
            "requested reserve=8, but rank 0 on GPU 0 would have no core left (none of the 8 cores "
            "near its GPU); reserve fewer, start fewer processes or allow more CPUs"
        )

    def test_for_a_single_core_each(self) -> None:
        assert refusal(EIGHT, 3, reserve=6, mode="single_unique") == (
            "requested reserve=6, but rank 2 on GPU 0 would have no core left (none of the 8 cores "
            "near its GPU); reserve fewer, start fewer processes or allow more CPUs"
        )


class TestCpusThatCannotBeHad:
    def test_a_mask_outside_the_machine(self) -> None:
        assert refusal(replace(EIGHT, allowed=cpus("8-9")), 1) == (
            "no CPU is allowed: the CPU mask (8-9) holds none of the online CPUs 0-7; "
            "check the mask or cpuset that the job was started with"
        )

    def test_a_rank_mask_outside_the_machine(self) -> None:
        assert refusal(EIGHT, 2, rank_allowed=["0-7", "8-9"]) == (
            "no CPU is allowed: rank_allowed[1] (8-9) holds none of the online CPUs 0-7; "
            "give each rank's CPUs by their ids on this machine"
        )

    def test_a_choice_outside_the_mask(self) -> None:
        assert refusal(EIGHT.with_allowed(cpus("2-7")), 2, cpus="1-2,8") == (
            "requested cpus=1-2,8, but the CPUs 1,8 are not available (online: 0-7; allowed: 2-7); "
            "name only allowed CPUs, or start the job with a wider CPU mask"
        )

    def test_a_choice_that_leaves_a_rank_nothing(self) -> None:
        assert refusal(EIGHT, 2, cpus="2-3", rank_allowed=["0-3", "4-7"]) == (
            "requested cpus=2-3, but rank 1 may use only the CPUs 4-7, none of which is in the "
            "list; add some of these"
        )

    def test_a_gpu_that_is_not_there(self) -> None:
        assert refusal(replace(EIGHT, visible=(0, 5)), 2) == (
            "GPU 5 is visible, but the topology has only the GPUs [0, 1]; "
            "observe the machine again, or correct its description"
        )
