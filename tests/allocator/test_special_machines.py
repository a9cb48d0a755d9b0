"""Plans and domains of special machines, each worked out by hand.

The plan is the default one: ``unique_contiguous``, by node, balanced. The working stands beside
each list.
"""

from __future__ import annotations

import pytest

from gpuaff.allocator.domains import gpu_domains
from gpuaff.allocator.plan import plan
from gpuaff.cpuset import format_cpulist
from gpuaff.topology.model import Topology
from tests.allocator.described import codes, packed_cores, shown
from tests.allocator.special_machines import (
    core_i9,
    dgx_a100_on_the_bus,
    dgx_h100,
    four_and_two,
    frontier,
    gb200,
    low_noise,
    nps4_backwards,
    power,
    xeon6_snc3,
)


def all_ranks(machine: Topology) -> list[str]:
    """A plan with one rank a GPU."""
    return shown(plan(machine, len(machine.gpus)))


def border_lists(machine: Topology) -> list[str]:
    return [format_cpulist(cpus) for _, cpus in sorted(gpu_domains(machine).items())]


class TestFrontier:
    """The GCDs are next to the nodes 3, 3, 1, 1, 0, 0, 2, 2; node n has the cores 16n … 16n + 15,
    and two GCDs share each node: 8 cores, one L3, for each. The sibling of core c is c + 64.

    GCD 0 and 1, node 3, cores 48-63: 48-55 and 56-63, with siblings 112-119 and 120-127.
    GCD 2 and 3, node 1, cores 16-31. GCD 4 and 5, node 0, cores 0-15. GCD 6 and 7, node 2, 32-47.
    """

    EXPECTED = (
        "48-55,112-119",
        "56-63,120-127",
        "16-23,80-87",
        "24-31,88-95",
        "0-7,64-71",
        "8-15,72-79",
        "32-39,96-103",
        "40-47,104-111",
    )

    @pytest.mark.case("B2", "B16", "B17", "B20")
    def test_plan(self) -> None:
        assert all_ranks(frontier()) == list(self.EXPECTED)

    @pytest.mark.case("B20")
    def test_domain(self) -> None:
        """No core is outside the homes, so each border is half a node, as above."""
        assert border_lists(frontier()) == list(self.EXPECTED)

    @pytest.mark.case("G8", "B20")
    def test_low_noise(self) -> None:
        """Without the first core of each L3 (0, 8, 16, … and their siblings 64, 72, …) a node has
        14 cores, 7 for each GCD: node 3 has 49-55 and 57-63, so GCD 0 gets 49-55."""
        assert all_ranks(frontier(low_noise())) == [
            "49-55,113-119",
            "57-63,121-127",
            "17-23,81-87",
            "25-31,89-95",
            "1-7,65-71",
            "9-15,73-79",
            "33-39,97-103",
            "41-47,105-111",
        ]

    @pytest.mark.case("G8")
    def test_what_is_allowed_moves_no_border(self) -> None:
        assert border_lists(frontier(low_noise())) == list(self.EXPECTED)


class TestGb200:
    """72 cores without siblings on each side, two GPUs: 36 each."""

    EXPECTED = ("0-35", "36-71", "72-107", "108-143")

    @pytest.mark.case("B16")
    def test_plan(self) -> None:
        assert all_ranks(gb200()) == list(self.EXPECTED)

    def test_domain(self) -> None:
        assert border_lists(gb200()) == list(self.EXPECTED)

    def test_border_where_sysfs_names_the_memory_nodes(self) -> None:
        """From node 2 (memory of GPU 0) it is 80 to node 0 and 120 to node 1; from node 18 the
        other way round: the same homes."""
        assert border_lists(gb200(sysfs_names_memory=True)) == list(self.EXPECTED)


class TestSnc3:
    """Six nodes of 32 cores; node n has the cores 32n … 32n + 31, siblings 192 higher. Two GPUs
    each next to the nodes 0 and 2, and 3 and 5; no GPU is at node 1 or 4."""

    GPUS = (0, 0, 2, 2, 3, 3, 5, 5)

    def test_plan(self) -> None:
        """16 cores of the own node each; nodes 1 and 4 stay free."""
        found = plan(xeon6_snc3(self.GPUS), 8)
        assert shown(found) == [
            "0-15,192-207",  # node 0: 0-31
            "16-31,208-223",
            "64-79,256-271",  # node 2: 64-95
            "80-95,272-287",
            "96-111,288-303",  # node 3: 96-127
            "112-127,304-319",
            "160-175,352-367",  # node 5: 160-191
            "176-191,368-383",
        ]
        assert codes(found) == ["scope-hint"]

    def test_domain(self) -> None:
        """Node 1 (32-63) is 12 from the nodes 0 and 2, 32 from the others: four GPUs share its 32
        cores, 8 each, in the order of their addresses: 32-39, 40-47, 48-55, 56-63. Node 4
        (128-159) likewise."""
        assert border_lists(xeon6_snc3(self.GPUS)) == [
            "0-15,32-39,192-207,224-231",
            "16-31,40-47,208-223,232-239",
            "48-55,64-79,240-247,256-271",
            "56-63,80-95,248-255,272-287",
            "96-111,128-135,288-303,320-327",
            "112-127,136-143,304-319,328-335",
            "144-151,160-175,336-343,352-367",
            "152-159,176-191,344-351,368-383",
        ]

    def test_border_of_one_card_a_socket(self) -> None:
        """GPU 0 at node 1, GPU 1 at node 3: each has all of its socket, 96 cores."""
        assert border_lists(xeon6_snc3((1, 3))) == ["0-95,192-287", "96-191,288-383"]


class TestNps4:
    """Eight nodes of 16 cores, siblings 128 higher, and a GPU at each, in the order 3, 2, 1, 0, 7,
    6, 5, 4: GPU 0 has node 3, cores 48-63, and so on."""

    EXPECTED = (
        "48-63,176-191",
        "32-47,160-175",
        "16-31,144-159",
        "0-15,128-143",
        "112-127,240-255",
        "96-111,224-239",
        "80-95,208-223",
        "64-79,192-207",
    )

    @pytest.mark.case("B17", "B21")
    def test_plan(self) -> None:
        assert all_ranks(nps4_backwards()) == list(self.EXPECTED)

    def test_domain(self) -> None:
        assert border_lists(nps4_backwards()) == list(self.EXPECTED)


@pytest.mark.case("G5")
class TestHybrid:
    """Six P cores (0,1), (2,3), … (10,11) and eight E cores 12 … 19, all next to every GPU."""

    def test_plan(self) -> None:
        """Two GPUs: three P cores and four E cores each."""
        assert all_ranks(core_i9(1)) == ["0-19"]
        assert all_ranks(core_i9(2)) == ["0-5,12-15", "6-11,16-19"]

    def test_domain(self) -> None:
        assert border_lists(core_i9(1)) == ["0-19"]
        assert border_lists(core_i9(2)) == ["0-5,12-15", "6-11,16-19"]

    def test_border_of_three(self) -> None:
        """Two P cores each; the 14 cores make shares of 5, 5 and 4, so 3, 3 and 2 E cores."""
        assert border_lists(core_i9(3)) == ["0-3,12-14", "4-7,15-17", "8-11,18-19"]

    def test_border_where_p_cores_do_not_come_out_even(self) -> None:
        """Four GPUs: two P cores for the first two, one for the others. 14 cores make 4, 4, 3 and
        3, so two E cores for each."""
        assert border_lists(core_i9(4)) == ["0-3,12-13", "4-7,14-15", "8-9,16-17", "10-11,18-19"]


class TestPower:
    @pytest.mark.case("G8")
    def test_plan_of_summit(self) -> None:
        """AC922: 22 cores of 4 CPUs a socket, of which the system keeps the last: CPUs 84-87 and
        172-175. Three GPUs a socket: 7 cores, 28 CPUs each."""
        machine = power(packed_cores(44, smt=4), (3, 3), allowed="0-83,88-171")
        assert all_ranks(machine) == ["0-27", "28-55", "56-83", "88-115", "116-143", "144-171"]

    def test_border_of_summit(self) -> None:
        """22 cores for three: 8, 7, 7; so 32, 28 and 28 CPUs, from 0 and from 88."""
        machine = power(packed_cores(44, smt=4), (3, 3), allowed="0-83,88-171")
        assert border_lists(machine) == [
            "0-31",
            "32-59",
            "60-87",
            "88-119",
            "120-147",
            "148-175",
        ]

    @pytest.mark.case("G2")
    def test_smt8(self) -> None:
        """Ten cores of 8 CPUs a socket, two GPUs: five cores, 40 CPUs each."""
        machine = power(packed_cores(20, smt=8), (2, 2))
        expected = ["0-39", "40-79", "80-119", "120-159"]
        assert all_ranks(machine) == expected
        assert border_lists(machine) == expected

    @pytest.mark.case("A14")
    def test_smt8_with_threads_switched_off(self) -> None:
        """Only the first CPU of each core is online: 0, 8, 16, …; five cores each."""
        machine = power([frozenset((cpu,)) for cpu in range(0, 160, 8)], (2, 2))
        expected = ["0,8,16,24,32", "40,48,56,64,72", "80,88,96,104,112", "120,128,136,144,152"]
        assert all_ranks(machine) == expected
        assert border_lists(machine) == expected


class TestDgxA100:
    """Eight nodes of 16 cores, siblings 128 higher; GPUs in pairs next to the nodes 3, 1, 7, 5."""

    def test_plan(self) -> None:
        """Half a node each: node 3 is 48-63, node 1 16-31, node 7 112-127, node 5 80-95."""
        assert all_ranks(dgx_a100_on_the_bus()) == [
            "48-55,176-183",
            "56-63,184-191",
            "16-23,144-151",
            "24-31,152-159",
            "112-119,240-247",
            "120-127,248-255",
            "80-87,208-215",
            "88-95,216-223",
        ]

    def test_domain(self) -> None:
        """Beside that, the nodes 0 and 2 (cores 0-15, 32-47) are 12 from both node 1 and node 3,
        32 from the other socket: GPUs 0 to 3 share the 32 cores, 8 each: 0-7, 8-15, 32-39, 40-47.
        Nodes 4 and 6 (64-79, 96-111): GPU 4 gets 64-71, 5 72-79, 6 96-103, 7 104-111."""
        assert border_lists(dgx_a100_on_the_bus()) == [
            "0-7,48-55,128-135,176-183",
            "8-15,56-63,136-143,184-191",
            "16-23,32-39,144-151,160-167",
            "24-31,40-47,152-159,168-175",
            "64-71,112-119,192-199,240-247",
            "72-79,120-127,200-207,248-255",
            "80-87,96-103,208-215,224-231",
            "88-95,104-111,216-223,232-239",
        ]

    def test_the_one_that_ships_has_the_same(self) -> None:
        """It tells of no PCI devices but its GPUs."""
        assert gpu_domains(Topology.named("dgx-a100")) == gpu_domains(dgx_a100_on_the_bus())


class TestDgxH100:
    """56 cores a socket for four GPUs: 14 each, siblings 112 higher."""

    EXPECTED = (
        "0-13,112-125",
        "14-27,126-139",
        "28-41,140-153",
        "42-55,154-167",
        "56-69,168-181",
        "70-83,182-195",
        "84-97,196-209",
        "98-111,210-223",
    )

    @pytest.mark.case("B16")
    def test_plan(self) -> None:
        assert all_ranks(dgx_h100()) == list(self.EXPECTED)

    def test_domain(self) -> None:
        assert border_lists(dgx_h100()) == list(self.EXPECTED)

    @pytest.mark.case("A23")
    def test_a_mask_that_is_narrower(self) -> None:
        """CPUs 0-27 and 56-83: 28 cores a socket without siblings, 7 for each GPU."""
        found = plan(dgx_h100().with_allowed(frozenset((*range(28), *range(56, 84)))), 8)
        assert shown(found)[:5] == ["0-6", "7-13", "14-20", "21-27", "56-62"]
        assert "mask-narrow" in codes(found)


class TestFourAndTwo:
    """24 cores a socket, siblings 48 higher."""

    SMALL = ("0-5,48-53", "6-11,54-59", "12-17,60-65", "18-23,66-71")
    """The first socket for four: 6 cores each."""

    @pytest.mark.case("B17")
    def test_plan(self) -> None:
        """Balanced: all get 6, so of the second socket's 24 cores the first 12 are used."""
        expected = [*self.SMALL, "24-29,72-77", "30-35,78-83"]
        assert all_ranks(four_and_two()) == expected

    def test_domain(self) -> None:
        """Borders are not balanced: the second socket's cores are for two, 12 each."""
        expected = [*self.SMALL, "24-35,72-83", "36-47,84-95"]
        assert border_lists(four_and_two()) == expected
