"""What a process of ours starts: the rank's own script once more, or a rank of its own."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gpuaff.launch.inherited import PINNED_VARIABLE, classify_pinned
from tests.fakedriver.driver import FakeDriver, MakeDriver
from tests.fakedriver.play import this_machine
from tests.pinning.conftest import of_script
from tests.processes import CPUS, printed

pytestmark = [pytest.mark.fake_driver, pytest.mark.needs("two-cpus")]

TOLD = """
import json, os, sys
import gpuaff

def told(affinity):
    return {
        "rank": affinity.rank,
        "gpu": affinity.gpu,
        "pinned": affinity.pinned,
        "cpus": sorted(os.sched_getaffinity(0)),
        "reserved": sorted(affinity.reserved),
        "codes": [warning.code for warning in affinity.warnings],
    }
"""

NUMBERS = {
    "arguments": ("1, 2", {}),
    "a script's variables": ("", {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}),
    "torchrun": (
        "",
        {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"},
    ),
}

CUT = {"mask-narrow", "mask-shrunk", "masks-unknown", "share-inherited", "too-few-cores"}
"""What is said of a rank whose CPUs were cut, or may be shared. A share of one CPU can't be cut
further: then ``too-few-cores`` alone shows that it was tried."""


def told(folder: Path, script: str, *words: str, env: Mapping[str, str]) -> list[dict[str, Any]]:
    """What the processes of a script say of themselves."""
    return of_script(folder, TOLD + textwrap.dedent(script), *words, env=env)


IMPORTED = """
    import multiprocessing
    import multiprocessing.pool
    at_import = told(gpuaff.set_affinity(NUMBERS))
    def work():
        return at_import, told(gpuaff.set_affinity(NUMBERS))
    if __name__ == "__main__":
        with multiprocessing.get_context(sys.argv[1]).Pool(1) as pool:
            for one in (at_import, *pool.apply(work)):
                print(json.dumps(one))
"""


QUICK = dict(zip(["fork", "spawn", "forkserver"], NUMBERS, strict=True))
"""Each way to start a child, and each way to tell a rank, once; the other pairs are slow tests."""


@pytest.mark.parametrize(
    ("method", "numbers"),
    [
        pytest.param(method, numbers, marks=() if QUICK[method] == numbers else pytest.mark.slow)
        for method in QUICK
        for numbers in NUMBERS
    ],
)
def test_a_child_that_imports_the_script_keeps_the_share(
    driver: FakeDriver, tmp_path: Path, method: str, numbers: str
) -> None:
    arguments, env = NUMBERS[numbers]
    script = IMPORTED.replace("NUMBERS", arguments)
    rank, *children = told(tmp_path, script, method, env={**driver.env(), **env})
    assert (rank["gpu"], len(rank["cpus"])) == (1, len(CPUS) // 2)
    for child in children:
        assert (child["gpu"], child["pinned"], child["cpus"]) == (1, True, rank["cpus"])
        assert not CUT & set(child["codes"])
    if env:
        called_again = children if method == "spawn" else children[1:]
        assert "rank-inherited" not in rank["codes"]
        assert all("rank-inherited" in child["codes"] for child in called_again)


WRAPPER = """
    import subprocess
    print(json.dumps(told(gpuaff.set_affinity(NUMBERS))), flush=True)
    if len(sys.argv) == 1:  # it wraps the same script, which is the real one then
        sys.exit(subprocess.run([sys.executable, __file__, "real"]).returncode)
"""


@pytest.mark.parametrize("numbers", NUMBERS)
def test_a_script_that_a_wrapper_starts_keeps_the_share(
    driver: FakeDriver, tmp_path: Path, numbers: str
) -> None:
    arguments, env = NUMBERS[numbers]
    script = WRAPPER.replace("NUMBERS", arguments)
    rank, real = told(tmp_path, script, env={**driver.env(), **env})
    assert (real["gpu"], real["pinned"], real["cpus"]) == (1, True, rank["cpus"])
    assert not CUT & set(real["codes"])


def test_cores_are_reserved_once(fake_driver: MakeDriver, tmp_path: Path) -> None:
    """The only rank keeps a core for helpers; the real script does not take another one."""
    env = {**fake_driver(this_machine(1)).env(), "GPUAFF_RESERVE": "1"}
    rank, real = told(tmp_path, WRAPPER.replace("NUMBERS", "0, 1"), env=env)
    assert rank["reserved"]
    assert (real["cpus"], real["reserved"]) == (rank["cpus"], rank["reserved"])
    assert sorted(rank["cpus"] + rank["reserved"]) == CPUS


def test_what_the_real_script_asks_for_counts_inside_the_share(driver: FakeDriver) -> None:
    """Its mask is all of the share, and it wants one core of that."""
    share = ",".join(map(str, CPUS))
    script = """
        import gpuaff
        for most in (None, 1):
            affinity = gpuaff.set_affinity(0, 2, max_physical_cores=most)
            print(*sorted(affinity), affinity.plan.share_of(0).cores)
    """
    env = {**driver.env(), "GPUAFF_PINNED": f"v1:0:2:{share}:"}
    kept, cut = (line.split() for line in printed(script, env=env).splitlines())
    assert list(map(int, kept[:-1])) == CPUS
    assert cut[-1] == "1"


OWN_RANKS = """
import subprocess
def children(**more):
    for rank in ("0", "1"):
        env = {**os.environ, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2", **more}
        done = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True)
        print(done.stdout.strip() or json.dumps(done.stderr))
if "LOCAL_RANK" in os.environ:
    print(json.dumps(told(gpuaff.set_affinity())))
    sys.exit()
"""
"""A script that starts its own ranks: what the main process does is up to each test."""


@pytest.fixture
def apart(fake_driver: MakeDriver) -> FakeDriver:
    """This machine with two GPUs, each near one CPU of its own."""
    plain = this_machine(2)
    gpus = tuple(
        gpu._replace(node_cpus=frozenset({cpu}), socket_cpus=frozenset({cpu}))
        for gpu, cpu in zip(plain.gpus, CPUS, strict=False)
    )
    return fake_driver(plain._replace(gpus=gpus))


def test_a_script_that_starts_its_own_ranks(apart: FakeDriver, tmp_path: Path) -> None:
    """``python train.py`` does not know yet that it starts ranks; each goes to its own GPU."""
    script = OWN_RANKS + "print(json.dumps(told(gpuaff.set_affinity())))\nchildren()\n"
    main, *ranks = told(tmp_path, script, env=apart.env())
    assert (main["rank"], main["gpu"], main["pinned"]) == (None, None, False)
    assert main["cpus"] == CPUS
    assert main["codes"] == ["no-rank"]
    assert [(rank["gpu"], rank["cpus"]) for rank in ranks] == [(0, [CPUS[0]]), (1, [CPUS[1]])]
    assert not any({"share-inherited", "masks-unknown"} & {*rank["codes"]} for rank in ranks)


def test_ranks_that_a_pinned_process_starts_are_not_cut_silently(
    apart: FakeDriver, tmp_path: Path
) -> None:
    script = OWN_RANKS + textwrap.dedent("""
        affinity = gpuaff.set_affinity(0, 2)
        children()
        children(GPUAFF_STRICT="1")
        affinity.restore()
        children()
    """)
    first, second, kept, refused, *later = told(tmp_path, script, env=apart.env())
    assert [one["cpus"] for one in (first, second, kept)] == [[CPUS[0]]] * 3
    assert "share-inherited" not in first["codes"] + kept["codes"]
    assert "share-inherited" in second["codes"]
    assert "share-inherited; strict" in str(refused)
    assert "restore()" in str(refused), "the remedy"
    assert [rank["cpus"] for rank in later] == [[CPUS[0]], [CPUS[1]]]
    assert not any("share-inherited" in rank["codes"] for rank in later)


def test_ranks_on_the_only_gpu_share_what_its_only_rank_had(
    fake_driver: MakeDriver, tmp_path: Path
) -> None:
    script = OWN_RANKS + "gpuaff.set_affinity(0, 1)\nchildren()\n"
    ranks = told(tmp_path, script, env=fake_driver(this_machine(1)).env())
    assert sorted(cpu for rank in ranks for cpu in rank["cpus"]) == CPUS
    assert not any("share-inherited" in rank["codes"] for rank in ranks)


@pytest.mark.parametrize(
    "value",
    ["", "v1", "v1:0:2", "v2:0:2:0-7:", "v1:x:2:0-7:", "v1:0:-2:0-7:", "v1:0:2:x:", "v1:::::"],
)
def test_a_variable_that_is_not_ours_counts_for_nothing(value: str) -> None:
    assert classify_pinned({PINNED_VARIABLE: value}.get, frozenset(range(4))) is None


def test_a_variable_of_other_cpus_counts_for_nothing(driver: FakeDriver) -> None:
    """It is left over: this process may use CPUs beside that share."""
    env = {**driver.env(), "GPUAFF_PINNED": f"v1:1:2:{CPUS[0]}:"}
    script = "import gpuaff; print([w.code for w in gpuaff.set_affinity(0, 2).warnings])"
    assert "share-inherited" not in printed(script, env=env)
