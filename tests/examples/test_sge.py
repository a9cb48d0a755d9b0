"""``examples/sge``, as jobs of a real Grid Engine, which counts GPUs and does not say which."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from tests.example_runs import EXAMPLES, finished
from tests.fakedriver.driver import FakeDriver, MakeDriver
from tests.fakedriver.play import this_machine
from tests.processes import CPUS, environment

pytestmark = [
    pytest.mark.slow,
    pytest.mark.fake_driver,
    pytest.mark.needs("qsub", "grid-engine", "two-cpus"),
    pytest.mark.timeout(240),
    pytest.mark.skipif(os.geteuid() != 0, reason="Grid Engine is started as root"),
]


@pytest.fixture(scope="module")
def grid_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The variables by which its commands find it."""
    bed = import_module("tests.schedulers.bed")
    with bed.running("grid_engine", tmp_path_factory.mktemp("sge")) as variables:
        yield variables


@pytest.fixture
def driver(fake_driver: MakeDriver) -> FakeDriver:
    return fake_driver(this_machine(4))


class Cluster:
    """A folder with the example, from which jobs are submitted."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self._folder, self._env = folder, env

    def printed(self, *words: str) -> list[str]:
        """What a job and its tasks printed."""
        done = finished(["qsub", "-sync", "y", *words], self._env, self._folder, timeout=200)
        outs = sorted(self._folder.glob("*.o*"))
        said = [path.read_text() for path in outs]
        assert done.returncode == 0, [done.stdout, done.stderr, *said]
        return "".join(said).splitlines()


@pytest.fixture
def cluster(driver: FakeDriver, grid_engine: dict[str, str], tmp_path: Path) -> Cluster:
    folder = tmp_path / "jobs"
    shutil.copytree(EXAMPLES / "sge", folder)
    env = environment({**driver.env(), "GPUAFF_LOCK_DIR": str(tmp_path / "locks")})
    ours = ("PATH", "PYTHONPATH", "GPUAFF_LOCK_DIR", *driver.env())
    lines = [f"export {name}={shlex.quote(env[name])}\n" for name in ours]
    node_file = import_module("tests.schedulers.grid_engine_bed").NODE_FILE
    Path(grid_engine["SGE_ROOT"], node_file).write_text("".join(lines))
    return Cluster(folder, {**env, **grid_engine})


def test_two_gpus(cluster: Cluster) -> None:
    [line] = cluster.printed("two_gpus.sh")
    assert line.startswith("job: GPU 0,1; cpus ")


def test_tasks_of_an_array_have_different_gpus(cluster: Cluster) -> None:
    lines = cluster.printed("-v", "SECONDS_OF_TRAINING=15", "array.sh")
    found = [re.fullmatch(r"task (\d): GPU (\d); cpus .*", line) for line in lines]
    pairs = [one.groups() for one in found if one is not None]
    assert sorted(task for task, _ in pairs) == ["1", "2", "3", "4"]
    assert sorted(gpu for _, gpu in pairs) == ["0", "1", "2", "3"]


def test_a_bound_job_stays_on_its_core(cluster: Cluster) -> None:
    [line] = cluster.printed("bound.sh")
    found = re.fullmatch(r"job: GPU 0; cpus (\d+) \(bound to (\d+)\)", line)
    assert found is not None, line
    assert found[1] == found[2]
    assert int(found[1]) in CPUS
