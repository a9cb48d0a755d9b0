"""Bad arguments: one clear line each, and nothing is guessed."""

from __future__ import annotations

from itertools import repeat
from typing import Any

import pytest

from gpuaff.allocator.model import Mode, Multithreading, Options, Scope, check_rank
from gpuaff.allocator.plan import plan, plan_with
from gpuaff.cpuset import MAX_CPU_ID as MOST
from gpuaff.errors import InvalidOptionError
from tests.allocator.described import one_node, spread_cores

MACHINE = one_node(spread_cores(4), gpus=2)


class Whole:
    """An integer that is no int, as numpy's are."""

    def __index__(self) -> int:
        return 2


@pytest.mark.parametrize("nproc", [0, -1, True, 2.0, "2", None, [2]])
def test_nproc_is_a_positive_whole_number(nproc: Any) -> None:
    with pytest.raises(
        InvalidOptionError, match=r"^nproc=.*: expected a whole number from 1 to 65535$"
    ):
        plan(MACHINE, nproc)


@pytest.mark.case("gpu-affinity-rule-6")
@pytest.mark.parametrize("rank", [4, 5, -1, True, False, 1.0, "1", None])
def test_a_rank_is_below_nproc(rank: Any) -> None:
    with pytest.raises(InvalidOptionError, match=r"^local_rank=.*from 0 to 3.*4 processes$"):
        check_rank(rank, 4)


def test_a_good_rank_is_given_back() -> None:
    assert [check_rank(rank, 4) for rank in range(4)] == [0, 1, 2, 3]
    assert check_rank(Whole(), 3) == 2
    assert type(check_rank(Whole(), 3)) is int


def test_the_rank_is_named_as_the_caller_names_it() -> None:
    with pytest.raises(InvalidOptionError, match=r"^rank=9: expected"):
        check_rank(9, 2, name="rank")


def test_integers_of_other_types_are_integers() -> None:
    options = Options.of(Whole(), min_physical_cores=Whole())
    assert (options.nproc, options.min_physical_cores) == (2, 2)


@pytest.mark.parametrize("name", ["min_physical_cores", "max_physical_cores"])
@pytest.mark.parametrize("value", [0, -3, True, 1.5, "4"])
def test_core_counts_are_positive_whole_numbers(name: str, value: object) -> None:
    counts: dict[str, Any] = {name: value}
    with pytest.raises(InvalidOptionError, match=rf"^{name}=.*: expected a whole number"):
        plan(MACHINE, 2, **counts)


def test_min_above_max_contradicts_itself() -> None:
    with pytest.raises(
        InvalidOptionError, match=r"^min_physical_cores=3: expected at most max_physical_cores=2$"
    ):
        plan(MACHINE, 2, min_physical_cores=3, max_physical_cores=2)


def test_min_may_equal_max() -> None:
    found = plan(MACHINE, 2, min_physical_cores=2, max_physical_cores=2)
    assert [share.cores for share in found.shares] == [2, 2]


@pytest.mark.parametrize(
    ("name", "value", "close"),
    [
        ("mode", "unique_contigous", "unique_contiguous"),
        ("mode", "UNIQUE-INTERLEAVED", "unique_interleaved"),
        ("scope", "sockets", "socket"),
        ("multithreading", "single-logical", "single_logical"),
    ],
)
def test_a_mistyped_word_gets_a_suggestion(name: str, value: str, close: str) -> None:
    words: dict[str, Any] = {name: value}
    with pytest.raises(InvalidOptionError, match=rf"^{name}=.*one of .*; did you mean {close}\?$"):
        plan(MACHINE, 2, **words)


@pytest.mark.parametrize("mode", ["", "numa", 3, None, Scope.NODE, [], object()])
def test_an_unknown_mode_lists_the_words(mode: Any) -> None:
    every = "all, single, single_unique, unique_interleaved, unique_contiguous"
    with pytest.raises(InvalidOptionError, match=rf"expected one of {every}"):
        plan(MACHINE, 2, mode=mode)


@pytest.mark.parametrize("balanced", [1, 0, "no", None])
def test_balanced_is_a_bool(balanced: Any) -> None:
    with pytest.raises(InvalidOptionError, match=r"^balanced=.*: expected True or False$"):
        plan(MACHINE, 2, balanced=balanced)


def test_words_and_members_mean_the_same() -> None:
    by_word = plan(MACHINE, 2, mode="single", scope="socket", multithreading="single_logical")
    by_member = plan(
        MACHINE,
        2,
        mode=Mode.SINGLE,
        scope=Scope.SOCKET,
        multithreading=Multithreading.SINGLE_LOGICAL,
    )
    assert by_word == by_member
    assert (by_word.mode, by_word.scope) == (Mode.SINGLE, Scope.SOCKET)
    assert by_word.multithreading is Multithreading.SINGLE_LOGICAL


@pytest.mark.parametrize(
    "value",
    [
        "0-3",
        b"0-3",
        {"0-1", "2-3"},
        frozenset({frozenset({0}), frozenset({1})}),
        {"0-1": 0, "2-3": 1},
        5,
    ],
)
def test_rank_allowed_is_a_list(value: object) -> None:
    """A set has no order, or another one in each process: ranks would take each other's CPUs."""
    with pytest.raises(InvalidOptionError, match=r"^rank_allowed=.*: expected a list of CPU sets"):
        Options.of(2, rank_allowed=value)


def test_rank_allowed_has_a_set_for_each_rank() -> None:
    with pytest.raises(InvalidOptionError, match=r"one for each of the 3 ranks; found 2$"):
        Options.of(3, rank_allowed=["0", "1"])
    with pytest.raises(InvalidOptionError, match=r"the 2 ranks; found more than 2$"):
        Options.of(2, rank_allowed=repeat("0-3"))
    with pytest.raises(InvalidOptionError, match=r"^rank_allowed\[1\]=.*at least one"):
        Options.of(2, rank_allowed=["0", ""])


@pytest.mark.parametrize("value", [b"0-3", bytearray(b"0"), memoryview(b"0"), 3, [True], [-1], []])
def test_what_is_no_set_of_cpus(value: object) -> None:
    with pytest.raises(InvalidOptionError, match=r"^cpus="):
        Options.of(1, cpus=value)


AN_ID = "an id is a whole number from 0 to 65535"
CPUS = "a list of CPUs such as 0-3,8, with at least one in it"
COUNT = "a whole number from 1 to 65535"
MASKS = "a list of CPU sets, one for each of the 2 ranks"
MODES = "all, single, single_unique, unique_interleaved, unique_contiguous, core_complex"
RESERVE = "a whole number of cores from 0 to 65535"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("mode", "numa", f"mode='numa': expected one of {MODES}"),
        ("scope", 3, "scope=3: expected one of node, socket"),
        (
            "multithreading",
            "all",
            "multithreading='all': expected one of all_logical, single_logical",
        ),
        (
            "partition",
            "machin",
            "partition='machin': expected one of auto, job, machine; did you mean machine?",
        ),
        ("balanced", "no", "balanced='no': expected True or False"),
        ("min_physical_cores", 0, f"min_physical_cores=0: expected {COUNT}"),
        ("max_physical_cores", 65536, f"max_physical_cores=65536: expected {COUNT}"),
        ("reserve", -1, f"reserve=-1: expected {RESERVE}"),
        ("reserve", 65536, f"reserve=65536: expected {RESERVE}"),
        ("reserve", None, f"reserve=None: expected {RESERVE}"),
        ("reserve", True, f"reserve=True: expected {RESERVE}"),
        ("reserve", "1", f"reserve='1': expected {RESERVE}"),
        ("cpus", "", f"cpus='': expected {CPUS}"),
        ("cpus", [], f"cpus=[]: expected {CPUS}"),
        ("cpus", 3, f"cpus=3: expected {CPUS} (it is no list)"),
        ("cpus", [-1], f"cpus=[-1]: expected {CPUS} ({AN_ID})"),
        ("cpus", [65536], f"cpus=[65536]: expected {CPUS} ({AN_ID})"),
        ("cpus", [0, "1"], f"cpus=[0, '1']: expected {CPUS} ({AN_ID})"),
        (
            "cpus",
            "x",
            f"cpus='x': expected {CPUS} ('x' is not a CPU id or a range such as 0-3)",
        ),
        ("rank_allowed", 5, f"rank_allowed=5: expected {MASKS}"),
        ("rank_allowed", "0-3", f"rank_allowed='0-3': expected {MASKS}"),
        ("rank_allowed", ["0-3"], f"rank_allowed=['0-3']: expected {MASKS}; found 1"),
        ("rank_allowed", ["0-3", ""], f"rank_allowed[1]='': expected {CPUS}"),
    ],
)
def test_the_whole_message(name: str, value: object, message: str) -> None:
    asked: dict[str, Any] = {name: value}
    with pytest.raises(InvalidOptionError) as caught:
        plan(MACHINE, 2, **asked)
    assert str(caught.value) == message


def test_the_whole_message_about_nproc() -> None:
    with pytest.raises(InvalidOptionError) as caught:
        plan(MACHINE, 65536)
    assert str(caught.value) == f"nproc=65536: expected {COUNT}"


def test_the_largest_that_can_be_meant() -> None:
    most = Options.of(
        MOST, min_physical_cores=MOST, max_physical_cores=MOST, reserve=MOST, cpus=[MOST]
    )
    assert (most.nproc, most.min_physical_cores, most.max_physical_cores, most.reserve) == (
        65535,
    ) * 4
    assert most.cpus == frozenset((65535,))
    assert Options.of(1, cpus="65535").cpus == frozenset((65535,))


def test_what_is_not_asked_is_the_same_everywhere() -> None:
    assert Options.of(2) == Options(nproc=2)
    assert plan(MACHINE, 2) == plan_with(MACHINE, Options(nproc=2))


@pytest.mark.parametrize("balanced", [True, False])
def test_the_plan_tells_whether_it_is_balanced(balanced: bool) -> None:
    assert plan(MACHINE, 2, balanced=balanced).balanced is balanced
