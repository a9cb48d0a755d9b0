"""The domain rule, step by step, and what holds on any machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuaff.allocator.domains import DOMAIN_RULE, gpu_domains
from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.notices import Notice
from gpuaff.topology.model import Accelerator, Gpu, NumaNode, Package, Source, Topology
from tests.allocator.described import bare, cpus, one_node, spread_cores
from tests.allocator.random_machines import any_machine, some_of
from tests.allocator.special_machines import dgx_a100_on_the_bus, on_the_bus

FOUR_NODES = ("0-3", "4-7", "8-11", "12-15")


def device(number: int, local: str | None = None, node: int | None = None) -> Accelerator:
    return Accelerator(
        pci_bus_id=f"0000:{number + 1:02x}:00.0",
        vendor="10de",
        local_cpus=None if local is None else cpus(local),
        numa_node=node,
    )


def machine(
    *devices: Accelerator,
    nodes: Sequence[str] = FOUR_NODES,
    distances: Sequence[Sequence[int]] | None = None,
    packages: Sequence[str] = (),
) -> Topology:
    """Sixteen CPUs, one a core, and a GPU for each device."""
    gpus = [Gpu(index=n, pci_bus_id=one.pci_bus_id) for n, one in enumerate(devices)]
    numa = [
        NumaNode(id=at, cpus=cpus(text), distances=tuple(distances[at]) if distances else None)
        for at, text in enumerate(nodes)
    ]
    return replace(
        bare("0-15", *gpus),
        numa_nodes=tuple(numa),
        packages=tuple(Package(id=at, cpus=cpus(text)) for at, text in enumerate(packages)),
        accelerators=devices,
    )


def lists(topology: Topology) -> list[str]:
    return [format_cpulist(found) for _, found in sorted(gpu_domains(topology).items())]


def test_the_version() -> None:
    """Whoever changes a domain of any machine must make it 2, and say so in the changelog."""
    assert DOMAIN_RULE == 1


class TestHome:
    """Step 1. Two devices; what is nobody's home goes to the other one, or to both."""

    def test_first_the_cpus_of_the_device(self) -> None:
        assert lists(machine(device(0, "0-3", 1), device(1, "4-15", 0))) == ["0-3", "4-15"]

    def test_as_far_as_they_are_online(self) -> None:
        assert lists(machine(device(0, "0-1,40-47"), device(1, "2-15"))) == ["0-1", "2-15"]

    def test_then_its_node(self) -> None:
        found = lists(machine(device(0, None, 1), device(1, "0-3,8-15")))
        assert found == ["4-7", "0-3,8-15"]

    def test_a_list_of_offline_cpus_is_none(self) -> None:
        found = lists(machine(device(0, "40-47", 1), device(1, "0-3,8-15")))
        assert found == ["4-7", "0-3,8-15"]

    def test_then_the_nodes_nearest_to_that(self) -> None:
        """Node 2 has no CPUs; from it nodes 0 and 1 are equally near, node 3 is farther. So both
        are at home on 0-7, and share it before the rest."""
        found = machine(
            device(0, None, 2),
            device(1, "0-7"),
            nodes=("0-3", "4-7", "", "8-15"),
            distances=((10, 12, 20, 40), (12, 10, 20, 40), (20, 20, 10, 30), (40, 40, 30, 10)),
        )
        assert lists(found) == ["0-3,8-11", "4-7,12-15"]

    @pytest.mark.parametrize("node", [None, 2, 7])
    def test_else_all(self, node: int | None) -> None:
        """Nothing told; a node without CPUs and without distances; one that is not there."""
        found = machine(device(0, None, node), device(1, "0-15"), nodes=("0-7", "8-15", ""))
        assert lists(found) == ["0-7", "8-15"]


class TestAtHome:
    """Step 2 and 4: cores in a home are shared among those at home there."""

    def test_in_blocks_by_address(self) -> None:
        home = [device(number, "0-15") for number in range(4)]
        assert lists(machine(*home)) == list(FOUR_NODES)

    def test_the_lower_address_gets_the_odd_core(self) -> None:
        home = [device(number, "0-15") for number in range(3)]
        assert lists(machine(*home)) == ["0-5", "6-10", "11-15"]

    def test_homes_that_overlap(self) -> None:
        """The first can only have 0-3. The second's other 12 are its own."""
        assert lists(machine(device(0, "0-3"), device(1, "0-15"))) == ["0-3", "4-15"]

    def test_cores_are_whole(self) -> None:
        """Four cores (i, i + 4); two for each. A core is at home where any of its CPUs is."""
        shared = on_the_bus(one_node(spread_cores(4), 2))
        assert lists(shared) == ["0-1,4-5", "2-3,6-7"]
        split = replace(
            shared,
            accelerators=(device(0, "0-3"), device(1, "4-7")),
        )
        assert lists(split) == ["0-1,4-5", "2-3,6-7"]

    def test_a_cpu_that_is_in_no_core_counts_as_one(self) -> None:
        """The cores (0,4), 1, 2, 3 and 5, 6, 7."""
        shared = replace(on_the_bus(one_node(spread_cores(4), 2)), cores=(cpus("0,4"),))
        assert lists(shared) == ["0-4", "5-7"]

    def test_cores_are_in_the_order_of_their_lowest_cpu(self) -> None:
        """Only the core (5,6) is known; the seven are 0, 1, 2, 3 and 4, (5,6), 7."""
        shared = replace(on_the_bus(one_node(spread_cores(4), 2)), cores=(cpus("5-6"),))
        assert lists(shared) == ["0-3", "4-7"]

    def test_offline_siblings_are_not_there(self) -> None:
        shared = on_the_bus(one_node(spread_cores(4), 2))
        assert lists(replace(shared, cpus=cpus("0-5"))) == ["0-1,4-5", "2-3"]


class TestInNobodysHome:
    """Step 3. GPUs at the nodes 0 and 3; the nodes 1 and 2 (CPUs 4-11) are nobody's."""

    DEVICES = (device(0, "0-3", 0), device(1, "12-15", 3))

    def test_the_nearest_home_has_them(self) -> None:
        apart = ((10, 20, 12, 40), (20, 10, 40, 12), (12, 40, 10, 20), (40, 12, 20, 10))
        found = machine(*self.DEVICES, distances=apart)
        assert lists(found) == ["0-3,8-11", "4-7,12-15"]

    def test_the_row_of_the_core_counts(self) -> None:
        """Tables need not be symmetric: from node 1 it is nearer to node 3."""
        odd = ((10, 11, 11, 40), (30, 10, 40, 20), (20, 40, 10, 30), (40, 11, 11, 10))
        found = machine(*self.DEVICES, distances=odd)
        assert lists(found) == ["0-3,8-11", "4-7,12-15"]

    def test_those_equally_near_share_them(self) -> None:
        flat = [[10 if here == there else 20 for there in range(4)] for here in range(4)]
        assert lists(machine(*self.DEVICES, distances=flat)) == ["0-7", "8-15"]

    def test_without_distances_the_package_counts(self) -> None:
        found = machine(*self.DEVICES, packages=("0-3,8-11", "4-7,12-15"))
        assert lists(found) == ["0-3,8-11", "4-7,12-15"]

    def test_a_package_without_a_home_is_for_all(self) -> None:
        found = machine(*self.DEVICES, packages=("0-3", "4-11", "12-15"))
        assert lists(found) == ["0-7", "8-15"]

    def test_and_so_is_what_nobody_knows(self) -> None:
        assert lists(machine(*self.DEVICES)) == ["0-7", "8-15"]

    def test_who_has_less_at_home_gets_more(self) -> None:
        """Three GPUs share 0-7: 3, 3, 2; one has 8-11: 4. With the free 12-15 all get 4."""
        home = [device(number, "0-7") for number in range(3)]
        found = machine(*home, device(3, "8-11"))
        assert lists(found) == ["0-2,12", "3-5,13", "6-7,14-15", "8-11"]

    def test_nobody_swaps_its_home_for_it(self) -> None:
        """Both GPUs of a DGX A100's node keep half of it, though the free nodes are as large."""
        found = gpu_domains(dgx_a100_on_the_bus())
        assert all(len(found[gpu] & cpus("48-63,176-191")) == 16 for gpu in (0, 1))


class TestWhoCounts:
    def test_devices_that_are_no_gpus_of_ours_have_their_part(self) -> None:
        """One of four is with a virtual machine: the driver does not show it."""
        home = [device(number, "0-15") for number in range(4)]
        seen = replace(machine(*home), gpus=(Gpu(index=0, pci_bus_id="0000:03:00.0"),))
        assert lists(seen) == ["8-11"]

    def test_a_gpu_that_sysfs_does_not_show_has_none(self) -> None:
        gpus = (
            Gpu(index=0, pci_bus_id="0000:01:00.0"),
            Gpu(index=1, pci_bus_id="0000:99:00.0"),
            Gpu(index=2),
        )
        assert set(gpu_domains(replace(machine(device(0, "0-7")), gpus=gpus))) == {0}

    def test_no_accelerator_no_domain(self) -> None:
        assert gpu_domains(replace(machine(), gpus=(Gpu(index=0, node_cpus=cpus("0-3")),))) == {}
        assert gpu_domains(Topology()) == {}

    def test_where_they_are_not_told_the_gpus_count(self) -> None:
        gpus = (
            Gpu(index=0, local_cpus=cpus("12-15"), node_cpus=cpus("0-15")),
            Gpu(index=1, node_cpus=cpus("4-7"), numa_node=2),
            Gpu(index=2, numa_node=2),
            Gpu(index=5, pci_bus_id="0000:09:00.0"),
        )
        described = replace(machine(), gpus=gpus, accelerators=None)
        assert lists(described) == ["12-15", "4-7", "8-11", "0-3"]

    def test_more_of_them_than_cores(self) -> None:
        home = [device(number, "0-1") for number in range(3)]
        flat = machine(*home, device(3, "2-15"))
        assert lists(flat) == ["0", "1", "", "2-15"]

    def test_no_cpu_is_known(self) -> None:
        gpus = (Gpu(index=0, node_cpus=cpus("0-3")),)
        assert gpu_domains(Topology(gpus=gpus, visible=(0,))) == {0: frozenset()}


# --- on any machine ------------------------------------------------------------------------


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
    return replace(known, gpus=gpus, visible=tuple(range(len(gpus))), accelerators=devices)


@st.composite
def as_strangers_see_it(draw: st.DrawFn, topology: Topology) -> Topology:
    """The same machine as another process sees it: its mask, its driver, its GPUs, its notes."""
    near = st.one_of(st.none(), some_of(topology.cpus))
    shown = draw(st.lists(st.sampled_from(topology.gpus), min_size=1, unique=True))
    gpus = tuple(
        replace(
            gpu,
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
    return replace(
        topology,
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
def test_each_online_cpu_is_in_one_domain(topology: Topology) -> None:
    found = list(gpu_domains(topology).values())
    assert frozenset().union(*found) == topology.cpus
    assert sum(map(len, found)) == len(topology.cpus)


@given(with_devices())
def test_cores_stay_whole(topology: Topology) -> None:
    for domain in gpu_domains(topology).values():
        for core in topology.cores or ():
            assert core <= domain or core.isdisjoint(domain)


@st.composite
def told(draw: st.DrawFn) -> tuple[Topology, list[CpuSet]]:
    """A machine whose nodes and devices tell all, and the devices' homes."""
    topology = draw(with_devices())
    numa = topology.numa_nodes or (NumaNode(id=0, cpus=topology.cpus),)
    row = st.lists(st.integers(11, 13), min_size=len(numa), max_size=len(numa)).map(tuple)
    nodes = tuple(replace(node, distances=draw(row)) for node in numa)
    homes = [draw(some_of(topology.cpus)) for _ in topology.gpus]
    devices = tuple(
        replace(one, local_cpus=home)
        for one, home in zip(topology.accelerators or (), homes, strict=True)
    )
    return replace(topology, numa_nodes=nodes, accelerators=devices), homes


@given(told())
def test_who_is_at_home_goes_first_and_who_is_nearest_then(
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
    devices = [replace(one, local_cpus=topology.cpus) for one in topology.accelerators or ()]
    found = gpu_domains(replace(topology, accelerators=tuple(devices)))
    cores = topology.cores or [frozenset((cpu,)) for cpu in topology.cpus]
    sizes = [sum(1 for core in cores if core & domain) for domain in found.values()]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True) or topology.efficiency_cpus
