"""What cannot be meant: one clear line, at once, and nothing is touched."""

from __future__ import annotations

from itertools import repeat

import pytest

from gpuaff.claims.candidates import Request, parse_request
from gpuaff.errors import InvalidOptionError
from tests.claim_lab import Lab


class Whole:
    """A whole number of another library's, as NumPy's are."""

    def __init__(self, value: int) -> None:
        self._value = value

    def __index__(self) -> int:
        return self._value


class Odd:
    """What has no words, and can't be compared: NumPy's arrays can't be, either."""

    def __repr__(self) -> str:
        raise RuntimeError("no words")

    def __eq__(self, other: object) -> bool:
        raise ValueError("ambiguous")

    __hash__ = None  # type: ignore[assignment]  # as Python does for such classes


HUGE = 10**5000
"""Python refuses to write it down."""


@pytest.mark.parametrize(
    "n",
    [
        *(0, -1, True, False, 1.0, 1.5, "2", "", None, 10**9, [1], b"auto"),
        *(pytest.param(HUGE, id="huge"), Odd(), "two\nlines \x1b[31m", [Odd()]),
    ],
)
def test_how_many(n: object) -> None:
    with pytest.raises(
        InvalidOptionError, match=r"^n=.*: expected a number of GPUs from 1 to 1024"
    ) as caught:
        parse_request(n)
    assert str(caught.value).isprintable()


def test_numbers_of_other_libraries() -> None:
    told = parse_request(
        Whole(2), candidates=[Whole(3), 1, "2"], min_free_memory=Whole(5), wait=Whole(7)
    )
    assert told == Request(count=2, candidates=(3, 1, "2"), min_free_memory=5, wait=7.0)
    assert parse_request(1, gpus=Whole(1)) == Request(count=1, gpus=(1,))


@pytest.mark.parametrize("option", ["gpus", "candidates"])
@pytest.mark.parametrize(
    "value",
    [
        *([], "", ",", [True], [1.5], [None], [[0]], 1.5, True, object(), ["a", ""], range(2000)),
        *(b"\x00", bytearray(b"0"), memoryview(b"0"), [b"0"], Odd(), [Odd()], repeat(0)),
    ],
)
def test_which(option: str, value: object) -> None:
    with pytest.raises(
        InvalidOptionError, match=f"^{option}=.*expected GPUs by index, UUID or PCI"
    ):
        parse_request(1, **{option: value})


@pytest.mark.parametrize(
    "wait", [-1, -0.5, float("nan"), float("-inf"), "x", "5", True, [], 1j, Odd()]
)
def test_how_long(wait: object) -> None:
    with pytest.raises(InvalidOptionError, match=r"^wait=.*: expected seconds to wait, 0"):
        parse_request(1, wait=wait)


@pytest.mark.parametrize(
    ("wait", "meant"),
    [(0, 0.0), (2.5, 2.5), (None, None), (float("inf"), None), (10**400, None), (1e300, None)],
)
def test_how_long_may_be(wait: object, meant: float | None) -> None:
    assert parse_request(1, wait=wait).wait == meant


@pytest.mark.parametrize(
    "options",
    [
        {"max_utilization": 101},
        {"max_utilization": -1},
        {"max_utilization": 50.0},
        {"min_free_memory": -1},
        {"min_free_memory": "10G"},
        {"min_free_memory": True},
        {"min_free_memory": 1e9},
        {"visible": "indices"},
        {"visible": True},
        {"visible": 0},
        {"visible": Odd()},
        {"max_utilization": HUGE},
        {"gpus": [0, 1], "candidates": [0, 1]},
    ],
)
def test_the_rest(options: dict[str, object]) -> None:
    with pytest.raises(InvalidOptionError):
        parse_request(1, **options)


def test_as_many_as_are_named() -> None:
    assert (
        parse_request(1, gpus=[0, 1])
        == parse_request(2, gpus=(0, 1))
        == Request(count=2, gpus=(0, 1))
    )
    with pytest.raises(InvalidOptionError, match=r"^n=3: expected 2, as many as gpus= names"):
        parse_request(3, gpus=[0, 1])


@pytest.mark.fake_driver
class TestOnAMachine:
    @pytest.mark.parametrize(
        ("call", "said"),
        [
            ("0", "n=0: expected a number of GPUs from 1 to 1024, or"),
            ("gpus=[0, 0]", "gpus=[0, 0]: expected each GPU once (GPU 0 is there"),
            ("candidates='2,2'", "candidates=['2', '2']: expected each GPU once"),
            ("gpus=[4]", "gpus=4: expected the index, UUID or PCI address of a"),
            ("gpus=[-1]", "gpus=-1: expected the index, UUID or PCI address of"),
            ("gpus=[10**5000]", "gpus=<int>: expected the index, UUID or PCI ad"),
            ("gpus='9' * 5000", "gpus='99999999999999999999999999999999999999"),
            ("gpus='GPU-ffff'", "gpus='GPU-ffff': expected the index, UUID or"),
            ("gpus='0000:7f:00.0'", "gpus='0000:7f:00.0': expected the index,"),
            ("1, placeholder='pytorch'", "placeholder='pytorch': expected one of"),
            ("1, placeholder=3", "placeholder=3: expected one of context, torch"),
            ("1, pin=1", "pin=1: expected True or False"),
            ("1, own_is_free=None", "own_is_free=None: expected True or False"),
            ("1, on_wait=3", "on_wait=3: expected a function of one argument"),
        ],
    )
    def test_one_clear_line(self, lab: Lab, call: str, said: str) -> None:
        assert lab.refused(call).startswith(f"InvalidOptionError {said}")

    @pytest.mark.parametrize(
        ("call", "said"),
        [
            ("3, candidates=[0, 1]", "3 GPUs; candidates= names 2"),
            ("5, wait=None", "5 GPUs; this machine has 4 GPUs"),
        ],
    )
    def test_more_than_there_are(self, lab: Lab, call: str, said: str) -> None:
        assert lab.refused(call) == f"NotEnoughGpusError requested {said}"

    def test_another_machine_is_described(self, lab: Lab) -> None:
        said = lab.refused("", GPUAFF_FSROOT="/nowhere")
        assert said.startswith("ClaimError GPUAFF_FSROOT describes another machine")
