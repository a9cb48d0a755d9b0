"""What started a rank, above its wrappers: real processes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.environments import variables
from tests.processes import CPUS, environment, run

pytestmark = pytest.mark.needs("two-cpus")

ALL, ONE = sorted(CPUS), [CPUS[0]]

LOOK = """
    import json
    from gpuaff.launch import binding
    from gpuaff.launch.ranks import Ranks
    over = binding.observe_ancestry(Ranks(local_rank=0, local_size={size}))
    mask = lambda cpus: cpus and sorted(cpus)
    print(json.dumps([mask(over.parent), mask(over.starter), over.starter_name]))
"""

TORCHRUN = variables("LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 TORCHELASTIC_RUN_ID=none")
MPIRUN = variables("OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=1")
SRUN = variables("SLURM_LOCALID=0 SLURM_PROCID=4 SLURM_NODEID=0 SLURM_STEP_ID=0")
SRUN |= variables("SLURM_STEP_TASKS_PER_NODE=2")

STAY = ["sh", "-c", '"$0" "$@"; exit $?']
"""A shell that stays between."""


def look(prefix: Sequence[str], env: Mapping[str, str], size: int = 2) -> Any:
    done = run(LOOK.format(size=size), env=env, prefix=prefix)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def bound(*wrappers: str) -> list[str]:
    return ["taskset", "-c", str(CPUS[0]), *wrappers]


@pytest.mark.parametrize("env", [TORCHRUN, MPIRUN, SRUN], ids=["torchrun", "mpirun", "srun"])
@pytest.mark.parametrize("wrappers", [STAY, ["timeout", "30"], [*STAY, *STAY]])
def test_a_wrapper_of_a_rank_has_its_variables(
    env: Mapping[str, str], wrappers: Sequence[str]
) -> None:
    parent, starter, name = look(bound(*wrappers), env)
    assert (parent, starter) == (ONE, ALL)
    assert name not in ("sh", "timeout")


def test_nobody_stands_between() -> None:
    assert look([], TORCHRUN)[:2] == [ALL, ALL]


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, {"TORCHELASTIC_RUN_ID": "none"}),
        ({**TORCHRUN, "LOCAL_RANK": "1"}, {"LOCAL_RANK": "0"}),
        ({**MPIRUN, "PMIX_NAMESPACE": "2"}, {"PMIX_NAMESPACE": "1"}),
        ({**SRUN, "SLURM_STEP_ID": "1"}, {"SLURM_STEP_ID": "0"}),
    ],
    ids=["torchrun in a shell with LOCAL_RANK", "torchrun", "mpirun", "srun"],
)
def test_a_launcher_inside_another_ones_rank(
    outer: Mapping[str, str], inner: Mapping[str, str]
) -> None:
    """The shell stands for the inner launcher: it has the variables of the outer one."""
    variables = [f"{name}={value}" for name, value in inner.items()]
    script = 'env "$@"; exit $?'
    _, starter, name = look(bound("sh", "-c", script, "sh", *variables), outer)
    assert (starter, name) == (ONE, "sh")


def test_what_cannot_be_read_is_no_wrapper() -> None:
    variables = [f"{name}={value}" for name, value in TORCHRUN.items()]
    path = f"PYTHONPATH={environment()['PYTHONPATH']}"
    wrapped = bound("env", "-i", path, "sh", "-c", 'env "$@"; exit $?', "sh", *variables)
    assert look(wrapped, {})[1:] == [ONE, "sh"]


def test_an_unknown_launcher_is_the_parent() -> None:
    assert look(bound(*STAY), {"RANK": "0", "SLURM_LOCALID": "0"})[1:] == [ONE, "sh"]
    single = {**TORCHRUN, "LOCAL_WORLD_SIZE": "1"}
    assert look(bound(*STAY), single, size=1)[1:] == [ONE, "sh"], "nobody else to agree with"
