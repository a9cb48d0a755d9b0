from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path

import pytest

from gpuaff.cpuset import format_cpulist, parse_cpulist
from gpuaff.errors import TopologyError
from gpuaff.topology import serialize
from gpuaff.topology.model import Source, Topology
from gpuaff.topology.serialize import machine_names, named

NAMES = (
    "dgx-1",
    "dgx-2",
    "dgx-a100",
    "dgx-h100",
    "gb200x4",
    "gh200x4",
    "l40x4",
    "workstation-2gpu",
)

# By hand: sockets, cores in a socket, threads of a core, NUMA nodes that have CPUs, all nodes.
SHAPES = {
    "dgx-1": (2, 20, 2, 2, 2),
    "dgx-2": (2, 24, 2, 2, 2),
    "dgx-a100": (2, 64, 2, 8, 8),
    "dgx-h100": (2, 56, 2, 2, 2),
    "gb200x4": (2, 72, 1, 2, 34),
    "gh200x4": (4, 72, 1, 4, 36),
    "l40x4": (2, 128, 2, 2, 2),
    "workstation-2gpu": (1, 12, 2, 1, 1),
}

# By hand: for each GPU the CPUs beside it, as nvidia-smi prints them, and the node.
BESIDE = {
    "dgx-1": [("0-19,40-59", 0)] * 4 + [("20-39,60-79", 1)] * 4,
    "dgx-2": [("0-23,48-71", 0)] * 8 + [("24-47,72-95", 1)] * 8,
    "dgx-a100": [
        ("48-63,176-191", 3),
        ("48-63,176-191", 3),
        ("16-31,144-159", 1),
        ("16-31,144-159", 1),
        ("112-127,240-255", 7),
        ("112-127,240-255", 7),
        ("80-95,208-223", 5),
        ("80-95,208-223", 5),
    ],
    "dgx-h100": [("0-55,112-167", 0)] * 4 + [("56-111,168-223", 1)] * 4,
    "gb200x4": [("0-71", 0), ("0-71", 0), ("72-143", 1), ("72-143", 1)],
    "gh200x4": [("0-71", 0), ("72-143", 1), ("144-215", 2), ("216-287", 3)],
    "l40x4": [("0-127,256-383", 0)] * 2 + [("128-255,384-511", 1)] * 2,
    "workstation-2gpu": [("0-23", 0)] * 2,
}

# By hand: the buses (on Grace: the domains) of the GPUs' PCI addresses.
BUSES = {
    "dgx-1": "06 07 0a 0b 85 86 89 8a",
    "dgx-2": "34 36 39 3b 57 59 5c 5e b7 b9 bc be e0 e2 e5 e7",
    "dgx-a100": "07 0f 47 4e 87 90 b7 bd",
    "dgx-h100": "1b 43 52 61 9d c3 d1 df",
}

every_machine = pytest.mark.parametrize("name", NAMES)


def test_the_names() -> None:
    assert machine_names() == NAMES


def test_a_topology_has_them_by_name() -> None:
    assert Topology.named("dgx-1") == named("dgx-1")


def test_names_in_any_case() -> None:
    assert named(" DGX-A100 ") == named("dgx-a100")


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
    file = Path(__file__).parents[2] / "src/gpuaff/topology/machines" / f"{name}.json"
    text = file.read_text("utf-8")
    assert text == serialize.dumps(named(name))
    assert len(text) < 10_240


@every_machine
def test_shape(name: str) -> None:
    sockets, per_socket, threads, nodes_with_cpus, nodes = SHAPES[name]
    machine = named(name)
    count = sockets * per_socket
    assert machine.cpus == machine.allowed == frozenset(range(count * threads))
    assert machine.cores == tuple(
        frozenset(range(core, count * threads, count)) for core in range(count)
    )
    assert machine.packages is not None
    assert machine.numa_nodes is not None
    assert [package.id for package in machine.packages] == list(range(sockets))
    for package in machine.packages:
        first = package.id * per_socket
        ours = [machine.cores[core] for core in range(first, first + per_socket)]
        assert package.cpus == frozenset().union(*ours)
    assert [node.id for node in machine.numa_nodes] == list(range(nodes))
    assert [node.id for node in machine.numa_nodes if node.cpus] == list(range(nodes_with_cpus))
    assert machine.efficiency_cpus == frozenset()
    assert machine.notes == ()


@every_machine
def test_nodes_and_caches_cut_the_sockets(name: str) -> None:
    machine = named(name)
    assert machine.packages is not None
    assert machine.numa_nodes is not None
    sockets = [package.cpus for package in machine.packages]
    nodes = [node.cpus for node in machine.numa_nodes if node.cpus]
    caches = list(machine.l3 or nodes)
    for outer, inner in ((sockets, nodes), (nodes, caches), (caches, machine.cores or ())):
        assert sum(map(len, inner)) == len(machine.cpus)
        assert all(sum(small <= large for large in outer) == 1 for small in inner)


@every_machine
def test_gpus(name: str) -> None:
    machine = named(name)
    beside = [(gpu.node_cpus, gpu.numa_node) for gpu in machine.gpus]
    assert beside == [(parse_cpulist(cpus), node) for cpus, node in BESIDE[name]]
    assert machine.visible == tuple(range(len(machine.gpus)))
    assert [gpu.index for gpu in machine.gpus] == list(machine.visible)
    for gpu in machine.gpus:
        assert gpu.source is Source.GIVEN
        assert (gpu.uuid, gpu.mig, gpu.local_cpus) == (None, None, None)
        assert gpu.name is not None
        packages = [
            one.cpus for one in machine.packages or () if gpu.node_cpus and one.cpus & gpu.node_cpus
        ]
        assert [gpu.socket_cpus] == packages


@every_machine
def test_the_node_of_a_gpu_is_the_one_whose_cpus_it_has(name: str) -> None:
    machine = named(name)
    for gpu in machine.gpus:
        assert gpu.node_cpus is not None
        assert machine.nodes_of(gpu.node_cpus) == (gpu.numa_node,)


@pytest.mark.parametrize("name", BUSES)
def test_pci_addresses(name: str) -> None:
    addresses = [gpu.pci_bus_id for gpu in named(name).gpus]
    assert addresses == [f"0000:{bus}:00.0" for bus in BUSES[name].split()]


def test_pci_addresses_of_grace() -> None:
    superchips = [gpu.pci_bus_id for gpu in named("gh200x4").gpus]
    assert superchips == ["0009:01:00.0", "0019:01:00.0", "0029:01:00.0", "0039:01:00.0"]
    pairs = [gpu.pci_bus_id for gpu in named("gb200x4").gpus]
    assert pairs == ["0008:01:00.0", "0009:01:00.0", "0018:01:00.0", "0019:01:00.0"]


@pytest.mark.case("gpu-affinity-rule-4", "A20")
def test_dgx_a100_socket_and_cache() -> None:
    machine = named("dgx-a100")
    sockets = [format_cpulist(gpu.socket_cpus or ()) for gpu in machine.gpus]
    assert sockets == ["0-63,128-191"] * 4 + ["64-127,192-255"] * 4
    assert machine.l3 is not None
    assert len(machine.l3) == 32
    assert machine.l3[12] == parse_cpulist("48-51,176-179")


@pytest.mark.parametrize(
    ("name", "nodes"), [("gh200x4", [4, 12, 20, 28]), ("gb200x4", [2, 10, 18, 26])]
)
def test_gpu_memory_is_a_node_without_cpus(name: str, nodes: list[int]) -> None:
    machine = named(name)
    assert machine.numa_nodes is not None
    assert [gpu.memory_node for gpu in machine.gpus] == nodes
    without = [node for node in machine.numa_nodes if not node.cpus]
    assert [node.id for node in without if node.has_memory] == nodes
    assert all(node.has_memory for node in machine.numa_nodes if node.cpus)


@every_machine
def test_distances(name: str) -> None:
    nodes = named(name).numa_nodes or ()
    if name in ("gb200x4", "gh200x4", "l40x4"):
        assert all(node.distances is None for node in nodes)
        return
    for a, b in combinations(range(len(nodes)), 2):
        there, back = nodes[a].distances, nodes[b].distances
        assert there is not None
        assert back is not None
        expected = 21 if name != "dgx-a100" else 12 if a // 4 == b // 4 else 32
        assert there[b] == back[a] == expected
    assert [node.distances[i] for i, node in enumerate(nodes) if node.distances] == [10] * len(
        nodes
    )


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("dgx-2", "NV6"),
        ("dgx-a100", "NV12"),
        ("dgx-h100", "NV18"),
        ("gb200x4", "NV18"),
        ("gh200x4", "NV6"),
        ("workstation-2gpu", "PHB"),
    ],
)
def test_links_that_are_all_alike(name: str, word: str) -> None:
    links = named(name).links
    assert links is not None
    for i, row in enumerate(links):
        assert row[i] == "X"
        assert set(row[:i] + row[i + 1 :]) == {word}


def test_the_cube_mesh_of_dgx_1() -> None:
    links = named("dgx-1").links
    assert links is not None
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
    page = (Path(__file__).parents[2] / "docs" / "machines.md").read_text("utf-8")
    rows = re.findall(rf"^\| `{name}` \|(.*)\|$", page, re.MULTILINE)
    assert len(rows) == 2
    sockets, cores, threads, nodes, every_node = SHAPES[name]
    assert rows[0].split("|")[0].strip().endswith(f": {sockets * cores * threads}")
    assert rows[0].split("|")[1].split()[0] == str(nodes)
    assert rows[0].split("|")[2].split()[0] == str(len(BESIDE[name]))
    assert nodes == every_node or f"({every_node} in all)" in rows[0]


@pytest.mark.case("visible-devices", "D1")
def test_uuids_cannot_be_looked_up_on_a_machine_that_ships() -> None:
    seen = named("dgx-1").with_visible_devices("GPU-0a1b2c3d")
    assert seen.visible == ()
    assert [note.code for note in seen.notes] == ["visible-none"]
    assert named("dgx-1").with_visible_devices("7,0").visible == (7, 0)
