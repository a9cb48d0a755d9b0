"""The ranks by whatever launcher started a process; recorded environments first."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuaff.launch import ROWS, Launcher
from gpuaff.launch.ranks import Ranks, classify_ranks
from tests.environments import recorded, started, variables

Environ = Mapping[str, str]


def at(environ: Environ, *, host: str | None = None, above: Any = (), cgroup: str = "") -> Ranks:
    return classify_ranks(
        environ.get, host=host, ancestors=lambda: tuple(above), cgroup=lambda: cgroup
    )


def place(ranks: Ranks) -> tuple[int, int] | None:
    return (ranks.local_rank, ranks.local_size) if ranks.is_told else None


def codes(ranks: Ranks) -> list[str]:
    return [notice.code for notice in ranks.warnings]


# What was recorded.

RECORDED = [
    (launcher, name)
    for launcher in (
        *("dragon", "deepspeed", "flux", "horovod", "hydra", "jsrun", "mpich", "mvapich"),
        *("openmpi", "pals", "pmix", "slurm", "torchrun"),
    )
    for name in recorded(launcher)
]


@pytest.mark.parametrize(("launcher", "name"), RECORDED)
def test_every_recorded_rank(launcher: str, name: str) -> None:
    for rank in started(launcher, name):
        here = at(rank.environ)
        told = rank.told
        assert here.is_told == (told["local_rank"] is not None)
        expected = {**told, "local_rank": told["local_rank"] or 0}
        expected["local_size"] = told["local_size"] or 1
        assert {name: getattr(here, name) for name in expected} == expected
        for number, variable in here.sources.items():
            is_short = (launcher, number) in (("slurm", "local_size"), ("flux", "local_size"))
            assert is_short or rank.environ[variable] == str(getattr(here, number))


def test_every_launcher_is_recorded() -> None:
    launchers = {
        at(rank.environ).launcher for launcher, name in RECORDED for rank in started(launcher, name)
    }
    assert launchers == set(Launcher)


def test_where_each_number_came_from() -> None:
    here = at(started("slurm", "gres")[1].environ)
    assert here.launcher is Launcher.SLURM
    assert here.sources["local_rank"] == "SLURM_LOCALID"
    assert here.sources["local_size"] == "SLURM_STEP_TASKS_PER_NODE"
    assert here.sources["node"] == "SLURM_NODEID"


def test_ranks_can_be_sent_and_compared() -> None:
    here = at(started("torchrun", "torchrun")[1].environ)
    there = pickle.loads(pickle.dumps(here))
    assert (there, there.sources, hash(there)) == (here, here.sources, hash(here))


# Which numbers count, and with which warnings.

STEP = variables(
    "SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_LOCALID=1 SLURM_PROCID=7 SLURM_NODEID=3"
    " SLURMD_NODENAME=n4 SLURM_STEP_TASKS_PER_NODE=2(x3),4 SLURM_STEP_NUM_TASKS=10"
    " SLURM_STEP_NUM_NODES=4"
)
BATCH = variables(
    "SLURM_JOB_ID=7 SLURM_LOCALID=0 SLURM_PROCID=0 SLURM_NODEID=0 SLURM_NTASKS=10"
    " SLURM_TASKS_PER_NODE=2(x3),4"
)
HYDRA = variables("MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2 PMI_RANK=5 PMI_SIZE=8")
NUMBERS = variables("LOCAL_RANK=3 LOCAL_WORLD_SIZE=4")
ALONE = variables("LOCAL_RANK=0 RANK=0 WORLD_SIZE=1")
ONE_TASK = {**STEP, "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x4)"}
FLUX = started("flux", "one-node")[1].environ
FLUX_5 = variables("FLUX_TASK_LOCAL_ID=1 FLUX_TASK_RANK=4 FLUX_JOB_SIZE=5 FLUX_JOB_NNODES=2")
JSRUN = started("jsrun", "jsrun")[1].environ
OMPI = started("openmpi", "oversubscribed")[0].environ  # rank 0 of 3
OMPI_1_OF_2 = variables("OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2")
TORCHRUN = started("torchrun", "torchrun")[0].environ  # rank 0 of 2
VIRTUAL = variables(
    "TORCHELASTIC_RUN_ID=x LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 RANK=3 WORLD_SIZE=4 GROUP_RANK=1"
    " GROUP_WORLD_SIZE=2 CUDA_VISIBLE_DEVICES=1"
)
BAD, NONE, STALE = ["bad-rank"], ["no-rank"], ["ranks-stale", "no-rank"]
CONTRADICT = ["ranks-contradict"]
SRUN, MPIRUN = ("sh", "slurmstepd", "slurmd"), ("sh", "mpirun", "slurmstepd")

CASES: dict[str, tuple[Environ, dict[str, Any], tuple[int, int] | None, list[str]]] = {
    "no variables": ({}, {}, None, NONE),
    "a node with more tasks than others": (STEP, {}, (1, 4), []),
    "a node with fewer": ({**STEP, "SLURM_NODEID": "2"}, {}, (1, 2), []),
    "a node that the list lacks": ({**STEP, "SLURM_NODEID": "4"}, {}, None, BAD),
    "a batch script": (BATCH, {}, None, NONE),
    "a shell of salloc": ({**STEP, "SLURM_STEP_ID": "4294967290"}, {}, None, NONE),
    "a shell of srun --pty": ({**STEP, "SLURM_PTY_PORT": "40000"}, {}, None, NONE),
    "a login shell": ({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-4]"}, {}, None, NONE),
    "a step of another machine": (STEP, {"host": "n1"}, None, STALE),
    "a step of this machine": (STEP, {"host": "N4.example.org"}, (1, 4), []),
    "a node with another name, below slurmstepd": (STEP, {"host": "n1", "above": SRUN}, (1, 4), []),
    "a node without a name": ({**STEP, "SLURMD_NODENAME": ""}, {"host": "n1"}, (1, 4), []),
    "mpirun in srun": ({**STEP, **OMPI}, {}, (0, 3), CONTRADICT),
    "srun with variables of mpirun": ({**STEP, **OMPI}, {"above": SRUN}, (1, 4), CONTRADICT),
    "mpirun in srun, seen above": ({**STEP, **OMPI}, {"above": MPIRUN}, (0, 3), []),
    "srun with variables of an mpirun of one": (
        {**STEP, **OMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, {"above": SRUN}, (1, 4), CONTRADICT
    ),
    "mpirun in one task": ({**ONE_TASK, **OMPI}, {}, (0, 3), []),
    "mpiexec in srun": ({**STEP, **HYDRA}, {}, (1, 2), CONTRADICT),
    "torchrun in all others": ({**STEP, **OMPI, **HYDRA, **TORCHRUN}, {}, (0, 2), []),
    "torchrun in srun": ({**STEP, **TORCHRUN}, {}, (0, 2), []),
    "an unknown launcher": (NUMBERS, {}, (3, 4), []),
    "an unknown launcher beside a known one": ({**NUMBERS, **HYDRA}, {}, (1, 2), CONTRADICT),
    "numbers that a script copied": (
        {**HYDRA, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, {}, (1, 2), []
    ),
    "an unknown launcher in one task": ({**ONE_TASK, **NUMBERS}, {}, (3, 4), []),
    "one process described by hand": (ALONE, {}, (0, 1), []),
    "one of two described by hand": ({**ALONE, "WORLD_SIZE": "2"}, {}, None, BAD),
    "rank 1 of one": ({**ALONE, "LOCAL_RANK": "1"}, {}, None, BAD),
    "one described by hand beside a launcher": ({**HYDRA, **ALONE}, {}, (1, 2), CONTRADICT),
    "LOCAL_RANK alone": ({"LOCAL_RANK": "3"}, {}, None, BAD),
    "LOCAL_WORLD_SIZE alone": ({"LOCAL_WORLD_SIZE": "4"}, {}, None, BAD),
    "LOCAL_RANK in srun": ({**STEP, "LOCAL_RANK": "3"}, {}, (1, 4), []),
    "LOCAL_WORLD_SIZE in srun": ({**STEP, "LOCAL_WORLD_SIZE": "4"}, {}, (1, 4), []),
    "PALS that Flux completes": ({**FLUX, "PALS_LOCAL_RANKID": "1"}, {}, (1, 2), []),
    "torchrun that Flux does not complete": (
        {**FLUX, "TORCHELASTIC_RUN_ID": "x", "LOCAL_RANK": "1"}, {}, None, BAD
    ),
    "jsrun for Open MPI": ({**JSRUN, **OMPI_1_OF_2}, {}, (1, 2), []),
    "Flux on two nodes": (FLUX_5, {}, (1, 3), ["size-assumed"]),
    "Flux with an uneven node": ({**FLUX_5, "FLUX_TASK_LOCAL_ID": "3"}, {}, None, BAD),
    "Flux without a size": ({**FLUX_5, "FLUX_JOB_SIZE": ""}, {}, None, BAD),
    "a hidden local rank": (VIRTUAL, {}, (1, 2), []),
    "the hidden local rank 0": ({**VIRTUAL, "RANK": "2"}, {}, (0, 2), []),
    "a hidden local rank of one node": (
        {**VIRTUAL, "WORLD_SIZE": "2", "RANK": "1"}, {}, (1, 2), []
    ),
    "several visible GPUs": ({**VIRTUAL, "CUDA_VISIBLE_DEVICES": "0,1"}, {}, (0, 2), []),
    "unequal nodes hide it": ({**VIRTUAL, "WORLD_SIZE": "5"}, {}, (0, 2), []),
    "no group": ({**VIRTUAL, "GROUP_RANK": ""}, {}, (0, 2), []),
    "no rank in the job": ({**VIRTUAL, "RANK": "x"}, {}, (0, 2), []),
    "a rank above the job": ({**HYDRA, "PMI_RANK": "8"}, {}, (1, 2), ["world-unknown"]),
    "a job below the node": ({**HYDRA, "PMI_SIZE": "1"}, {}, (1, 2), ["world-unknown"]),
    "a node too many": ({**STEP, "SLURM_STEP_NUM_NODES": "3"}, {}, (1, 4), ["world-unknown"]),
    "a rank in the job that is no number": ({**HYDRA, "PMI_RANK": "five"}, {}, (1, 2), []),
}  # fmt: skip


@pytest.mark.case("D10")
@pytest.mark.parametrize(("environ", "around", "expected", "warnings"), CASES.values(), ids=CASES)
def test_which_numbers_count(
    environ: Environ, around: dict[str, Any], expected: object, warnings: list[str]
) -> None:
    here = at(environ, **around)
    assert (place(here), codes(here)) == (expected, warnings)


JOB_NUMBERS: dict[str, tuple[Environ, tuple[int | None, ...]]] = {
    "none": ({}, (None, None, None, None)),
    "of a step": (STEP, (7, 10, 3, 4)),
    "impossible ranks": ({**HYDRA, "PMI_RANK": "8"}, (None, None, None, None)),
    "an unreadable rank": ({**HYDRA, "PMI_RANK": "five"}, (None, 8, None, None)),
    "impossible nodes": ({**STEP, "SLURM_STEP_NUM_NODES": "3"}, (7, 10, None, None)),
    "by hand": (ALONE, (0, 1, None, None)),
}


@pytest.mark.parametrize(("environ", "expected"), JOB_NUMBERS.values(), ids=JOB_NUMBERS)
def test_numbers_in_the_job(environ: Environ, expected: tuple[int | None, ...]) -> None:
    here = at(environ)
    assert (here.rank, here.size, here.node, here.nodes) == expected


MESSAGES: dict[str, tuple[Environ, str]] = {
    "a lost node": ({**STEP, "SLURM_NODEID": "4"}, "SLURM_NODEID='4'"),
    "a batch script": (BATCH, "a batch script or a shell of Slurm is no task of srun"),
    "a step elsewhere": (STEP, "SLURMD_NODENAME='n4' is not this machine, n1"),
    "a rank above": ({**NUMBERS, "LOCAL_RANK": "4"}, "LOCAL_RANK=4 is not below 4"),
    "no size": ({"LOCAL_RANK": "0"}, "LOCAL_RANK=0 is set, but LOCAL_WORLD_SIZE is not"),
    "a negative rank": ({**NUMBERS, "LOCAL_RANK": "-1"}, "LOCAL_RANK='-1' is not a rank number"),
    "a long rank": ({**NUMBERS, "LOCAL_RANK": "9" * 99}, f"LOCAL_RANK='{'9' * 37}...'"),
    "a word as size": ({**NUMBERS, "LOCAL_WORLD_SIZE": "two"}, "LOCAL_WORLD_SIZE='two' is not a"),
    "a size of 0": ({**NUMBERS, "LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE='0' is not a"),
    "a size of many": ({**NUMBERS, "LOCAL_WORLD_SIZE": "99999"}, "'99999' is not a number"),
}


@pytest.mark.parametrize(("environ", "said"), MESSAGES.values(), ids=MESSAGES)
def test_the_warning_names_the_variables(environ: Environ, said: str) -> None:
    here = at(environ, host="n1", above=() if environ is STEP else SRUN)
    assert said in here.warnings[0].message


@pytest.mark.parametrize("environ", [one for one, _ in MESSAGES.values() if "LOCAL_RANK" in one])
def test_a_bad_rank_is_not_replaced_by_that_of_the_launcher_around(environ: Environ) -> None:
    here = at({**environ, "TORCHELASTIC_RUN_ID": "x", **ONE_TASK})
    assert (here.local_rank, here.local_size, here.is_told) == (0, 1, False)
    assert codes(here) == ["bad-rank"]


@pytest.mark.parametrize(
    ("lines", "is_inside"),
    [
        ("0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_1", True),
        ("0::/system.slice/slurmstepd.scope/job_7/step_0", True),
        ("9:cpuset:/\n4:memory:/slurm/uid_0/job_7/step_0/task_1\n0::/", True),
        ("0::/system.slice/slurmstepd.scope/job_7/step_extern/user", False),
        ("0::/system.slice/slurmstepd.scope/job_77/step_0/user", False),
        ("0::/system.slice/slurmstepd.scope/job_7/step_01/user", False),
        ("0::/", False),
    ],
)
def test_a_step_is_known_by_its_cgroup(lines: str, is_inside: bool) -> None:
    """Where a node's name in Slurm is not its host's, and root's processes cannot be seen."""
    here = at(STEP, host="ip-10-0-0-1", cgroup=lines)
    assert codes(here) == ([] if is_inside else STALE)


NAMES = sorted(
    {name for row in ROWS for name in (*row[1:7], *row.marks, *row.run) if name}
    | {"PMIX_RANK", "SLURM_PTY_PORT", "SLURMD_NODENAME", "SLURM_NTASKS"}
    | {"CUDA_VISIBLE_DEVICES", "SLURM_JOB_ID"}
)
VALUES = st.sampled_from(
    ["", "0", "1", "2", "3", "-1", "x", "99999999999", "2(x3),1", "2(x", "n1", "٣"]
)


@given(
    st.dictionaries(st.sampled_from(NAMES), VALUES | st.text(max_size=5)),
    st.none() | st.sampled_from(["n1", "n9", ""]),
    st.lists(st.sampled_from(["slurmstepd", "orted", "hydra_pmi_proxy", "sh", ""]), max_size=4),
)
def test_any_environment(environ: dict[str, str], host: str | None, above: list[str]) -> None:
    here = at(environ, host=host, above=above)
    assert 0 <= here.local_rank < here.local_size
    assert here.rank is None or here.size is None or here.rank < here.size
    assert here.node is None or here.nodes is None or here.node < here.nodes
    assert here.size is None or here.size >= here.local_size
    assert here.is_told or {"no-rank", "bad-rank"} & set(codes(here))
    again = at(environ, host=host, above=above)
    assert (again, again.warnings, again.sources) == (here, here.warnings, here.sources)
    assert all(environ[variable] for variable in here.sources.values())
