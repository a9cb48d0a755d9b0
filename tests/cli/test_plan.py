"""``gpuaff plan``: who would get what."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuaff.cpuset import parse_cpulist
from tests.cli.calls import as_json, called, on_one_cpu, refused

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


def plan(words: str) -> dict[str, Any]:
    return as_json("plan", *words.split())


def cpus(plan: dict[str, Any]) -> list[str]:
    return [share["cpus"] for share in plan["ranks"]]


TABLES = json.loads((Path(__file__).parents[1] / "data/plan_options.json").read_text("utf-8"))
"""Options and facts of the plan, rank by rank; values that are refused, and what is expected."""


@pytest.mark.case("gpu-affinity-rule-4", "A20", "B7", "B17", "D8")
@pytest.mark.parametrize("words", TABLES["dgx-a100"])
def test_plans_of_dgx_a100(words: str) -> None:
    found = plan(f"--from dgx-a100 {words}")
    for name, values in TABLES["dgx-a100"][words].items():
        assert [share[name] for share in found["ranks"]] == values, name


@pytest.mark.case("gpu-affinity-rule-4")
def test_the_plan_as_json() -> None:
    found = plan("--from dgx-a100 --nproc 8")
    keys = ["schema_version", "mode", "scope", "partition", "border_rule", "ranks", "warnings"]
    assert list(found) == keys
    assert (found["schema_version"], found["partition"]) == (1, "job")
    assert (found["mode"], found["scope"]) == ("unique_contiguous", "node")
    keys = ["rank", "gpu", "cpus", "cores", "numa_nodes", "source", "reserved"]
    assert list(found["ranks"][3]) == keys
    assert (found["ranks"][3]["source"], found["ranks"][3]["reserved"]) == ("given", "")
    assert "scope-hint" in [warning["code"] for warning in found["warnings"]]
    assert all(set(warning) == {"code", "message"} for warning in found["warnings"])
    socket = plan("--from dgx-a100 --scope socket")
    assert (socket["scope"], cpus(socket)[0]) == ("socket", "32-39,48-55,160-167,176-183")
    every = plan("--from dgx-a100 --mode unique_interleaved")
    assert every["mode"] == "unique_interleaved"
    assert parse_cpulist(cpus(every)[0]) == {*range(48, 64, 2), *range(176, 192, 2)}


class TestLive:
    @pytest.mark.case("A4", "A6", "A14", "G7", "G8")
    def test_stays_inside_the_mask(self) -> None:
        with on_one_cpu() as cpu:
            assert cpus(plan("--nproc 1")) == [cpu]

    def test_no_gpu_is_no_failure(self, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GPUAFF_FSROOT", str(tree))
        monkeypatch.setenv("GPUAFF_MODE", "nonsense")  # options of the environment do not count
        found = plan("--nproc 2")
        assert [share["gpu"] for share in found["ranks"]] == [None, None]
        assert (found["mode"], cpus(found)) == ("unique_contiguous", ["0-3", "0-3"])
        assert "no-gpu" in [warning["code"] for warning in found["warnings"]]

    def test_options_of_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GPUAFF_MODE", "single")
        monkeypatch.setenv("GPUAFF_SCOPE", "socket")
        found = plan("--nproc 1")
        assert (found["mode"], found["scope"]) == ("single", "socket")
        assert plan("--mode all")["mode"] == "all", "an argument wins"
        assert plan("--from dgx-a100")["mode"] == "unique_contiguous", "another machine"

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
    def test_wrong_ones(
        self, name: str, value: str, expected: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(f"GPUAFF_{name}", value)
        line = refused("plan", code=2)
        assert line.startswith(f"gpuaff: GPUAFF_{name}={value!r}: expected {expected}")


class TestExact:
    """Masks of each rank's own, and cores for helpers, on a DGX H100.

    GPU 0 is next to 0-55,112-167, GPU 4 to 56-111,168-223.
    """

    @pytest.mark.parametrize(
        ("words", "expected"),
        [
            ("--visible-devices 0,4 --rank-allowed 0-27 56-83,168-195", ["0-27", "56-83,168-195"]),
            ("--rank-allowed 8-11 4-7 0-3", ["8-11", "4-7", "0-3"]),
            ("--rank-allowed 8-11 --rank-allowed 4-7 0-3", ["8-11", "4-7", "0-3"]),
            ("--nproc 2 --rank-allowed 8-11 4-7", ["8-11", "4-7"]),
        ],
    )
    def test_each_rank_inside_its_own_cpus(self, words: str, expected: list[str]) -> None:
        assert cpus(plan(f"--from dgx-h100 {words}")) == expected

    def test_cores_for_helpers(self) -> None:
        """A rank's part is 14 cores, 0-13 with siblings 112-125; two of them are kept."""
        found = plan("--from dgx-h100 --reserve 2")["ranks"][0]
        assert found["cores"] == 12
        used, kept = (parse_cpulist(found[key]) for key in ("cpus", "reserved"))
        assert len(kept) == 4
        assert used.isdisjoint(kept)
        assert used | kept == parse_cpulist("0-13,112-125")
        none = plan("--from dgx-h100 --reserve 0")
        assert {share["reserved"] for share in none["ranks"]} == {""}

    def test_unlike_numbers(self) -> None:
        words = "plan --from dgx-h100 --nproc 3 --rank-allowed 0-27 56-83"
        message = "expected as many as the 2 lists of --rank-allowed, one for each rank"
        assert refused(*words.split(), code=2) == f"gpuaff: --nproc=3: {message}\n"
        both = "plan --allowed 0 --rank-allowed 0"
        assert "not allowed with argument" in refused(*both.split(), code=2)

    @pytest.mark.case("A18")
    def test_absent_cpus(self) -> None:
        words = ("plan", "--from", "dgx-h100", "--rank-allowed")
        note = "gpuaff: note: --rank-allowed: dgx-h100 has no CPU 900 online [allowed-absent]\n"
        assert note in called(*words, "0-3", "4-7,900").err
        line = refused(*words, "900", "901", code=2)
        assert "gpuaff: --rank-allowed='900-901': expected some of" in line

    def test_a_mask_given_by_rank_answers_the_saved_one(self, tmp_path: Path) -> None:
        data = {"schema_version": 1, "cpus": "0-7", "allowed": "0-3", "gpus": [{"index": 0}]}
        (tmp_path / "one.json").write_text(json.dumps(data))
        words = ("plan", "--from", str(tmp_path / "one.json"))
        assert "saved-allowed" in called(*words).err
        assert "saved-allowed" not in called(*words, "--rank-allowed", "0-3").err


def test_a_table_and_a_picture() -> None:
    said = called("plan", "--from", "dgx-a100", "--nproc", "8")
    lines = said.out.splitlines()
    assert lines[0] == "dgx-a100: 8 ranks, unique_contiguous, by node"
    assert [line.split() for line in lines[3:11]] == [
        [str(rank), str(rank), node, "8", "given", A100_NODE[rank]]
        for rank, node in enumerate("33117755")
    ]
    (pictured,) = (line.split() for line in lines if line.startswith("node 3"))
    assert ("".join(pictured[4:-1]), pictured[-1]) == ("0000000011111111", "48-63,176-191")
    assert "scope=" not in said.out
    assert said.err.startswith("gpuaff: note: ")


def test_a_plan_repeats_what_its_topology_is_unsure_of(gpuaff: Callable[..., Any]) -> None:
    """As far as it depends on it, and each once."""
    table = (
        "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\n"
        "GPU0\t X \tSYS\t0-3\t0\n"
        "GPU1\tSYS\t X \t4-7\t1\n"
    )
    done = gpuaff("plan", "--from", "-", "--json", given=table)
    found = json.loads(done.stdout)
    codes = [warning["code"] for warning in found["warnings"]]
    assert (cpus(found), done.stderr) == (["0-3", "4-7"], "")
    assert codes.count("cores-unknown") == 1
    assert "uuids-unknown" not in codes
    lines = gpuaff("plan", "--from", "-", given=table).stderr.splitlines()
    assert len(lines) == len(set(lines)) > 0
    assert all(line.startswith("gpuaff: note: ") for line in lines)


@pytest.mark.parametrize("option", TABLES["refused"])
def test_invalid_values(option: str) -> None:
    for value, expected in TABLES["refused"][option].items():
        line = refused("plan", f"{option}={value}", code=2)
        assert f"argument {option}: {value!r}: expected" in line
        assert expected in line


def test_a_minimum_that_is_not_available() -> None:
    words = ("plan", "--from", "dgx-a100", "--min-physical-cores")
    refused(*words, "5", "--max-physical-cores", "4", code=2)
    assert "9" in refused(*words, "9")
