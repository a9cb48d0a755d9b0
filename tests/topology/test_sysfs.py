"""The CPU side of real machines, against hwloc's lstopo and against figures read by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuaff import Topology
from gpuaff._system.kernel import Tree
from gpuaff.cpuset import format_cpulist, parse_cpulist
from gpuaff.topology.sysfs import read_cpus
from tests import machine_trees
from tests.machine_trees import Lstopo
from tests.trees import write, write_cpus


@pytest.fixture(scope="module", params=machine_trees.NAMES)
def root(request: pytest.FixtureRequest, real_trees: Path) -> Path:
    return machine_trees.unpack(request.param, real_trees)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """An empty tree to fill by hand."""
    return tmp_path


def unpacked(name: str, folder: Path) -> Topology:
    return read_cpus(Tree(str(machine_trees.unpack(name, folder))))


@pytest.mark.needs("lstopo-no-graphics")
def test_agrees_with_lstopo(root: Path) -> None:
    ours, theirs = read_cpus(Tree(str(root))), Lstopo(root)
    assert ours.cpus == theirs.cpus
    assert set(ours.cores or ()) == theirs.sets("Core")
    assert {package.cpus for package in ours.packages or ()} == theirs.sets("Package")
    assert set(ours.l3 or ()) == theirs.sets("L3Cache")


@pytest.mark.needs("lstopo-no-graphics")
@pytest.mark.case("A9", "A10")
def test_numa_nodes_agree_with_lstopo(root: Path) -> None:
    nodes, theirs = read_cpus(Tree(str(root))).numa_nodes or (), Lstopo(root).numa_nodes
    assert [node.id for node in nodes] == sorted(theirs)
    # hwloc attaches a node without CPUs to its nearest ones; such a node has none for us.
    assert all(node.cpus in (theirs[node.id], frozenset()) for node in nodes)
    assert any(node.cpus for node in nodes)


@pytest.mark.needs("lstopo-no-graphics")
def test_a_cpuset_is_what_lstopo_takes_away(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUAFF_FSROOT", str(root))
    seen, left = Topology.observe(), Lstopo(root, everything=False).cpus
    if root.name == "nvidiagpunumanodes":
        # hwloc takes cpuset.cpus (0-175); the kernel obeys cpuset.effective_cpus (0-87).
        left = seen.cpus & parse_cpulist("0-87")
    said = [note.message for note in seen.notes if note.code == "cpuset"]
    assert seen.allowed == seen.cpus, "in a tree every online CPU is allowed"
    assert len(said) == (left != seen.cpus)
    assert all(f"CPUs {format_cpulist(left)};" in message for message in said)


# Read by eye from the trees' own files; each line says which.
BY_HAND = {
    # cpu*/topology/thread_siblings_list is one id each; package_cpus_list 0-63, 64-127
    "128arm-2pa2n8cluster4co": (128, 128, 2, 4),
    # online 0-3,5-15; core_siblings_list pairs 0-1, 2-3, … and 5 alone
    "16amd64-8n2c-cpusets": (15, 15, 8, 8),
    # thread_siblings_list 0-1 … 10-11, then 12 … 19 alone
    "20em64t-hybrid-1p6c2t+2ca4co1t": (20, 14, 1, 1),
    # online 0-31, possible 0-47
    "32amd64-4s2n4c-cgroup2": (32, 32, 4, 8),
    # node0 1 2 33 34 45 72 73
    "48amd64-4pa2n6c-sparse": (48, 48, 4, 8),
    # online 0-15,88-103; nodes 0 and 8 have CPUs, 250-255 are GPU memory
    "nvidiagpunumanodes": (32, 8, 2, 8),
    # online 4-20, core_siblings_list 4,6,8…20 and 5,7,…19; only node1 is left
    "offline-cpu0-node0": (17, 17, 2, 1),
}


@pytest.mark.parametrize("name", machine_trees.NAMES)
def test_counts_read_by_hand(name: str, real_trees: Path) -> None:
    seen = unpacked(name, real_trees)
    counted = tuple(len(x or ()) for x in (seen.cpus, seen.cores, seen.packages, seen.numa_nodes))
    assert counted == BY_HAND[name]


@pytest.mark.case("A18")
def test_possible_cpus_are_not_online_ones(real_trees: Path) -> None:
    tree = Tree(str(machine_trees.unpack("32amd64-4s2n4c-cgroup2", real_trees)))
    seen = read_cpus(tree)
    assert format_cpulist(seen.cpus) == "0-31"


@pytest.mark.case("G5")
def test_efficiency_cores_of_an_intel_hybrid(real_trees: Path) -> None:
    assert (
        format_cpulist(unpacked("20em64t-hybrid-1p6c2t+2ca4co1t", real_trees).efficiency_cpus)
        == "12-19"
    )


@pytest.mark.case("G5")
def test_the_kernel_names_the_efficiency_cpus(tree: Path) -> None:
    write_cpus(tree, cpus=6, siblings=lambda cpu: str(cpu))
    write(tree, "sys/devices/cpu_atom/cpus", "4-5\n")
    assert read_cpus(Tree(str(tree))).efficiency_cpus == {4, 5}


@pytest.mark.case("G5")
@pytest.mark.parametrize(("little", "expected"), [(400, {0, 1}), (980, set())])
def test_capacities_tell_little_cores(tree: Path, little: int, expected: set[int]) -> None:
    write_cpus(tree, cpus=4, siblings=str)
    for cpu in range(4):
        capacity = little if cpu < 2 else 1024
        write(tree, f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity", f"{capacity}\n")
    assert read_cpus(Tree(str(tree))).efficiency_cpus == expected


@pytest.mark.parametrize("threads", [1, 2, 4, 8])
def test_every_number_of_threads(tree: Path, threads: int) -> None:
    count = 16
    cores = count // threads
    write_cpus(
        tree, cpus=count, siblings=lambda cpu: format_cpulist(range(cpu % cores, count, cores))
    )
    seen = read_cpus(Tree(str(tree)))
    assert [sorted(core) for core in seen.cores or ()] == [
        list(range(core, count, cores)) for core in range(cores)
    ]
    assert [package.id for package in seen.packages or ()] == [0], "a package of id −1 gets one"


@pytest.mark.case("G1")
def test_more_than_1024_cpus(tree: Path) -> None:
    write_cpus(tree, cpus=1280, siblings=lambda cpu: f"{cpu % 640},{cpu % 640 + 640}")
    seen = read_cpus(Tree(str(tree)))
    assert len(seen.cores or ()) == 640
    assert seen.cores is not None
    assert seen.cores[639] == {639, 1279}


@pytest.mark.case("A18")
def test_offline_siblings_are_left_out(tree: Path) -> None:
    write_cpus(tree, cpus=4, siblings=lambda cpu: f"{cpu % 2},{cpu % 2 + 2}", online="0-2\n")
    assert [sorted(core) for core in read_cpus(Tree(str(tree))).cores or ()] == [[0, 2], [1]]


def test_an_unreadable_tree_knows_nothing(tree: Path) -> None:
    seen = read_cpus(Tree(str(tree)))
    assert seen == Topology()


@pytest.mark.parametrize("content", ["", "garbage", "0-", "99999999999", "3-1", "\0"])
def test_damaged_lists_are_as_if_missing(tree: Path, content: str) -> None:
    write(tree, "sys/devices/system/cpu/online", content)
    assert read_cpus(Tree(str(tree))) == Topology()
    write(tree, "sys/devices/system/cpu/online", "0-1\n\0")
    write(tree, "sys/devices/system/cpu/cpu0/topology/thread_siblings_list", content)
    seen = read_cpus(Tree(str(tree)))
    assert seen == Topology(cpus=frozenset({0, 1}), allowed=frozenset({0, 1}))


def test_a_torn_row_of_distances_says_nothing(tree: Path) -> None:
    write_cpus(tree, cpus=2, siblings=str)
    for number in (0, 1):
        folder = f"sys/devices/system/node/node{number}"
        write(tree, f"{folder}/cpulist", f"{number}\n")
        write(tree, f"{folder}/distance", "10 20\n" if number == 0 else "20\n")
    nodes = read_cpus(Tree(str(tree))).numa_nodes or ()
    assert [node.distances for node in nodes] == [(10, 20), None]
