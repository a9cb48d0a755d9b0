"""Ranks that a launcher has bound, or not: real processes, seen from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from gpuaff._system.kernel import Tree
from gpuaff.topology.sysfs import cpuset_of
from tests.fakedriver.driver import FakeDriver
from tests.pinning.conftest import of_script
from tests.processes import CPUS, environment, printed, run

pytestmark = [pytest.mark.fake_driver, pytest.mark.needs("two-cpus")]

PIN = """
    import json, os, sys
    import gpuaff
    rank, size = int(os.environ[sys.argv[1]]), int(os.environ[sys.argv[2]])
    affinity = gpuaff.set_affinity(rank, size)
    print(json.dumps({
        "rank": rank,
        "gpu": affinity.gpu,
        "cpus": sorted(os.sched_getaffinity(0)),
        "shares": len(affinity.plan.shares),
        "codes": [warning.code for warning in affinity.warnings],
    }))
"""

SLURM = ("SLURM_LOCALID", "SLURM_NTASKS")
MPI = ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")


def pinned(
    driver: FakeDriver, env: Mapping[str, str], prefix: Sequence[str] = (), names: Any = SLURM
) -> dict[str, Any]:
    done = run(PIN, *names, env={**driver.env(), **env}, prefix=prefix)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def in_step(rank: int, **more: str) -> dict[str, str]:
    """A task of a step of two, as srun starts it."""
    numbers = {"SLURM_LOCALID": str(rank), "SLURM_NTASKS": "2", "SLURM_NODEID": "0"}
    return {**numbers, "SLURM_STEP_TASKS_PER_NODE": "2", **more}


@pytest.mark.case("A23", "G7")
def test_ranks_that_a_wrapper_has_bound(driver: FakeDriver) -> None:
    """A loop around taskset: each rank keeps what it has, also with strict."""
    for rank, cpu in enumerate(CPUS[:2]):
        numbers = {"SLURM_LOCALID": str(rank), "SLURM_NTASKS": "2", "GPUAFF_STRICT": str(rank)}
        found = pinned(driver, numbers, prefix=["taskset", "-c", str(cpu)])
        assert (found["gpu"], found["cpus"], found["shares"]) == (rank, [cpu], 1)
        assert "masks-unknown" in found["codes"]


@pytest.mark.case("B19")
def test_ranks_that_srun_has_bound(driver: FakeDriver) -> None:
    second, first = CPUS[:2]
    bound = {
        "SLURM_CPU_BIND_TYPE": "mask_cpu:",
        "SLURM_CPU_BIND_LIST": f"{1 << first:#x},{1 << second:#x}",
    }
    for rank, cpu in enumerate((first, second)):
        found = pinned(driver, in_step(rank, **bound), prefix=["taskset", "-c", str(cpu)])
        assert (found["cpus"], found["shares"]) == ([cpu], 2)
        assert not {"masks-unknown", "mask-shrunk"} & set(found["codes"])


def test_strict_does_not_accept_unknown_gpus(driver: FakeDriver) -> None:
    own = {"SLURM_STEP_GPUS": "7", "CUDA_VISIBLE_DEVICES": "1", "SLURM_GPUS_ON_NODE": "4"}
    env = in_step(0, SLURM_CPU_BIND_TYPE="none", **own)
    found = pinned(driver, env)
    assert (found["cpus"], "gpus-unknown" in found["codes"]) == (CPUS, True)
    done = run(PIN, *SLURM, env={**driver.env(), **env, "GPUAFF_STRICT": "1"})
    assert "gpus-unknown; strict" in done.stderr


def torchruns(rank: int) -> dict[str, str]:
    """A rank of two, as torchrun starts it; whoever runs the tests is its agent."""
    mine = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
    return {**mine, "LOCAL": str(rank), "SIZE": "2"}


STAY = ["sh", "-c", '"$0" "$@"; exit $?']
WRAPPERS = {
    "a shell binds itself": [*STAY[:2], f"taskset -cp CPU $$ >/dev/null; {STAY[2]}"],
    "a shell is bound": ["taskset", "-c", "CPU", *STAY],
    "a tool is bound": ["taskset", "-c", "CPU", "timeout", "30"],
    "none is bound": ["sh", "-c", 'timeout 30 "$0" "$@"; exit $?'],
}


@pytest.mark.case("A23")
@pytest.mark.parametrize("way", WRAPPERS)
def test_wrappers_of_torchruns_ranks(driver: FakeDriver, way: str) -> None:
    """Each is bound as its rank is, and makes the mask look common."""
    for rank, cpu in enumerate(CPUS[:2]):
        wrapper = [word.replace("CPU", str(cpu)) for word in WRAPPERS[way]]
        found = pinned(driver, torchruns(rank), wrapper, ("LOCAL", "SIZE"))
        is_bound = way != "none is bound"
        assert (found["gpu"], found["shares"]) == (rank, 1 if is_bound else 2)
        assert ("masks-unknown" in found["codes"]) is is_bound
        assert not is_bound or found["cpus"] == [cpu]


def test_a_wrapper_of_a_task_that_srun_has_not_bound(driver: FakeDriver) -> None:
    for rank, cpu in enumerate(CPUS[:2]):
        step = {**in_step(rank, SLURM_CPU_BIND_TYPE="none"), "SLURM_PROCID": str(rank)}
        assert pinned(driver, step)["shares"] == 2
        bound = pinned(driver, step, ["taskset", "-c", str(cpu), "timeout", "30"])
        if cpuset_of(Tree()) is not None:
            assert (bound["cpus"], bound["shares"]) == ([cpu], 1)


TASK_WITH_TWO_GPUS = in_step(
    0,
    SLURM_CPU_BIND_TYPE="none",
    SLURM_STEP_GPUS="0,1",
    SLURM_GPUS_ON_NODE="4",
    SLURM_JOB_GPUS="0-3",
    SLURM_JOB_NUM_NODES="1",
)


WORKER = """
    import json, multiprocessing, os, sys
    def work(rank):
        import gpuaff
        affinity = gpuaff.set_affinity(rank, 2)
        codes = [notice.code for notice in affinity.warnings]
        here = [notice.code for notice in gpuaff.ranks().warnings]
        return {"gpu": affinity.gpu, "cpus": sorted(affinity), "codes": codes, "ranks": here}
    if __name__ == "__main__":
        with multiprocessing.get_context(sys.argv[1]).Pool(1) as pool:
            print(json.dumps([pool.apply(work, (rank,)) for rank in (0, 1)]))
"""


@pytest.mark.case("C10", "D10")
@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("is_a_task", [True, False])
def test_a_worker_whose_number_is_its_tasks(
    driver: FakeDriver, tmp_path: Path, method: str, is_a_task: bool
) -> None:
    """``srun -n2 --gpus-per-task=2``: worker 0 of task 0 is one of two, and is not the task."""
    env = {**driver.env(), **(TASK_WITH_TWO_GPUS if is_a_task else {})}
    ((zero, one),) = of_script(tmp_path, WORKER, method, env=env)
    assert (zero["gpu"], one["gpu"]) == (0, 1)
    assert zero["cpus"]
    assert one["cpus"]
    assert not set(zero["cpus"]) & set(one["cpus"])
    unwanted = {"gpus-unknown", "masks-unknown", "rank-inherited"}
    assert not unwanted & {*zero["codes"], *one["codes"]}


def test_a_thread_that_is_importing_multiprocessing(driver: FakeDriver) -> None:
    """What is in sys.modules then has no functions yet."""
    code = """
import sys, types
import gpuaff
sys.modules["multiprocessing.process"] = types.ModuleType("multiprocessing.process")
print(gpuaff.ranks().local_rank, gpuaff.set_affinity().rank, len(gpuaff.spread(0, 1)) > 0)
"""
    env = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert driver.run([sys.executable, "-c", code], env=env).stdout == "1 1 True\n"


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_child_that_sets_the_variables_itself(
    driver: FakeDriver, tmp_path: Path, method: str
) -> None:
    """As functions do that ``torch.multiprocessing.spawn`` starts: the numbers are its own."""
    numbers = '{"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}'
    script = WORKER.replace("set_affinity(rank, 2)", "set_affinity()")
    script = script.replace("import gpuaff", f"os.environ |= {numbers}; import gpuaff")
    (found,) = of_script(tmp_path, script, method, env=driver.env())
    assert [one["gpu"] for one in found] == [0, 1]
    assert not any("rank-inherited" in one["codes"] + one["ranks"] for one in found)


CLAIMER = """
    import os, subprocess, sys
    import gpuaff
    from gpuaff.launch.inherited import ParentClaim as Claimed
    from gpuaff._system.kernel import thread_facts
    started = thread_facts(os.getpid(), os.getpid()).started
    claim = Claimed(slot=0, pid=os.getpid(), started=started, uuids=("GPU-1",))
    more = dict(word.split("=") for word in sys.argv[2:])
    env = {**os.environ, "GPUAFF_CLAIM": str(claim), **more}
    command = [sys.executable, "-c", sys.argv[1], "LOCAL", "SIZE"]
    sys.exit(subprocess.run(command, env=env).returncode)
"""


@pytest.mark.parametrize("is_around_the_launcher", [False, True])
def test_a_wrapper_that_has_claimed_for_its_rank(
    driver: FakeDriver, is_around_the_launcher: bool
) -> None:
    """``gpuaff run --per-rank -- sh -c "python …"``: the shell has claimed, for Python."""
    rank = torchruns(1)
    inside = rank if is_around_the_launcher else {}
    done = run(
        CLAIMER,
        textwrap.dedent(PIN),
        *(f"{name}={value}" for name, value in inside.items()),
        env={**driver.env(), "CUDA_VISIBLE_DEVICES": "1", **({} if inside else rank)},
        fresh=True,  # Python reads the variables that it was started with
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["gpu"] == 1
    assert ("one-gpu" in found["codes"]) is is_around_the_launcher
    assert found["shares"] == (2 if is_around_the_launcher else 1)


@pytest.mark.case("D12")
def test_no_gpu_is_hidden(driver: FakeDriver) -> None:
    """Peer access and NCCL need all GPUs visible: pinning sets a variable of its own alone."""
    script = """
        import os
        import gpuaff
        before = dict(os.environ)
        affinity = gpuaff.set_affinity(1, 2)
        assert affinity.pinned
        assert os.environ.pop("GPUAFF_PINNED").startswith("v1:1:2:")
        print(affinity.gpu, dict(os.environ) == before)
    """
    assert printed(script, env=driver.env()) == "1 True"
    assert printed(script, env={**driver.env(), "CUDA_VISIBLE_DEVICES": "1,0"}) == "0 True"


def under_mpirun(
    driver: FakeDriver, *options: str, shell: bool = False, first: str = ""
) -> list[dict[str, Any]]:
    """What two ranks under the real mpirun say, by rank; the shell does something first."""
    command = [sys.executable, "-c", textwrap.dedent(PIN), *MPI]
    wrapper = ["sh", "-c", f'{first} "$0" "$@"; exit $?'] if shell else []
    mpirun = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    done = subprocess.run(
        [*mpirun, *options, *wrapper, *command],
        capture_output=True,
        text=True,
        env={**environment(driver.env()), "HOME": os.environ.get("HOME", "/")},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return sorted(said, key=lambda rank: int(rank["rank"]))


@pytest.mark.needs("mpirun.openmpi")
@pytest.mark.parametrize("shell", [False, True])
def test_ranks_that_mpirun_has_bound(driver: FakeDriver, shell: bool) -> None:
    """A shell between them has the rank's mask too, and makes it look common."""
    bound = ("--use-hwthread-cpus", "--bind-to", "hwthread")
    first, second = under_mpirun(driver, *bound, shell=shell)
    for rank in (first, second):
        assert len(rank["cpus"]) == 1
        assert rank["shares"] == 1
        assert "masks-unknown" in rank["codes"]
        assert "mask-shrunk" not in rank["codes"]
    assert first["cpus"] != second["cpus"]
    assert [first["gpu"], second["gpu"]] == [0, 1]


@pytest.mark.needs("mpirun.openmpi")
def test_a_shell_of_ranks_that_mpirun_has_not_bound(driver: FakeDriver) -> None:
    first, second = under_mpirun(driver, "--bind-to", "none", shell=True)
    assert first["cpus"] != second["cpus"]
    assert "masks-unknown" not in first["codes"] + second["codes"]


@pytest.mark.needs("mpirun.openmpi")
def test_shells_of_mpiruns_ranks_that_bind_themselves(driver: FakeDriver) -> None:
    cpus = " ".join(map(str, CPUS[:2]))
    choose = f"set -- $OMPI_COMM_WORLD_LOCAL_RANK {cpus}; shift $(($1 + 1)); echo $1"
    bind = f"taskset -cp $({choose}) $$ >/dev/null;"
    found = under_mpirun(driver, "--bind-to", "none", shell=True, first=bind)
    assert [rank["cpus"] for rank in found] == [[cpu] for cpu in CPUS[:2]]
    assert all("masks-unknown" in rank["codes"] for rank in found)
