"""The mpiruns of Open MPI and MPICH, bound and unbound; a claim around them, and in each rank."""

from __future__ import annotations

import pytest

from tests.schedulers.jobs import FIRST, GPUAFF, SECOND, Stage, by

OPEN_MPI = ("mpirun.openmpi", "--allow-run-as-root", "-n", "2")
MPICH = ("mpirun.mpich", "-n", "2")

pytestmark = [pytest.mark.slow, pytest.mark.fake_driver, pytest.mark.needs("two-cpus")]


LOCAL_RANK = {OPEN_MPI: "OMPI_COMM_WORLD_LOCAL_RANK", MPICH: "MPI_LOCALRANKID"}
UNBOUND = {OPEN_MPI: ("--bind-to", "none"), MPICH: ()}
BOTH = [pytest.param(one, marks=pytest.mark.needs(one[0])) for one in (OPEN_MPI, MPICH)]


@pytest.mark.parametrize("mpirun", BOTH)
def test_unbound(stage: Stage, mpirun: tuple[str, ...]) -> None:
    name = LOCAL_RANK[mpirun]
    with stage.ranks(*mpirun, *UNBOUND[mpirun], *stage.rank("pin"), count=2) as ranks:
        assert [rank.cpus for rank in by(ranks, name)] == [FIRST, SECOND]
        assert {rank.before for rank in ranks} == {FIRST | SECOND}


@pytest.mark.case("B19")
@pytest.mark.parametrize("mpirun", BOTH)
def test_bound(stage: Stage, mpirun: tuple[str, ...]) -> None:
    to_core = ("--bind-to" if mpirun == OPEN_MPI else "-bind-to", "core")
    with stage.ranks(*mpirun, *to_core, *stage.rank("pin"), count=2) as ranks:
        ranks = by(ranks, LOCAL_RANK[mpirun])
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
    with stage.ranks(*mpirun, *UNBOUND[mpirun], *GPUAFF, "--", *stage.rank(), count=2) as ranks:
        assert [rank.cpus for rank in by(ranks, LOCAL_RANK[mpirun])] == [FIRST, SECOND]


@pytest.mark.parametrize("mpirun", BOTH)
def test_each_rank_claims(stage: Stage, mpirun: tuple[str, ...]) -> None:
    claims = (*GPUAFF, "--per-rank", "-n", "2", "--")
    with stage.ranks(*mpirun, *claims, *stage.rank(), count=2) as ranks:
        shown = ",".join(rank.environ["CUDA_VISIBLE_DEVICES"] for rank in ranks)
        assert sorted(shown.split(",")) == ["0", "1", "2", "3"]
