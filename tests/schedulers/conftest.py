"""Schedulers are started once for all tests, each in a folder of its own, and ended after them."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakedriver.driver import FakeDriver
from tests.processes import environment
from tests.schedulers import grid_engine_bed, slurm_bed
from tests.schedulers.bed import running
from tests.schedulers.jobs import Stage, two_sides


def _bed(scheduler: str) -> Any:
    @pytest.fixture(scope="session")
    def bed() -> Iterator[dict[str, str]]:
        """The variables by which a scheduler's commands find it."""
        with tempfile.TemporaryDirectory() as folder, running(scheduler, Path(folder)) as variables:
            yield variables

    return bed


slurm, grid_engine = _bed("slurm"), _bed("grid_engine")


@pytest.fixture
def stage(tmp_path: Path, driver_builds: Path, request: pytest.FixtureRequest) -> Stage:
    """This machine with four GPUs, or as many as the test's parameter, for jobs on one node."""
    folder, gpus = tmp_path / "stage", getattr(request, "param", 4)
    folder.mkdir()
    driver = FakeDriver(two_sides(gpus), tmp_path / "driver", builds=driver_builds)
    return Stage(folder, {**driver.env(), "GPUAFF_LOCK_DIR": str(tmp_path / "locks")})


@pytest.fixture
def on_slurm(slurm: dict[str, str], tmp_path: Path, driver_builds: Path) -> Stage:
    """Both nodes of the Slurm, idle, each with four GPUs and leases of its own."""
    slurm_bed.wait_until_idle(slurm)
    nodes, folder = tmp_path / "nodes", tmp_path / "stage"
    nodes.mkdir()
    folder.mkdir()
    for node in slurm_bed.NODES:
        machine = two_sides(slurm_bed.GPUS)
        driver = FakeDriver(machine, tmp_path / f"driver-{node}", builds=driver_builds)
        variables = {**driver.env(), "GPUAFF_LOCK_DIR": str(tmp_path / f"locks-{node}")}
        lines = [f"export {name}={value}\n" for name, value in variables.items()]
        (nodes / node).write_text("".join(lines))
    return Stage(folder, {**slurm, slurm_bed.NODE_FILES: str(nodes)})


@pytest.fixture
def on_grid_engine(grid_engine: dict[str, str], stage: Stage) -> Stage:
    """The host of the Grid Engine, with four GPUs."""
    variables = environment(stage.variables)
    names = ("PATH", "PYTHONPATH", *stage.variables)
    lines = [f"export {name}={shlex.quote(variables[name])}\n" for name in names]
    Path(grid_engine["SGE_ROOT"], grid_engine_bed.NODE_FILE).write_text("".join(lines))
    stage.variables.update(grid_engine)
    return stage
