"""How many GPUs a scheduler has granted: its variables, Torque's file, real ``qstat``s."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpuaff.launch import allocation
from gpuaff.launch.allocation import Granted, classify_grant
from tests.environments import started, table, variables
from tests.processes import printed


def of(said: Mapping[str, str], **how: str | None) -> Granted:
    names = [name for name in said if name.startswith("SGE_HGR_")]
    return classify_grant(said.get, names=names, **{"host": "node7", **how})


def counted(said: Mapping[str, str], **how: str | None) -> list[Any]:
    """The number, and the list of indices."""
    found = of(said, **how)
    return [found.count, found.indices and list(found.indices)]


# Slurm: what it was seen to set, without what CUDA shows, and with it.


@pytest.mark.parametrize(("name", "expected"), table("recorded"))
def test_slurm(name: str, expected: list[Any]) -> None:
    for rank, (count, indices) in zip(started("slurm", name), expected, strict=True):
        unset = {k: text for k, text in rank.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
        assert counted(unset) == [count, indices]
        assert counted({**unset, "CUDA_VISIBLE_DEVICES": "0"}) == [count, None]


@pytest.mark.parametrize(("said", "granted"), table("grants"))
def test_what_variables_grant(said: str, granted: list[Any]) -> None:
    assert counted(variables(said)) == granted


def test_a_map_is_listed_with_blanks() -> None:
    assert counted({"SGE_HGR_gpu": "0 2"}) == [2, [0, 2]]


@pytest.mark.parametrize(("said", "source"), table("sources"))
def test_where_it_comes_from(said: str, source: str) -> None:
    assert of(variables(said)).source.startswith(source)


TORQUE = {"PBS_GPUFILE": "/var/spool/torque/aux//12.headgpu"}


@pytest.mark.parametrize(("text", "expected"), [*table("torque"), (None, [None, None])])
def test_torque(text: str | None, expected: list[Any]) -> None:
    assert counted(TORQUE, gpu_file=text) == expected
    assert counted(TORQUE, gpu_file=text, host="NODE7.example.org") == expected
    assert counted(TORQUE, gpu_file=text, host=None) == [None, None]


@pytest.mark.parametrize(
    ("said", "count"),
    [
        ({"PBS_GPUFILE": "/a\nb\x1b[2J"}, None),
        ({"PBS_GPUFILE": "/" + "\x1b" * 200}, None),
        ({"PBS_GPUFILE": "/" + "a" * 100_000}, None),
        ({"SGE_HGR_gpu": " ".join(f"GPU{number}" for number in range(10_000))}, 10_000),
        ({"SLURM_STEP_GPUS": ",".join(map(str, range(0, 60_000, 2)))}, 30_000),
    ],
)
def test_what_is_quoted_is_one_short_line(said: dict[str, str], count: int | None) -> None:
    found = of(said)
    assert found.count == count
    assert found.source.isprintable()
    assert len(found.source) <= 300


def test_other_vendors_variables_prove_nothing() -> None:
    """Slurm sets all of them, whatever is in the node."""
    for rank in started("slurm", "two-nodes-gres-0"):
        assert rank.environ["ROCR_VISIBLE_DEVICES"] == rank.environ["ZE_AFFINITY_MASK"] == "0,1"
        foreign = ("ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "GPU_DEVICE_ORDINAL")
        rest = {name: text for name, text in rank.environ.items() if name not in foreign}
        assert of(rest) == of(rank.environ)
        assert of({name: rank.environ[name] for name in foreign}) == of({})


@pytest.mark.parametrize("name", ["gpu-2", "array", "binding", "parallel"])
def test_a_grid_engine_without_maps_tells_nothing(name: str) -> None:
    for rank in started("grid_engine", name):
        assert counted(rank.environ) == [None, None]


NAMES = (
    *("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "SLURM_GPUS_ON_NODE", "SLURM_JOB_NUM_NODES"),
    *("SLURM_NODEID", "SLURM_STEP_ID", "SLURM_JOB_ID", "SGE_HGR_gpu", "SGE_HGR_cuda"),
    *("PBS_GPUFILE", "CUDA_VISIBLE_DEVICES"),
)


@given(
    st.dictionaries(st.sampled_from(NAMES), st.sampled_from(["0", "1", "0,2", "9-12"]) | st.text()),
    st.none() | st.text(),
)
def test_any_environment(said: dict[str, str], gpu_file: str | None) -> None:
    found = of(said, gpu_file=gpu_file)
    assert found.source
    assert found.indices is None or "CUDA_VISIBLE_DEVICES" not in said
    if found.indices is not None:
        assert found.count is not None
        assert list(found.indices) == sorted(set(found.indices))
        assert 0 <= found.count <= len(found.indices)


# qstat.

REPORT = """\
==============================================================
job_number:                 4711
exec_file:                  job_scripts/4711
owner:                      somebody
hard resource_list:         {requests}
mail_list:                  somebody@head
job_name:                   train.sh
env_list:                   TERM=NONE,gpu=7
usage    1:                 cpu=00:01:30, mem=1.0 GBs, io=0.0
"""


@pytest.mark.parametrize(("requests", "count"), table("qstat"))
def test_what_qstat_prints(requests: str, count: int | None) -> None:
    found, said = allocation.parse_qstat(REPORT.format(requests=requests))
    assert (found, bool(said)) == (count, True)
    assert len(said) < 300


def test_the_other_spelling() -> None:
    assert allocation.parse_qstat("hard_resource_list: gpu=2") == (2, "gpu=2")


@given(st.text())
@example("Following jobs do not exist:\n4711\n")
def test_any_other_report(text: str) -> None:
    assert allocation.parse_qstat(text)[0] is None
    assert allocation.parse_qstat(f"hard resource_list: {text}")[1]


IN_A_JOB = {"JOB_ID": "4711", "SGE_ROOT": "/opt/sge", "QUEUE": "gpu.q"}

ASK = """
    import json
    from gpuaff.launch import allocation
    allocation.SECONDS = {seconds}
    found = allocation.granted()
    print(json.dumps([found.count, found.indices, found.source]))
"""


def asked(folder: Path, env: Mapping[str, str] | None = None, *, seconds: float = 5) -> list[Any]:
    """What a process says in a job of Grid Engine that finds ``qstat`` in a folder."""
    said = {**IN_A_JOB, "PATH": f"{folder}:{os.environ['PATH']}", **(env or {})}
    found: list[Any] = json.loads(printed(ASK.format(seconds=seconds), env=said))
    return found


def qstat(folder: Path, script: str) -> Path:
    """A stand-in for the program."""
    program = folder / "qstat"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return folder


def test_qstat_is_asked(tmp_path: Path) -> None:
    report = tmp_path / "report"
    report.write_text(REPORT.format(requests="gpu=2,h_rt=3600"))
    folder = qstat(tmp_path, f'test "$*" = "-j 4711" && cat {report}')
    for env in ({}, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}):
        assert asked(folder, env) == [2, None, "qstat -j 4711: gpu=2"]


@pytest.mark.parametrize(
    "env", ["JOB_ID=", "JOB_ID=../4711", f"JOB_ID={'4' * 21}", "SGE_ROOT= QUEUE=", "SGE_HGR_gpu=3"]
)
def test_qstat_is_not_asked(tmp_path: Path, env: str) -> None:
    folder = qstat(tmp_path, f"touch {tmp_path}/asked")
    asked(folder, variables(env))
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo 'error: no master' >&2; exit 1", "failed with status 1 (error: no master)"),
        ("exit 3", "failed with status 3 (it prints nothing)"),
        ("kill -9 $$", "failed with status -9 (it prints nothing)"),
        ("cat", "no request (hard resource_list) for GPUs"),
    ],
)
def test_a_qstat_that_fails(tmp_path: Path, script: str, why: str) -> None:
    count, indices, source = asked(qstat(tmp_path, script))
    assert (count, indices) == (None, None)
    assert source.endswith(why)
    assert "qstat -j 4711" in source


def test_no_qstat(tmp_path: Path) -> None:
    nothing_else = {"PATH": str(tmp_path)}  # this machine may have Grid Engine
    assert asked(tmp_path, nothing_else)[2].endswith("qstat -j 4711 is not on PATH")


@pytest.mark.parametrize("script", ["exec sleep 60", "sleep 2 & exit 0", "exec >&- 2>&-; sleep 2"])
def test_a_qstat_that_does_not_answer(tmp_path: Path, script: str) -> None:
    folder = qstat(tmp_path, script)
    assert asked(folder, seconds=0.3)[2].endswith("does not answer within 0.3 s")


def test_torques_file(tmp_path: Path) -> None:
    file = tmp_path / "12.headgpu"
    file.write_text(f"{os.uname().nodename}-gpu1\nother-gpu0\n")
    assert asked(tmp_path, {"PBS_GPUFILE": str(file)})[:2] == [1, [1]]
