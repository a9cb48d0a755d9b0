"""Which machine is meant: ``--from``, GPUAFF_FSROOT, ``--allowed``, ``--visible-devices``."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuaff.topology.model import Topology
from tests.cli.calls import as_json, called, on_one_cpu, refused

Runner = Callable[..., "subprocess.CompletedProcess[str]"]

LSCPU = """\
CPU(s):                  4
On-line CPU(s) list:     0-3
NUMA node(s):            1
NUMA node0 CPU(s):       0-3
"""


def topo(*words: str) -> dict[str, Any]:
    return as_json("topo", *words)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """DGX A100 as a process saved it that has CPUs 0-9 and sees GPUs 3 and 1."""
    file = tmp_path / "saved.json"
    machine = Topology.named("dgx-a100").with_visible_devices("3,1")
    machine.with_allowed(frozenset(range(10))).save(file)
    return file


class TestWhat:
    def test_a_file_wins_over_a_machine_and_a_folder_does_not(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert topo("--from", "dgx-a100")["cpus"] == "0-255"
        (tmp_path / "dgx-a100").write_text(LSCPU)
        (tmp_path / "dgx-1").mkdir()
        assert topo("--from", "dgx-a100")["cpus"] == "0-3"
        assert topo("--from", "dgx-1")["cpus"] == "0-79"

    @pytest.mark.parametrize("start", ["", "\n \t", "\ufeff"])
    def test_json_is_known_by_its_content(self, start: str, saved: Path, tmp_path: Path) -> None:
        odd = tmp_path / "no-suffix.txt"
        odd.write_text(start + saved.read_text(), encoding="utf-8")
        assert topo("--from", str(odd))["cpus"] == "0-255"

    @pytest.mark.parametrize(
        "text",
        [
            LSCPU.encode(),
            LSCPU.encode("utf-16"),  # what PowerShell writes
            f"[me@node01 ~]$ lscpu\n{LSCPU}".encode(),
            f"\x1b[4mhost\x1b[0m\n{LSCPU}".encode(),  # underlined, as nvidia-smi's tables
        ],
    )
    def test_a_paste(self, text: bytes, tmp_path: Path) -> None:
        (tmp_path / "paste").write_bytes(text)
        assert topo("--from", str(tmp_path / "paste"))["cpus"] == "0-3"

    def test_standard_input(self, gpuaff: Runner, saved: Path) -> None:
        for text, cpus in ((LSCPU, "0-3"), (saved.read_text(), "0-255")):
            done = gpuaff("topo", "--from", "-", "--json", given=text)
            assert (done.returncode, done.stderr) == (0, "")
            assert json.loads(done.stdout)["cpus"] == cpus

    def test_a_pipe_is_read_once(self, tmp_path: Path) -> None:
        fifo = tmp_path / "fifo"
        os.mkfifo(fifo)
        with subprocess.Popen(["/bin/sh", "-c", f"printf '%s' \"$0\" > {fifo}", LSCPU]):
            assert called("topo", "--from", str(fifo)).out.startswith(f"{fifo}: 4 CPUs")


class TestRefused:
    def test_a_name_of_nothing(self) -> None:
        line = refused("topo", "--from", "dgx-a10")
        assert line.startswith("gpuaff: --from 'dgx-a10': No such file or directory; ")
        assert "gh200x4" in line
        assert line.endswith("; did you mean dgx-a100?\n")

    @pytest.mark.parametrize("name", ["", "a\0b", "x" * 5000, "nowhere/at/all", "\udcff"])
    def test_names_that_cannot_be(self, name: str) -> None:
        line = refused("plan", "--from", name)
        assert "expected a file, - or a machine that ships" in line
        assert len(line) < 400

    def test_what_cannot_be_read(self, tmp_path: Path) -> None:
        assert "Is a directory; expected a file" in refused("topo", "--from", str(tmp_path))
        assert "Input/output error; expected a file" in refused("topo", "--from", "/proc/self/mem")
        assert "/dev/zero: more than 4 MiB" in refused("topo", "--from", "/dev/zero")

    @pytest.mark.parametrize(
        ("data", "problem"),
        [
            *((text, "no CPU and no NVIDIA") for text in (b"\x7fELF\x00\x01", b"", b"Dear all\n")),
            *((text, "") for text in (b"[", b"[]", b"{}", b'["a"]', b"{]")),
            (b'{"a":' * 200_000, "n"),
        ],
    )
    def test_what_is_no_topology(self, data: bytes, problem: str, tmp_path: Path) -> None:
        file = tmp_path / "x"
        file.write_bytes(data)
        line = refused("topo", "--from", str(file))
        assert line.startswith(f"gpuaff: {file}: ")
        assert problem in line

    def test_closed_standard_input(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sys.stdin", None)
        assert refused("topo", "--from", "-").startswith("gpuaff: standard input: no CPU")

    @settings(max_examples=30, deadline=None)
    @given(st.data())
    def test_json_cut_anywhere(self, data: st.DataObject) -> None:
        whole = json.dumps(Topology.named("dgx-a100").to_dict())
        cut = whole[: data.draw(st.integers(1, len(whole) - 1))]
        with _file(cut.encode()) as name:
            assert "not JSON: " in refused("topo", "--from", name)

    @settings(max_examples=100, deadline=None)
    @given(
        st.binary(max_size=200) | st.text(max_size=200).map(lambda t: t.encode("utf-8", "replace"))
    )
    def test_anything_at_all_is_one_line(self, data: bytes) -> None:
        with _file(data) as name:
            said = called("topo", "--from", name)
        assert said.code in (0, 1)
        assert (said.err.count("\n"), said.out) == (1, "") if said.code else True


@contextlib.contextmanager
def _file(data: bytes) -> Iterator[str]:
    """A file with this in it: one of the kernel's, so that Hypothesis leaves none behind."""
    handle = os.memfd_create("given")
    try:
        os.write(handle, data)
        yield f"/proc/self/fd/{handle}"
    finally:
        os.close(handle)


class TestNeutral:
    """With ``--from``, the process that saved and the process that asks play no part."""

    def test_all_cpus_are_allowed_and_all_gpus_visible(
        self, saved: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
        monkeypatch.setenv("CUDA_DEVICE_ORDER", "bogus")
        with on_one_cpu():
            found = topo("--from", str(saved))
        assert (found["cpus"], found["allowed"], found["visible"]) == (
            "0-255",
            "0-255",
            [*range(8)],
        )
        assert topo("--from", str(saved), "--visible-devices", "1,0")["visible"] == [1, 0]

    def test_notes_say_how_it_was(self, saved: Path) -> None:
        said = called("topo", "--from", str(saved))
        assert said.code == 0
        assert (
            f"gpuaff: note: {saved} was saved by a process allowed 0-9 only; "
            "gpuaff plan --allowed 0-9 plans for it [saved-allowed]\n" in said.err
        )
        assert (
            f"gpuaff: note: {saved} was saved by a process that saw GPU 3,1 only; "
            "--visible-devices '3,1' shows it so [saved-visible]\n" in said.err
        )
        codes = {one["code"] for one in as_json("plan", "--from", str(saved))["warnings"]}
        assert {"saved-allowed", "saved-visible"} <= codes

    def test_who_says_so_needs_no_note(self, saved: Path) -> None:
        words = ("--from", str(saved), "--allowed", "0-9", "--visible-devices", "3,1")
        plan = as_json("plan", *words)
        assert [share["gpu"] for share in plan["ranks"]] == [3, 1]
        assert not [w for w in plan["warnings"] if w["code"].startswith("saved-")]

    @pytest.mark.parametrize(
        ("text", "visible"), [("", []), ("-1", []), ("7,0", [7, 0]), ("0,99,1", [0]), ("0,0", [])]
    )
    @pytest.mark.case("visible-devices")
    def test_visible_devices_is_read_as_the_driver_reads_it(
        self, text: str, visible: list[int]
    ) -> None:
        assert topo("--from", "dgx-a100", f"--visible-devices={text}")["visible"] == visible


@pytest.mark.case("F3")
def test_the_files_of_another_machine(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUAFF_FSROOT: without its driver."""
    monkeypatch.setenv("GPUAFF_FSROOT", str(tree))
    found = topo()
    assert (found["cpus"], found["allowed"], found["gpus"]) == ("0-3", "0-3", [])
    assert found["cores"] == ["0,2", "1,3"]
    shown = called("topo").out
    assert shown.startswith(f"{tree}: 1 socket, 2 cores, 4 CPUs (2 threads per core)")
    assert called("topo", "--from", "dgx-a100").out.startswith("dgx-a100: "), "--from wins"
    monkeypatch.setenv("GPUAFF_FSROOT", str(tree.parent))
    said = f"gpuaff: GPUAFF_FSROOT={tree.parent}: there is no sys/devices/system below it\n"
    assert refused("topo") == said
