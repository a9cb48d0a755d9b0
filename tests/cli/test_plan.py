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
        keys = ["schema_version", "mode", "scope", "partition", "border_rule", "ranks", "warnings"]
        assert list(found) == keys
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


class TestExact:
    """Masks of each rank's own, cores for helpers, borders."""

    SIDES = ("--rank-allowed", "0-27", "56-83,168-195")

    def test_each_rank_inside_its_own_cpus(self, plan: Planner) -> None:
        """GPU 0 is next to 0-55,112-167: rank 0 has the 28 cores that it may use. GPU 4 is next to
        56-111,168-223, and rank 1 on it may use 28 cores."""
        found = plan("--from", "dgx-h100", "--visible-devices", "0,4", *self.SIDES)
        assert cpus(found) == ["0-27", "56-83,168-195"]

    def test_as_many_ranks_as_lists(self, plan: Planner) -> None:
        found = plan("--from", "dgx-h100", "--rank-allowed", "8-11", "4-7", "0-3")
        assert [share["rank"] for share in found["ranks"]] == [0, 1, 2]
        assert cpus(found) == ["8-11", "4-7", "0-3"]

    def test_the_option_may_be_repeated(self, plan: Planner) -> None:
        lists = ("--rank-allowed", "8-11", "--rank-allowed", "4-7", "0-3")
        assert cpus(plan("--from", "dgx-h100", *lists)) == ["8-11", "4-7", "0-3"]

    def test_cores_for_helpers(self, plan: Planner) -> None:
        """A rank's part is 14 cores, 0-13 with siblings 112-125; two of them are kept."""
        found = plan("--from", "dgx-h100", "--reserve", "2")["ranks"][0]
        assert found["cores"] == 12
        used, kept = (parse_cpulist(found[key]) for key in ("cpus", "reserved"))
        assert len(kept) == 4
        assert used.isdisjoint(kept)
        assert used | kept == parse_cpulist("0-13,112-125")

    def test_none_for_helpers(self, plan: Planner) -> None:
        found = plan("--from", "dgx-h100", "--reserve", "0")
        assert {share["reserved"] for share in found["ranks"]} == {""}

    @pytest.mark.parametrize("word", ["auto", "job"])
    def test_a_job_for_itself(self, word: str, plan: Planner) -> None:
        found = plan("--from", "dgx-a100", "--partition", word)
        assert found["partition"] == "job"
        assert cpus(found) == A100_NODE

    def test_unlike_numbers(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["plan", "--from", "dgx-h100", "--nproc", "3", *self.SIDES]) == 2
        message = "expected as many as the 2 lists of --rank-allowed, one for each rank"
        assert capsys.readouterr() == ("", f"gpuaff: --nproc=3: {message}\n")
        assert main(["plan", "--from", "dgx-h100", "--nproc", "2", *self.SIDES]) == 0

    def test_not_both_kinds(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["plan", "--allowed", "0", "--rank-allowed", "0"]) == 2
        assert "not allowed with argument" in capsys.readouterr().err

    @pytest.mark.case("A18")
    def test_absent_cpus(self, capsys: pytest.CaptureFixture[str]) -> None:
        args = ["plan", "--from", "dgx-h100", "--rank-allowed"]
        assert main([*args, "0-3", "4-7,900"]) == 0
        note = "gpuaff: note: --rank-allowed: dgx-h100 has no CPU 900 online [allowed-absent]\n"
        assert note in capsys.readouterr().err
        assert main([*args, "900", "901"]) == 2
        assert "gpuaff: --rank-allowed='900-901': expected some of" in capsys.readouterr().err

    def test_a_mask_given_by_rank_answers_the_saved_one(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        data = {"schema_version": 1, "cpus": "0-7", "allowed": "0-3", "gpus": [{"index": 0}]}
        (tmp_path / "one.json").write_text(json.dumps(data))
        command = ["plan", "--from", str(tmp_path / "one.json")]
        assert main(command) == 0
        assert "saved-allowed" in capsys.readouterr().err
        assert main([*command, "--rank-allowed", "0-3"]) == 0
        assert "saved-allowed" not in capsys.readouterr().err


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
        expected = "expected a whole number from 1 to 65535; see gpuaff plan --help"
        assert err == f"gpuaff: error: argument {option}: {value!r}: {expected}\n"

    @pytest.mark.parametrize(
        ("option", "value", "words"),
        [
            ("--mode", "ALL", "core_complex; did you mean all?"),
            ("--mode", "unique-contiguous", "; did you mean unique_contiguous?"),
            ("--mode", "", "one of all, single, single_unique, unique_interleaved,"),
            ("--scope", "nodes", "one of node, socket; did you mean node?"),
            ("--scope", "zebra", "one of node, socket; see gpuaff plan --help\n"),
            ("--multithreading", "all", "one of all_logical, single_logical"),
            ("--partition", "node", "one of auto, job, machine"),
            ("--reserve", "-1", "a whole number of cores from 0 to"),
            ("--reserve", "two", "a whole number of cores from 0 to"),
            ("--rank-allowed", "", "a list of CPUs such as 0-3,8, with at least one in it"),
            ("--rank-allowed", "3-1", "a list of CPUs such as 0-3,8"),
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
