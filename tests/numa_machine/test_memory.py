"""Where the memory of pinned ranks lies, as move_pages(2) tells."""

from __future__ import annotations

import pytest

from tests.numa_machine.seen import ON_THE_MACHINE, PAGES, Found

pytestmark = ON_THE_MACHINE

# Where memory lies.


@pytest.mark.case("A11")
def test_memory_lies_on_the_node_of_the_share(found: Found) -> None:
    for rank, node in zip(found("pages"), ("1", "0", "0", "1"), strict=True):
        assert rank["after"] == {"pages": {node: 4 * PAGES}, "policy": "default"}


@pytest.mark.case("A11")
def test_memory_that_was_touched_before_stays_where_it_was(found: Found) -> None:
    for rank, node in zip(found("pages"), ("0", "1", "1", "0"), strict=True):
        assert rank["before"]["pages"] == {node: PAGES}


def test_without_pinning_memory_lies_on_the_other_node(found: Found) -> None:
    assert found("pages_without_pinning")["pages"] == {"0": PAGES}


# Memory policy. Rank 0 is on node 1 and touches memory from CPU 0 on node 0.


def test_without_a_policy_memory_lies_where_it_is_touched(found: Found) -> None:
    assert found("memory_policies")["None"]["pages"] == {"0": PAGES}


@pytest.mark.case("C11")
@pytest.mark.parametrize("memory", ["preferred", "bind", "interleave"])
def test_memory_lies_on_the_nodes_of_the_share(found: Found, memory: str) -> None:
    seen = found("memory_policies")[memory]
    assert seen["pages"] == {"1": PAGES}
    assert seen["policy"].startswith(memory[:6])
    assert (seen["said"]["cpus"], set(seen["threads"])) == ("8-11", {"8-11"})


def test_memory_lies_on_the_named_nodes(found: Found) -> None:
    seen = found("memory_policies")
    both = seen["interleave:0-1"]["pages"]
    assert sum(both.values()) == PAGES
    assert min(both.values()) >= PAGES / 4, "about half each, as far as huge pages divide"
    assert seen["bind:0"]["pages"] == {"0": PAGES}, "touched from node 1"


def test_restore_undoes_the_policy(found: Found) -> None:
    assert found("memory_policies")["restored"] == {"pages": {"0": PAGES}, "policy": "default"}


@pytest.mark.case("A16", "G10", "B22")
def test_cpus_are_pinned_where_their_memory_is_denied(found: Found) -> None:
    seen = found("memory_refused")
    assert seen["mems"] == "0"
    assert seen["None"]["said"]["cpus"] == "8-11"
    assert set(seen["None"]["threads"]) == {"8-11"}
    assert seen["None"]["pages"] == {"0": PAGES}


@pytest.mark.case("A16", "G10", "B22")
@pytest.mark.parametrize(
    ("memory", "code"),
    [
        ("preferred", "memory-none"),
        ("bind", "memory-none"),
        ("interleave", "memory-none"),
        ("interleave:0-1", "memory-cut"),
    ],
)
def test_a_policy_on_a_node_that_is_denied(found: Found, memory: str, code: str) -> None:
    seen = found("memory_refused")[memory]
    assert code in seen["said"]["codes"]
    assert (seen["said"]["cpus"], set(seen["threads"])) == ("8-11", {"8-11"})
    assert seen["pages"] == {"0": PAGES}


def test_a_policy_that_is_denied_is_an_error_when_strict(found: Found) -> None:
    seen = found("memory_refused")
    assert seen["strict"]["raised"] == "GPUAffinityError"
    assert set(seen["after"]) == {"0-15"}
