"""What is tried inside the machine. Each scenario tells what it saw, and judges nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from tests.numa_machine.inside.looking import threads
from tests.numa_machine.inside.world import (
    CPU,
    LAUNCHER,
    Rank,
    World,
    all_online,
    ask_all,
    display_devices,
    on,
    pin_all,
    switch,
    text,
)

Scenario: TypeAlias = Callable[[World], Any]

SCENARIOS: dict[str, Scenario] = {}
"""Those that are played, by their names, in this order."""

_NODES = Path("/sys/devices/system/node")


def scenario(act: Scenario) -> Scenario:
    """Have it played."""
    SCENARIOS[act.__name__] = act
    return act


def pinned(ranks: Sequence[Rank], **options: Any) -> dict[str, Any]:
    """Let all ranks of a job pin themselves: what they say, and where their threads are then."""
    return {"said": pin_all(ranks, **options), "threads": [rank.threads() for rank in ranks]}


# The machine itself.


@scenario
def machine(world: World) -> Any:
    """What the kernel says of the machine; gpuaff is not asked."""
    cpus = [CPU / f"cpu{number}" for number in range(16)]
    devices = display_devices()
    return {
        "possible": text(CPU / "possible"),
        "online": text(CPU / "online"),
        "cores": sorted({text(cpu / "topology/core_cpus_list") for cpu in cpus}),
        "packages": sorted({text(cpu / "topology/package_cpus_list") for cpu in cpus}),
        "l3": sorted({text(cpu / "cache/index3/shared_cpu_list") for cpu in cpus}),
        "nodes": [text(_NODES / f"node{node}/cpulist") for node in (0, 1)],
        "distances": [text(_NODES / f"node{node}/distance") for node in (0, 1)],
        "gpus": [[device.name, text(device / "numa_node")] for device in devices],
    }


@scenario
def topo_command(world: World) -> Any:
    """What ``gpuaff topo`` says of it, as installed from the wheel."""
    env = world.env()
    command = [sys.executable, "-m", "gpuaff", "topo", "--json"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


# Four ranks.


@scenario
def four_ranks(world: World) -> Any:
    """Each with three more threads, and one that the first makes afterwards."""
    ranks = world.ranks(4)
    for rank in ranks:
        rank.ask("threads", count=3)
    before = ranks[0].threads()
    said = pin_all(ranks)
    ranks[0].ask("threads", count=1)
    return {
        "before": before,
        "said": said,
        "threads": [rank.threads() for rank in ranks],
        "restored": [rank.ask("restore") for rank in ranks],
        "after": [rank.threads() for rank in ranks],
    }


@scenario
def other_options(world: World) -> Any:
    """The same four processes, again and again."""
    ranks = world.ranks(4)
    asked: dict[str, dict[str, Any]] = {
        "scope=socket": {"scope": "socket"},
        "single_logical": {"multithreading": "single_logical"},
        "unique_interleaved": {"mode": "unique_interleaved"},
        "core_complex": {"mode": "core_complex"},
        "single": {"mode": "single"},
        "reserve=1": {"reserve": 1},
    }
    return {name: pinned(ranks, **options) for name, options in asked.items()}


@scenario
def pages(world: World) -> Any:
    """Where memory lies that a rank touches before it is pinned, on the other node, and after."""
    found = []
    for number, rank in enumerate(world.ranks(4)):
        before = rank.touched(on=[0] if number in (0, 3) else [8])
        rank.ask("pin", rank=number, of=4)
        found.append({"before": before, "after": rank.touched(mib=64)})
    return found


@scenario
def pages_without_pinning(world: World) -> Any:
    """A rank that ``taskset`` keeps on the other node than its GPU, and that is not pinned."""
    return world.rank(on("0-7")).touched()


# Launchers, by their variables; nobody passes a number.


_SRUN = """
SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_PROCID={rank} SLURM_LOCALID={rank} SLURM_NODEID=0
SLURM_STEP_NUM_TASKS=4 SLURM_STEP_NUM_NODES=1 SLURM_STEP_TASKS_PER_NODE=4 SLURM_TASKS_PER_NODE=4
SLURM_JOB_NUM_NODES=1 SLURM_CPU_BIND_TYPE=none SLURM_CPU_BIND_LIST= SLURM_CPU_BIND=quiet,none
SLURM_GPUS_ON_NODE=4 SLURM_JOB_GPUS=0,1,2,3 SLURM_STEP_GPUS={gpus} CUDA_VISIBLE_DEVICES={gpus}
"""
_MPIRUN = """
OMPI_COMM_WORLD_LOCAL_RANK={rank} OMPI_COMM_WORLD_LOCAL_SIZE=4 OMPI_COMM_WORLD_RANK={rank}
OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_NODE_RANK={rank}
"""
_MPICH = "MPI_LOCALRANKID={rank} MPI_LOCALNRANKS=4 PMI_RANK={rank} PMI_SIZE=4"


def _variables(launcher: str, gpus: Sequence[str] = ("0,1,2,3",) * 4) -> list[dict[str, str]]:
    """What each of four ranks is started with."""
    texts = [launcher.format(rank=rank, gpus=gpus[rank]) for rank in range(4)]
    return [dict(word.split("=", 1) for word in text.split()) for text in texts]


@scenario
def launchers(world: World) -> Any:
    """Four ranks as started by each, bound by none."""
    map_gpu = f"{_SRUN} SLURM_GPU_BIND=map_gpu:1,3,0,2"
    started = {
        "srun": _variables(_SRUN),
        "srun map_gpu": _variables(map_gpu, "1302"),
        "mpirun": _variables(_MPIRUN),
        "mpich": _variables(_MPICH),
    }
    found = {}
    for name, variables in started.items():
        ranks = world.launched(variables)
        said = ask_all(ranks, "pin")
        found[name] = {"said": said, "threads": [rank.threads() for rank in ranks]}
    return found


# Worker processes.


def _spread(ranks: list[Rank], method: str, workers: int, *then: str) -> Any:
    """Each rank's workers on their parts, and what becomes of them by each further step."""
    said = ask_all(ranks, "start_workers", method=method, workers=workers, threads=2)

    def step(answers: Any) -> Any:
        pids = [[worker["pid"] for worker in of_rank] for of_rank in said]
        seen = [[threads(pid) for pid in of_rank] for of_rank in pids]
        return {"said": answers, "threads": seen, "mains": [rank.threads() for rank in ranks]}

    found = {"start": step([[worker["cpus"] for worker in of_rank] for of_rank in said])}
    for what in then:
        found[what] = step(ask_all(ranks, "tell_workers", what=what))
    ask_all(ranks, "end_workers")
    return {**found, "codes": [worker["codes"] for of_rank in said for worker in of_rank]}


@scenario
def workers(world: World) -> Any:
    """Two ranks, on a node each, with three workers each; the fork server is older than the pin."""
    ranks = world.ranks(2)
    ask_all(ranks, "start_fork_server")
    said = pin_all(ranks)
    found = {
        method: _spread(ranks, method, 3, "swap", "restore")
        for method in ("fork", "spawn", "forkserver")
    }
    return {"said": said, **found, "restored": ask_all(ranks, "restore")}


@scenario
def workers_of_four_ranks(world: World) -> Any:
    """Two ranks on each node, as srun starts them, with cores for one worker; and with two."""
    ranks = world.launched(_variables(_SRUN))
    ask_all(ranks, "pin")
    return [_spread(ranks, "fork", count, "restore rank") for count in (1, 2)]


# Borders.


@scenario
def small_cpuset(world: World) -> Any:
    """Half of each node's cores."""
    ranks = world.ranks(4, world.cpuset("2-5,8-11").inside)
    return pinned(ranks)


@scenario
def cpuset_of_one_node(world: World) -> Any:
    """Two GPUs have none of their CPUs in it."""
    ranks = world.ranks(4, world.cpuset("0-7").inside)
    return pinned(ranks)


@scenario
def cpuset_and_core_complex(world: World) -> Any:
    """A cpuset leaves one core of an L3 domain."""
    ranks = world.ranks(4, world.cpuset("0-5,8-15").inside)
    return [
        [said["cpus"] for said in pin_all(ranks, mode=mode)]
        for mode in ("core_complex", "unique_contiguous")
    ]


@scenario
def job_started_by_numactl(world: World) -> Any:
    """``numactl`` put a job on the other node than its GPU's, CPUs and memory."""
    rank = world.rank(["numactl", "--cpunodebind=0", "--membind=0", *LAUNCHER])
    said = rank.ask("pin", rank=0, of=4)
    return {"said": said, "threads": rank.threads(), "touched": rank.touched()}


@scenario
def ranks_started_by_numactl(world: World) -> Any:
    """A wrapper around each rank gave it the node of its GPU."""
    ranks = world.each([["numactl", f"--cpunodebind={node}"] for node in (1, 0, 0, 1)])
    return pinned(ranks)


@scenario
def masks_of_their_own(world: World) -> Any:
    """A launcher that gpuaff does not know bound each rank by itself; then all are told."""
    masks = ["4-13", "0-9", "2-15", "10-15"]
    ranks = world.each([on(mask) for mask in masks])
    return {"unknown": pinned(ranks), "told": pinned(ranks, rank_allowed=masks)}


@scenario
def two_jobs(world: World) -> Any:
    """Two strangers' jobs, with other options and GPUs, that know nothing of each other."""
    first = world.ranks(2, CUDA_VISIBLE_DEVICES="0,1")
    second = world.ranks(2, CUDA_VISIBLE_DEVICES="2,3")
    found = {}
    for partition in ("job", "machine"):
        said = pin_all(first, partition=partition)
        said += pin_all(second, partition=partition, mode="unique_interleaved", scope="socket")
        found[partition] = {"said": said, "threads": [r.threads() for r in (*first, *second)]}
    return found


# A cpuset that changes.


@scenario
def cpuset_that_shrinks(world: World) -> Any:
    """Under a pinned process: a part of its share goes, then all of it; then all is granted."""
    box = world.cpuset("0-15")
    rank = world.rank(box.inside)
    rank.ask("threads", count=3)
    first = rank.ask("pin", rank=1, of=4)
    steps = []
    for granted in ("2-15", "8-15"):
        box.grant(granted)
        meanwhile = rank.threads()
        said = rank.ask("pin", rank=1, of=4)
        steps.append({"meanwhile": meanwhile, "said": said, "threads": rank.threads()})
    box.grant("0-15")
    restored = rank.ask("restore")
    return {"first": first, "steps": steps, "restored": restored, "after": rank.threads()}


@scenario
def cpuset_that_shrinks_meanwhile(world: World) -> Any:
    """While a call is under way it loses the share, or a part of it."""
    found = []
    for granted in ("0-3,8-15", "0-5,8-15"):
        box = world.cpuset("0-15")
        rank = world.rank(box.inside)
        said = rank.ask("pin_while", rank=2, of=4, writes=[(box.cpus, granted)])
        found.append({"said": said, "threads": rank.threads()})
    return found


# CPUs that go offline.


@scenario
def offline_before(world: World) -> Any:
    """CPUs are offline when the job starts; masks of processes name them nevertheless."""
    with world.without(3, 13):
        ranks = world.ranks(4)
        return {"before": ranks[0].threads(), **pinned(ranks)}


def _offline_between(world: World, *cpus: int, **options: Any) -> Any:
    rank = world.rank()
    rank.ask("threads", count=3)
    said = [rank.ask("pin", rank=2, of=4, **options)]
    with world.without(*cpus):
        said += [rank.ask("pin", rank=2, of=4, **options)]
        threads = rank.threads()
    said += [rank.ask("pin", rank=2, of=4, **options)]
    return {
        "cpus": [one["cpus"] for one in said],
        "threads": [threads, rank.threads()],
        "restored": rank.ask("restore"),
        "after": rank.threads(),
    }


@scenario
def offline_between_calls(world: World) -> Any:
    """A part of a share goes offline and comes back, and then all of a share."""
    part = _offline_between(world, 5)
    return {"part": part, "whole": _offline_between(world, 4, 5, max_physical_cores=1)}


@scenario
def offline_at_the_end(world: World) -> Any:
    """``restore`` while a part of the share, or all of it, is offline."""
    found = []
    for cpus in ((5,), (4, 5)):
        rank = world.rank()
        rank.ask("threads", count=3)
        rank.ask("pin", rank=2, of=4, max_physical_cores=1)
        with world.without(*cpus):
            found.append({"restored": rank.ask("restore"), "threads": rank.threads()})
    return found


@scenario
def offline_meanwhile(world: World) -> Any:
    """While a call is under way a part of the share goes offline, or all of it."""
    found = []
    for cpus in ((5,), (4, 5)):
        rank = world.rank()
        writes = [(str(switch(cpu)), "0") for cpu in cpus]
        said = rank.ask("pin_while", rank=2, of=4, max_physical_cores=1, writes=writes)
        found.append({"said": said, "threads": rank.threads()})
        all_online()
    return found


@scenario
def offline_again_and_again(world: World) -> Any:
    """CPUs of the share come and go while a rank, pinned before, calls eight times."""
    rank = world.rank()
    rank.ask("threads", count=3)
    rank.ask("pin", rank=2, of=4)
    rank.tell("pin_often", rank=2, of=4, times=8)
    with world.flapping(5, 6):
        often = rank.answer()
    said = rank.ask("pin", rank=2, of=4)
    return {"often": often, "said": said, "threads": rank.threads()}


# Memory.


@scenario
def memory_policies(world: World) -> Any:
    """Where pages lie that a pinned rank touches from a CPU of the other node."""
    rank = world.rank()
    found = {}
    for memory in (None, "preferred", "bind", "interleave", "interleave:0-1", "bind:0"):
        said = rank.ask("pin", rank=0, of=4, memory=memory)
        threads, cpu = rank.threads(), 8 if memory == "bind:0" else 0
        found[str(memory)] = {"said": said, "threads": threads, **rank.touched(on=[cpu])}
    rank.ask("restore")
    return {**found, "restored": rank.touched(on=[0])}


@scenario
def memory_refused(world: World) -> Any:
    """The cpuset has the CPUs of both nodes and the memory of node 0 only."""
    rank = world.rank(world.cpuset("0-15", mems="0").inside)
    mems, found = rank.mems(), {}
    for memory in (None, "preferred", "bind", "interleave", "interleave:0-1"):
        said = rank.ask("pin", rank=0, of=4, memory=memory)
        found[str(memory)] = {"said": said, "threads": rank.threads(), **rank.touched()}
    rank.ask("restore")
    strict = rank.ask("pin", rank=0, of=4, memory="bind", strict=True)
    return {"mems": mems, **found, "strict": strict, "after": rank.threads()}
