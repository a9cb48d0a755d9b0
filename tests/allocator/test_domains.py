"""The domains of GPUs, and ``partition="machine"``: what holds on any machine."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gpuaff.allocator.domains import DOMAIN_RULE, gpu_domains
from gpuaff.allocator.model import Plan
from gpuaff.allocator.plan import plan
from gpuaff.cpuset import CpuSet
from gpuaff.notices import Notice
from gpuaff.topology.model import Accelerator, Gpu, MigInstance, NumaNode, Source, Topology
from tests.allocator.described import (
    box,
    codes,
    cpus,
    dgx_a100,
    on_the_bus,
    one_node,
    spread_cores,
    union,
)
from tests.allocator.random_machines import MODES, SCOPES, any_machine, regular, some_of


def test_a_change_of_any_domain_makes_the_version_2_and_is_in_the_changelog() -> None:
    assert DOMAIN_RULE == 1


def test_devices_that_the_driver_does_not_show_have_their_part() -> None:
    """One of four, on bus 3, is this process's; the others are with virtual machines."""
    known = on_the_bus(one_node(spread_cores(16, smt=1), gpus=4))
    seen = known._replace(gpus=(Gpu(index=0, pci_bus_id="0000:03:00.0"),))
    assert gpu_domains(seen) == {0: cpus("8-11")}


def test_a_gpu_that_sysfs_does_not_show_has_none() -> None:
    known = on_the_bus(one_node(spread_cores(8, smt=1), gpus=1))
    gpus = (*known.gpus, Gpu(index=1, pci_bus_id="0000:99:00.0"), Gpu(index=2))
    assert gpu_domains(known._replace(gpus=gpus)) == {0: cpus("0-7")}
    hidden = known._replace(accelerators=())
    assert gpu_domains(hidden) == {}
    found = plan(hidden, 1, partition="machine")
    assert found.partition == "job"
    message = (
        'partition="machine" has no effect: GPU 0 is missing from sysfs, so its domain is unknown; '
        "the CPUs 0-7 are cut among the ranks of this job only, and another job may get the same "
        "ones"
    )
    assert found.warnings == (Notice("border-unused", message),)


def test_where_the_driver_disagrees_with_sysfs_the_warning_names_the_domain() -> None:
    """sysfs puts GPU 0 next to 0-3, and so its domain; the driver says 4-7."""
    nodes = [range(4), range(4, 8)]
    known = on_the_bus(box(spread_cores(8, smt=1), nodes=nodes, sockets=[[0], [1]], gpus=[0, 1]))
    mistaken = (known.gpus[0]._replace(node_cpus=cpus("4-7"), numa_node=1), known.gpus[1])
    found = plan(known._replace(gpus=mistaken), 1, partition="machine")
    message = (
        "no local CPU available: none of the CPUs near GPU 0 (4-7) is in the GPU's domain, so the "
        "nearest allowed CPUs are used; allow some of these"
    )
    assert found.warnings == (Notice("near-not-allowed", message, rank=0),)


def test_mig_instances_share_a_domain_and_the_warning_says_so() -> None:
    instances = tuple(
        MigInstance(uuid=f"MIG-{letter}", gpu_instance=at, compute_instance=0)
        for at, letter in enumerate("ab", 1)
    )
    first, *others = dgx_a100().gpus
    machine = dgx_a100()._replace(gpus=(first._replace(mig=instances), *others))
    found = plan(machine._replace(visible=(0,)), 1, partition="machine")
    assert found.warnings[0] == Notice(
        "border-shared",
        "GPU 0 has MIG instances, which share its domain: a job on another instance gets the same "
        "CPUs; give each job CPUs of its own (cpus=)",
    )
    assert found.shares == plan(machine, 8, partition="machine").shares[:1]
    assert codes(plan(machine._replace(visible=(1,)), 1, partition="machine")) == ["scope-hint"]


# --- on any machine ------------------------------------------------------------------------


@st.composite
def strangers_job(draw: st.DrawFn, machine: Topology, gpus: list[int]) -> Plan:
    """A job on these GPUs; it sees the machine its own way and asks its own things."""
    needed = union(gpu_domains(machine)[gpu] for gpu in gpus)
    more = draw(st.sets(st.sampled_from(sorted(machine.cpus))))
    seen = machine._replace(visible=tuple(gpus)).with_allowed(needed | more)
    if draw(st.booleans()):  # a driver that knows nothing about near CPUs
        silent = tuple(gpu._replace(node_cpus=None, socket_cpus=None) for gpu in seen.gpus)
        seen = seen._replace(gpus=silent)
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
def test_jobs_that_know_nothing_of_each_other_get_different_cpus(data: st.DataObject) -> None:
    machine = on_the_bus(data.draw(regular()))
    assume(len(machine.gpus) > 1 and all(gpu_domains(machine).values()))
    order = data.draw(st.permutations([gpu.index for gpu in machine.gpus]))
    cut = data.draw(st.integers(1, len(order) - 1))
    one, other = (data.draw(strangers_job(machine, part)) for part in (order[:cut], order[cut:]))
    assert (one.partition, other.partition) == ("machine", "machine")
    taken = [union(share.cpus for share in found.shares) for found in (one, other)]
    assert taken[0].isdisjoint(taken[1])
    assert all(share.cpus for found in (one, other) for share in found.shares)


@st.composite
def with_devices(draw: st.DrawFn) -> Topology:
    """Any machine, with PCI devices that may tell anything, and a GPU for each."""
    known = draw(any_machine())
    near = st.one_of(st.none(), some_of(known.cpus), some_of(range(max(known.cpus) + 4)))
    node = st.one_of(st.none(), st.integers(0, 2 * len(known.numa_nodes or ())))
    devices = tuple(
        Accelerator(
            pci_bus_id=f"0000:{number + 1:02x}:00.0",
            vendor="10de",
            local_cpus=draw(near),
            numa_node=draw(node),
        )
        for number in range(draw(st.integers(1, 5)))
    )
    gpus = tuple(Gpu(index=n, pci_bus_id=one.pci_bus_id) for n, one in enumerate(devices))
    return known._replace(gpus=gpus, visible=tuple(range(len(gpus))), accelerators=devices)


@st.composite
def as_strangers_see_it(draw: st.DrawFn, topology: Topology) -> Topology:
    """The same machine as another process sees it: its mask, its driver, its GPUs, its notes."""
    near = st.one_of(st.none(), some_of(topology.cpus))
    shown = draw(st.lists(st.sampled_from(topology.gpus), min_size=1, unique=True))
    gpus = tuple(
        gpu._replace(
            node_cpus=draw(near),
            socket_cpus=draw(near),
            local_cpus=draw(near),
            numa_node=draw(st.sampled_from((None, 0, 1, 2))),
            memory_node=draw(st.sampled_from((None, 3))),
            name=draw(st.sampled_from((None, "NVIDIA H100"))),
            source=draw(st.sampled_from((None, Source.NVML, Source.GIVEN))),
        )
        for gpu in sorted(shown, key=lambda gpu: gpu.index)
    )
    return topology._replace(
        allowed=draw(some_of(topology.cpus)),
        gpus=gpus,
        visible=tuple(draw(st.permutations([gpu.index for gpu in gpus]))),
        links=None,
        notes=(Notice("no-driver", "none"),),
    )


@pytest.mark.case("B13", "B14")
@given(st.data())
def test_two_strangers_find_the_same_domains(data: st.DataObject) -> None:
    topology = data.draw(with_devices())
    found = gpu_domains(topology)
    one, other = (data.draw(as_strangers_see_it(topology)) for _ in range(2))
    for seen in (one, other):
        assert gpu_domains(seen) == {gpu.index: found[gpu.index] for gpu in seen.gpus}
    for mine, mine_cpus in gpu_domains(one).items():
        for theirs, their_cpus in gpu_domains(other).items():
            assert mine == theirs or mine_cpus.isdisjoint(their_cpus)


@given(st.one_of(with_devices(), any_machine()))
def test_each_online_cpu_is_in_one_domain_and_cores_stay_whole(topology: Topology) -> None:
    found = list(gpu_domains(topology).values())
    assert frozenset().union(*found) == topology.cpus
    assert sum(map(len, found)) == len(topology.cpus)
    for core in topology.cores or ():
        assert any(core <= domain for domain in found)


@st.composite
def told(draw: st.DrawFn) -> tuple[Topology, list[CpuSet]]:
    """A machine whose nodes and devices tell all, and the devices' homes."""
    topology = draw(with_devices())
    numa = topology.numa_nodes or (NumaNode(id=0, cpus=topology.cpus),)
    row = st.lists(st.integers(11, 13), min_size=len(numa), max_size=len(numa)).map(tuple)
    nodes = tuple(node._replace(distances=draw(row)) for node in numa)
    homes = [draw(some_of(topology.cpus)) for _ in topology.gpus]
    devices = tuple(
        one._replace(local_cpus=home)
        for one, home in zip(topology.accelerators or (), homes, strict=True)
    )
    return topology._replace(numa_nodes=nodes, accelerators=devices), homes


@given(told())
def test_local_accelerators_go_first_and_then_the_nearest(
    drawn: tuple[Topology, list[CpuSet]],
) -> None:
    topology, homes = drawn
    nodes = topology.numa_nodes or ()
    known = {cpu: core for core in topology.cores or () for cpu in core}
    for index, domain in gpu_domains(topology).items():
        for cpu in domain:
            core = known.get(cpu, frozenset((cpu,)))
            hosts = {n for n, home in enumerate(homes) if not core.isdisjoint(home)}
            assert index in (hosts or nearest(min(core), nodes, homes))


def nearest(cpu: int, nodes: Sequence[NumaNode], homes: Sequence[CpuSet]) -> set[int]:
    """The numbers of the homes that are nearest to a CPU, by the words of the rule."""
    (row,) = [node.distances or () for node in nodes if cpu in node.cpus]
    far = {
        number: min(row[at] for at, node in enumerate(nodes) if node.cpus & home)
        for number, home in enumerate(homes)
    }
    return {number for number, distance in far.items() if distance == min(far.values())}


@given(with_devices())
def test_no_share_could_grow_at_the_cost_of_a_larger_one(topology: Topology) -> None:
    """Where all are at home everywhere, sizes differ by one core at most."""
    devices = [one._replace(local_cpus=topology.cpus) for one in topology.accelerators or ()]
    found = gpu_domains(topology._replace(accelerators=tuple(devices)))
    cores = topology.cores or [frozenset((cpu,)) for cpu in topology.cpus]
    sizes = [sum(1 for core in cores if core & domain) for domain in found.values()]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True) or topology.efficiency_cpus
