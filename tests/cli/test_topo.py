"""``gpuaff topo``, and what all commands have in common."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpuaff import __version__
from gpuaff.cpuset import parse_cpulist
from gpuaff.topology.model import Topology
from tests.cli.calls import as_json, called, on_one_cpu, refused
from tests.processes import environment, unmeasured

HEAVY = {b"rich", b"rich_argparse", b"pynvml", b"psutil", b"filelock"}


def into(handle: int, *args: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the command with this descriptor as its standard output."""
    return subprocess.run(
        [sys.executable, "-m", "gpuaff", *args],
        stdout=handle,
        stderr=subprocess.PIPE,
        env={k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"} | env,
        text=True,
        check=False,
    )


@pytest.mark.case("A4", "A6", "A14", "F3", "G8")
def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """With or without a GPU; the mask is what is allowed."""
    online = parse_cpulist(Path("/sys/devices/system/cpu/online").read_text())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    found = as_json("topo", "--visible-devices", "")
    assert (found["schema_version"], found["visible"]) == (1, [])
    assert parse_cpulist(found["cpus"]) == online
    assert parse_cpulist(found["allowed"]) == os.sched_getaffinity(0) & online
    with on_one_cpu() as cpu:
        assert as_json("topo")["allowed"] == cpu
    assert called("topo").out.startswith("this machine: ")


def test_the_topology_as_json() -> None:
    found = as_json("topo", "--from", "dgx-a100")
    assert list(found)[:3] == ["schema_version", "cpus", "allowed"]
    assert [gpu["numa_node"] for gpu in found["gpus"]] == [3, 3, 1, 1, 7, 7, 5, 5]
    assert Topology.from_dict(as_json("topo", "--from", "gh200x4")) == Topology.named("gh200x4")
    assert called("topo", "--from", "dgx-2", "--json").out.startswith('{\n  "schema_version": 1,\n')


class TestSave:
    def test_what_is_saved_is_read_back(self, tmp_path: Path) -> None:
        file = tmp_path / "it.json"
        said = called("topo", "--from", "dgx-a100", "--save", str(file))
        assert (said.code, said.out) == (0, "")
        assert said.err.splitlines()[0] == f"gpuaff: saved {file} (256 CPUs, 8 GPUs)"
        assert Topology.load(file) == Topology.named("dgx-a100")
        assert as_json("topo", "--from", str(file)) == as_json("topo", "--from", "dgx-a100")

    @pytest.mark.parametrize(
        ("words", "code", "said"),
        [
            (("--save", "/"), 1, "/: is a folder; name the file to write"),
            (("--save", "no/such/it.json"), 1, "no/such/it.json: No such file or directory"),
            (("--save=",), 2, "--save='': expected the name of a file; --json prints"),
            (("--save=-",), 2, "--save='-': expected the name of a file; --json prints"),
            (("--json", "--save", "x"), 2, "not allowed with argument --json"),
            (("--save=a/x.SVG",), 2, "--save='a/x.SVG': expected a file for JSON, such as"),
        ],
    )
    def test_where_nothing_is_saved(self, words: tuple[str, ...], code: int, said: str) -> None:
        assert said in refused("topo", "--from", "dgx-a100", *words, code=code)


class TestUse:
    def test_version(self) -> None:
        assert called("--version") == (0, f"gpuaff {__version__}\n", "")

    @pytest.mark.parametrize("args", [["--help"], ["topo", "-h"], ["run", "--help"]])
    def test_help(self, args: list[str]) -> None:
        said = called(*args)
        assert (said.code, said.err) == (0, "")
        assert said.out.lower().startswith("usage: gpuaff")
        assert "\x1b" not in said.out

    @pytest.mark.parametrize(
        "words", ["", "plna", "topo x", "topo --fro x", "plan --partitions job"]
    )
    def test_wrong_use(self, words: str) -> None:
        line = refused(*words.split(), code=2)
        assert line.startswith("gpuaff: error: ")
        assert line.endswith(" --help\n")

    @pytest.mark.parametrize("words", ["topo --json", "plan --json --nproc 4"])
    def test_json_needs_none_of_the_heavy(self, words: str) -> None:
        command = [sys.executable, "-X", "importtime", "-m", "gpuaff", *words.split()]
        done = subprocess.run(
            [*command, "--from", "dgx-a100"],
            capture_output=True,
            check=True,
            env=unmeasured(environment()),
        )
        assert not set(re.findall(rb"\| +(\w+)", done.stderr)) & HEAVY

    @pytest.mark.parametrize("args", ["topo --from dgx-a100", "plan --from dgx-a100", "--help"])
    @pytest.mark.parametrize("env", [{}, {"PYTHONUNBUFFERED": "1"}])
    def test_a_reader_that_goes_away(self, args: str, env: dict[str, str]) -> None:
        reader, writer = os.pipe()
        os.close(reader)
        done = into(writer, *args.split(), env=env)
        os.close(writer)
        assert done.stderr == ""
        assert done.returncode == 141 or args == "--help"

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
    @pytest.mark.parametrize("env", [{}, {"PYTHONUNBUFFERED": "1"}])
    def test_a_full_disk(self, env: dict[str, str]) -> None:
        with Path("/dev/full").open("wb") as full:
            done = into(full.fileno(), "topo", "--from", "dgx-a100", "--json", env=env)
        assert done.returncode == 1
        assert done.stderr == "gpuaff: output: No space left on device\n"

    @pytest.mark.parametrize(
        ("command", "code", "out", "err"),
        [
            ("topo --from dgx-a100 --json >&-", 0, "", ""),
            ("topo --from /nothing >&-", 1, "", "gpuaff: --from '/nothing': No such file "),
            ("topo --from /nothing 2>&-", 1, "", ""),
            ("--version 2>&-", 0, "gpuaff ", ""),
        ],
    )
    def test_closed_streams(self, command: str, code: int, out: str, err: str) -> None:
        words = ["/bin/sh", "-c", f"exec {sys.executable} -m gpuaff {command}"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == code
        for found, expected in ((done.stdout, out), (done.stderr, err)):
            assert found.startswith(expected)
            assert expected or not found
