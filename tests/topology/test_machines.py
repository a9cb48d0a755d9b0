"""The machines that ship, and one that was saved, against figures written down by hand."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from gpuaff import plan
from gpuaff.cpuset import format_cpulist, parse_cpulist
from gpuaff.errors import TopologyError
from gpuaff.topology import serialize
from gpuaff.topology.model import Source, Topology
from gpuaff.topology.serialize import machine_names, named

ROOT = Path(__file__).parents[2]
BY_HAND: dict[str, dict[str, Any]] = json.loads(
    (ROOT / "tests/data/shipped_machines.json").read_text("utf-8")
)
"""``shape``: sockets, cores in a socket, threads of a core, NUMA nodes that have CPUs, all nodes.

``beside``: how many GPUs have which CPUs beside them, as nvidia-smi prints them, and which node.
``addresses``: the buses (on Grace with their domains) of the GPUs. ``distances``: to the nodes of
the same socket, and of the other; unknown where there are none. ``links``: where all are alike.
``memory``: the nodes that are the GPUs' memory.
"""

every_machine = pytest.mark.parametrize("name", BY_HAND)


def test_the_names() -> None:
    assert machine_names() == tuple(BY_HAND)
    assert Topology.named("dgx-1") == named(" DGX-1 "), "in any case"


def test_an_unknown_name_is_told_what_there_is() -> None:
    with pytest.raises(TopologyError) as caught:
        named("dgx-a10")
    assert str(caught.value) == (
        "dgx-a10: no such machine; there are dgx-1, dgx-2, dgx-a100, dgx-h100, gb200x4, "
        "gh200x4, l40x4, workstation-2gpu; did you mean dgx-a100?"
    )


@pytest.mark.parametrize(
    "name", ["", "../../pyproject", "dgx-1.json", "/etc/passwd", "a\0b", "a\nb", "x" * 10_000]
)
def test_a_name_is_no_path(name: str) -> None:
    with pytest.raises(TopologyError, match="no such machine; ") as caught:
        named(name)
    assert len(str(caught.value)) < 300
    assert len(str(caught.value).splitlines()) == 1


@every_machine
def test_files_are_as_gpuaff_saves_them(name: str) -> None:
    text = (ROOT / "src/gpuaff/topology/machines" / f"{name}.json").read_text("utf-8")
    assert text == serialize.dumps(named(name))
    assert len(text) < 10_240


@every_machine
def test_shape(name: str) -> None:
    sockets, per_socket, threads, nodes_with_cpus, nodes = BY_HAND[name]["shape"]
    machine = named(name)
    count = sockets * per_socket
    assert machine.cpus == machine.allowed == frozenset(range(count * threads))
    assert machine.cores == tuple(
        frozenset(range(core, count * threads, count)) for core in range(count)
    )
    packages, numa_nodes = machine.packages or (), machine.numa_nodes or ()
    assert [package.id for package in packages] == list(range(sockets))
    for package in packages:
        first = package.id * per_socket
        ours = [machine.cores[core] for core in range(first, first + per_socket)]
        assert package.cpus == frozenset().union(*ours)
    assert [node.id for node in numa_nodes] == list(range(nodes))
    assert [node.id for node in numa_nodes if node.cpus] == list(range(nodes_with_cpus))
    assert machine.efficiency_cpus == frozenset()
    assert machine.notes == ()


@every_machine
def test_nodes_and_caches_cut_the_sockets(name: str) -> None:
    machine = named(name)
    sockets = [package.cpus for package in machine.packages or ()]
    nodes = [node.cpus for node in machine.numa_nodes or () if node.cpus]
    caches = list(machine.l3 or nodes)
    for outer, inner in ((sockets, nodes), (nodes, caches), (caches, machine.cores or ())):
        assert sum(map(len, inner)) == len(machine.cpus)
        assert all(sum(small <= large for large in outer) == 1 for small in inner)


@every_machine
def test_gpus(name: str) -> None:
    machine = named(name)
    places = [
        (parse_cpulist(cpus), node)
        for count, cpus, node in BY_HAND[name]["beside"]
        for _ in range(count)
    ]
    assert [(gpu.node_cpus, gpu.numa_node) for gpu in machine.gpus] == places
    assert machine.visible == tuple(range(len(machine.gpus)))
    assert [gpu.index for gpu in machine.gpus] == list(machine.visible)
    for gpu in machine.gpus:
        assert gpu.source is Source.GIVEN
        assert (gpu.uuid, gpu.mig, gpu.local_cpus) == (None, None, None)
        assert gpu.name is not None
        near = gpu.node_cpus or frozenset()
        assert [gpu.socket_cpus] == [one.cpus for one in machine.packages or () if one.cpus & near]
        assert machine.nodes_of(near) == (gpu.numa_node,)


@pytest.mark.parametrize("name", [name for name in BY_HAND if "addresses" in BY_HAND[name]])
def test_pci_addresses(name: str) -> None:
    buses = BY_HAND[name]["addresses"].split()
    full = [bus if ":" in bus else f"0000:{bus}" for bus in buses]
    assert [gpu.pci_bus_id for gpu in named(name).gpus] == [f"{bus}:00.0" for bus in full]


@pytest.mark.case("gpu-affinity-rule-4", "A20")
def test_dgx_a100_socket_and_cache() -> None:
    machine = named("dgx-a100")
    sockets = [format_cpulist(gpu.socket_cpus or ()) for gpu in machine.gpus]
    assert sockets == ["0-63,128-191"] * 4 + ["64-127,192-255"] * 4
    assert machine.l3 is not None
    assert len(machine.l3) == 32
    assert machine.l3[12] == parse_cpulist("48-51,176-179")


@every_machine
def test_gpu_memory_is_a_node_without_cpus(name: str) -> None:
    machine = named(name)
    nodes, memory = machine.numa_nodes or (), BY_HAND[name].get("memory", [])
    assert [gpu.memory_node for gpu in machine.gpus if gpu.memory_node is not None] == memory
    assert [node.id for node in nodes if node.has_memory and not node.cpus] == memory
    assert all(node.has_memory for node in nodes if node.cpus)


@every_machine
def test_distances(name: str) -> None:
    nodes, by_hand = named(name).numa_nodes or (), BY_HAND[name].get("distances")
    if by_hand is None:
        assert all(node.distances is None for node in nodes)
        return
    per_socket = max(1, len(nodes) // 2)
    rows = [node.distances or () for node in nodes]
    for a, b in combinations(range(len(nodes)), 2):
        expected = by_hand[0 if a // per_socket == b // per_socket else 1]
        assert rows[a][b] == rows[b][a] == expected
    assert [row[place] for place, row in enumerate(rows)] == [10] * len(nodes)


@pytest.mark.parametrize("name", [name for name in BY_HAND if "links" in BY_HAND[name]])
def test_links_that_are_all_alike(name: str) -> None:
    for place, row in enumerate(named(name).links or ()):
        assert row[place] == "X"
        assert set(row[:place] + row[place + 1 :]) == {BY_HAND[name]["links"]}


def test_the_cube_mesh_of_dgx_1() -> None:
    links = named("dgx-1").links or ()
    for i, row in enumerate(links):
        # Six NVLinks a GPU: two pairs and two single ones; to one GPU of the other half.
        assert sum(int(cell[2:]) for cell in row if cell.startswith("NV")) == 6
        assert [links[j][i] for j in range(8)] == list(row)
        half = range(4) if i >= 4 else range(4, 8)
        assert [j for j in half if row[j] != "SYS"] == [(i + 4) % 8]
    assert links[0] == ("X", "NV1", "NV1", "NV2", "NV2", "SYS", "SYS", "SYS")


def test_links_of_l40x4() -> None:
    assert named("l40x4").links == (
        ("X", "NODE", "SYS", "SYS"),
        ("NODE", "X", "SYS", "SYS"),
        ("SYS", "SYS", "X", "NODE"),
        ("SYS", "SYS", "NODE", "X"),
    )


@every_machine
def test_the_docs_have_them(name: str) -> None:
    page = (ROOT / "docs/machines.md").read_text("utf-8")
    rows = re.findall(rf"^\| `{name}` \|(.*)\|$", page, re.MULTILINE)
    assert len(rows) == 2
    sockets, cores, threads, nodes, every_node = BY_HAND[name]["shape"]
    assert rows[0].split("|")[0].strip().endswith(f": {sockets * cores * threads}")
    assert rows[0].split("|")[1].split()[0] == str(nodes)
    assert rows[0].split("|")[2].split()[0] == str(len(named(name).gpus))
    assert nodes == every_node or f"({every_node} in all)" in rows[0]


@pytest.mark.case("visible-devices", "D1")
def test_uuids_cannot_be_looked_up_on_a_machine_that_ships() -> None:
    seen = named("dgx-1").with_visible_devices("GPU-0a1b2c3d")
    assert seen.visible == ()
    assert [note.code for note in seen.notes] == ["visible-none"]
    assert named("dgx-1").with_visible_devices("7,0").visible == (7, 0)


@pytest.mark.case("real-machine")
def test_a_virtual_machine_with_two_h100() -> None:
    """One NUMA node, no SMT, a kernel and a driver that agree."""
    machine = Topology.load(ROOT / "tests/data/machines/h100x2-vm.json")
    assert format_cpulist(machine.cpus) == "0-31"
    assert machine.links == (("X", "NV18"), ("NV18", "X")), "NVLink over a host bridge"
    assert [gpu.numa_node for gpu in machine.gpus] == [0, 0]
    # 32 cores near both GPUs: 16 each, in blocks or every second one.
    two = [format_cpulist(share.cpus) for share in plan(machine, 2).shares]
    assert two == ["0-15", "16-31"]
    dealt = plan(machine, 2, mode="unique_interleaved").shares
    assert [sorted(share.cpus) for share in dealt] == [
        list(range(0, 32, 2)),
        list(range(1, 32, 2)),
    ]
    # four ranks: two on each GPU, its sixteen cores cut again
    four = [format_cpulist(share.cpus) for share in plan(machine, 4).shares]
    assert four == ["0-7", "16-23", "8-15", "24-31"]
