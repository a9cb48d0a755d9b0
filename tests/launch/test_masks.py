"""Whose masks: what each launcher says, and what the masks themselves say."""

from __future__ import annotations

import tracemalloc
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuaff.launch import Launcher
from gpuaff.launch.binding import Masks, Whose
from gpuaff.launch.ranks import Ranks, active_row
from gpuaff.launch.slurm import named_masks, tasks_here
from tests.environments import Started, masks_seen, started, table, variables

NARROW, WIDE, FOUR = frozenset({0}), frozenset({0, 1}), frozenset(range(4))


def changed(rank: Started, changes: Mapping[str, str | None]) -> Started:
    kept = {**rank.environ, **changes}
    return replace(rank, environ={name: text for name, text in kept.items() if text is not None})


@pytest.mark.parametrize(
    ("environ", "unbound"),
    [
        ("LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 TORCHELASTIC_RUN_ID=none", "torchrun without --numa-"),
        ("OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=2", "mpirun --bind-to none"),
        ("MPI_LOCALRANKID=0 MPI_LOCALNRANKS=2", "mpiexec -bind-to none"),
        ("LOCAL_RANK=0 LOCAL_WORLD_SIZE=2", "without taskset or numactl around each"),
    ],
)
def test_each_launcher_has_its_own_remedy(environ: str, unbound: str) -> None:
    ranks = Ranks(local_rank=0, local_size=2)
    masks = masks_seen(variables(environ), ranks, own=NARROW, starter=WIDE, online=WIDE)
    assert masks.whose is Whose.UNKNOWN
    assert masks.unbound.startswith(unbound)


NAMED = {
    "gres": [{0}, {1}],
    "gpus-per-task": [{0}, {1}],
    "map-gpu": [{0}, {1}],
    "map-cpu": [{1}, {0}],
    "list-used-again": [{0}, {0}, {1}, {0}],
}


@pytest.mark.case("B19", "A17")
@pytest.mark.parametrize(("name", "expected"), NAMED.items())
def test_srun_names_every_ranks_mask(name: str, expected: list[set[int]]) -> None:
    for rank in started("slurm", name):
        named = tuple(map(frozenset, expected))
        assert rank.masks() == Masks(Whose.NAMED, "", named, True, "srun --cpu-bind=none")


# Each rank of a recorded start: what is changed of it, and what is known of the masks then.
C, N, U = Whose.COMMON, Whose.NAMED, Whose.UNKNOWN
LIST, NUMBERED = "SLURM_CPU_BIND_LIST", "SLURM_LOCALID"
WRAPPED = {"starter": NARROW, "starter_name": "sh"}

STARTS: dict[str, tuple[str, str, dict[str, Any], Whose, str]] = {
    "srun: one mask for all": ("slurm", "one-mask-for-all", {}, C, ""),
    "srun: one mask for tasks of a GPU": ("slurm", "two-tasks-a-gpu", {}, C, ""),
    "srun: one mask on the second node": ("slurm", "second-node", {}, C, ""),
    "srun bound none": ("slurm", "job-gpus", {}, C, ""),
    "srun bound none, below a wider daemon": ("slurm", "job-gpus", {"starter": FOUR}, C, ""),
    "a wrapper bound it": (
        "slurm", "job-gpus", {"own": NARROW, "starter": WIDE, "cpuset": frozenset({0, 1, 9})},
        U, "its cpuset has the CPUs 0-1",
    ),
    "a cpuset that is not seen": ("slurm", "job-gpus", {"own": NARROW, "starter": FOUR}, C, ""),
    "CPUAffinity= of systemd": ("slurm", "job-gpus", {"cpuset": FOUR}, C, ""),
    "a daemon of more than its cpuset": (
        "slurm", "job-gpus", {"starter": FOUR, "cpuset": frozenset({0, 1, 9})}, C, ""
    ),
    "srun bound by another rule": ("slurm", "cores", {}, U, "srun bound the ranks by rank"),
    "srun without a plugin": ("slurm", "no-plugin", {}, C, ""),
    "srun without a plugin, below a wider": ("slurm", "no-plugin", {"starter": FOUR}, U, "0-3"),
    "a batch script is no step": ("slurm", "batch-script", {}, C, ""),
    "mpirun 4 bound": ("openmpi", "bound", {}, U, "mpirun bound each rank"),
    "mpirun 4 bound, in a wrapper": ("openmpi", "bound", WRAPPED, U, "mpirun bound each rank"),
    "mpirun 5 bound": ("openmpi", "5-bound", {}, U, ""),
    "mpirun 5 bound, in a wrapper": ("openmpi", "5-bound", WRAPPED, U, ""),
    **{
        f"mpirun: {name}": ("openmpi", name, {}, C, "")
        for name in ("unbound", "oversubscribed", "5-unbound")
    },
    **{
        f"a wrapper of mpirun: {name}": ("openmpi", name, {"own": NARROW}, U, "")
        for name in ("unbound", "oversubscribed", "5-unbound")
    },
    "mpirun 5 behind a shell": ("openmpi", "5-unbound", {"starter_name": "sh"}, U, "does not say"),
    "torchrun": ("torchrun", "torchrun", {}, C, ""),
    "a wrapper of torchrun": ("torchrun", "torchrun", {"own": NARROW}, U, "may use CPUs 0-1"),
}  # fmt: skip


@pytest.mark.parametrize(("launcher", "name", "seen", "whose", "why"), STARTS.values(), ids=STARTS)
def test_what_is_known_of_recorded_starts(
    launcher: str, name: str, seen: dict[str, Any], whose: Whose, why: str
) -> None:
    for rank in started(launcher, name):
        masks = rank.masks(**seen)
        assert (masks.whose, masks.named) == (whose, None)
        assert why in masks.source


def test_a_mask_of_the_whole_machine_is_bound_by_nothing() -> None:
    for rank in started("openmpi", "5-unbound"):
        assert rank.masks(starter_name="sh", online=rank.own).whose is Whose.COMMON


# Rank 0 of 2, bound to CPU 0: what srun's variables say instead, its own mask, and what follows.
BOUND: dict[str, tuple[dict[str, str | None], dict[str, Any], Whose, str]] = {
    "another mask": ({}, {"own": {1}}, U, "SLURM_CPU_BIND_LIST gives it 0"),
    "a wider mask": ({}, {"own": {0, 1}}, U, "SLURM_CPU_BIND_LIST gives it 0"),
    "less than listed, of its own": ({LIST: "0x3,0xc"}, {"own": {0}}, N, ""),
    "as listed, overlapping": ({LIST: "0x3,0x6"}, {"own": {0, 1}}, N, ""),
    "less than listed, overlapping": ({LIST: "0x3,0x6"}, {"own": {0}}, U, "gives it 0-1"),
    "less than listed for both": ({LIST: "0x3,0x3"}, {"own": {0}}, U, "gives it 0-1"),
    "one CPU of both is offline": ({LIST: "0x7,0x7"}, {"own": {0, 1}, "online": {0, 1, 3}}, C, ""),
    "one of its CPUs is offline": ({LIST: "0x7,0x38"}, {"own": {0, 1}, "online": {0, 1, 3}}, N, ""),
    "offline, and narrowed": ({LIST: "0x7,0x7"}, {"own": {0}, "online": {0, 1, 3}}, U, "0-1"),
    "the other has nothing": ({LIST: "0x7,0x4"}, {"own": {0, 1}, "online": {0, 1, 3}}, U, "there"),
    "an unreadable list": ({LIST: "?"}, {}, U, "malformed"),
    "the list of another machine": ({LIST: "0x1,0x100"}, {}, U, "not there"),
    "other numbers than srun's": ({NUMBERED: "1"}, {}, U, "SLURM_LOCALID"),
    "ranks started by hand in a shell": (
        {"SLURM_STEP_TASKS_PER_NODE": "1", LIST: "0x3"}, {"own": WIDE, "starter": WIDE}, C, ""
    ),
    "and bound there": (
        {"SLURM_STEP_TASKS_PER_NODE": "1", LIST: "0x3"}, {"starter": WIDE}, U, "CPUs 0-1"
    ),
}  # fmt: skip


@pytest.mark.case("A18")
@pytest.mark.parametrize(("changes", "seen", "whose", "why"), BOUND.values(), ids=BOUND)
def test_a_list_counts_where_the_own_mask_agrees(
    changes: dict[str, str | None], seen: dict[str, Any], whose: Whose, why: str
) -> None:
    rank = changed(started("slurm", "gres")[0], changes)
    masks = rank.masks(**{name: frozenset(cpus) for name, cpus in seen.items()})
    assert masks.whose is whose
    assert why in masks.source


@pytest.mark.parametrize(("said", "expected"), table("masks"))
def test_lists_of_masks_and_of_cpus(said: str, expected: list[list[int]] | None) -> None:
    kind, _, text = said.partition(" ")
    env = {"SLURM_CPU_BIND_TYPE": f"cores,{kind}:", "SLURM_CPU_BIND_LIST": text}
    assert named_masks(env.get, 3) == (expected and tuple(map(frozenset, expected)))


@given(st.text("0123456789abcdefx*,", max_size=20), st.sampled_from(["mask_cpu:", "map_cpu:"]))
def test_any_list_is_read_or_refused(text: str, kind: str) -> None:
    said = {"SLURM_CPU_BIND_TYPE": kind, "SLURM_CPU_BIND_LIST": text}
    masks = named_masks(said.get, 4)
    assert masks is None or (len(masks) == 4 and all(masks))


def test_a_list_that_repeats_itself_takes_little_memory() -> None:
    """A variable holds up to 128 KB: written out, so many of these would be 850 million masks."""
    text = ",".join(["0x2*65535"] * 100)
    said = {"SLURM_CPU_BIND_TYPE": "mask_cpu", "SLURM_CPU_BIND_LIST": text}
    tracemalloc.start()
    try:
        masks = named_masks(said.get, 65_535)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert masks == (frozenset({1}),) * 65_535
    assert peak < 5_000_000, "some 8 bytes a task"


@pytest.mark.parametrize(("said", "expected"), table("tasks"))
def test_tasks_of_this_node(said: str, expected: int | None) -> None:
    counts, _, node = said.partition(" at ")
    env = {"SLURM_STEP_TASKS_PER_NODE": counts, "SLURM_NODEID": node}
    assert tasks_here(env.get) == expected


INSIDE = [
    ("torchrun", "torchrun", "gres", Launcher.TORCHRUN),
    ("torchrun", "torchrun", "job-gpus", Launcher.TORCHRUN),
    ("torchrun", "torchrun", "batch-script", Launcher.TORCHRUN),
    ("openmpi", "unbound", "batch-script", Launcher.OPEN_MPI),
    ("slurm", "batch-script", "batch-script", Launcher.UNKNOWN),
]


@pytest.mark.parametrize(("launcher", "name", "outside", "active"), INSIDE)
def test_a_launcher_inside_slurm(launcher: str, name: str, outside: str, active: Launcher) -> None:
    for rank in started(launcher, name):
        around = started("slurm", outside)[0].environ
        inside = replace(rank, environ={**around, **rank.environ})
        assert active_row(inside.environ.get, inside.ranks).launcher is active
        assert inside.masks().whose is Whose.COMMON


def test_local_rank_alone_is_not_torchrun() -> None:
    """Job scripts set LOCAL_RANK from SLURM_LOCALID, in a shell that has the rank's mask."""
    rank = changed(started("slurm", "gres")[1], variables("LOCAL_RANK=1 LOCAL_WORLD_SIZE=2"))
    assert rank.masks(starter=rank.own, starter_name="bash").whose is Whose.NAMED


BY_HAND: list[tuple[dict[str, Any], Whose]] = [
    ({}, C),
    ({"own": NARROW}, U),
    ({"starter": NARROW}, U),
    ({"starter": None}, U),  # the first process of a container: each rank may be in a cpuset
    ({"starter": None, "own": FOUR}, C),
]


@pytest.mark.case("G7", "A23")
@pytest.mark.parametrize(("seen", "whose"), BY_HAND)
def test_an_unknown_launcher_is_judged_by_its_mask(seen: dict[str, Any], whose: Whose) -> None:
    ranks = Ranks(local_rank=1, local_size=2)
    seen = {"own": WIDE, "starter": WIDE, "starter_name": "sh", **seen}
    assert masks_seen({}, ranks, **seen).whose is whose


ALONE: list[tuple[str, str, dict[str, str | None], bool]] = [
    ("openmpi", "bound", {}, True),
    ("openmpi", "unbound", {}, False),
    ("slurm", "gres", {}, True),
    ("slurm", "map-cpu", {}, True),
    ("slurm", "job-gpus", {}, False),
    ("slurm", "gres", {LIST: "0x1,0x3"}, False),
    ("slurm", "gres", {LIST: "?"}, False),
    ("slurm", "gres", {NUMBERED: None}, False),
    ("slurm", "gres", {NUMBERED: "2"}, False),
    ("slurm", "gres", {"SLURM_STEP_TASKS_PER_NODE": None}, False),
]


@pytest.mark.parametrize(("launcher", "name", "changes", "bound"), ALONE)
def test_whether_a_launcher_bound_a_rank_that_is_alone(
    launcher: str, name: str, changes: dict[str, str | None], bound: bool
) -> None:
    """Its launcher takes it for rank 1 of 2, it says that it is the only one."""
    rank = changed(started(launcher, name)[1], changes)
    masks = replace(rank, ranks=Ranks(local_rank=0, local_size=1)).masks(starter=None)
    assert (masks.whose, masks.bound) == (Whose.COMMON, bound)
