"""Bad arguments: one clear line each, and nothing is guessed."""

from __future__ import annotations

from itertools import repeat
from typing import Any

import pytest

from gpuaff.allocator.model import Mode, Multithreading, Options, Scope, check_rank, given_options
from gpuaff.allocator.plan import plan, plan_with
from gpuaff.cpuset import MAX_CPU_ID
from gpuaff.errors import InvalidOptionError
from tests.allocator.described import one_node, shown, spread_cores

MACHINE = one_node(spread_cores(4), gpus=2)


class Two:
    """An integer that is no int, as numpy's are."""

    def __index__(self) -> int:
        return 2


@pytest.mark.case("gpu-affinity-rule-6")
@pytest.mark.parametrize("rank", [4, 5, -1, True, False, 1.0, "1", None])
def test_a_rank_is_below_nproc(rank: Any) -> None:
    expected = "expected a whole number from 0 to 3, as there are 4 processes"
    with pytest.raises(InvalidOptionError) as caught:
        check_rank(rank, 4)
    assert str(caught.value) == f"local_rank={rank!r}: {expected}"


def test_a_good_rank_is_given_back_as_an_int() -> None:
    assert [check_rank(rank, 4) for rank in range(4)] == [0, 1, 2, 3]
    assert type(check_rank(Two(), 3)) is int
    with pytest.raises(InvalidOptionError, match=r"^rank=9: expected"):
        check_rank(9, 2, name="rank")


def test_integers_of_other_types_are_integers() -> None:
    options = Options.of(Two(), min_physical_cores=Two(), cpus=iter([Two(), 5]))
    assert (options.nproc, options.min_physical_cores, options.cpus) == (2, 2, frozenset((2, 5)))
    assert shown(plan(MACHINE, 2, rank_allowed=[{0, 1}, range(2, 4)])) == ["0-1", "2-3"]


def test_min_may_equal_max_but_not_be_above() -> None:
    found = plan(MACHINE, 2, min_physical_cores=2, max_physical_cores=2)
    assert [share.cores for share in found.shares] == [2, 2]
    expected = r"^min_physical_cores=3: expected at most max_physical_cores=2$"
    with pytest.raises(InvalidOptionError, match=expected):
        plan(MACHINE, 2, min_physical_cores=3, max_physical_cores=2)


def test_words_and_members_mean_the_same() -> None:
    by_word = plan(MACHINE, 2, mode="single", scope="socket", multithreading="single_logical")
    one_each = Multithreading.SINGLE_LOGICAL
    by_member = plan(MACHINE, 2, mode=Mode.SINGLE, scope=Scope.SOCKET, multithreading=one_each)
    assert by_word == by_member
    found = by_word.mode, by_word.scope, by_word.multithreading
    assert found == (Mode.SINGLE, Scope.SOCKET, one_each)


AN_ID = "(an id is a whole number from 0 to 65535)"
CPUS = "a list of CPUs such as 0-3,8, with at least one in it"
COUNT = "a whole number from 1 to 65535"
MASKS = "a list of CPU sets, one for each of the 2 ranks"
MODES = "one of all, single, single_unique, unique_interleaved, unique_contiguous, core_complex"
THREADS = "one of all_logical, single_logical"
RESERVE = "a whole number of cores from 0 to 65535"
FLAG = "True or False"


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("nproc", [0, -1, True, 2.0, "2", None, [2], 65536], COUNT),
        ("min_physical_cores", [0, -3, True, 1.5, "4", 65536], COUNT),
        ("max_physical_cores", [0, -3, True, 1.5, "4", 65536], COUNT),
        ("reserve", [-1, 65536, None, True, "1"], RESERVE),
        ("balanced", [1, 0, "no", None], FLAG),
        ("mode", ["", "numa", 3, None, Scope.NODE, []], MODES),
        ("mode", ["unique_contigous"], f"{MODES}; did you mean unique_contiguous?"),
        ("mode", ["UNIQUE-INTERLEAVED"], f"{MODES}; did you mean unique_interleaved?"),
        ("scope", [3], "one of node, socket"),
        ("scope", ["sockets"], "one of node, socket; did you mean socket?"),
        ("multithreading", ["all"], THREADS),
        ("multithreading", ["single-logical"], f"{THREADS}; did you mean single_logical?"),
        ("partition", ["machin"], "one of auto, job, machine; did you mean machine?"),
        ("cpus", ["", []], CPUS),
        ("cpus", [3, b"0-3", bytearray(b"0"), memoryview(b"0")], f"{CPUS} (it is no list)"),
        ("cpus", [[-1], [65536], [0, "1"], [True]], f"{CPUS} {AN_ID}"),
        ("cpus", ["x"], f"{CPUS} ('x' is not a CPU id or a range such as 0-3)"),
        # A set has no order, or another one in each process: ranks would take each other's CPUs.
        ("rank_allowed", [5, "0-3", b"0-3", {"0-1", "2-3"}, {"0-1": 0, "2-3": 1}], MASKS),
        ("rank_allowed", [["0-3"]], f"{MASKS}; found 1"),
        ("rank_allowed", [[]], f"{MASKS}; found 0"),
        ("rank_allowed", [["0", "1", "2"], repeat("0-3")], f"{MASKS}; found more than 2"),
    ],
)
def test_what_is_invalid_is_named_with_what_was_expected(
    name: str, values: list[Any], expected: str
) -> None:
    for value in values:
        asked: dict[str, Any] = {"nproc": 2, name: value}
        with pytest.raises(InvalidOptionError) as caught:
            plan(MACHINE, **asked)
        assert (caught.value.option, caught.value.value) == (name, value)
        message = str(caught.value)
        assert message.startswith(f"{name}=")
        assert message.endswith(f": expected {expected}")


@pytest.mark.parametrize("masks", [["0-3", ""], ["0-3", "x"]])
def test_an_invalid_mask_is_named_with_its_rank(masks: list[str]) -> None:
    with pytest.raises(InvalidOptionError, match=rf"^rank_allowed\[1\]='{masks[1]}': expected"):
        plan(MACHINE, 2, rank_allowed=masks)


def test_the_largest_values_are_accepted() -> None:
    most = MAX_CPU_ID
    options = Options.of(
        most, min_physical_cores=most, max_physical_cores=most, reserve=most, cpus=[most]
    )
    assert options[:1] + options[5:7] == (65535, 65535, 65535)
    assert (options.reserve, options.cpus) == (65535, frozenset((65535,)))


def test_what_is_not_asked_is_the_default() -> None:
    assert Options.of(2) == Options(nproc=2)
    assert plan(MACHINE, 2) == plan_with(MACHINE, Options(nproc=2))


def test_an_argument_goes_before_its_variable() -> None:
    texts = {"mode": "all", "reserve": "1", "balanced": "no", "cpus": "0-3", "strict": "yes"}
    given = given_options({"mode": Mode.SINGLE, "reserve": 0, "scope": None}, texts.get)
    cpus = frozenset({0, 1, 2, 3})
    assert given == {"mode": Mode.SINGLE, "reserve": 0, "balanced": False, "cpus": cpus}


def test_an_invalid_variable_is_named() -> None:
    with pytest.raises(InvalidOptionError, match=r"^GPUAFF_RESERVE='x': expected a whole number"):
        given_options({}, {"reserve": "x"}.get)
