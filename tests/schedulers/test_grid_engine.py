"""A real Grid Engine, which counts GPUs and does not say which: gpuaff finds free ones."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

import pytest

from tests.schedulers.jobs import Stage

pytestmark = [
    pytest.mark.slow,
    pytest.mark.fake_driver,
    pytest.mark.needs("root", "sge_qmaster", "sge_execd", "qsub", "qconf", "two-cpus"),
]


def job(stage: Stage, *options: str, commands: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Submit a script with these commands, and stay until its job has ended."""
    path = stage.folder / "job.sh"
    path.write_text("\n".join([*map(shlex.join, commands), ""]))
    submit = ("qsub", "-sync", "y", "-cwd", "-j", "y", "-o", "out-job", "-S", "/bin/sh")
    return (*submit, *options, str(path))


def test_tasks_of_an_array_have_different_gpus(on_grid_engine: Stage) -> None:
    one = on_grid_engine.rank("claim=auto")
    command = job(on_grid_engine, "-t", "1-4", "-l", "gpu=1", commands=[one])
    with on_grid_engine.ranks(*command, count=4) as ranks:
        assert sorted(rank.environ["SGE_TASK_ID"] for rank in ranks) == ["1", "2", "3", "4"]
        assert sorted(rank.claim for rank in ranks) == [[0], [1], [2], [3]]


@pytest.mark.case("B19")
def test_a_job_that_is_bound_stays_there(on_grid_engine: Stage) -> None:
    """Two tasks, each bound to a core: nothing that gpuaff does leaves it."""
    one = on_grid_engine.rank("claim=auto", "pin=0,1")
    options = ("-t", "1-2", "-l", "gpu=2", "-binding", "linear:1")
    command = job(on_grid_engine, *options, commands=[one])
    with on_grid_engine.ranks(*command, count=2) as ranks:
        first, second = ranks
        assert not {*first.claim} & {*second.claim}
        assert not first.cpus & second.cpus
        for rank in ranks:
            assert rank.cpus == rank.before == {int(rank.environ["SGE_BINDING"])}
