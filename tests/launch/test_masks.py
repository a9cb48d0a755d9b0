"""Whose masks: what each launcher says, and what the masks themselves say."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuaff.launch.launchers import Launcher
from gpuaff.launch.masks import Masks, Whose
from gpuaff.launch.ranks import Ranks, active_launcher
from gpuaff.launch.slurm import named_masks, tasks_here
from tests.environments import Started, masks_seen, started

NARROW, WIDE = frozenset({0}), frozenset({0, 1})


def found(rank: Started, **seen: object) -> Masks:
    return rank.masks(**seen)


def with_variables(rank: Started, **changes: str | None) -> Started:
    kept = {**rank.environ, **changes}
    return replace(rank, environ={name: text for name, text in kept.items() if text is not None})


@pytest.mark.parametrize(
    ("environ", "unbound"),
    [
        (
            {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"},
            "torchrun without --numa-binding, and without taskset around each",
        ),
        (
            {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            "mpirun --bind-to none",
        ),
        ({"MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}, "mpiexec -bind-to none"),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, "without taskset or numactl around each"),
    ],
)
def test_each_launcher_has_its_own_remedy(environ: dict[str, str], unbound: str) -> None:
    ranks = Ranks(local_rank=0, local_size=2)
    masks = masks_seen(environ, ranks, own=NARROW, starter=WIDE, online=WIDE)
    assert (masks.whose, masks.unbound) == (Whose.UNKNOWN, unbound)


def masks_of(launcher: str, name: str) -> list[Masks]:
    return [found(rank) for rank in started(launcher, name)]


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
    for masks in masks_of("slurm", name):
        assert masks.whose is Whose.NAMED
        assert masks.named == tuple(map(frozenset, expected))
        assert masks.bound


@pytest.mark.parametrize("name", ["one-mask-for-all", "two-tasks-a-gpu", "second-node"])
def test_srun_names_one_mask_for_all(name: str) -> None:
    for masks in masks_of("slurm", name):
        assert (masks.whose, masks.named) == (Whose.COMMON, None)


def test_srun_says_that_it_has_bound_nobody() -> None:
    for rank in started("slurm", "job-gpus"):
        assert found(rank).whose is Whose.COMMON
        assert found(rank, starter=frozenset(range(4))).whose is Whose.COMMON, "slurmstepd's mask"


def test_a_wrapper_has_bound_what_srun_has_not() -> None:
    for rank in started("slurm", "job-gpus"):
        wrapped = found(rank, own=NARROW, starter=WIDE, cpuset=frozenset({0, 1, 9}))
        assert wrapped.whose is Whose.UNKNOWN
        assert "its cpuset has the CPUs 0-1" in wrapped.source
        unseen = found(rank, own=NARROW, starter=frozenset(range(4)), cpuset=None)
        assert unseen.whose is Whose.COMMON


def test_the_system_has_narrowed_what_starts_srun_s_tasks() -> None:
    """CPUAffinity= of systemd: the step's daemon lacks CPUs of its cpuset, and so does everyone."""
    for rank in started("slurm", "job-gpus"):
        assert found(rank, cpuset=frozenset(range(4))).whose is Whose.COMMON
        daemon = frozenset(range(4))
        assert found(rank, starter=daemon, cpuset=frozenset({0, 1, 9})).whose is Whose.COMMON


def test_srun_has_bound_by_another_rule() -> None:
    for masks in masks_of("slurm", "cores"):
        assert masks.whose is Whose.UNKNOWN
        assert "rank" in masks.source
        assert masks.bound


def test_without_the_plugin_nobody_binds() -> None:
    for rank in started("slurm", "no-plugin"):
        assert found(rank).whose is Whose.COMMON
        assert found(rank, starter=frozenset(range(4))).whose is Whose.UNKNOWN


@pytest.mark.parametrize("own", [{1}, {0, 1}, {2}])
def test_a_list_that_the_own_mask_belies_is_stale(own: set[int]) -> None:
    rank = started("slurm", "gres")[0]
    masks = found(rank, own=frozenset(own))
    assert masks.whose is Whose.UNKNOWN
    assert "SLURM_CPU_BIND_LIST gives it 0" in masks.source
    assert not masks.bound, "somebody else has moved it"


def test_less_than_the_list_says_is_right_where_nobody_else_may_be() -> None:
    wide = with_variables(started("slurm", "gres")[0], SLURM_CPU_BIND_LIST="0x3,0xc")
    assert found(wide, own=NARROW).whose is Whose.NAMED
    overlapping = with_variables(wide, SLURM_CPU_BIND_LIST="0x3,0x6")
    assert found(overlapping, own=WIDE).whose is Whose.NAMED
    assert found(overlapping, own=NARROW).whose is Whose.UNKNOWN
    same = with_variables(wide, SLURM_CPU_BIND_LIST="0x3,0x3")
    assert found(same, own=NARROW).whose is Whose.UNKNOWN


@pytest.mark.case("A18")
@pytest.mark.parametrize(
    ("bound", "own", "whose"),
    [
        ("0x7,0x7", {0, 1}, Whose.COMMON),
        ("0x7,0x38", {0, 1}, Whose.NAMED),
        ("0x7,0xf", {0, 1}, Whose.NAMED),
        ("0x7,0x7", {0}, Whose.UNKNOWN),
        ("0x7,0x4", {0, 1}, Whose.UNKNOWN),
    ],
)
def test_a_cpu_of_the_list_is_offline(bound: str, own: set[int], whose: Whose) -> None:
    rank = with_variables(started("slurm", "gres")[0], SLURM_CPU_BIND_LIST=bound)
    masks = found(rank, own=frozenset(own), online=frozenset({0, 1, 3}))
    assert masks.whose is whose


LISTS = {
    "0x1,0x2": [{0}, {1}, {0}],
    "1,2,4,8": [{0}, {1}, {2}],
    "0x3*2,0xc": [{0, 1}, {0, 1}, {2, 3}],
    "0x1*60000": [{0}, {0}, {0}],
    "0x0000000000000400000000000000": [{58}] * 3,
    "": None,
    "0x0,0x1": None,
    "0x1,": None,
    "0x1*": [{0}] * 3,
    "0x1*x": None,
    "0x1*0": None,
    "0xg": None,
    "-1": None,
}


@pytest.mark.parametrize(("text", "expected"), LISTS.items())
def test_lists_of_masks(text: str, expected: list[set[int]] | None) -> None:
    variables = {"SLURM_CPU_BIND_TYPE": "cores,mask_cpu:", "SLURM_CPU_BIND_LIST": text}
    masks = named_masks(variables.get, 3)
    assert masks == (None if expected is None else tuple(map(frozenset, expected)))


IDS = {
    "1,0": [1, 0, 1],
    "0*2,0x10": [0, 0, 16],
    "08": [8, 8, 8],
    "0x": None,
    "a": None,
    "1_0": None,
    "99999": None,
    " ": None,
}


@pytest.mark.parametrize(("text", "expected"), IDS.items())
def test_lists_of_cpus(text: str, expected: list[int] | None) -> None:
    variables = {"SLURM_CPU_BIND_TYPE": "map_cpu:", "SLURM_CPU_BIND_LIST": text}
    masks = named_masks(variables.get, 3)
    assert masks == (None if expected is None else tuple(frozenset({cpu}) for cpu in expected))


@given(st.text("0123456789abcdefx*,", max_size=20), st.sampled_from(["mask_cpu:", "map_cpu:"]))
def test_any_list_is_read_or_refused(text: str, kind: str) -> None:
    variables = {"SLURM_CPU_BIND_TYPE": kind, "SLURM_CPU_BIND_LIST": text}
    masks = named_masks(variables.get, 4)
    assert masks is None or (len(masks) == 4 and all(masks))


def test_a_list_that_repeats_itself_takes_little_memory() -> None:
    """A variable holds up to 128 KB: written out, so many of these would be 850 million masks."""
    variables = {
        "SLURM_CPU_BIND_TYPE": "mask_cpu",
        "SLURM_CPU_BIND_LIST": ",".join(["0x2*65535"] * 100),
    }
    tracemalloc.start()
    try:
        masks = named_masks(variables.get, 65_535)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert masks == (frozenset({1}),) * 65_535
    assert peak < 5_000_000, "some 8 bytes a task"


def test_a_list_that_cannot_be_read() -> None:
    rank = with_variables(started("slurm", "gres")[0], SLURM_CPU_BIND_LIST="?")
    assert found(rank).whose is Whose.UNKNOWN
    assert "malformed" in found(rank).source


def test_a_list_of_another_machine() -> None:
    rank = with_variables(started("slurm", "gres")[0], SLURM_CPU_BIND_LIST="0x1,0x100")
    assert found(rank).whose is Whose.UNKNOWN
    assert "not there" in found(rank).source


def test_ranks_numbered_otherwise_than_srun_does() -> None:
    rank = with_variables(started("slurm", "gres")[0], SLURM_LOCALID="1")
    assert found(rank).whose is Whose.UNKNOWN
    assert "SLURM_LOCALID" in found(rank).source


COUNTS = {
    ("2(x3),1", 0): 2,
    ("2(x3),1", 2): 2,
    ("2(x3),1", 3): 1,
    ("2(x3),1", 4): None,
    ("4", 0): 4,
    ("4", 1): None,
    ("3,1(x2)", 1): 1,
    ("2(x99999999)", 7): None,
    ("2(x60000)", 50000): 2,
    ("", 0): None,
    ("x", 0): None,
    ("2(x)", 0): 2,
    ("2(x-1)", 0): None,
    ("-2", 0): None,
}


@pytest.mark.parametrize(("text", "expected"), COUNTS.items())
def test_tasks_of_this_node(text: tuple[str, int], expected: int | None) -> None:
    counts, node = text
    variables = {"SLURM_STEP_TASKS_PER_NODE": counts, "SLURM_NODEID": str(node)}
    assert tasks_here(variables.get) == expected


def test_a_batch_script_is_no_step() -> None:
    """Whatever starts the ranks there, rank 0 must not take it for srun and the others not."""
    for rank in started("slurm", "batch-script"):
        assert active_launcher(rank.environ.get, rank.ranks) is Launcher.UNKNOWN
        assert found(rank).whose is Whose.COMMON


def test_a_shell_that_srun_started() -> None:
    """One task, in which a user starts several ranks by hand."""
    shell = with_variables(
        started("slurm", "gres")[0], SLURM_STEP_TASKS_PER_NODE="1", SLURM_CPU_BIND_LIST="0x3"
    )
    assert found(shell, own=WIDE, starter=WIDE).whose is Whose.COMMON
    assert found(shell, own=NARROW, starter=WIDE).whose is Whose.UNKNOWN


@pytest.mark.parametrize("outside", ["gres", "job-gpus", "batch-script"])
def test_torchrun_inside_slurm(outside: str) -> None:
    for rank in started("torchrun", "torchrun"):
        inside = replace(rank, environ={**started("slurm", outside)[0].environ, **rank.environ})
        assert active_launcher(inside.environ.get, inside.ranks) is Launcher.TORCHRUN
        assert found(inside).whose is Whose.COMMON
        assert found(inside, own=NARROW).whose is Whose.UNKNOWN, "a wrapper bound it"


def test_local_rank_alone_is_not_torchrun() -> None:
    """Job scripts set LOCAL_RANK from SLURM_LOCALID, in a shell that has the rank's mask."""
    rank = with_variables(started("slurm", "gres")[1], LOCAL_RANK="1", LOCAL_WORLD_SIZE="2")
    assert found(rank, starter=rank.own, starter_name="bash").whose is Whose.NAMED


@pytest.mark.parametrize("name", ["bound", "5-bound"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_mpirun_has_bound_the_ranks(name: str, wrapped: bool) -> None:
    """Also when a shell stands between mpirun and the rank: it has the rank's mask."""
    for rank in started("openmpi", name):
        masks = found(rank, starter=rank.own, starter_name="sh") if wrapped else found(rank)
        assert masks.whose is Whose.UNKNOWN


@pytest.mark.parametrize("name", ["unbound", "oversubscribed", "5-unbound"])
def test_mpirun_has_bound_nobody(name: str) -> None:
    for rank in started("openmpi", name):
        assert found(rank).whose is Whose.COMMON
        assert found(rank, own=NARROW).whose is Whose.UNKNOWN, "a wrapper bound it"


def test_open_mpi_5_behind_a_shell_does_not_tell() -> None:
    for rank in started("openmpi", "5-unbound"):
        assert found(rank, starter_name="sh").whose is Whose.UNKNOWN
        assert found(rank, starter_name="sh", online=rank.own).whose is Whose.COMMON


def test_mpirun_inside_slurm() -> None:
    """On other nodes mpirun starts its daemon with srun, one for each node."""
    for rank in started("openmpi", "unbound"):
        outside = with_variables(started("slurm", "gres")[0], SLURM_STEP_TASKS_PER_NODE="1(x2)")
        inside = replace(rank, environ={**outside.environ, **rank.environ})
        assert active_launcher(inside.environ.get, inside.ranks) is Launcher.OPEN_MPI
        assert found(inside).whose is Whose.COMMON


def by_hand(**seen: Any) -> Masks:
    ranks = Ranks(local_rank=1, local_size=2)
    return masks_seen({}, ranks, **{"own": WIDE, "starter": WIDE, "starter_name": "sh", **seen})


@pytest.mark.case("G7", "A23")
def test_an_unknown_launcher_is_judged_by_its_mask() -> None:
    assert by_hand().whose is Whose.COMMON
    narrowed = by_hand(own=NARROW)
    assert narrowed.whose is Whose.UNKNOWN
    assert "the process that started this rank may use CPUs 0-1" in narrowed.source
    assert by_hand(starter=NARROW).whose is Whose.UNKNOWN


def test_a_parent_out_of_sight() -> None:
    """The first process of a container: every rank may be in a cpuset of its own."""
    assert by_hand(starter=None).whose is Whose.UNKNOWN
    assert by_hand(starter=None, own=frozenset(range(4))).whose is Whose.COMMON


def alone(launcher: str, name: str, **changes: str | None) -> Started:
    """A process that its launcher takes for rank 1 of 2, and that says it is the only one."""
    rank = with_variables(started(launcher, name)[1], **changes)
    return replace(rank, ranks=Ranks(local_rank=0, local_size=1))


def test_a_launcher_has_bound_a_rank_that_is_alone() -> None:
    """So nobody need suspect OpenMP of it."""
    assert found(alone("openmpi", "bound")).bound
    assert not found(alone("openmpi", "unbound")).bound
    for name in ("gres", "map-cpu"):
        assert found(alone("slurm", name)).bound
    assert not found(alone("slurm", "job-gpus")).bound


@pytest.mark.parametrize(
    "changes",
    [
        {"SLURM_CPU_BIND_LIST": "0x1,0x3"},
        {"SLURM_CPU_BIND_LIST": "?"},
        {"SLURM_LOCALID": None},
        {"SLURM_LOCALID": "2"},
        {"SLURM_STEP_TASKS_PER_NODE": None},
    ],
)
def test_less_than_srun_has_bound_it_to_is_somebody_elses_doing(
    changes: dict[str, str | None],
) -> None:
    assert not found(alone("slurm", "gres", **changes)).bound


@pytest.mark.parametrize("launcher", ["bound", "unbound"])
def test_one_rank_has_its_mask(launcher: str) -> None:
    rank = replace(started("openmpi", launcher)[0], ranks=Ranks(local_rank=0, local_size=1))
    assert found(rank, own=NARROW, starter=None).whose is Whose.COMMON
