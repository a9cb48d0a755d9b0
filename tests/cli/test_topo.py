"""``gpuaff topo``, and what all commands have in common."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpuaff import __version__
from gpuaff.cli import main
from gpuaff.cpuset import parse_cpulist
from gpuaff.topology.model import Topology

Runner = Callable[..., "subprocess.CompletedProcess[str]"]

HEAVY = {"rich", "rich_argparse", "pynvml", "psutil", "filelock", "torch"}


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


class TestLive:
    def test_shows_this_machine(self, gpuaff: Runner) -> None:
        online = parse_cpulist(Path("/sys/devices/system/cpu/online").read_text())
        done = gpuaff("topo", "--json")
        found = json.loads(done.stdout)
        assert (done.returncode, done.stderr) == (0, "")
        assert found["schema_version"] == 1
        assert parse_cpulist(found["cpus"]) == online
        assert parse_cpulist(found["allowed"]) == os.sched_getaffinity(0) & online

    @pytest.mark.case("A4", "F3")
    def test_people_see_it_with_or_without_a_gpu(self, gpuaff: Runner) -> None:
        done = gpuaff("topo")
        assert done.returncode == 0
        assert done.stdout.startswith("this machine: ")

    def test_visible_devices_may_be_told(self, gpuaff: Runner) -> None:
        """Whatever the environment says; with a GPU or without one."""
        done = gpuaff("topo", "--json", "--visible-devices", "", env={"CUDA_VISIBLE_DEVICES": "0"})
        assert (done.returncode, done.stderr) == (0, "")
        assert json.loads(done.stdout)["visible"] == []

    @pytest.mark.case("A6", "A14", "G8")
    def test_the_mask_is_what_is_allowed(self, gpuaff: Runner) -> None:
        mask = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {max(mask)})
        try:
            done = gpuaff("topo", "--json")
        finally:
            os.sched_setaffinity(0, mask)
        assert json.loads(done.stdout)["allowed"] == str(max(mask))


class TestJson:
    def test_has_what_is_promised(self, gpuaff: Runner) -> None:
        found = json.loads(gpuaff("topo", "--from", "dgx-a100", "--json").stdout)
        assert list(found)[:3] == ["schema_version", "cpus", "allowed"]
        assert found["cores"][0] == "0,128"
        assert [package["cpus"] for package in found["packages"]] == [
            "0-63,128-191",
            "64-127,192-255",
        ]
        assert [gpu["node_cpus"] for gpu in found["gpus"][::2]] == [
            "48-63,176-191",
            "16-31,144-159",
            "112-127,240-255",
            "80-95,208-223",
        ]
        assert [gpu["numa_node"] for gpu in found["gpus"]] == [3, 3, 1, 1, 7, 7, 5, 5]
        assert found["visible"] == list(range(8))

    def test_is_what_the_library_says(self, gpuaff: Runner) -> None:
        found = json.loads(gpuaff("topo", "--from", "gh200x4", "--json").stdout)
        assert Topology.from_dict(found) == Topology.named("gh200x4")

    def test_is_the_same_each_time(self, gpuaff: Runner) -> None:
        first, second = (gpuaff("topo", "--from", "dgx-2", "--json").stdout for _ in range(2))
        assert first == second
        assert first.endswith("}\n")
        assert first.startswith('{\n  "schema_version": 1,\n')


class TestSave:
    def test_what_is_saved_is_read_back(self, gpuaff: Runner, tmp_path: Path) -> None:
        done = gpuaff("topo", "--from", "dgx-a100", "--save", "it.json")
        assert (done.returncode, done.stdout) == (0, "")
        assert done.stderr.splitlines()[0] == "gpuaff: saved it.json (256 CPUs, 8 GPUs)"
        assert Topology.load(tmp_path / "it.json") == Topology.named("dgx-a100")
        again = gpuaff("topo", "--from", "it.json", "--json")
        assert again.stdout == gpuaff("topo", "--from", "dgx-a100", "--json").stdout

    def test_a_folder_is_refused(self, gpuaff: Runner, tmp_path: Path) -> None:
        done = gpuaff("topo", "--save", str(tmp_path))
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == f"gpuaff: {tmp_path}: is a folder; name the file to write\n"

    def test_where_there_is_no_folder(self, gpuaff: Runner) -> None:
        done = gpuaff("topo", "--from", "dgx-a100", "--save", "no/such/it.json")
        assert (done.returncode, done.stdout) == (1, "")
        assert "no/such" in done.stderr
        assert done.stderr == "gpuaff: no/such/it.json: No such file or directory\n"
        assert done.stderr.count("\n") == 1

    @pytest.mark.parametrize("name", ["", "-"])
    def test_a_name_that_is_none(self, name: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["topo", f"--save={name}"]) == 2
        assert "expected the name of a file; --json prints" in capsys.readouterr().err

    def test_json_and_save_exclude_each_other(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["topo", "--json", "--save", "x"]) == 2
        assert "not allowed with argument --json" in capsys.readouterr().err


class TestUse:
    def test_version(self, gpuaff: Runner) -> None:
        done = gpuaff("--version")
        assert (done.returncode, done.stdout) == (0, f"gpuaff {__version__}\n")

    @pytest.mark.parametrize("args", [["--help"], ["topo", "-h"], ["plan", "--help"]])
    def test_help(self, args: list[str], gpuaff: Runner) -> None:
        done = gpuaff(*args)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.lower().startswith("usage: gpuaff")
        assert "\x1b" not in done.stdout

    @pytest.mark.parametrize(
        "args",
        [[], ["plna"], ["topo", "x"], ["topo", "--fro", "x"], ["plan", "--partitions", "job"]],
    )
    def test_wrong_use(self, args: list[str], gpuaff: Runner) -> None:
        done = gpuaff(*args)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("gpuaff: error: ")
        assert done.stderr.endswith(" --help\n")
        assert done.stderr.count("\n") == 1

    @pytest.mark.parametrize("args", [["topo", "--json"], ["plan", "--json", "--nproc", "4"]])
    def test_json_needs_none_of_the_heavy(self, args: list[str]) -> None:
        code = (
            "import sys; from gpuaff.cli import main; "
            f"code = main({[*args, '--from', 'dgx-a100']}); "
            f"sys.exit(code or repr({HEAVY} & set(sys.modules)))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            text=True, check=False,
        )  # fmt: skip
        assert done.stderr == "set()\n"

    @pytest.mark.parametrize("args", [["topo"], ["topo", "--json"], ["plan"], ["--help"]])
    @pytest.mark.parametrize("env", [{}, {"PYTHONUNBUFFERED": "1"}])
    def test_a_reader_that_goes_away(self, args: list[str], env: dict[str, str]) -> None:
        reader, writer = os.pipe()
        os.close(reader)
        source = [] if args == ["--help"] else ["--from", "dgx-a100"]
        done = into(writer, *args, *source, env=env)
        os.close(writer)
        assert done.stderr == ""
        assert done.returncode == 141 or args == ["--help"]

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
    @pytest.mark.parametrize("machine", ["dgx-1", "dgx-a100"])
    @pytest.mark.parametrize("env", [{}, {"PYTHONUNBUFFERED": "1"}])
    def test_a_full_disk(self, machine: str, env: dict[str, str]) -> None:
        with Path("/dev/full").open("wb") as full:
            done = into(full.fileno(), "topo", "--from", machine, "--json", env=env)
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
        done = subprocess.run(
            ["/bin/sh", "-c", f"exec {sys.executable} -m gpuaff {command}"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code
        for found, expected in ((done.stdout, out), (done.stderr, err)):
            assert found.startswith(expected)
            assert expected or not found
