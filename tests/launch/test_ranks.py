"""The ranks by whatever launcher started a process; recorded environments first."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuaff.launch import ROWS, Launcher
from gpuaff.launch.ranks import Ranks, classify_ranks
from tests.environments import FOLDER, recorded, started, variables

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
    assert (there, hash(there)) == (here, hash(here))


# Which numbers count, and with which warnings.

TABLES: dict[str, dict[str, Any]] = json.loads((FOLDER.parent / "ranks.json").read_text("utf-8"))
"""Environments as texts (variables, and names of others), and what follows from each."""

RECORDS = {
    "FLUX": started("flux", "one-node")[1],
    "JSRUN": started("jsrun", "jsrun")[1],
    "OMPI": started("openmpi", "oversubscribed")[0],  # rank 0 of 3
    "TORCHRUN": started("torchrun", "torchrun")[0],  # rank 0 of 2
}
SRUN = ("sh", "slurmstepd", "slurmd")


def environ(text: str) -> dict[str, str]:
    """``STEP SLURM_NODEID=2``: an environment with changes."""
    found: dict[str, str] = {}
    for word in text.split():
        if "=" in word:
            found |= variables(word)
        elif word in RECORDS:
            found |= RECORDS[word].environ
        else:
            found |= environ(TABLES["bases"][word])
    return found


def cases(name: str) -> Any:
    """The rows of a table, by their names."""
    return [pytest.param(*row, id=case) for case, row in TABLES[name].items()]


STEP = environ("STEP")


@pytest.mark.case("D10")
@pytest.mark.parametrize(("text", "around", "expected", "warnings"), cases("cases"))
def test_which_numbers_count(
    text: str, around: dict[str, Any], expected: list[int] | None, warnings: list[str]
) -> None:
    here = at(environ(text), **around)
    assert (place(here), codes(here)) == (expected and tuple(expected), warnings)


@pytest.mark.parametrize(("text", "expected"), cases("in the job"))
def test_numbers_in_the_job(text: str, expected: list[int | None]) -> None:
    here = at(environ(text))
    assert [here.rank, here.size, here.node, here.nodes] == expected


@pytest.mark.parametrize(("text", "said"), cases("messages"))
def test_the_warning_names_the_variables(text: str, said: str) -> None:
    here = at(environ(text), host="n1", above=() if text == "STEP" else SRUN)
    assert said in here.warnings[0].message


@pytest.mark.parametrize("text", [one for one, _ in TABLES["messages"].values() if "LOCAL" in one])
def test_a_bad_rank_is_not_replaced_by_that_of_the_launcher_around(text: str) -> None:
    here = at(environ(f"{text} TORCHELASTIC_RUN_ID=x ONE_TASK"))
    assert (here.local_rank, here.local_size, here.is_told) == (0, 1, False)
    assert codes(here) == ["bad-rank"]


@pytest.mark.parametrize(("lines", "is_inside"), TABLES["cgroups"].items())
def test_a_step_is_known_by_its_cgroup(lines: str, is_inside: bool) -> None:
    """Where a node's name in Slurm is not its host's, and root's processes cannot be seen."""
    here = at(STEP, host="ip-10-0-0-1", cgroup=lines)
    assert codes(here) == ([] if is_inside else ["ranks-stale", "no-rank"])


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
