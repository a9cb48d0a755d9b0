"""The machine, and four ranks on it: every thread is where it should be."""

from __future__ import annotations

import pytest

from tests.numa_machine.seen import ON_THE_MACHINE, Found, assert_pinned, codes

pytestmark = ON_THE_MACHINE

# The machine.


def test_the_machine_is_as_meant(found: Found) -> None:
    seen = found("machine")
    assert (seen["online"], seen["possible"]) == ("0-15", "0-31")
    assert seen["nodes"] == seen["packages"] == ["0-7", "8-15"]
    assert seen["distances"] == ["10 21", "21 10"]
    assert sorted(seen["cores"]) == sorted(f"{cpu}-{cpu + 1}" for cpu in range(0, 16, 2))
    assert sorted(seen["l3"]) == ["0-3", "12-15", "4-7", "8-11"]
    assert [node for _, node in seen["gpus"]] == ["1", "0", "0", "1"]


@pytest.mark.case("A18")
def test_topo_tells_what_the_kernel_does(found: Found) -> None:
    seen, topo = found("machine"), found("topo_command")
    assert topo["cpus"] == topo["allowed"] == "0-15", "not the 32 that the kernel could take"
    assert sorted(topo["cores"]) == sorted(seen["cores"])
    assert sorted(topo["l3"]) == sorted(seen["l3"])
    assert [package["cpus"] for package in topo["packages"]] == seen["packages"]
    assert [node["cpus"] for node in topo["numa_nodes"]] == seen["nodes"]
    assert [node["distances"] for node in topo["numa_nodes"]] == [[10, 21], [21, 10]]
    gpus = [[gpu["pci_bus_id"], str(gpu["numa_node"])] for gpu in topo["gpus"]]
    assert gpus == seen["gpus"]
    near = [gpu["node_cpus"] for gpu in topo["gpus"]]
    assert near == [gpu["local_cpus"] for gpu in topo["gpus"]] == ["8-15", "0-7", "0-7", "8-15"]


# Four ranks.


@pytest.mark.case("A13", "B17")
def test_every_thread_of_four_ranks_is_on_its_share(found: Found) -> None:
    seen = found("four_ranks")
    assert seen["before"] == ["0-31"] * 4, "not pinned, all that the kernel could take"
    assert_pinned(seen, "8-11", "0-3", "4-7", "12-15")
    assert [len(threads) for threads in seen["threads"]] == [5, 4, 4, 4]
    assert [(said["gpu"], said["nodes"]) for said in seen["said"]] == [
        (0, [1]),
        (1, [0]),
        (2, [0]),
        (3, [1]),
    ]
    assert codes(seen) == [set()] * 4


def test_restore_gives_every_thread_all_cpus(found: Found) -> None:
    seen = found("four_ranks")
    assert seen["restored"] == ["0-15"] * 4
    assert [set(threads) for threads in seen["after"]] == [{"0-15"}] * 4


@pytest.mark.parametrize(
    ("options", "cpus"),
    [
        # A node is a socket here.
        ("scope=socket", ("8-11", "0-3", "4-7", "12-15")),
        ("single_logical", ("8,10", "0,2", "4,6", "12,14")),
        ("unique_interleaved", ("8-9,12-13", "0-1,4-5", "2-3,6-7", "10-11,14-15")),
        ("single", ("8-9", "0-1", "0-1", "8-9")),
        # Each has one of the L3 domains.
        ("core_complex", ("8-11", "0-3", "4-7", "12-15")),
    ],
)
def test_other_options(found: Found, options: str, cpus: tuple[str, ...]) -> None:
    assert_pinned(found("other_options")[options], *cpus)


def test_whole_l3_domains_first(found: Found) -> None:
    # Of node 0 there are cores 0 and 1, which share an L3 cache, and 2. A share is one core.
    complexes, blocks = found("cpuset_and_core_complex")
    assert complexes == ["8-9", "4-5", "0-1", "10-11"], "rank 1 has the domain of one core"
    assert blocks == ["8-9", "0-1", "2-3", "10-11"]


def test_cores_for_helpers_stay_out(found: Found) -> None:
    seen = found("other_options")["reserve=1"]
    for said, part in zip(seen["said"], ("8-9", "0-1", "4-5", "12-13"), strict=True):
        assert said["cpus"] == part
    assert [said["reserved"] for said in seen["said"]] == ["10-11", "2-3", "6-7", "14-15"]
    assert_pinned(seen, "8-9", "0-1", "4-5", "12-13")
