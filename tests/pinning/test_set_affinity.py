"""``set_affinity`` in real processes, over the fake driver, seen from outside."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.fakedriver.driver import FakeDriver
from tests.fakedriver.state import NVML
from tests.processes import CPUS, masks, printed, run, stopped

pytestmark = [pytest.mark.fake_driver, pytest.mark.needs("two-cpus")]

ALL = frozenset(CPUS)

CALLS = (Path(__file__).parents[1] / "programs/calls.py").read_text("utf-8")

Calls = Sequence[tuple[str, Mapping[str, str]]]


def results(
    driver: FakeDriver | None, calls: Calls, prefix: Sequence[str] = (), **env: str
) -> list[dict[str, Any]]:
    """What comes of calls with these arguments and variables, in turn, in one process."""
    done = run(
        CALLS, json.dumps(calls), env={**(driver.env() if driver else {}), **env}, prefix=prefix
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    assert len(found) == len(calls)
    return found


def called(
    driver: FakeDriver | None, arguments: str = "", prefix: Sequence[str] = (), **env: str
) -> dict[str, Any]:
    """What comes of one call, which succeeds."""
    (found,) = results(driver, [(arguments, {})], prefix, **env)
    assert "error" not in found, found
    return found


def errors(driver: FakeDriver | None, calls: Calls, **env: str) -> list[tuple[str, str]]:
    """The class and text of the error of each call: one line each."""
    found = [(one["error"], one["text"]) for one in results(driver, calls, **env)]
    assert not any("\n" in text for _, text in found)
    return found


def raised(driver: FakeDriver | None, arguments: str, **env: str) -> tuple[str, str]:
    """The class and text of the error of one call."""
    return errors(driver, [(arguments, {})], **env)[0]


WAITING = """
    import sys, threading, time
    import gpuaff
    for _ in range(5):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    affinity = gpuaff.set_affinity()
    print(affinity.gpu)
    sys.stdin.readline()
    affinity.restore()
    print("restored")
    sys.stdin.readline()
"""


@pytest.mark.case("B2", "B17", "A13")
def test_two_ranks_share_the_machine(driver: FakeDriver) -> None:
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                stopped(
                    WAITING,
                    env={**driver.env(), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"},
                )
            )
            for rank in (0, 1)
        ]
        assert [rank.heard() for rank in ranks] == ["0", "1"]
        seen = [set(masks(rank.pid).values()) for rank in ranks]
        assert [len(one) for one in seen] == [1, 1], "every thread of a rank has one mask"
        (first,), (second,) = seen
        assert first.isdisjoint(second)
        assert frozenset() not in (first, second)
        assert first | second == ALL or len(ALL) % 2
        for rank in ranks:
            rank.go_on()
            assert rank.heard() == "restored"
            assert set(masks(rank.pid).values()) == {ALL}


@pytest.mark.case("B5")
def test_the_one_line(driver: FakeDriver) -> None:
    script = """
        import logging
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        import gpuaff
        gpuaff.set_affinity(1, 2)
    """
    (line,) = [one for one in run(script, env=driver.env()).stderr.splitlines() if "->" in one]
    where = r"GPU 1 \(NUMA [0-9?,]+\) cpus [0-9,-]+ \[\d+ cores?\]"
    assert re.fullmatch(f"gpuaff: rank 1 -> {where}", line)


def test_arguments_or_variables(driver: FakeDriver) -> None:
    by_hand = called(driver, "1, 2")
    assert (by_hand["rank"], by_hand["gpu"], by_hand["pinned"]) == (1, 1, True)
    assert called(driver, LOCAL_RANK="1", LOCAL_WORLD_SIZE="2") == by_hand
    ignored = called(driver, "1, 2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    assert ignored == by_hand


def test_neither_is_rank_0_of_1_on_the_only_gpu_said_once(driver: FakeDriver) -> None:
    script = """
        import gpuaff
        assert gpuaff.set_affinity().rank == 0
        assert "no-rank" in [warning.code for warning in gpuaff.set_affinity().warnings]
    """
    done = run(script, env={**driver.env(), "CUDA_VISIBLE_DEVICES": "1"})
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("rank 0 of 1") == 1
    assert "call set_affinity(local_rank, nproc_per_node)" in done.stderr


def test_a_batch_script_is_no_rank_said_once(driver: FakeDriver) -> None:
    env = {"SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_TASKS_PER_NODE": "2"}
    found = called(driver, SLURM_JOB_ID="7", **env)
    assert (found["rank"], found["pinned"]) == (None, False)
    assert found["codes"] == ["no-rank"], "one remark is enough"


def test_numbers_that_the_launcher_contradicts_count(driver: FakeDriver) -> None:
    torchrun = {"TORCHELASTIC_RUN_ID": "x", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    found = called(driver, "1, 2", **torchrun)
    assert (found["rank"], found["gpu"]) == (1, 1)
    script = """
        import gpuaff
        for call in ((1, 2), (0, 1)):
            print([w.code for w in gpuaff.set_affinity(*call, strict=True).warnings])
    """
    said = printed(script, env={**driver.env(), **torchrun}).splitlines()
    assert ("rank-differs" in said[0], "ranks-beside" in said[1]) == (True, True)


NO_RANK = [("2", "2"), ("-1", "2"), ("x", "2"), ("0", ""), ("", "2"), ("1.0", "2"), ("0", "99999")]


def test_variables_that_name_no_rank(driver: FakeDriver) -> None:
    environments = [{"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size} for rank, size in NO_RANK]
    for found in results(driver, [("", env) for env in environments]):
        assert (found["pinned"], found["codes"]) == (False, ["bad-rank"])
        assert frozenset(found["cpus"]) == ALL
    for kind, _ in errors(driver, [("strict=True", env) for env in environments]):
        assert kind == "GPUAffinityError"


WRONG = {
    "0": ("TypeError", "nproc_per_node"),
    "nproc_per_node=2": ("TypeError", "local_rank"),
    "2, 2": ("InvalidOptionError", "from 0 to 1"),
    "'0', 2": ("InvalidOptionError", "from 0 to 1"),
    "0, 0": ("InvalidOptionError", "nproc_per_node=0"),
    "0, '2'": ("InvalidOptionError", "nproc_per_node='2'"),
    "0, 2, mode='fastest'": ("InvalidOptionError", "unique_contiguous"),
    "0, 2, multithreading='none'": ("InvalidOptionError", "all_logical"),
    "0, 2, balanced='yes'": ("InvalidOptionError", "True or False"),
    "0, 2, strict='yes'": ("InvalidOptionError", "True or False"),
    "0, 2, min_physical_cores=0": ("InvalidOptionError", "from 1 to 65535"),
    "0, 2, min_physical_cores=3, max_physical_cores=2": ("InvalidOptionError", "at most"),
}


WRONG_VARIABLES = {
    "GPUAFF_MODE": "fastest",
    "GPUAFF_SCOPE": "rack",
    "GPUAFF_MULTITHREADING": "both",
    "GPUAFF_BALANCED": "maybe",
    "GPUAFF_MIN_PHYSICAL_CORES": "-1",
    "GPUAFF_MAX_PHYSICAL_CORES": "many",
    "GPUAFF_STRICT": "2",
    "GPUAFF": "perhaps",
}


def test_wrong_arguments_and_variables_always_raise(driver: FakeDriver) -> None:
    for env in ({}, {"GPUAFF": "off"}):
        found = errors(driver, [(call, {}) for call in WRONG], **env)
        for (kind, text), (call, expected) in zip(found, WRONG.items(), strict=True):
            assert (kind, expected[1] in text) == (expected[0], True), call
    found = errors(driver, [("0, 2", {name: value}) for name, value in WRONG_VARIABLES.items()])
    for (name, value), (kind, text) in zip(WRONG_VARIABLES.items(), found, strict=True):
        assert (kind, text.partition(": ")[0]) == ("InvalidOptionError", f"{name}={value!r}")


def test_argument_then_variable_then_default(driver: FakeDriver) -> None:
    calls = [
        ("0, 2", {"GPUAFF_MODE": "all"}),
        ("0, 2", {"GPUAFF_MODE": "single"}),
        ("0, 2, mode='all'", {"GPUAFF_MODE": "single"}),
        ("0, 2, mode='all'", {"GPUAFF_MAX_PHYSICAL_CORES": "1"}),
        ("0, 2", {"GPUAFF": "on"}),
    ]
    whole, single, argument, cut, on = results(driver, calls)
    assert frozenset(whole["cpus"]) == frozenset(argument["cpus"]) == ALL
    assert single["cores"] == cut["cores"] == 1
    assert on["pinned"]


def test_the_off_switch(driver: FakeDriver) -> None:
    words = ("off", "0", "false", "no", "OFF")
    for found in results(driver, [("0, 2, strict=True", {"GPUAFF": word}) for word in words]):
        assert frozenset(found["cpus"]) == ALL
        assert (found["pinned"], found["codes"], found["gpu"]) == (False, ["off"], None)
    assert driver.inits == 0, "the driver is left alone"


@pytest.mark.case("B8")
def test_no_program_is_needed_and_the_driver_is_shut_down_again(driver: FakeDriver) -> None:
    assert called(driver, "0, 2", PATH="/nowhere")["pinned"]
    assert driver.inits == driver.shutdowns > 0


# Best effort, and its opposite.


@pytest.mark.case("A4", "F5")
@pytest.mark.parametrize(
    ("code", "told"),
    [(NVML.LIB_RM_VERSION_MISMATCH, "mismatch"), (NVML.DRIVER_NOT_LOADED, "not loaded")],
)
def test_no_driver(driver: FakeDriver, code: int, told: str) -> None:
    driver.refuse(code)
    found = called(driver, "0, 2")
    assert frozenset(found["cpus"]) == ALL
    assert not found["pinned"]
    assert found["codes"][0] == "no-driver"
    kind, text = raised(driver, "0, 2, strict=True")
    assert kind == "NoDriverError"
    assert told in text
    assert raised(driver, "0, 2", GPUAFF_STRICT="1")[0] == "NoDriverError"
    script = "import gpuaff\nfor _ in range(3): gpuaff.set_affinity(0, 2)"
    lines = run(script, env=driver.env()).stderr.splitlines()
    assert [line.startswith("gpuaff: ") for line in lines if told in line] == [True], "said once"


@pytest.mark.case("A1", "F1")
def test_an_empty_mask_from_the_driver_means_unknown(driver: FakeDriver) -> None:
    driver.set_cpus(0, node=[], socket=[])
    driver.set_cpus(1, node=None, socket=None)
    driver.set_memory(0, None)
    driver.set_memory(1, None)
    found = [called(driver, f"{rank}, 2") for rank in (0, 1)]
    assert all(one["pinned"] for one in found)
    assert not set(found[0]["cpus"]) & set(found[1]["cpus"])
    assert all("nvml" in one["codes"] for one in found), "the empty mask is told"


@pytest.mark.case("A5", "A6", "A17", "G7", "G8", "A14")
def test_it_stays_inside_what_it_was_given(driver: FakeDriver) -> None:
    last = str(CPUS[-1])
    found = called(driver, "0, 1", ["taskset", "-c", last])
    assert found["cpus"] == [CPUS[-1]]
    assert found["pinned"]


@pytest.mark.case("A2")
def test_near_cpus_that_are_not_allowed(driver: FakeDriver) -> None:
    driver.set_cpus(0, node=[CPUS[0]], socket=[CPUS[0]])
    found = called(driver, "0, 1", ["taskset", "-c", str(CPUS[-1])])
    assert found["cpus"] == [CPUS[-1]]
    assert set(found["codes"]) & {"near-not-allowed", "mask-narrow"}


@pytest.mark.case("A23", "F8")
def test_a_mask_narrower_than_the_near_cpus_is_reported_once(driver: FakeDriver) -> None:
    script = "import gpuaff, logging; logging.basicConfig(level=20)\n"
    script += "for _ in range(2): gpuaff.set_affinity(0, 1)"
    done = run(script, env=driver.env(), prefix=["taskset", "-c", str(CPUS[0])])
    assert done.stderr.count("[mask-narrow]") == 1


def test_rank_0_speaks_for_the_job(driver: FakeDriver) -> None:
    for gpu in (0, 1):
        driver.set_cpus(gpu, node=CPUS[:1], socket=CPUS)
    for rank, times in ((0, 1), (1, 0)):
        script = f"import gpuaff\nprint(gpuaff.set_affinity({rank}, 2).warnings)"
        done = run(script, env=driver.env())
        assert "scope-hint" in done.stdout
        assert done.stderr.count("[scope-hint]") == times


@pytest.mark.case("C7")
def test_a_mask_of_one_core_that_the_parent_has_not(driver: FakeDriver) -> None:
    script = """
        import os, gpuaff
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # as a BLAS does on import
        affinity = gpuaff.set_affinity(0, 1)
        print(len(affinity), [w.message for w in affinity.warnings if w.code == "mask-shrunk"])
    """
    said = printed(script, env=driver.env())
    assert said.startswith("1 ['")
    assert "OPENBLAS_MAIN_FREE" in said


def test_another_machines_files_pin_nobody(driver: FakeDriver, tmp_path: Path) -> None:
    found = called(driver, "0, 2", GPUAFF_FSROOT=str(tmp_path))
    assert frozenset(found["cpus"]) == ALL
    assert (found["pinned"], found["codes"]) == (False, ["other-machine"])
    assert raised(driver, "0, 2, strict=True", GPUAFF_FSROOT=str(tmp_path))[0] == "GPUAffinityError"


def test_numbers_beside_a_lost_gpu_are_nvidia_smis_and_it_is_said(driver: FakeDriver) -> None:
    """CUDA may count the lost one or not, so that its 1 may be another GPU."""
    driver.lose_gpu(0)
    found = called(driver, "0, 1", CUDA_VISIBLE_DEVICES="1")
    assert (found["gpu"], found["pinned"]) == (1, True)
    assert "visible-lost" in found["codes"]
    by_uuid = called(
        driver, "0, 1", CUDA_VISIBLE_DEVICES="GPU-00000000-0000-4000-8000-000000000001"
    )
    assert by_uuid["gpu"] == 1
    assert "visible-lost" not in by_uuid["codes"]


def test_without_linux_nothing_happens() -> None:
    script = """
        import os
        del os.sched_setaffinity, os.sched_getaffinity
        import gpuaff
        affinity = gpuaff.set_affinity(0, 2)
        print(len(affinity), affinity.pinned, affinity.restore(), affinity.warnings[0].code)
        print(gpuaff.Topology.observe().allowed)
        gpuaff.set_affinity(0, 2, strict=True)
    """
    done = run(script)
    assert done.stdout == "0 False frozenset() not-linux\nfrozenset()\n"
    assert "GPUAffinityError: this system has no sched_setaffinity (Linux has)" in done.stderr


# Twice, and back.


def test_a_storm_of_threads(driver: FakeDriver) -> None:
    script = """
        import sys, threading, time
        import gpuaff
        def storm():
            while True:
                thread = threading.Thread(target=time.sleep, args=(0.003,))
                thread.start(); thread.join()
        for _ in range(8):
            threading.Thread(target=storm, daemon=True).start()
        affinity = gpuaff.set_affinity(0, 2)
        print([w.code for w in affinity.warnings if w.code.startswith("threads")])
        sys.stdin.readline()
    """
    with stopped(script, env=driver.env()) as process:
        assert process.heard() == "[]"
        for _ in range(10):
            assert len(set(masks(process.pid).values())) == 1
            assert set(masks(process.pid).values()) != {ALL}


UNSEEN = """
    import os, threading, time, gpuaff
    everything = os.sched_getaffinity(0)
    thread = threading.Thread(target=time.sleep, args=(50,), daemon=True)
    thread.start()
    affinity = gpuaff.set_affinity(0, 2)
    print(affinity.pinned, [warning.code for warning in affinity.warnings])
    affinity.restore()
    try:
        gpuaff.set_affinity(0, 2, strict=True)
    except gpuaff.GPUAffinityError as error:
        print("threads-unseen" in str(error), os.sched_getaffinity(0) == everything)
"""


@pytest.mark.needs("mounts", "pid-namespaces")
@pytest.mark.parametrize(
    "prefix",
    [
        ["unshare", "-m", "sh", "-c", 'mount -t tmpfs none /proc && exec "$0" "$@"'],
        ["unshare", "-pf"],
    ],
    ids=["no-proc", "of-another-namespace"],
)
def test_threads_that_proc_does_not_show(driver: FakeDriver, prefix: list[str]) -> None:
    told = run(UNSEEN, env=driver.env(), prefix=prefix).stdout.splitlines()
    assert told == ["True ['threads-unseen']", "True True"]


def test_the_result_is_a_set(driver: FakeDriver) -> None:
    script = """
        import copy, os, pickle, gpuaff
        affinity = gpuaff.set_affinity(0, 2)
        assert affinity == set(affinity) == os.sched_getaffinity(0)
        assert isinstance(affinity, frozenset)
        for other in (pickle.loads(pickle.dumps(affinity)), copy.copy(affinity)):
            assert type(other) is frozenset and other == affinity
        print(repr(affinity))
    """
    assert re.fullmatch(r"<Affinity rank=0 gpu=0 cpus=[0-9,-]+>", printed(script, env=driver.env()))
