"""GPUAFF_CLAIM: what is read is what was written, and nothing else is read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuaff.launch.inherited import CLAIM_VARIABLE, ParentClaim, claim_in_environment

GPU = "GPU-8d0ce8f2-1b2d-4c9a-8f0e-0123456789ab"
MIG = "MIG-8d0ce8f2-1b2d-4c9a-8f0e-0123456789ab"


def read(text: str | None) -> tuple[ParentClaim | None, list[str]]:
    found, notice = claim_in_environment({CLAIM_VARIABLE: text}.get)
    return found, [] if notice is None else [notice.code]


def test_an_example() -> None:
    expected = ParentClaim(slot=3, pid=4711, started=12345678901, uuids=(GPU, MIG))
    assert str(expected) == f"v1:3:4711:12345678901:{GPU},{MIG}"
    assert read(f"v1:3:4711:12345678901:{GPU},{MIG}") == (expected, [])


@given(
    st.builds(
        ParentClaim,
        slot=st.integers(0, 1023),
        pid=st.integers(1, 1 << 22),
        started=st.integers(0, 1 << 63),
        uuids=st.lists(st.uuids().map("GPU-{}".format), min_size=1, unique=True).map(tuple),
    )
)
def test_what_is_read_is_what_was_written(claim: ParentClaim) -> None:
    assert read(str(claim)) == (claim, [])


@pytest.mark.parametrize("text", [None, "", "  "])
def test_no_claim(text: str | None) -> None:
    assert read(text) == (None, [])


INVALID = (
    *("v1", "v1:0:1:2", "v1:0:1:2:", "v1:0:1:2:0", "v1:0:1:2:GPU-", "x" * 4000),
    *(f"v2:0:1:2:{GPU}", f"0:1:2:{GPU}", f"v1:-1:1:2:{GPU}", f"v1:0:0:2:{GPU}"),
    *(f"v1:0:1:²:{GPU}", f"v1:0:1:{'9' * 21}:{GPU}", f"v1:0:1:2:{GPU},"),
    *(f"v1:0:1:2:{GPU},{GPU}", f"v1:0:1:2:{GPU}:more", f"v1:0:1:2:MIG-{GPU}/7/0"),
)


@pytest.mark.parametrize("text", INVALID)
def test_what_cannot_be_read_counts_as_not_set(text: str) -> None:
    assert read(text) == (None, ["claim-unreadable"])


@given(st.text(max_size=60))
def test_any_text(text: str) -> None:
    found, codes = read(text)
    assert (found is None) == (codes != []) or not text.strip()
    assert found is None or str(found).count(":") == 4
