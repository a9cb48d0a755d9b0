"""Mode ``core_complex``: shares as large as contiguous ones, made of whole L3 domains."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuaff.allocator.plan import plan
from gpuaff.errors import GPUAffinityError
from gpuaff.pinning.report import refuse_if_broken
from gpuaff.topology.model import Gpu, Source, Topology
from tests.allocator.described import bare, box, codes, cpus, one_node, shown, spread_cores, union
from tests.allocator.random_machines import SCOPES, any_machine


def with_l3(machine: Topology, cores_each: int) -> Topology:
    """The machine with so many consecutive cores in each L3 domain."""
    cores = machine.cores or ()
    starts = range(0, len(cores), cores_each)
    return replace(machine, l3=tuple(union(cores[at : at + cores_each]) for at in starts))


def epyc(gpus: int, **more: Any) -> Topology:
    """An EPYC of 64 cores in one NUMA node (NPS1), eight L3 domains of eight; no SMT."""
    return with_l3(one_node(spread_cores(64, smt=1), gpus=gpus, **more), 8)


def blocks(size: int, count: int) -> list[str]:
    return [f"{at}-{at + size - 1}" for at in range(0, size * count, size)]


class TestEpyc:
    def test_two(self) -> None:
        assert shown(plan(epyc(2), 2, mode="core_complex")) == ["0-31", "32-63"]

    def test_three(self) -> None:
        """21 cores each: two domains and five. The first two find five in a domain, 48-55 and
        56-63; of these three each are left, and the last takes five of the six."""
        found = plan(epyc(3), 3, mode="core_complex")
        assert shown(found) == ["0-15,48-52", "16-31,56-60", "32-47,53-55,61-62"]

    def test_four(self) -> None:
        assert shown(plan(epyc(4), 4, mode="core_complex")) == blocks(16, 4)

    def test_five(self) -> None:
        """12 cores each: a domain, and half a domain of the three that are left. In blocks rank 1
        would have 12-23: four of one domain and a whole one."""
        found = plan(epyc(5), 5, mode="core_complex")
        assert shown(found) == [
            "0-7,40-43",
            "8-15,44-47",
            "16-23,48-51",
            "24-31,52-55",
            "32-39,56-59",
        ]

    def test_eight(self) -> None:
        assert shown(plan(epyc(8), 8, mode="core_complex")) == blocks(8, 8)

    def test_sixteen_halves(self) -> None:
        assert shown(plan(epyc(16), 16, mode="core_complex")) == blocks(4, 16)

    def test_twenty_are_in_one_domain_each(self) -> None:
        """3 cores each, two ranks a domain; the last four find two left in each domain."""
        found = plan(epyc(20), 20, mode="core_complex")
        twos = [f"{at}-{at + 2}" for domain in range(0, 64, 8) for at in (domain, domain + 3)]
        rest = ["6-7,14", "15,22-23", "30-31,38", "39,46-47"]
        assert shown(found) == twos + rest

    def test_ranks_on_one_gpu_cut_its_part_again(self) -> None:
        """Four GPUs of two domains each, two ranks on each."""
        found = plan(epyc(4), 8, mode="core_complex")
        assert shown(found) == [f"{at}-{at + 7}" for at in (0, 16, 32, 48, 8, 24, 40, 56)]

    def test_hyperthreads_come_along(self) -> None:
        machine = with_l3(one_node(spread_cores(64), gpus=5), 8)
        assert shown(plan(machine, 5, mode="core_complex"))[1] == "8-15,44-47,72-79,108-111"

    def test_trimmed_to_whole_domains(self) -> None:
        found = plan(epyc(5), 5, mode="core_complex", max_physical_cores=8)
        assert shown(found) == blocks(8, 5)

    def test_the_filling_is_reserved_first(self) -> None:
        found = plan(epyc(5), 5, mode="core_complex", reserve=4)
        assert shown(found) == blocks(8, 5)
        assert [share.reserved for share in found.shares][:2] == [cpus("40-43"), cpus("44-47")]


LUMI_MASK = "1-7,9-15,17-23,25-31,33-39,41-47,49-55,57-63"


def lumi(ranks_near: list[int], nodes: int = 4) -> Topology:
    """LUMI-G or Frontier: the first core of each L3 domain belongs to the system."""
    each = 64 // nodes
    machine = box(
        spread_cores(64),
        nodes=[range(each * node, each * node + each) for node in range(nodes)],
        sockets=[range(nodes)],
        gpus=ranks_near,
    )
    return with_l3(machine, 8).with_allowed(
        cpus(LUMI_MASK) | frozenset(cpu + 64 for cpu in cpus(LUMI_MASK))
    )


@pytest.mark.case("G8")
class TestFirstCoreOfEachDomainTaken:
    def test_one_domain_for_each_of_eight(self) -> None:
        """GPU order is not node order; a domain is whole with its seven allowed cores."""
        found = plan(lumi([3, 3, 1, 1, 0, 0, 2, 2]), 8, mode="core_complex")
        firsts = (48, 56, 16, 24, 0, 8, 32, 40)
        expected = [f"{at + 1}-{at + 7},{at + 65}-{at + 71}" for at in firsts]
        assert shown(found) == expected

    def test_three_of_a_node(self) -> None:
        """14 cores in two domains for three: 4 each. 1-4 and 9-12 in one domain each; of the three
        and three that are left the last takes three and one."""
        found = plan(lumi([0, 0, 0]), 3, mode="core_complex", multithreading="single_logical")
        assert shown(found) == ["1-4", "9-12", "5-7,13"]

    def test_three_of_one_node_for_all(self) -> None:
        """NPS1, 56 cores: 18 each, two domains and four."""
        found = plan(
            lumi([0] * 3, nodes=1), 3, mode="core_complex", multithreading="single_logical"
        )
        assert shown(found) == [
            "1-7,9-15,49-52",
            "17-23,25-31,57-60",
            "33-39,41-47,53-55,61",
        ]


def test_a_dgx_a100_by_socket() -> None:
    """L3 domains of four cores. By node two domains each, and the deal brings two each."""
    machine = with_l3(
        box(
            spread_cores(128),
            nodes=[range(16 * node, 16 * node + 16) for node in range(8)],
            sockets=[range(4), range(4, 8)],
            gpus=[3, 3, 1, 1, 7, 7, 5, 5],
        ),
        4,
    )
    for scope in SCOPES:
        found = plan(machine, 8, mode="core_complex", scope=scope)
        assert found.shares == plan(machine, 8, scope=scope).shares


def test_by_socket_what_makes_no_full_round_goes_to_everyone() -> None:
    """Node 0: cores 0-5, L3 domains 0-3 and 4-5; three ranks with two cores each: the first takes
    the whole domain 4-5. The four others of the socket, 6-9, are two, one and one more. Balanced,
    everyone has three of the ten."""
    machine = box(
        spread_cores(10, smt=1), nodes=[range(6), range(6, 10)], sockets=[[0, 1]], gpus=[0] * 3
    )
    machine = replace(machine, l3=(cpus("0-3"), cpus("4-5"), cpus("6-9")))
    found = plan(machine, 3, mode="core_complex", scope="socket", balanced=False)
    assert shown(found) == ["4-7", "0-1,8", "2-3,9"]
    even = plan(machine, 3, mode="core_complex", scope="socket")
    assert shown(even) == ["4-6", "0-1,8", "2-3,9"]


@pytest.mark.case("G5")
def test_fast_and_slow_cores_are_cut_apart() -> None:
    """Fast 0-7 and slow 8-15, L3 domains of four; three ranks: two fast and two slow each."""
    machine = replace(
        with_l3(one_node(spread_cores(16, smt=1), gpus=3), 4), efficiency_cpus=cpus("8-15")
    )
    found = plan(machine, 3, mode="core_complex")
    assert shown(found) == ["0-1,8-9", "2-3,10-11", "4-5,12-13"]


@pytest.mark.case("G5")
def test_fast_cores_are_kept_before_whole_domains() -> None:
    """A has 0-7, of which 2-3 and 6-7 are slow, and may keep four, as many as B has."""
    machine = overlapping("0-8", "8-11", online="0-11", l3=("0-3", "4-7", "8-11"))
    machine = replace(machine, efficiency_cpus=cpus("2-3,6-7"))
    assert shown(plan(machine, 2, mode="core_complex")) == ["0-1,4-5", "8-11"]


def overlapping(*near: str, online: str, l3: tuple[str, ...]) -> Topology:
    gpus = [Gpu(index=i, node_cpus=cpus(text), source=Source.NVML) for i, text in enumerate(near)]
    return replace(bare(online, *gpus), l3=tuple(map(cpus, l3)))


def test_overlapping_near_sets_are_packed_group_by_group() -> None:
    """0-3 only for A, 12-15 only for B, of 4-11 four each: A takes the domains 4-5 and 10-11,
    which are the lowest that fit, B then 6-9."""
    machine = overlapping("0-11", "4-15", online="0-15", l3=("0-3", "4-5", "6-9", "10-11", "12-15"))
    found = plan(machine, 2, mode="core_complex")
    assert shown(found) == ["0-5,10-11", "6-9,12-15"]


def test_balanced_trims_an_overlapping_share_by_domain() -> None:
    """C has four cores, so A keeps four of its six: the domain 0, 2, 4 and one more. B has 6, and
    7-11 to itself."""
    machine = overlapping(
        "0-6", "6-11", "12-15", online="0-15", l3=("0,2,4", "1,3,5", "6", "7-11", "12-15")
    )
    found = plan(machine, 3, mode="core_complex")
    assert shown(found) == ["0-2,4", "6-9", "12-15"]
    assert shown(plan(machine, 3, mode="core_complex", balanced=False))[0] == "0-5"


def test_balanced_may_leave_out_the_lowest_domain() -> None:
    """C has two cores, and so A keeps two of 0-5: the whole domain 4-5."""
    machine = overlapping("0-6", "6-11", "12-13", online="0-13", l3=("0-3", "4-5", "6-11", "12-13"))
    assert shown(plan(machine, 3, mode="core_complex")) == ["4-5", "6-7", "12-13"]


@pytest.mark.parametrize("l3", [None, ()])
def test_without_l3_it_is_contiguous_and_that_is_said(l3: tuple[()] | None) -> None:
    machine = replace(epyc(5), l3=l3)
    found = plan(machine, 5, mode="core_complex")
    assert found.shares == plan(machine, 5).shares
    assert codes(found) == ["complex-unknown"]
    assert codes(plan(machine, 5)) == []


def test_strict_does_not_accept_that() -> None:
    found = plan(replace(epyc(5), l3=None), 5, mode="core_complex")
    with pytest.raises(GPUAffinityError, match="complex-unknown; strict"):
        refuse_if_broken(found.warnings)


def test_a_core_in_no_domain_is_one_of_its_own() -> None:
    machine = replace(one_node(spread_cores(6, smt=1), gpus=2), l3=(cpus("0-1"), cpus("4-5")))
    assert shown(plan(machine, 2, mode="core_complex")) == ["0-2", "3-5"]
    assert shown(plan(machine.with_visible_devices("0"), 3, mode="core_complex")) == [
        "0-1",
        "2-3",
        "4-5",
    ]


@pytest.mark.parametrize("scope", SCOPES)
def test_other_modes_do_not_look_at_domains(scope: str) -> None:
    assert shown(plan(epyc(3), 3, scope=scope)) == ["0-20", "21-41", "42-62"]
    found = plan(epyc(5), 5, mode="unique_interleaved", scope=scope)
    assert found.shares[1].cpus == frozenset(range(1, 60, 5))


def test_by_socket_a_large_node_keeps_whole_domains_at_the_balanced_size() -> None:
    """GPU 0's node has 0-5, with the L3 domains 0-3 and 4-5; GPU 1's has 6-7, so both keep two
    node cores: GPU 0 a whole domain. Of the others, 8-15, each node core has one dealt to it; GPU
    0 has those that come to two cores of a block, 0 and 1."""
    machine = box(
        spread_cores(16, smt=1),
        nodes=[range(6), range(6, 8), range(8, 16)],
        sockets=[[0, 1, 2]],
        gpus=[0, 1],
    )
    machine = replace(machine, l3=(cpus("0-3"), cpus("4-5"), cpus("6-7"), cpus("8-15")))
    found = plan(machine, 2, mode="core_complex", scope="socket")
    assert shown(found) == ["4-5,8-9", "6-7,14-15"]


@st.composite
def with_domains(draw: st.DrawFn) -> Topology:
    machine = draw(any_machine())
    cores = machine.cores or tuple(frozenset((cpu,)) for cpu in sorted(machine.cpus))
    domain = [draw(st.integers(0, 4)) for _ in cores]
    parts = [
        union(core for core, own in zip(cores, domain, strict=True) if own == at) for at in range(5)
    ]
    return replace(machine, l3=tuple(sorted(filter(None, parts), key=min)))


@settings(max_examples=50)
@given(with_domains(), st.integers(1, 7), st.sampled_from(SCOPES), st.booleans())
def test_shares_are_as_large_as_contiguous_ones(
    machine: Topology, nproc: int, scope: str, balanced: bool
) -> None:
    asked: dict[str, Any] = {"scope": scope, "balanced": balanced}
    plain = plan(machine, nproc, **asked)
    found = plan(machine, nproc, mode="core_complex", **asked)
    assert [share.cores for share in found.shares] == [share.cores for share in plain.shares]
    assert codes(found) == codes(plain)
    if "too-few-cores" not in codes(found):
        everyone = [cpu for share in found.shares for cpu in share.cpus]
        assert len(everyone) == len(set(everyone))
