"""The ranks by whatever launcher started a process; recorded environments first."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuaff.launch.launchers import ROWS, Launcher
from gpuaff.launch.ranks import Ranks, classify_ranks
from tests.environments import recorded, started


def at(environ: Mapping[str, str], *, host: str | None = None, above: Any = ()) -> Ranks:
    return classify_ranks(environ.get, host=host, ancestors=lambda: tuple(above))


def place(environ: Mapping[str, str], **more: Any) -> tuple[int, int] | None:
    """Local rank and size; None where nobody tells."""
    ranks = at(environ, **more)
    return (ranks.local_rank, ranks.local_size) if ranks.is_told else None


def codes(environ: Mapping[str, str], **more: Any) -> list[str]:
    return [notice.code for notice in at(environ, **more).warnings]


def message(environ: Mapping[str, str], **more: Any) -> str:
    (notice,) = at(environ, **more).warnings
    return notice.message


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


def test_nobody() -> None:
    here = at({})
    assert (here.local_rank, here.local_size, here.launcher) == (0, 1, Launcher.UNKNOWN)
    assert (here.rank, here.size, here.node, here.nodes) == (None, None, None, None)
    assert (dict(here.sources), here.is_told) == ({}, False)
    assert codes({}) == ["no-rank"]


def test_it_can_be_sent_and_compared() -> None:
    here = at(started("torchrun", "torchrun")[1].environ)
    there = pickle.loads(pickle.dumps(here))
    assert there == here
    assert there.sources == here.sources
    assert hash(there) == hash(here)


# Slurm.

STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_LOCALID": "1",
    "SLURM_PROCID": "7",
    "SLURM_NODEID": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),4",
    "SLURM_STEP_NUM_TASKS": "10",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NODELIST": "n[1-4]",
}


def test_nodes_with_unequal_numbers_of_tasks() -> None:
    here = at(STEP)
    assert (here.local_rank, here.local_size) == (1, 4)
    assert (here.rank, here.size, here.node, here.nodes) == (7, 10, 3, 4)
    assert place({**STEP, "SLURM_NODEID": "2"}) == (1, 2)


def test_a_node_that_the_list_does_not_have() -> None:
    lost = {**STEP, "SLURM_NODEID": "4"}
    assert (place(lost), codes(lost)) == (None, ["bad-rank"])
    assert "SLURM_NODEID='4'" in message(lost)


SHELLS: dict[str, dict[str, str]] = {
    "a batch script": {
        "SLURM_JOB_ID": "7",
        "SLURM_NODEID": "0",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NTASKS": "10",
        "SLURM_TASKS_PER_NODE": "2(x3),4",
    },
    "salloc": {**STEP, "SLURM_STEP_ID": "4294967290"},
    "srun --pty": {**STEP, "SLURM_PTY_PORT": "40000"},
    "a login shell": {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-4]"},
}


@pytest.mark.parametrize("environ", SHELLS.values(), ids=SHELLS)
def test_a_shell_of_slurm_is_one_process(environ: dict[str, str]) -> None:
    assert (place(environ), codes(environ)) == (None, ["no-rank"])
    assert "no task of srun" in message(environ)


def test_a_batch_script_says_how_many_tasks_there_are() -> None:
    assert "none of the job's 10 tasks" in message(SHELLS["a batch script"])


def test_a_step_of_other_machines() -> None:
    """A shell with the variables of a step that it is not in."""
    elsewhere = {**STEP, "SLURM_STEP_NODELIST": "n[2-5]"}
    assert codes(elsewhere, host="n1") == ["ranks-stale", "no-rank"]
    assert place(elsewhere, host="n1") is None
    assert "n[2-5] does not name this machine, n1" in at(elsewhere, host="n1").warnings[0].message
    assert place(elsewhere, host="n3.example.org") == (1, 4)
    assert place(elsewhere, host="n1", above=["sh", "slurmstepd", "slurmd"]) == (1, 4), (
        "a node's name in Slurm need not be its host's"
    )
    assert place({**elsewhere, "SLURM_STEP_NODELIST": "n[2"}, host="n1") == (1, 4), "unreadable"


# Several launchers.

HYDRA = {"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_RANK": "5", "PMI_SIZE": "8"}
NUMBERS = {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}
ONE_TASK = {**STEP, "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x4)"}


@pytest.mark.parametrize(
    ("lines", "is_inside"),
    [
        ("0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_1", True),
        ("0::/system.slice/slurmstepd.scope/job_7/step_0", True),
        ("9:cpuset:/\n4:memory:/slurm/uid_0/job_7/step_0/task_1\n0::/", True),
        ("0::/system.slice/slurmstepd.scope/job_7/step_extern/user", False),
        ("0::/system.slice/slurmstepd.scope/job_77/step_0/user", False),
        ("0::/system.slice/slurmstepd.scope/job_7/step_01/user", False),
        ("0::/user.slice/user-0.slice/session-1.scope", False),
        ("0::/", False),
        ("", False),
    ],
)
def test_a_step_is_known_by_its_cgroup(lines: str, is_inside: bool) -> None:
    """Where a node's name in Slurm is not its host's, and root's processes cannot be seen."""
    step = {**STEP, "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n[2-5]"}
    here = classify_ranks(step.get, host="ip-10-0-0-1", cgroup=lambda: lines)
    assert here.is_told == is_inside
    assert [notice.code for notice in here.warnings] == (
        [] if is_inside else ["ranks-stale", "no-rank"]
    )


def test_the_innermost_counts() -> None:
    rank, worker = started("openmpi", "oversubscribed")[0], started("torchrun", "torchrun")[0]
    assert place({**STEP, **rank.environ}) == (0, 3)
    assert place({**STEP, **HYDRA}) == (1, 2)
    assert place({**STEP, **rank.environ, **HYDRA, **worker.environ}) == (0, 2)
    assert codes({**ONE_TASK, **rank.environ}) == []
    assert codes({**STEP, **worker.environ}) == [], "`beside` says that"


def test_what_is_above_tells_which_is_the_innermost() -> None:
    """``srun`` of a script whose environment has another mpirun's variables."""
    rank = started("openmpi", "oversubscribed")[0].environ
    both = {**STEP, **rank}
    assert (place(both), codes(both)) == ((0, 3), ["ranks-contradict"])
    srun = ["sh", "slurmstepd", "slurmd"]
    assert (place(both, above=srun), codes(both, above=srun)) == ((1, 4), ["ranks-contradict"])
    mpirun = ["sh", "mpirun", "slurmstepd"]
    assert (place(both, above=mpirun), codes(both, above=mpirun)) == ((0, 3), [])
    old = {**both, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    assert place(old, above=srun) == (1, 4)


def test_numbers_of_a_launcher_that_is_not_known() -> None:
    assert place(NUMBERS) == (3, 4)
    assert at(NUMBERS).launcher is Launcher.UNKNOWN
    assert (place({**NUMBERS, **HYDRA}), codes({**NUMBERS, **HYDRA})) == (
        (1, 2),
        ["ranks-contradict"],
    )
    copied = {**HYDRA, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert (place(copied), codes(copied)) == ((1, 2), [])
    assert (place({**ONE_TASK, **NUMBERS}), codes({**ONE_TASK, **NUMBERS})) == ((3, 4), [])


def test_one_process_that_is_described_by_hand() -> None:
    """``LOCAL_RANK=0 RANK=0 WORLD_SIZE=1``, so that a script for several starts without a launcher.

    It is another thing where the job has more, or where a launcher tells more.
    """
    alone = {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1"}
    here = classify_ranks(alone.get)
    assert (here.local_rank, here.local_size, here.rank, here.size) == (0, 1, 0, 1)
    assert here.sources["local_size"] == "WORLD_SIZE"
    assert codes(alone) == []
    for wrong in ({**alone, "WORLD_SIZE": "2"}, {**alone, "LOCAL_RANK": "1"}):
        assert codes(wrong) == ["bad-rank"]
    assert classify_ranks({**HYDRA, **alone}.get).launcher is Launcher.HYDRA


def test_part_of_the_numbers_beside_a_launchers() -> None:
    for part in ({"LOCAL_RANK": "3"}, {"LOCAL_WORLD_SIZE": "4"}):
        assert (place({**STEP, **part}), codes({**STEP, **part})) == ((1, 4), [])
        assert codes(part) == ["bad-rank"]


def test_two_launchers_of_the_same_process() -> None:
    """jsrun starts Open MPI's processes, Flux Cray MPICH's: both set variables."""
    flux = started("flux", "one-node")[1].environ
    assert place({**flux, "PALS_LOCAL_RANKID": "1", "PALS_RANKID": "1"}) == place(flux)
    lsf = started("jsrun", "jsrun")[1].environ
    assert (
        codes({**lsf, "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}) == []
    )


def test_what_one_of_them_lacks_is_no_other_launchers() -> None:
    """Flux tells of rank 1 of 2, torchrun's rank 1 is another process."""
    flux = started("flux", "one-node")[1].environ
    lacking = {**flux, "TORCHELASTIC_RUN_ID": "x", "LOCAL_RANK": "1"}
    assert codes(lacking) == ["bad-rank"]
    other = {**flux, "PALS_LOCAL_RANKID": "0"}
    assert codes(other)[-1] == "bad-rank"


def test_flux_tells_how_many_on_all_nodes() -> None:
    uneven = {
        "FLUX_TASK_LOCAL_ID": "1",
        "FLUX_TASK_RANK": "4",
        "FLUX_JOB_SIZE": "5",
        "FLUX_JOB_NNODES": "2",
    }
    assert (place(uneven), codes(uneven)) == ((1, 3), ["size-assumed"])
    assert codes({**uneven, "FLUX_TASK_LOCAL_ID": "3"}) == ["bad-rank"]
    assert codes({**uneven, "FLUX_JOB_SIZE": ""}) == ["bad-rank"]


@pytest.mark.case("D10")
def test_torchrun_that_hides_the_place() -> None:
    """``--virtual-local-rank``: LOCAL_RANK=0 and one GPU for each."""
    worker = {
        "TORCHELASTIC_RUN_ID": "x",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "RANK": "3",
        "WORLD_SIZE": "4",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "CUDA_VISIBLE_DEVICES": "1",
    }
    assert (place(worker), at(worker).sources["local_rank"]) == ((1, 2), "RANK")
    assert place({**worker, "RANK": "2"}) == (0, 2)
    assert place({**worker, "WORLD_SIZE": "2", "RANK": "1"}) == (1, 2)
    for change in (
        {"CUDA_VISIBLE_DEVICES": "0,1"},
        {"WORLD_SIZE": "5"},
        {"GROUP_RANK": ""},
        {"RANK": "x"},
    ):
        assert place({**worker, **change}) == (0, 2)


# Bad input.


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ({"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK=2 is not below"),
        ({"LOCAL_RANK": "0"}, "LOCAL_WORLD_SIZE is not"),
        ({"LOCAL_RANK": "-1", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK='-1' is not a rank number"),
        (
            {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "two"},
            "LOCAL_WORLD_SIZE='two' is not a",
        ),
        (
            {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "0"},
            "LOCAL_WORLD_SIZE='0' is not a",
        ),
        ({"LOCAL_RANK": "9" * 99, "LOCAL_WORLD_SIZE": "2"}, f"LOCAL_RANK='{'9' * 37}...'"),
        (
            {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "99999"},
            "LOCAL_WORLD_SIZE='99999' is not a number",
        ),
    ],
)
def test_numbers_that_name_no_rank(numbers: dict[str, str], said: str) -> None:
    """The outer launcher's are not taken in their place."""
    inside = {**numbers, "TORCHELASTIC_RUN_ID": "x", **ONE_TASK}
    for environ in (numbers, inside):
        here = at(environ)
        assert (here.local_rank, here.local_size, here.is_told) == (0, 1, False)
        assert codes(environ) == ["bad-rank"]
        assert said in message(environ)


@pytest.mark.parametrize(
    ("wrong", "lost"),
    [
        ({"PMI_RANK": "8"}, ["rank", "size"]),
        ({"PMI_SIZE": "1"}, ["rank", "size"]),
    ],
)
def test_numbers_in_the_job_that_cannot_be(wrong: dict[str, str], lost: list[str]) -> None:
    here = at({**HYDRA, **wrong})
    assert (here.local_rank, here.local_size) == (1, 2)
    assert [getattr(here, name) for name in lost] == [None, None]
    assert codes({**HYDRA, **wrong}) == ["world-unknown"]


def test_numbers_in_the_job_that_cannot_be_read() -> None:
    here = at({**HYDRA, "PMI_RANK": "five"})
    assert (here.rank, here.size, list(here.warnings)) == (None, 8, [])
    nodes = {**STEP, "SLURM_STEP_NUM_NODES": "3"}
    assert (at(nodes).node, at(nodes).nodes, codes(nodes)) == (None, None, ["world-unknown"])


NAMES = sorted(
    {
        name
        for row in ROWS
        for name in (
            *(row.local_rank, row.local_size, row.rank, row.size, row.node, row.nodes),
            *row.marks,
            *row.run,
        )
        if name
    }
    | {"PMIX_RANK", "SLURM_PTY_PORT", "SLURM_STEP_NODELIST", "SLURM_NTASKS"}
    | {"CUDA_VISIBLE_DEVICES", "SLURM_JOB_ID"}
)
VALUES = st.sampled_from(
    ["", "0", "1", "2", "3", "-1", "x", "99999999999", "2(x3),1", "2(x", "n[1-3,7]", "n[1", "٣"]
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
    assert here.is_told or {"no-rank", "bad-rank"} & {notice.code for notice in here.warnings}
    again = at(environ, host=host, above=above)
    assert (again, again.warnings, again.sources) == (here, here.warnings, here.sources)
    assert all(environ[variable] for variable in here.sources.values())
