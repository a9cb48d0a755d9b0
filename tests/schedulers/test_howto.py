"""The how-to pages: their files and commands, run as a reader would, print what stands there."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.processes import environment
from tests.schedulers.jobs import Stage

DOCS = Path(__file__).parents[2] / "docs"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.fake_driver,
    pytest.mark.needs("two-cpus", "gpuaff"),
    pytest.mark.skipif(not DOCS.exists(), reason="needs the docs of a checkout"),
]

AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

_BLOCK = re.compile(r"^```(python|bash|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NAMED = re.compile(r"^# (\S+\.(?:py|sh))\n", re.MULTILINE)


def follow(page: str, stage: Stage) -> None:
    """Do what a page says, from its top to its end."""
    blocks = _BLOCK.findall((DOCS / page).read_text("utf-8"))
    assert any(language == "console" for language, _ in blocks)
    env = environment({**stage.variables, **AS_ROOT})
    for language, text in blocks:
        if language == "console":
            for shown in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
                command, _, expected = shown.partition("\n")
                done = subprocess.run(
                    ["bash", "-o", "pipefail", "-c", command],
                    capture_output=True,
                    text=True,
                    cwd=stage.folder,
                    env=env,
                    timeout=100,
                    check=False,
                )
                said = f"$ {command}\n{done.stdout}\n{done.stderr}"
                assert done.returncode == 0, said
                assert plain(done.stdout) == plain(expected), said
        else:
            named = _NAMED.search(text)
            assert named is not None, text
            (stage.folder / named[1]).write_text(text)


def plain(text: str) -> list[str]:
    """Lines without numbers of jobs, torchrun's remarks, and that fake GPUs are not in /sys."""
    lines = [re.sub(r"job \d+|Job \d+", "job N", line) for line in text.splitlines()]
    noise = re.compile(r"[WE]\d{4} |\s*$|.*\[(border-unused|grant-unpinned)\]$")
    return [line.rstrip() for line in lines if not noise.match(line)]


@pytest.mark.case("B19", "D5", "D12")
@pytest.mark.needs("root", "slurmctld", "slurmd", "munged", "srun", "torch", "torchrun")
def test_slurm(on_slurm: Stage) -> None:
    follow("slurm.md", on_slurm)


@pytest.mark.needs("root", "sge_qmaster", "sge_execd", "qsub", "qconf")
def test_grid_engine(on_grid_engine: Stage) -> None:
    follow("sge.md", on_grid_engine)


@pytest.mark.parametrize("stage", [2], indirect=True)
@pytest.mark.needs("mpirun.openmpi", "mpiexec.hydra")
def test_mpi(stage: Stage, tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "mpirun").symlink_to("/usr/bin/mpirun.openmpi")
    path = environment()["PATH"]
    stage.variables["PATH"] = f"{programs}:{path}"
    follow("mpi.md", stage)


@pytest.mark.parametrize("stage", [2], indirect=True)
@pytest.mark.case("B5", "D12")
@pytest.mark.needs("torch", "torchrun")
def test_torchrun(stage: Stage) -> None:
    follow("torchrun.md", stage)
