"""How many GPUs a scheduler has granted: its variables, Torque's file, real ``qstat``s."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuaff.launch import allocation
from gpuaff.launch.allocation import Granted, classify_grant
from tests.environments import started
from tests.processes import printed


def told(
    variables: Mapping[str, str], *, gpu_file: str | None = None, host: str | None = "node7"
) -> tuple[int | None, tuple[int, ...] | None]:
    found = of(variables, gpu_file=gpu_file, host=host)
    return found.count, found.indices


def of(
    variables: Mapping[str, str], *, gpu_file: str | None = None, host: str | None = "node7"
) -> Granted:
    names = [name for name in variables if name.startswith("SGE_HGR_")]
    return classify_grant(variables.get, names=names, gpu_file=gpu_file, host=host)


# Slurm: what it was seen to set, without what CUDA shows, and with it.


def without_cuda(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in environ.items() if name != "CUDA_VISIBLE_DEVICES"}


SLURM: dict[str, list[tuple[int | None, tuple[int, ...] | None]]] = {
    "gres": [(2, (0, 1))] * 2,
    "gpus-per-task": [(1, (0,)), (1, (1,))],
    "map-gpu": [(1, (1,)), (1, (0,))],
    "gpu-bind-none": [(2, None)] * 2,
    "job-gpus": [(1, (0,)), (1, (1,))],
    "second-node": [(1, (0,)), (1, (2,))],
    "tres-per-task": [(2, (8, 9))] * 2,
    "batch-script": [(2, (0, 1))] * 2,
    "no-plugin": [(None, None)] * 2,
}


@pytest.mark.parametrize(("name", "expected"), SLURM.items())
def test_slurm(name: str, expected: list[tuple[int | None, tuple[int, ...] | None]]) -> None:
    ranks = started("slurm", name)
    assert [told(without_cuda(rank.environ)) for rank in ranks] == expected
    for rank, (count, _) in zip(ranks, expected, strict=True):
        shown = {**rank.environ, "CUDA_VISIBLE_DEVICES": "0"}
        found = of(shown)
        assert (found.count, found.indices) == (count, None)


JOB = {"SLURM_JOB_ID": "1", "SLURM_JOB_GPUS": "8-11", "SLURM_GPUS_ON_NODE": "4"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"SLURM_JOB_NUM_NODES": "1"}, (4, (8, 9, 10, 11))),
        ({"SLURM_NNODES": "1"}, (4, (8, 9, 10, 11))),
        # A batch script is on the first node; so is the first node of a step that is on all.
        ({"SLURM_JOB_NUM_NODES": "2", "SLURM_NODEID": "0"}, (4, (8, 9, 10, 11))),
        ({"SLURM_JOB_NUM_NODES": "2", "SLURM_NODEID": "1"}, (4, None)),
        ({"SLURM_JOB_NUM_NODES": "2", "SLURM_NODEID": "0", "SLURM_STEP_ID": "0"}, (4, None)),
        (
            {
                "SLURM_JOB_NUM_NODES": "2",
                "SLURM_NODEID": "0",
                "SLURM_STEP_ID": "0",
                "SLURM_STEP_NUM_NODES": "2",
            },
            (4, (8, 9, 10, 11)),
        ),
        (
            {
                "SLURM_JOB_NUM_NODES": "2",
                "SLURM_NODEID": "0",
                "SLURM_STEP_ID": "0",
                "SLURM_STEP_NUM_NODES": "1",
            },
            (4, None),
        ),
        ({}, (4, None)),
        # A step of fewer GPUs that names none: which ones it has of the job's is not told.
        ({"SLURM_JOB_NUM_NODES": "1", "SLURM_GPUS_ON_NODE": "2"}, (2, (8, 9, 10, 11))),
        ({"SLURM_JOB_NUM_NODES": "1", "SLURM_GPUS_ON_NODE": "0"}, (0, (8, 9, 10, 11))),
    ],
)
def test_the_batch_scripts_gpus(variables: dict[str, str], expected: object) -> None:
    assert told({**JOB, **variables}) == expected


@pytest.mark.parametrize(
    ("variables", "count"),
    [
        ({"SLURM_STEP_GPUS": "0-7"}, 4),
        ({"SLURM_STEP_GPUS": "0,8", "SLURM_JOB_NUM_NODES": "1"}, 4),
        ({"SLURM_GPUS_ON_NODE": "8", "SLURM_JOB_NUM_NODES": "1"}, 8),
        ({"SLURM_STEP_GPUS": "0", "SLURM_GPUS_ON_NODE": "", "SLURM_NNODES": "1"}, None),
    ],
)
def test_what_is_left_over_from_another_job(variables: dict[str, str], count: int | None) -> None:
    found = of({**JOB, **variables})
    assert (found.count, found.indices) == (count, None)
    assert "left over" in found.source


@pytest.mark.parametrize("text", ["", "all", "0,,1", "-1", "0x3"])
def test_lists_that_cannot_be_read(text: str) -> None:
    assert told({"SLURM_STEP_GPUS": text, "SLURM_GPUS_ON_NODE": "2"}) == (2, None)
    assert told({"SLURM_GPUS_ON_NODE": text, "SLURM_STEP_GPUS": "4-5"}) == (2, (4, 5))


def test_a_job_without_gpus() -> None:
    found = of({"SLURM_JOB_ID": "7"})
    assert (found.count, found.indices) == (None, None)
    assert found.source.startswith("Slurm granted no GPUs")


# Grid Engine's resource maps.


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"SGE_HGR_gpu": "0 2"}, (2, (0, 2))),
        ({"SGE_HGR_GPU_CARD": "11"}, (1, (11,))),
        ({"SGE_HGR_cuda": "1,0"}, (2, (0, 1))),
        ({"SGE_HGR_gpu": "GPU1 GPU2"}, (2, None)),
        ({"SGE_HGR_gpu": "gpu0 gpu1"}, (2, None)),
        ({"SGE_HGR_gpu": "0 gpu1"}, (2, None)),
        ({"SGE_HGR_gpu": "1 1"}, (1, (1,))),
        ({"SGE_HGR_gpu": "0", "SGE_HGR_cuda": "0"}, (1, (0,))),
        ({"SGE_HGR_gpu": "0", "SGE_HGR_cuda": "1"}, (None, None)),
        ({"SGE_HGR_fpga": "0"}, (None, None)),
        ({"SGE_HGR_gpu": ""}, (None, None)),
        ({"SGE_HGR_gpu": "NONE"}, (None, None)),
    ],
)
def test_resource_maps(variables: dict[str, str], expected: object) -> None:
    assert told(variables) == expected


# Torque.

TORQUE = {"PBS_GPUFILE": "/var/spool/torque/aux//12.headgpu"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node7-gpu0\nnode7-gpu10\n", (2, (0, 10))),
        ("node7.example.org-gpu3", (1, (3,))),
        ("node6-gpu0\nnode7-gpu1\n", (1, (1,))),
        ("rack-gpu-gpu1\nnode7-gpu2", (1, (2,))),
        ("node6-gpu0\n", (None, None)),
        ("", (None, None)),
        ("node7\n", (None, None)),
        ("node7-gpux\n", (None, None)),
        (None, (None, None)),
    ],
)
def test_torque(text: str | None, expected: object) -> None:
    assert told(TORQUE, gpu_file=text) == expected
    assert told(TORQUE, gpu_file=text, host="NODE7.example.org") == expected


def test_torque_on_a_nameless_machine() -> None:
    assert told(TORQUE, gpu_file="node7-gpu0", host=None) == (None, None)


@pytest.mark.parametrize(
    ("variables", "count"),
    [
        ({"PBS_GPUFILE": "/a\nb\x1b[2J"}, None),
        ({"PBS_GPUFILE": "/" + "\x1b" * 200}, None),
        ({"PBS_GPUFILE": "/" + "a" * 100_000}, None),
        ({"SGE_HGR_gpu": " ".join(f"GPU{number}" for number in range(10_000))}, 10_000),
        ({"SLURM_STEP_GPUS": ",".join(map(str, range(0, 60_000, 2)))}, 30_000),
    ],
)
def test_what_is_quoted_is_one_short_line(variables: dict[str, str], count: int | None) -> None:
    found = of(variables)
    assert found.count == count
    assert found.source.isprintable()
    assert len(found.source) <= 300


# Nobody, several, and whatever else there may be.


def test_nobody_tells() -> None:
    found = of({})
    assert found == Granted(count=None, indices=None, source=found.source)
    assert found.source.startswith("no scheduler has set")


@pytest.mark.parametrize("text", ["", "0", "GPU-1,GPU-2", "NoDevFiles"])
def test_the_visible_ones(text: str) -> None:
    found = of({"CUDA_VISIBLE_DEVICES": text})
    assert (found.count, found.indices) == (None, None)
    assert found.source == "CUDA_VISIBLE_DEVICES"


def test_lsf() -> None:
    """``mps=yes,nocvd`` keeps the variable unset."""
    job = {"LSB_JOBID": "101", "LSB_HOSTS": "node7", "LSB_DJOB_NUMPROC": "4"}
    found = of(job)
    assert (found.count, found.indices) == (None, None)
    assert found.source.startswith("LSF gives its GPUs by CUDA_VISIBLE_DEVICES")
    shown = of({**job, "CUDA_VISIBLE_DEVICES": "2,3"})
    assert shown.source == "CUDA_VISIBLE_DEVICES"
    assert told({**job, "SLURM_GPUS_ON_NODE": "2"}) == (2, None)


def test_the_first_scheduler_counts() -> None:
    both = {"SLURM_GPUS_ON_NODE": "2", "SGE_HGR_gpu": "0"}
    found = of(both)
    assert found.count == 2
    assert found.source == (
        "SLURM_GPUS_ON_NODE=2, but SGE_HGR_gpu=0: one is left over from another job"
    )
    assert of({**both, "SLURM_GPUS_ON_NODE": "1"}).source == "SLURM_GPUS_ON_NODE=1"
    assert told({"SLURM_JOB_ID": "1", "SGE_HGR_gpu": "3"}) == (1, (3,)), "one tells nothing"


def test_other_vendors_variables_prove_nothing() -> None:
    """Slurm sets all of them, whatever is in the node."""
    for rank in started("slurm", "two-nodes-gres-0"):
        assert rank.environ["ROCR_VISIBLE_DEVICES"] == rank.environ["ZE_AFFINITY_MASK"] == "0,1"
        foreign = ("ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "GPU_DEVICE_ORDINAL")
        rest = {name: text for name, text in rank.environ.items() if name not in foreign}
        assert of(rest) == of(rank.environ)
        only = {name: rank.environ[name] for name in foreign}
        assert of(only) == of({})


@pytest.mark.parametrize("name", ["gpu-2", "array", "binding", "parallel"])
def test_a_grid_engine_without_maps_tells_nothing(name: str) -> None:
    for rank in started("grid_engine", name):
        assert told(rank.environ) == (None, None)


NAMES = (
    *("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "SLURM_GPUS_ON_NODE", "SLURM_JOB_NUM_NODES"),
    *("SLURM_NODEID", "SLURM_STEP_ID", "SLURM_JOB_ID", "SGE_HGR_gpu", "SGE_HGR_cuda"),
    *("PBS_GPUFILE", "CUDA_VISIBLE_DEVICES"),
)


@given(
    st.dictionaries(st.sampled_from(NAMES), st.sampled_from(["0", "1", "0,2", "9-12"]) | st.text()),
    st.none() | st.text(),
)
def test_any_environment(variables: dict[str, str], gpu_file: str | None) -> None:
    found = of(variables, gpu_file=gpu_file)
    assert found.source
    assert found.indices is None or "CUDA_VISIBLE_DEVICES" not in variables
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


@pytest.mark.parametrize(
    ("requests", "count"),
    [
        ("gpu=2,h_rt=3600", 2),
        ("h_rt=3600,mem_free=8G,ngpus=1", 1),
        ("GPU=3", 3),
        ("gpu=0", 0),
        ("gpu=1,cuda=1", 1),
        ("gpu=1,cuda=2", None),
        ("gpu=true", None),
        ("gpu=2.5", None),
        ("gpu=-1", None),
        ("gpu=" + "9" * 5000, None),
        ("gpu=0x2", None),
        ("gpu=", None),
        ("gpu_mem=16,gpu_type=7", None),
        ("h_rt=3600", None),
    ],
)
def test_what_qstat_prints(requests: str, count: int | None) -> None:
    found, said = allocation.parse_qstat(REPORT.format(requests=requests), "4711")
    assert (found, bool(said)) == (count, True)
    assert len(said) < 300


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Following jobs do not exist:\n4711\n",
        REPORT.format(requests="gpu=1").replace("11", "12"),
    ],
)
def test_a_report_of_something_else(text: str) -> None:
    assert allocation.parse_qstat(text, "4711") == (None, "this is not about the job")


def test_the_other_spelling() -> None:
    text = "job_number: 4711\nhard_resource_list: gpu=2"
    assert allocation.parse_qstat(text, "4711") == (2, "gpu=2")


@given(st.text())
def test_any_report(text: str) -> None:
    assert allocation.parse_qstat(text, "4711")[0] is None
    assert allocation.parse_qstat(f"job_number: 4711\n{text}", "4711")[1]


IN_A_JOB = {"JOB_ID": "4711", "SGE_ROOT": "/opt/sge", "QUEUE": "gpu.q"}

ASK = """
    import json
    from gpuaff.launch import allocation
    allocation.SECONDS = {seconds}
    found = allocation.granted()
    print(json.dumps([found.count, found.indices, found.source]))
"""


def asked(
    folder: Path | None, env: Mapping[str, str] | None = None, *, seconds: float = 5
) -> list[Any]:
    """What a process says in a job of Grid Engine that finds ``qstat`` in a folder."""
    path = "" if folder is None else f"{folder}:{os.environ['PATH']}"
    variables = {**IN_A_JOB, "PATH": path, **(env or {})}
    found: list[Any] = json.loads(printed(ASK.format(seconds=seconds), env=variables))
    return found


def qstat(folder: Path, script: str) -> Path:
    """A stand-in for the program."""
    program = folder / "qstat"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return folder


def test_qstat_is_asked(tmp_path: Path) -> None:
    report = tmp_path / "report"
    report.write_text(REPORT.format(requests="gpu=2,h_rt=3600"))
    folder = qstat(tmp_path, f'test "$*" = "-j 4711" && cat {report}')
    assert asked(folder) == [2, None, "qstat -j 4711: gpu=2"]
    shown = asked(folder, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"})
    assert shown == [2, None, "qstat -j 4711: gpu=2"]


@pytest.mark.parametrize(
    "env",
    [
        {"JOB_ID": ""},
        {"JOB_ID": "../4711"},
        {"JOB_ID": "4" * 21},
        {"SGE_ROOT": "", "QUEUE": ""},
        {"SLURM_GPUS_ON_NODE": "1"},
        {"SGE_HGR_gpu": "3"},
    ],
)
def test_qstat_is_not_asked(tmp_path: Path, env: dict[str, str]) -> None:
    folder = qstat(tmp_path, f"touch {tmp_path}/asked")
    asked(folder, env)
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo 'error: no master' >&2; exit 1", "failed with status 1 (error: no master)"),
        ("exit 3", "failed with status 3 (it prints nothing)"),
        ("kill -9 $$", "failed with status -9 (it prints nothing)"),
        ("yes", "prints more than 1048576 bytes"),
        ("cat", "this is not about the job"),
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
    (tmp_path / "qstat").write_text("no program")
    (tmp_path / "qstat").chmod(0o755)
    assert "cannot be started (Exec format error)" in asked(tmp_path, nothing_else)[2]


@pytest.mark.parametrize("script", ["sleep 60", "sleep 60 & exit 0", "exec >&- 2>&-; sleep 60"])
def test_a_qstat_that_does_not_answer(tmp_path: Path, script: str) -> None:
    """It is ended, with what it has started."""
    folder = qstat(tmp_path, f"echo $$ > {tmp_path}/pid\n{script}")
    start = time.monotonic()
    assert asked(folder, seconds=0.3)[2].endswith("does not answer within 0.3 s")
    assert time.monotonic() - start < 20
    group = int((tmp_path / "pid").read_text())
    ends = time.monotonic() + 10
    while any(_group_of(stat) == group for stat in Path("/proc").glob("[0-9]*/stat")):
        assert time.monotonic() < ends, "something is left"
        time.sleep(0.01)


def _group_of(stat_file: Path) -> int | None:
    try:
        fields = stat_file.read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[2])


def test_torques_file(tmp_path: Path) -> None:
    host = os.uname().nodename
    file = tmp_path / "12.headgpu"
    file.write_text(f"{host}-gpu1\nother-gpu0\n")
    assert asked(None, {"PBS_GPUFILE": str(file)})[:2] == [1, [1]]
