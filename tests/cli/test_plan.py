"""``gpuaff plan``: who would get what."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.calls import as_json, called, on_one_cpu, refused


def plan(words: str) -> dict[str, Any]:
    return as_json("plan", *words.split())


def cpus(plan: dict[str, Any]) -> list[str]:
    return [share["cpus"] for share in plan["ranks"]]


TABLES = json.loads((Path(__file__).parents[1] / "data/plan_options.json").read_text("utf-8"))
"""Options and facts of the plan, rank by rank; values that are refused, and what is expected."""


PLANS = [(machine, words) for machine in ("dgx-a100", "dgx-h100") for words in TABLES[machine]]


@pytest.mark.case("gpu-affinity-rule-4", "A20", "B7", "B17", "D8")
@pytest.mark.parametrize(("machine", "words"), PLANS)
def test_plans_of_shipped_machines(machine: str, words: str) -> None:
    found = plan(f"--from {machine} {words}")
    for name, values in TABLES[machine][words].items():
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
    other = plan("--from dgx-a100 --scope socket --mode unique_interleaved")
    assert (other["mode"], other["scope"]) == ("unique_interleaved", "socket")


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


def test_lists_of_each_ranks_cpus() -> None:
    words = "plan --from dgx-h100 --nproc 3 --rank-allowed 0-27 56-83"
    message = "expected as many as the 2 lists of --rank-allowed, one for each rank"
    assert refused(*words.split(), code=2) == f"gpuaff: --nproc=3: {message}\n"
    both = "plan --allowed 0 --rank-allowed 0"
    assert "not allowed with argument" in refused(*both.split(), code=2)


@pytest.mark.case("A18")
@pytest.mark.parametrize("option", ["--allowed", "--rank-allowed"])
def test_absent_cpus_are_told(option: str) -> None:
    words = ("plan", "--from", "dgx-h100", option)
    note = f"gpuaff: note: {option}: dgx-h100 has no CPU 900 online [allowed-absent]\n"
    assert note in called(*words, "4-7,900").err
    line = refused(*words, "900-901", code=2)
    assert line == f"gpuaff: {option}='900-901': expected some of the CPUs of dgx-h100, 0-223\n"


def test_a_mask_given_by_rank_answers_the_saved_one(tmp_path: Path) -> None:
    data = {"schema_version": 1, "cpus": "0-7", "allowed": "0-3", "gpus": [{"index": 0}]}
    (tmp_path / "one.json").write_text(json.dumps(data))
    words = ("plan", "--from", str(tmp_path / "one.json"))
    assert "saved-allowed" in called(*words).err
    assert "saved-allowed" not in called(*words, "--rank-allowed", "0-3").err


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
