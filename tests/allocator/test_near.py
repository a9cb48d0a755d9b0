"""Which CPUs are near a GPU: the steps of the search, and the machines that need them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpuaff.allocator.plan import plan
from gpuaff.topology.model import Gpu, NumaNode, Package, Source, Topology
from tests.allocator.described import (
    bare,
    box,
    codes,
    cpus,
    dgx_a100,
    one_node,
    shown,
    spread_cores,
)

NODES = (
    NumaNode(id=0, cpus=cpus("0-3"), distances=(10, 20, 30)),
    NumaNode(id=1, cpus=cpus("4-7"), distances=(20, 10, 20)),
    NumaNode(id=2, cpus=cpus("8-11"), distances=(30, 20, 10)),
)
PACKAGES = (Package(id=0, cpus=cpus("0-7")), Package(id=1, cpus=cpus("8-11")))


def on_nodes(gpu: Gpu, *, allowed: str = "0-11", nodes: tuple[NumaNode, ...] = NODES) -> Topology:
    """Twelve CPUs, three nodes, two sockets, one GPU."""
    told = bare("0-11", gpu, allowed=allowed)
    return replace(told, numa_nodes=nodes, packages=PACKAGES)


def answer(machine: Topology, scope: str = "node") -> tuple[str, Source]:
    found = plan(machine, 1, scope=scope)
    return shown(found)[0], found.shares[0].source


class TestByNode:
    @pytest.mark.parametrize("source", [Source.NVML, Source.SYSFS, Source.GIVEN])
    def test_first_the_best_source_there_was(self, source: Source) -> None:
        gpu = Gpu(
            index=0, node_cpus=cpus("0-2"), local_cpus=cpus("4-5"), numa_node=2, source=source
        )
        assert answer(on_nodes(gpu)) == ("0-2", source)

    def test_without_a_source_it_was_given(self) -> None:
        assert answer(on_nodes(Gpu(index=0, node_cpus=cpus("0-2")))) == ("0-2", Source.GIVEN)

    def test_then_the_pci_devices_list(self) -> None:
        gpu = Gpu(index=0, node_cpus=cpus("0-2"), local_cpus=cpus("4-5"), source=Source.NVML)
        assert answer(on_nodes(gpu, allowed="3-11")) == ("4-5", Source.SYSFS)

    @pytest.mark.parametrize(
        ("source", "expected"),
        [(None, Source.SYSFS), (Source.NVML, Source.SYSFS), (Source.GIVEN, Source.GIVEN)],
    )
    def test_then_the_cpus_of_its_node(self, source: Source | None, expected: Source) -> None:
        gpu = Gpu(index=0, numa_node=1, source=source)
        assert answer(on_nodes(gpu)) == ("4-7", expected)

    def test_then_the_nearest_node(self) -> None:
        gpu = Gpu(index=0, numa_node=0)
        assert answer(on_nodes(gpu, allowed="6-11")) == ("6-7", Source.NEAREST)

    def test_nodes_equally_near_are_taken_together(self) -> None:
        gpu = Gpu(index=0, numa_node=1)
        assert answer(on_nodes(gpu, allowed="3,8-9")) == ("3,8-9", Source.NEAREST)

    def test_distances_count_from_the_nodes_that_hold_the_named_cpus(self) -> None:
        gpu = Gpu(index=0, node_cpus=cpus("8-11"), source=Source.NVML)
        assert answer(on_nodes(gpu, allowed="0-7")) == ("4-7", Source.NEAREST)

    def test_then_all(self) -> None:
        assert answer(on_nodes(Gpu(index=0))) == ("0-11", Source.ALL)

    def test_without_distances_nothing_is_nearest(self) -> None:
        nodes = tuple(replace(node, distances=None) for node in NODES)
        gpu = Gpu(index=0, numa_node=0)
        assert answer(on_nodes(gpu, allowed="6-11", nodes=nodes)) == ("6-11", Source.ALL)


class TestBySocket:
    def test_first_what_the_source_tells(self) -> None:
        gpu = Gpu(
            index=0, node_cpus=cpus("0-1"), socket_cpus=cpus("0-5"), numa_node=0, source=Source.NVML
        )
        assert answer(on_nodes(gpu), "socket") == ("0-5", Source.NVML)

    @pytest.mark.parametrize(
        ("source", "expected"), [(Source.NVML, Source.SYSFS), (Source.GIVEN, Source.GIVEN)]
    )
    def test_then_the_packages_of_its_node(self, source: Source, expected: Source) -> None:
        gpu = Gpu(index=0, node_cpus=cpus("0-1"), source=source)
        assert answer(on_nodes(gpu), "socket") == ("0-7", expected)

    def test_a_node_that_is_not_allowed_still_tells_its_package(self) -> None:
        gpu = Gpu(index=0, numa_node=0)
        assert answer(on_nodes(gpu, allowed="6-11"), "socket") == ("6-7", Source.SYSFS)

    def test_without_packages_the_node(self) -> None:
        gpu = Gpu(index=0, numa_node=1)
        assert answer(replace(on_nodes(gpu), packages=None), "socket") == ("4-7", Source.SYSFS)

    def test_the_nearest_node_is_widened_to_its_package(self) -> None:
        """Socket 1 is not allowed; of socket 0, node 1 is nearest to node 2."""
        gpu = Gpu(index=0, numa_node=2)
        assert answer(on_nodes(gpu, allowed="0-7"), "socket") == ("0-7", Source.NEAREST)
        assert answer(on_nodes(gpu, allowed="0-7")) == ("4-7", Source.NEAREST)

    def test_then_all(self) -> None:
        assert answer(on_nodes(Gpu(index=0)), "socket") == ("0-11", Source.ALL)


@pytest.mark.case("A2")
def test_slurm_moved_the_job_away_from_its_gpus_node() -> None:
    """A DGX A100 whose grant is ten cores of node 0, with GPUs of node 3."""
    found = plan(dgx_a100(visible=[0, 1], allowed="0-9,128-137"), 2)
    assert shown(found) == ["0-4,128-132", "5-9,133-137"]
    assert {share.source for share in found.shares} == {Source.NEAREST}
    assert codes(found) == ["near-not-allowed"]
    assert "no local CPU available" in found.warnings[0].message
    assert "GPUs 0-1 (48-63,176-191)" in found.warnings[0].message


@pytest.mark.case("A2")
def test_no_local_cpu_and_no_distances() -> None:
    gpus = [Gpu(index=index, node_cpus=cpus("8-11"), source=Source.GIVEN) for index in (0, 1)]
    found = plan(bare("0-11", *gpus, allowed="0-3"), 2)
    assert shown(found) == ["0-1", "2-3"]
    assert {share.source for share in found.shares} == {Source.ALL}
    assert codes(found) == ["near-not-allowed"]


@pytest.mark.case("A5", "A6", "F8")
def test_a_cpuset_inside_a_node_is_cut_not_given_up() -> None:
    found = plan(dgx_a100(allowed="50-63,178-191"), 2)
    assert shown(found) == ["50-56,178-184", "57-63,185-191"]
    assert codes(found) == ["mask-narrow"]


@pytest.mark.case("A23", "F8")
def test_a_narrow_mask_is_said_once_for_all() -> None:
    found = plan(dgx_a100(allowed="0-50,64-127,128-178,192-255"), 8)
    assert [warning.code for warning in found.warnings].count("mask-narrow") == 1
    narrow = next(warning for warning in found.warnings if warning.code == "mask-narrow")
    assert "only 48-50,176-178 of the CPUs near GPUs 0-1 (48-63,176-191)" in narrow.message
    assert narrow.rank is None


def test_offline_cpus_in_a_mask_do_not_make_it_narrow() -> None:
    gpu = Gpu(index=0, node_cpus=cpus("0-7"), source=Source.NVML)
    assert codes(plan(bare("0-5", gpu), 1)) == []
    assert codes(plan(bare("0-5", gpu, allowed="0-4"), 1)) == ["mask-narrow"]


@pytest.mark.case("A7", "F6")
def test_an_unknown_node_is_not_node_0() -> None:
    """sysfs has −1 for both GPUs: the allowed CPUs of all nodes are shared out."""
    gpus = (Gpu(index=0), Gpu(index=1))
    machine = replace(bare("0-11", *gpus), numa_nodes=NODES, packages=PACKAGES)
    found = plan(machine, 2)
    assert shown(found) == ["0-5", "6-11"]
    assert codes(found) == ["near-unknown"]
    assert "near GPUs 0-1" in found.warnings[0].message


@pytest.mark.case("A7")
def test_the_driver_knows_better_than_the_firmware() -> None:
    gpu = Gpu(index=0, node_cpus=cpus("4-7"), numa_node=None, source=Source.NVML)
    assert answer(on_nodes(gpu)) == ("4-7", Source.NVML)


def test_one_gpu_unknown_beside_a_known_one() -> None:
    """It may have every CPU; the known one only 0-3, and so gets these."""
    gpus = (Gpu(index=0, node_cpus=cpus("0-3"), source=Source.NVML), Gpu(index=1))
    found = plan(replace(bare("0-11", *gpus), numa_nodes=NODES), 2, balanced=False)
    assert shown(found) == ["0-3", "4-11"]
    assert [(warning.code, warning.rank) for warning in found.warnings] == [("near-unknown", 1)]


@pytest.mark.case("A9", "A10")
def test_grace_hopper_with_nine_nodes() -> None:
    """Node 0 has all CPUs, the nodes 1-8 are memory; sysfs puts the GPU on node 1."""
    distances = (10, *[80] * 8)
    nodes = (
        NumaNode(id=0, cpus=cpus("0-71"), distances=distances),
        *(NumaNode(id=node, cpus=cpus(""), distances=(80, *[10] * 8)) for node in range(1, 9)),
    )
    told = bare("0-71", Gpu(index=0, numa_node=1, memory_node=1))
    found = plan(replace(told, numa_nodes=nodes), 1)
    assert shown(found) == ["0-71"]
    assert found.shares[0].numa_nodes == (0,)
    assert found.shares[0].source is Source.NEAREST
    assert codes(found) == []


@pytest.mark.case("A9")
def test_a_node_without_cpus_and_without_distances() -> None:
    nodes = (
        NumaNode(id=0, cpus=cpus("0-3")),
        NumaNode(id=1, cpus=cpus("4-7")),
        NumaNode(id=6, cpus=cpus("")),
    )
    found = plan(replace(bare("0-7", Gpu(index=0, numa_node=6)), numa_nodes=nodes), 1)
    assert shown(found) == ["0-7"]
    assert codes(found) == ["near-unknown"]
    assert found.warnings[0].rank == 0


@pytest.mark.case("F6")
def test_with_one_node_that_has_cpus_nothing_is_unknown() -> None:
    nodes = (NumaNode(id=0, cpus=cpus("0-7")), NumaNode(id=6, cpus=cpus("")))
    found = plan(replace(bare("0-7", Gpu(index=0)), numa_nodes=nodes), 1)
    assert shown(found) == ["0-7"]
    assert codes(found) == []


@pytest.mark.case("A11")
def test_the_plan_tells_the_numa_node_to_bind_memory_to() -> None:
    """GB200: two Grace CPUs, two GPUs each."""
    machine = box(
        spread_cores(144, smt=1),
        nodes=[range(72), range(72, 144)],
        sockets=[[0], [1]],
        gpus=[0, 0, 1, 1],
    )
    found = plan(machine, 4)
    assert shown(found) == ["0-35", "36-71", "72-107", "108-143"]
    assert [share.numa_nodes for share in found.shares] == [(0,), (0,), (1,), (1,)]


@pytest.mark.case("A14", "G8", "G7")
def test_ids_are_those_of_the_system_and_cpu_0_may_be_missing() -> None:
    """LUMI-G's low-noise mode: the first core of each L3 (8 cores) belongs to the system."""
    mask = "1-7,9-15,17-23,25-31,33-39,41-47,49-55,57-63"
    machine = box(
        spread_cores(64, smt=1),
        nodes=[range(16 * node, 16 * node + 16) for node in range(4)],
        sockets=[range(4)],
        gpus=[3, 3, 1, 1, 0, 0, 2, 2],
        allowed=mask,
    )
    found = plan(machine, 8)
    assert shown(found)[:4] == ["49-55", "57-63", "17-23", "25-31"]
    assert frozenset().union(*(share.cpus for share in found.shares)) == cpus(mask)


@pytest.mark.case("G7")
def test_siblings_that_are_half_the_machine_apart() -> None:
    """2 × 14 cores, siblings i and i + 28, and systemd leaves 4-27 and 32-55."""
    machine = box(
        spread_cores(28),
        nodes=[range(14), range(14, 28)],
        sockets=[[0], [1]],
        gpus=[0, 1],
        allowed="4-27,32-55",
    )
    assert shown(plan(machine, 2)) == ["4-13,32-41", "14-23,42-51"]


@pytest.mark.case("A18")
def test_allowed_ids_that_are_not_online_are_ignored() -> None:
    machine = replace(one_node(spread_cores(8), gpus=1), allowed=cpus("0-31"))
    assert shown(plan(machine, 1)) == ["0-15"]


@pytest.mark.case("A20")
def test_near_sets_smaller_than_a_socket() -> None:
    gpu = Gpu(index=0, node_cpus=cpus("0-15"), socket_cpus=cpus("0-31"), source=Source.NVML)
    machine = bare("0-63", gpu)
    assert shown(plan(machine, 1)) == ["0-15"]
    assert shown(plan(machine, 1, scope="socket")) == ["0-31"]


@pytest.mark.case("A22")
def test_masks_that_name_cpus_that_do_not_exist() -> None:
    """An NDv2 with 40 CPUs, 20 a node, and masks written as if there were 32 a node."""
    gpus = [
        Gpu(index=index, node_cpus=cpus(text), source=Source.NVML)
        for index, text in enumerate(["0-31", "0-31", "32-63", "32-63"])
    ]
    found = plan(bare("0-39", *gpus), 4, balanced=False)
    assert shown(found) == ["0-15", "16-31", "32-35", "36-39"]


@pytest.mark.case("A17")
@pytest.mark.parametrize("mask", ["3,17,40-44", "0", "255", "64-80,200"])
def test_whatever_cores_a_job_gets(mask: str) -> None:
    found = plan(dgx_a100(allowed=mask), 8)
    assert all(share.cpus and share.cpus <= cpus(mask) for share in found.shares)


@pytest.mark.case("B17")
def test_gpus_are_asked_one_by_one() -> None:
    """Eight nodes, GPU g near node 7 − g, and no GPU on the nodes 0 and 1."""
    machine = box(
        spread_cores(16, smt=1),
        nodes=[(2 * node, 2 * node + 1) for node in range(8)],
        sockets=[range(8)],
        gpus=[7 - gpu for gpu in range(6)],
    )
    assert shown(plan(machine, 6)) == ["14-15", "12-13", "10-11", "8-9", "6-7", "4-5"]


def test_a_core_is_near_as_a_whole() -> None:
    """Masks that split cores: both GPUs are near all four cores, so each gets two."""
    machine = replace(
        one_node(spread_cores(4), gpus=2),
        gpus=(
            Gpu(index=0, node_cpus=cpus("0-3"), source=Source.NVML),
            Gpu(index=1, node_cpus=cpus("4-7"), source=Source.NVML),
        ),
    )
    assert shown(plan(machine, 2)) == ["0-1,4-5", "2-3,6-7"]
