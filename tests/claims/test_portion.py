"""Which part of the granted GPUs is a rank's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuaff.claims.candidates import slice_for_rank
from gpuaff.errors import NotEnoughGpusError
from gpuaff.launch.ranks import Ranks
from tests.claim_lab import Lab


def blocks(count: int, size: int) -> list[list[int]]:
    ranks = [Ranks(local_rank=rank, local_size=size) for rank in range(size)]
    return [[*range(count)][slice_for_rank(rank, count)] for rank in ranks]


@given(st.integers(1, 64), st.integers(0, 64))
def test_everything_once_and_as_even_as_can_be(size: int, more: int) -> None:
    found = blocks(size + more, size)
    assert sum(found, []) == [*range(size + more)]  # noqa: RUF017 - they are few
    lengths = [len(block) for block in found]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


@given(st.integers(1, 64), st.data())
def test_too_few_are_too_few_for_everybody(size: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, size - 1))
    rank = data.draw(st.integers(0, size - 1))
    with pytest.raises(NotEnoughGpusError, match=f"granted to the {size} ranks"):
        slice_for_rank(Ranks(local_rank=rank, local_size=size), count)


# In ranks, by variables of their launchers.

HYDRA = {"MPI_LOCALNRANKS": "2"}


def of_two(lab: Lab, call: str, **env: str) -> list[str]:
    """What two ranks of MPICH's get, while both stay."""
    code = f"say(*indices(gpuaff.claim_gpus({call}))); go_on()"
    ranks = [lab.start(code, MPI_LOCALRANKID=str(rank), **HYDRA, **env) for rank in range(2)]
    return [rank.heard() for rank in ranks]


@pytest.mark.fake_driver
class TestRanks:
    @pytest.mark.parametrize(
        ("env", "expected"),
        [
            ({"CUDA_VISIBLE_DEVICES": "3,1,0"}, ["3 1", "0"]),
            ({"SLURM_STEP_GPUS": "1-2", "SLURM_JOB_ID": "1"}, ["1", "2"]),
        ],
    )
    def test_two(self, lab: Lab, env: dict[str, str], expected: list[str]) -> None:
        assert of_two(lab, "'auto'", **env) == expected

    def test_nobody_says_which(self, lab: Lab) -> None:
        """Two of the four were granted: each takes one that is free."""
        found = of_two(lab, "'auto'", SLURM_GPUS_ON_NODE="2", SLURM_JOB_ID="1")
        assert sorted(found) == ["0", "1"]

    def test_fewer_than_ranks(self, lab: Lab) -> None:
        env = {"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "3", "CUDA_VISIBLE_DEVICES": "0,1"}
        said = lab.refused("'auto', wait=None", **env)
        assert said.startswith(
            "NotEnoughGpusError requested 3 GPUs; 2 were granted to the 3 ranks of this node"
        )

    @pytest.mark.parametrize(
        ("call", "visible", "indices"),
        [
            ("'auto'", "2", "2"),  # one that each sees is its own
            ("2", "0,1", "0 1"),  # a count is not divided
            ("'auto', candidates='2,3'", "0,1,2,3", "2 3"),
        ],
    )
    def test_what_is_not_divided(self, lab: Lab, call: str, visible: str, indices: str) -> None:
        env = {"MPI_LOCALRANKID": "1", "CUDA_VISIBLE_DEVICES": visible, **HYDRA}
        assert lab.one(f"say(*indices(gpuaff.claim_gpus({call})))", **env) == indices

    @pytest.mark.parametrize(
        ("claims", "expected"),
        [
            # The rank's child has the rank's variables, and the launcher is above both.
            ("rank", "<Claim of GPU 1, GPU 2>"),
            # The claim is for both ranks.
            ("launcher", "<Claim of GPU 2>"),
        ],
    )
    def test_inside_a_claim(self, lab: Lab, claims: str, expected: str) -> None:
        code = f"""
        import subprocess
        RANK = {{"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}}
        INNER = "import gpuaff; print(gpuaff.claim_gpus('auto'))"
        CLAIM = "import gpuaff; gpuaff.claim_gpus(gpus=[1, 2], placeholder=None)"

        def run(code, **more):
            env = {{**os.environ, **more}}
            return subprocess.check_output([sys.executable, "-c", code], text=True, env=env)

        if {claims!r} == "rank":
            child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {{INNER!r}}])"
            say(run(f"{{CLAIM}}; {{child}}", **RANK).strip())
        else:
            exec(CLAIM)
            say(run(INNER, **RANK).strip())
        """
        assert lab.one(code) == expected
