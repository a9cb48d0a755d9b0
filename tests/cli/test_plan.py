"""``gpuaff plan``: who would get what."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuaff.cli import main
from gpuaff.cpuset import parse_cpulist

Runner = Callable[..., "subprocess.CompletedProcess[str]"]

A100_NODE = [
    "48-55,176-183",
    "56-63,184-191",
    "16-23,144-151",
    "24-31,152-159",
    "112-119,240-247",
    "120-127,248-255",
    "80-87,208-215",
    "88-95,216-223",
]
"""What gpu_affinity gives the ranks of a DGX A100: half a node of 16 cores each."""


@pytest.fixture
def plan(gpuaff: Runner) -> Callable[..., dict[str, Any]]:
    def run(*args: str, env: dict[str, str] | None = None) -> dict[str, Any]:
        done = gpuaff("plan", *args, "--json", env=env)
        assert (done.returncode, done.stderr) == (0, "")
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    return run


Planner = Callable[..., dict[str, Any]]


def cpus(plan: dict[str, Any]) -> list[str]:
    return [share["cpus"] for share in plan["ranks"]]


class TestJson:
    @pytest.mark.case("gpu-affinity-rule-4", "A20", "B17")
    def test_dgx_a100(self, plan: Planner) -> None:
        found = plan("--from", "dgx-a100", "--nproc", "8")
        assert list(found) == ["schema_version", "mode", "scope", "partition", "ranks", "warnings"]
        assert (found["schema_version"], found["mode"], found["scope"]) == (
            1,
            "unique_contiguous",
            "node",
        )
        assert cpus(found) == A100_NODE
        assert found["ranks"][3] == {
            "rank": 3,
            "gpu": 3,
            "cpus": "24-31,152-159",
            "cores": 8,
            "numa_nodes": [1],
            "source": "given",
            "reserved": "",
        }

    def test_says_that_the_socket_has_more(self, plan: Planner) -> None:
        warnings = plan("--from", "dgx-a100")["warnings"]
        assert "scope-hint" in [warning["code"] for warning in warnings]
        assert all(set(warning) == {"code", "message"} for warning in warnings)

    @pytest.mark.case("gpu-affinity-rule-4")
    def test_the_socket(self, plan: Planner) -> None:
        found = plan("--from", "dgx-a100", "--scope", "socket")
        assert found["scope"] == "socket"
        assert cpus(found)[0] == "32-39,48-55,160-167,176-183"
        assert cpus(found)[2] == "0-7,16-23,128-135,144-151"

    @pytest.mark.case("B7")
    def test_one_cpu_a_core(self, plan: Planner) -> None:
        found = plan("--from", "dgx-a100", "--multithreading", "single_logical")
        assert cpus(found)[:2] == ["48-55", "56-63"]

    def test_interleaved(self, plan: Planner) -> None:
        found = plan("--from", "dgx-a100", "--mode", "unique_interleaved")
        assert found["mode"] == "unique_interleaved"
        even = {*range(48, 64, 2), *range(176, 192, 2)}
        assert parse_cpulist(cpus(found)[0]) == even

    def test_a_maximum(self, plan: Planner) -> None:
        found = plan("--from", "dgx-a100", "--max-physical-cores", "2")
        assert {share["cores"] for share in found["ranks"]} == {2}
        assert cpus(found)[0] == "48-49,176-177"

    def test_unbalanced(self, plan: Planner) -> None:
        """Three GPUs: two share node 3, one has node 1 for itself."""
        args = ("--from", "dgx-a100", "--visible-devices", "0,1,2")
        assert [share["cores"] for share in plan(*args)["ranks"]] == [8, 8, 8]
        assert [share["cores"] for share in plan(*args, "--unbalanced")["ranks"]] == [8, 8, 16]

    @pytest.mark.case("D8")
    def test_visible_devices_are_the_ranks(self, plan: Planner) -> None:
        found = plan("--from", "dgx-a100", "--visible-devices", "6,2")
        assert [share["gpu"] for share in found["ranks"]] == [6, 2]
        assert [share["numa_nodes"] for share in found["ranks"]] == [[5], [1]]

    def test_no_visible_device_is_one_rank_without_a_gpu(self, plan: Planner) -> None:
        (share,) = plan("--from", "dgx-a100", "--visible-devices", "")["ranks"]
        assert share["gpu"] is None
        assert share["source"] == "all"


class TestLive:
    @pytest.mark.case("A4", "A6", "A14", "G7", "G8")
    def test_stays_inside_the_mask(self, plan: Planner) -> None:
        mask = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {max(mask)})
        try:
            found = plan("--nproc", "1")
        finally:
            os.sched_setaffinity(0, mask)
        assert cpus(found) == [str(max(mask))]

    def test_no_gpu_is_no_failure(self, plan: Planner, tree: Path) -> None:
        found = plan("--nproc", "2", env={"GPUAFF_FSROOT": str(tree)})
        assert [share["gpu"] for share in found["ranks"]] == [None, None]
        assert cpus(found) == ["0-3", "0-3"]
        assert "no-gpu" in [warning["code"] for warning in found["warnings"]]

    def test_options_of_the_environment(self, plan: Planner) -> None:
        env = {"GPUAFF_MODE": "single", "GPUAFF_SCOPE": "socket", "GPUAFF_BALANCED": "0"}
        found = plan("--nproc", "1", env=env)
        assert (found["mode"], found["scope"]) == ("single", "socket")

    def test_an_argument_wins(self, plan: Planner) -> None:
        assert plan("--mode", "all", env={"GPUAFF_MODE": "nonsense"})["mode"] == "all"

    def test_they_do_not_reach_another_machine(self, plan: Planner) -> None:
        found = plan("--from", "dgx-a100", env={"GPUAFF_MODE": "nonsense"})
        assert found["mode"] == "unique_contiguous"

    @pytest.mark.parametrize(
        ("name", "value", "expected"),
        [
            ("MODE", "Single", "one of all, single,"),
            ("SCOPE", "die", "one of node, socket"),
            ("MULTITHREADING", "yes", "one of all_logical, single_logical"),
            ("BALANCED", "maybe", "one of 1, true"),
            ("MIN_PHYSICAL_CORES", "-1", "a whole number from 1"),
            ("MAX_PHYSICAL_CORES", "many", "a whole number from 1"),
        ],
    )
    def test_wrong_ones(self, name: str, value: str, expected: str, gpuaff: Runner) -> None:
        done = gpuaff("plan", env={f"GPUAFF_{name}": value})
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(f"gpuaff: GPUAFF_{name}={value!r}: expected {expected}")
        assert done.stderr.count("\n") == 1


class TestText:
    def test_a_table_and_a_picture(self, gpuaff: Runner) -> None:
        done = gpuaff("plan", "--from", "dgx-a100", "--nproc", "8")
        lines = done.stdout.splitlines()
        assert done.returncode == 0
        assert lines[0] == "dgx-a100: 8 ranks, unique_contiguous, by node"
        assert [line.split() for line in lines[3:11]] == [
            [str(rank), str(rank), node, "8", "given", A100_NODE[rank]]
            for rank, node in enumerate("33117755")
        ]
        pictured = [line.split() for line in lines if line.startswith("node 3")]
        assert "".join(pictured[0][4:-1]) == "0000000011111111"
        assert pictured[0][-1] == "48-63,176-191"

    def test_warnings_are_talk(self, gpuaff: Runner) -> None:
        done = gpuaff("plan", "--from", "dgx-a100")
        assert "scope=" not in done.stdout
        assert done.stderr.startswith("gpuaff: note: ")


class TestNotes:
    """A plan repeats what its topology is unsure of, as far as it depends on it."""

    TABLE = (
        "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\n"
        "GPU0\t X \tSYS\t0-3\t0\n"
        "GPU1\tSYS\t X \t4-7\t1\n"
    )

    def test_what_a_paste_lacks(self, gpuaff: Runner) -> None:
        done = gpuaff("plan", "--from", "-", "--json", given=self.TABLE)
        found = json.loads(done.stdout)
        codes = [warning["code"] for warning in found["warnings"]]
        assert cpus(found) == ["0-3", "4-7"]
        assert codes.count("cores-unknown") == 1
        assert "uuids-unknown" not in codes
        assert done.stderr == ""

    def test_people_are_told_each_once(self, gpuaff: Runner) -> None:
        lines = gpuaff("plan", "--from", "-", given=self.TABLE).stderr.splitlines()
        assert len(lines) == len(set(lines)) > 0
        assert all(line.startswith("gpuaff: note: ") for line in lines)


class TestRefused:
    @pytest.mark.parametrize("value", ["0", "-1", "2.5", "x", "", "1_0", "٣", "65536", "9" * 50])
    @pytest.mark.parametrize("option", ["--nproc", "--min-physical-cores", "--max-physical-cores"])
    def test_what_is_no_number(
        self, option: str, value: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["plan", f"{option}={value}"]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("usage: gpuaff plan")
        assert f"argument {option}: {value!r}: expected a whole number from 1 to 65535" in err

    @pytest.mark.parametrize(
        ("option", "value", "words"),
        [
            ("--mode", "ALL", "core_complex; did you mean all?"),
            ("--mode", "unique-contiguous", "; did you mean unique_contiguous?"),
            ("--mode", "", "one of all, single, single_unique, unique_interleaved,"),
            ("--scope", "nodes", "one of node, socket; did you mean node?"),
            ("--scope", "zebra", "one of node, socket\n"),
            ("--multithreading", "all", "one of all_logical, single_logical"),
        ],
    )
    def test_what_is_no_word(
        self, option: str, value: str, words: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["plan", f"{option}={value}"]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert f"argument {option}: {value!r}: expected" in err
        assert words in err

    def test_a_minimum_above_the_maximum(self, capsys: pytest.CaptureFixture[str]) -> None:
        args = ["--min-physical-cores", "5", "--max-physical-cores", "4"]
        assert main(["plan", "--from", "dgx-a100", *args]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("gpuaff: ")
        assert err.count("\n") == 1

    def test_a_minimum_that_cannot_be_had(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["plan", "--from", "dgx-a100", "--min-physical-cores", "9"]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("gpuaff: ")
        assert "9" in err
        assert err.count("\n") == 1
