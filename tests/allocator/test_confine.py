"""partition="machine": jobs that know nothing of each other don't meet."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gpuaff.allocator.domains import gpu_domains
from gpuaff.allocator.model import Plan
from gpuaff.allocator.plan import plan
from gpuaff.cpuset import CpuSet
from gpuaff.errors import GPUAffinityError
from gpuaff.topology.model import Accelerator, MigInstance, Topology
from tests.allocator.described import box, codes, cpus, dgx_a100, shown, spread_cores
from tests.allocator.random_machines import MODES, SCOPES, regular


def stranger(topology: Topology, visible: str, nproc: int, **options: Any) -> Plan:
    return plan(topology.with_visible_devices(visible), nproc, partition="machine", **options)


@pytest.mark.case("B13", "B14")
def test_two_jobs_on_one_node_of_a_dgx() -> None:
    """Both GPUs are near cores 48-63; alone in its own eyes each job would take all of them."""
    machine = dgx_a100()
    assert shown(plan(machine.with_visible_devices("0"), 1)) == ["48-63,176-191"]
    assert shown(plan(machine.with_visible_devices("1"), 1)) == ["48-63,176-191"]
    assert shown(stranger(machine, "0", 1)) == ["48-55,176-183"]
    assert shown(stranger(machine, "1", 1)) == ["56-63,184-191"]


def test_mode_scope_and_trimming_act_inside() -> None:
    """The border of GPU 2: cores 16-23 of its node, and 32-39 that belong to no GPU's node."""
    machine = dgx_a100()
    assert shown(stranger(machine, "2", 1, mode="all", scope="socket")) == [
        "16-23,32-39,144-151,160-167"
    ]
    assert shown(stranger(machine, "2", 1, mode="single")) == ["16,144"]
    assert shown(stranger(machine, "2", 2)) == ["16-19,144-147", "20-23,148-151"]
    assert shown(stranger(machine, "2", 1, max_physical_cores=3)) == ["16-18,144-146"]
    found = stranger(machine, "2", 1, reserve=2, multithreading="single_logical")
    assert shown(found) == ["16-21"]
    assert found.shares[0].reserved == cpus("22-23")


def test_what_it_says() -> None:
    found = stranger(dgx_a100(), "0,1", 2)
    assert (found.to_dict()["partition"], found.to_dict()["border_rule"]) == ("machine", 1)
    assert codes(found) == ["scope-hint"]
    usual = plan(dgx_a100(), 8, partition="auto")
    assert (usual.partition, usual.border_rule) == ("job", None)


class TestNotTheWholeBorder:
    """The plan is the one of partition="job" then, and says so once."""

    def test_a_mask_without_some_of_it(self) -> None:
        narrow = dgx_a100().with_allowed(cpus("48-63,176-190"))
        found = stranger(narrow, "0,1", 2)
        usual = plan(narrow.with_visible_devices("0,1"), 2)
        assert (found.shares, found.partition) == (usual.shares, "job")
        assert codes(found) == ["border-unused", *codes(usual)]
        assert "GPU 0, CPUs 0-7,48-55,128-135,176-183," in found.warnings[0].message
        assert "the CPUs 0-7,128-135 are not allowed" in found.warnings[0].message

    def test_one_rank_without_is_enough(self) -> None:
        """GPU 0 has its border, GPU 1 has not."""
        narrow = dgx_a100().with_allowed(cpus("0-7,48-63,128-135,176-191"))
        assert "GPU 1" in stranger(narrow, "0,1", 2).warnings[0].message
        assert stranger(narrow, "0", 1).partition == "machine"

    def test_sysfs_does_not_show_the_gpu(self) -> None:
        hidden = replace(dgx_a100(), accelerators=())
        found = stranger(hidden, "0", 1)
        assert (codes(found)[0], found.partition) == ("border-unused", "job")
        assert "GPU 0 is missing from sysfs" in found.warnings[0].message

    def test_more_gpus_than_cores(self) -> None:
        """Three GPUs, two cores: the third has no border, the first has core 0."""
        small = box(spread_cores(2), nodes=[range(2)], sockets=[[0]], gpus=[0, 0, 0])
        assert "GPU 2 has no domain" in stranger(small, "2", 1).warnings[0].message
        assert shown(stranger(small, "0", 1)) == ["0,2"]

    def test_no_gpu_at_all(self) -> None:
        found = stranger(replace(dgx_a100(), gpus=()), "", 1)
        assert "border-unused" not in codes(found)
        assert found.partition == "job"


def test_a_far_gpu_without_its_border_is_told_why() -> None:
    """Not the border but the mask leaves nothing near GPU 0."""
    found = stranger(dgx_a100().with_allowed(cpus("0-15")), "0", 1)
    (note,) = (note for note in found.warnings if note.code == "near-not-allowed")
    assert "is allowed by the CPU mask, so" in note.message


def test_mig_instances_share_a_border() -> None:
    """Strangers on two instances of GPU 0 have the same border, and that is said."""
    instances = tuple(
        MigInstance(uuid=f"MIG-{letter}", gpu_instance=at, compute_instance=0)
        for at, letter in enumerate("ab", 1)
    )
    first, *others = dgx_a100().gpus
    machine = replace(dgx_a100(), gpus=(replace(first, mig=instances), *others))
    found = plan(replace(machine, visible=(0,)), 1, partition="machine")
    assert codes(found)[0] == "border-shared"
    assert found.warnings[0].message == (
        "GPU 0 has MIG instances, which share its domain: a job on another instance gets the same "
        "CPUs; give each job CPUs of its own (cpus=)"
    )
    assert found.shares == plan(machine, 8, partition="machine").shares[:1]
    assert codes(plan(replace(machine, visible=(1,)), 1, partition="machine")) == ["scope-hint"]


class TestChosenCpus:
    def test_a_part_of_the_border(self) -> None:
        """The mask holds the border; what is left of it by choice is still apart from strangers."""
        assert shown(stranger(dgx_a100(), "0", 1, cpus="50-60")) == ["50-55"]

    def test_nothing_of_it(self) -> None:
        with pytest.raises(
            GPUAffinityError, match=r"rank 0 in the domain of GPU 0, CPUs 0-7,.* only 16-20;"
        ):
            stranger(dgx_a100(), "0", 1, cpus="16-20")


def test_each_rank_with_a_mask_of_its_own() -> None:
    everything = "0-255"
    found = stranger(dgx_a100(), "0,1", 2, rank_allowed=[everything, "8-15,56-63,136-143,184-191"])
    assert shown(found) == ["48-55,176-183", "56-63,184-191"]
    assert found.partition == "machine"


@st.composite
def jobs(draw: st.DrawFn, machine: Topology) -> list[Plan]:
    """Two jobs on GPUs of their own; each sees the machine its own way and asks its own things."""
    order = draw(st.permutations([gpu.index for gpu in machine.gpus]))
    cut = draw(st.integers(1, len(order) - 1))
    return [draw(job(machine, part)) for part in (order[:cut], order[cut:])]


@st.composite
def job(draw: st.DrawFn, machine: Topology, gpus: list[int]) -> Plan:
    needed: CpuSet = frozenset().union(*(gpu_domains(machine)[gpu] for gpu in gpus))
    more = draw(st.sets(st.sampled_from(sorted(machine.cpus))))
    seen = replace(machine, visible=tuple(gpus)).with_allowed(needed | more)
    if draw(st.booleans()):  # a driver that tells nothing about near CPUs
        silent = tuple(replace(gpu, node_cpus=None, socket_cpus=None) for gpu in seen.gpus)
        seen = replace(seen, gpus=silent)
    return plan(
        seen,
        draw(st.integers(1, 2 * len(gpus))),
        partition="machine",
        mode=draw(st.sampled_from((*MODES, "core_complex"))),
        scope=draw(st.sampled_from(SCOPES)),
        balanced=draw(st.booleans()),
        multithreading=draw(st.sampled_from(("all_logical", "single_logical"))),
        max_physical_cores=draw(st.one_of(st.none(), st.integers(1, 4))),
    )


@pytest.mark.case("B13", "B14")
@given(st.data())
def test_strangers_never_meet(data: st.DataObject) -> None:
    machine = data.draw(regular())
    assume(len(machine.gpus) > 1)
    devices = tuple(
        Accelerator(
            pci_bus_id=f"0000:{gpu.index:02x}:00.0",
            vendor="10de",
            local_cpus=gpu.node_cpus,
            numa_node=None,
        )
        for gpu in machine.gpus
    )
    named = tuple(
        replace(gpu, pci_bus_id=device.pci_bus_id)
        for gpu, device in zip(machine.gpus, devices, strict=True)
    )
    machine = replace(machine, gpus=named, accelerators=devices)
    assume(all(gpu_domains(machine).values()))
    one, other = data.draw(jobs(machine))
    assert (one.partition, other.partition) == ("machine", "machine")
    taken: list[CpuSet] = [
        frozenset().union(*(share.cpus for share in found.shares)) for found in (one, other)
    ]
    assert taken[0].isdisjoint(taken[1])
    assert all(share.cpus for found in (one, other) for share in found.shares)
