"""Whose masks: what each launcher says, and what the masks themselves say."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuaff.cpuset import parse_cpulist
from gpuaff.launch import Launcher
from gpuaff.launch.binding import Masks
from gpuaff.launch.ranks import Ranks, active_row
from gpuaff.launch.slurm import named_masks, tasks_here
from tests.environments import FOLDER, Started, masks_seen, started, table, variables

NARROW, WIDE, FOUR = frozenset({0}), frozenset({0, 1}), frozenset(range(4))


def changed(rank: Started, changes: Mapping[str, str]) -> Started:
    return replace(rank, environ={**rank.environ, **changes})


def whose_masks(masks: Masks) -> str:
    return "unknown" if masks.unknown else "named" if masks.named else "common"


TABLES = json.loads((FOLDER.parent / "masks.json").read_text("utf-8"))
"""What is seen of each rank of a recorded start, or of the first of two that srun has bound, and
what is known of the masks then; CPUs as lists."""


def cases(name: str) -> Any:
    """The rows of a table, by their names."""
    return [pytest.param(*row, id=case) for case, row in TABLES[name].items()]


def read(seen: dict[str, str]) -> dict[str, Any]:
    return {k: text if k == "starter_name" else parse_cpulist(text) for k, text in seen.items()}


@pytest.mark.parametrize(("environ", "unbound"), TABLES["remedies"].items())
def test_each_launcher_has_its_own_remedy(environ: str, unbound: str) -> None:
    ranks = Ranks(local_rank=0, local_size=2)
    masks = masks_seen(variables(environ), ranks, own=NARROW, starter=WIDE, online=WIDE)
    assert masks.unknown
    assert masks.unbound.startswith(unbound)


@pytest.mark.case("B19", "A17")
@pytest.mark.parametrize("name", TABLES["named"])
def test_srun_names_every_ranks_mask(name: str) -> None:
    named = tuple(map(frozenset, TABLES["named"][name]))
    for rank in started("slurm", name):
        assert rank.masks() == Masks("", named, True, "srun --cpu-bind=none")


@pytest.mark.parametrize(("launcher", "name", "seen", "whose", "why"), cases("starts"))
def test_what_is_known_of_recorded_starts(
    launcher: str, name: str, seen: dict[str, str], whose: str, why: str
) -> None:
    for rank in started(launcher, name):
        masks = rank.masks(**read(seen))
        assert (whose_masks(masks), masks.named) == (whose, None)
        assert why in masks.unknown


def test_a_mask_of_the_whole_machine_is_bound_by_nothing() -> None:
    for rank in started("openmpi", "5-unbound"):
        assert whose_masks(rank.masks(starter_name="sh", online=rank.own)) == "common"


@pytest.mark.case("A18")
@pytest.mark.parametrize(("changes", "seen", "whose", "why"), cases("bound"))
def test_a_list_counts_where_the_own_mask_agrees(
    changes: dict[str, str], seen: dict[str, str], whose: str, why: str
) -> None:
    masks = changed(started("slurm", "gres")[0], changes).masks(**read(seen))
    assert whose_masks(masks) == whose
    assert why in masks.unknown


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


@pytest.mark.parametrize(("launcher", "name", "outside", "active"), cases("inside of Slurm"))
def test_a_launcher_inside_slurm(launcher: str, name: str, outside: str, active: str) -> None:
    for rank in started(launcher, name):
        around = started("slurm", outside)[0].environ
        inside = replace(rank, environ={**around, **rank.environ})
        assert active_row(inside.environ.get, inside.ranks).launcher is Launcher[active]
        assert whose_masks(inside.masks()) == "common"


def test_local_rank_alone_is_not_torchrun() -> None:
    """Job scripts set LOCAL_RANK from SLURM_LOCALID, in a shell that has the rank's mask."""
    rank = changed(started("slurm", "gres")[1], variables("LOCAL_RANK=1 LOCAL_WORLD_SIZE=2"))
    assert rank.masks(starter=rank.own, starter_name="bash").named == (NARROW, frozenset({1}))


BY_HAND: list[tuple[dict[str, Any], str]] = [
    ({}, "common"),
    ({"own": NARROW}, "unknown"),
    ({"starter": NARROW}, "unknown"),
    ({"starter": None}, "unknown"),  # the first process of a container
    ({"starter": None, "own": FOUR}, "common"),
]


@pytest.mark.case("G7", "A23")
@pytest.mark.parametrize(("seen", "whose"), BY_HAND)
def test_an_unknown_launcher_is_judged_by_its_mask(seen: dict[str, Any], whose: str) -> None:
    ranks = Ranks(local_rank=1, local_size=2)
    seen = {"own": WIDE, "starter": WIDE, "starter_name": "sh", **seen}
    assert whose_masks(masks_seen({}, ranks, **seen)) == whose


@pytest.mark.parametrize(("launcher", "name", "changes", "bound"), cases("alone"))
def test_whether_a_launcher_bound_a_rank_that_is_alone(
    launcher: str, name: str, changes: str, bound: bool
) -> None:
    """Its launcher takes it for rank 1 of 2, it says that it is the only one."""
    rank = changed(started(launcher, name)[1], variables(changes))
    masks = replace(rank, ranks=Ranks(local_rank=0, local_size=1)).masks(starter=None)
    assert (whose_masks(masks), masks.bound) == ("common", bound)
