"""The mpiruns of Open MPI and MPICH, bound and unbound; a claim around them, and in each rank."""

from __future__ import annotations

import pytest

from tests.schedulers.jobs import FIRST, GPUAFF, SECOND, Stage, by

OPEN_MPI = ("mpirun.openmpi", "--allow-run-as-root", "-n", "2")
MPICH = ("mpirun.mpich", "-n", "2")

pytestmark = [pytest.mark.slow, pytest.mark.fake_driver, pytest.mark.needs("two-cpus")]


def needing(program: str, *values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.needs(program))


LOCAL_RANK = {OPEN_MPI: "OMPI_COMM_WORLD_LOCAL_RANK", MPICH: "MPI_LOCALRANKID"}
BOTH = [needing(one[0], one) for one in (OPEN_MPI, MPICH)]


@pytest.mark.parametrize(
    ("mpirun", "unbound"),
    [needing(OPEN_MPI[0], OPEN_MPI, ["--bind-to", "none"]), needing(MPICH[0], MPICH, [])],
)
def test_unbound(stage: Stage, mpirun: tuple[str, ...], unbound: list[str]) -> None:
    name = LOCAL_RANK[mpirun]
    command = (*mpirun, *unbound, *stage.rank("pin"))
    with stage.ranks(*command, count=2) as ranks:
        assert [rank.cpus for rank in by(ranks, name)] == [FIRST, SECOND]
        assert {rank.before for rank in ranks} == {FIRST | SECOND}


@pytest.mark.case("B19")
@pytest.mark.parametrize(
    ("mpirun", "bound"),
    [
        needing(OPEN_MPI[0], OPEN_MPI, ["--bind-to", "core"]),
        needing(MPICH[0], MPICH, ["-bind-to", "core"]),
    ],
)
def test_bound(stage: Stage, mpirun: tuple[str, ...], bound: list[str]) -> None:
    name = LOCAL_RANK[mpirun]
    command = (*mpirun, *bound, *stage.rank("pin"))
    with stage.ranks(*command, count=2) as ranks:
        ranks = by(ranks, name)
        assert {*ranks[0].cpus, *ranks[1].cpus} == FIRST | SECOND
        assert not ranks[0].cpus & ranks[1].cpus
        for rank in ranks:
            assert rank.cpus == rank.before
            assert "masks-unknown" in rank.told["codes"]


@pytest.mark.parametrize("count", ["1", "auto"])
@pytest.mark.parametrize("mpirun", BOTH)
def test_a_claim_around(stage: Stage, mpirun: tuple[str, ...], count: str) -> None:
    """Each rank takes one of its GPUs for itself: any, or that of its number."""
    name = LOCAL_RANK[mpirun]
    ranks_do = stage.rank(f"claim={count}", "pin")
    with stage.ranks(*GPUAFF, "-n", "2", "--", *mpirun, *ranks_do, count=2) as ranks:
        first, second = by(ranks, name)
        assert not {*first.claim} & {*second.claim}
        if count == "auto":
            assert first.claim < second.claim
        assert {rank.environ["CUDA_VISIBLE_DEVICES"] for rank in ranks} == {
            ",".join(map(str, sorted(first.claim + second.claim)))
        }


@pytest.mark.parametrize("mpirun", BOTH)
def test_run_inside(stage: Stage, mpirun: tuple[str, ...]) -> None:
    unbound = ("--bind-to", "none") if mpirun == OPEN_MPI else ()
    with stage.ranks(*mpirun, *unbound, *GPUAFF, "--", *stage.rank(), count=2) as ranks:
        assert [rank.cpus for rank in by(ranks, LOCAL_RANK[mpirun])] == [FIRST, SECOND]


@pytest.mark.parametrize("mpirun", BOTH)
def test_each_rank_claims(stage: Stage, mpirun: tuple[str, ...]) -> None:
    claims = (*GPUAFF, "--per-rank", "-n", "2", "--")
    with stage.ranks(*mpirun, *claims, *stage.rank(), count=2) as ranks:
        shown = ",".join(rank.environ["CUDA_VISIBLE_DEVICES"] for rank in ranks)
        assert sorted(shown.split(",")) == ["0", "1", "2", "3"]
