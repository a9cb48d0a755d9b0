"""Which machine is meant: ``--from``, GPUAFF_FSROOT, ``--allowed``, ``--visible-devices``."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuaff.cli import main
from gpuaff.topology.model import Topology

Runner = Callable[..., "subprocess.CompletedProcess[str]"]

LSCPU = """\
CPU(s):                  4
On-line CPU(s) list:     0-3
NUMA node(s):            1
NUMA node0 CPU(s):       0-3
"""


def run(*args: str) -> tuple[int, str, str]:
    """The command in this process: exit code, standard output, standard error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(args)
    return code, out.getvalue(), err.getvalue()


def topo(*args: str) -> dict[str, Any]:
    code, out, err = run("topo", *args, "--json")
    assert (code, err) == (0, "")
    found: dict[str, Any] = json.loads(out)
    return found


def refused(*args: str) -> str:
    """The one line that says why the command failed."""
    code, out, err = run(*args)
    assert (code, out) == (1, "")
    assert err.startswith("gpuaff: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    return err


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """DGX A100 as a process saved it that has CPUs 0-9 and sees GPUs 3 and 1."""
    file = tmp_path / "saved.json"
    machine = Topology.named("dgx-a100").with_visible_devices("3,1")
    machine.with_allowed(frozenset(range(10))).save(file)
    return file


class TestWhat:
    def test_a_machine_that_ships(self) -> None:
        assert topo("--from", "dgx-a100")["cpus"] == "0-255"

    def test_a_file_wins_over_a_machine(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "dgx-a100").write_text(LSCPU)
        monkeypatch.chdir(tmp_path)
        assert topo("--from", "dgx-a100")["cpus"] == "0-3"

    def test_a_folder_does_not(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "dgx-a100").mkdir()
        monkeypatch.chdir(tmp_path)
        assert topo("--from", "dgx-a100")["cpus"] == "0-255"

    def test_a_saved_file(self, saved: Path) -> None:
        assert topo("--from", str(saved))["cpus"] == "0-255"

    @pytest.mark.parametrize("start", ["", "\n \t", "\ufeff"])
    def test_json_is_known_by_its_content(self, start: str, saved: Path, tmp_path: Path) -> None:
        odd = tmp_path / "no-suffix.txt"
        odd.write_text(start + saved.read_text(), encoding="utf-8")
        assert topo("--from", str(odd))["cpus"] == "0-255"

    def test_a_prompt_is_not_json(self, tmp_path: Path) -> None:
        paste = tmp_path / "paste"
        paste.write_text(f"[me@node01 ~]$ lscpu\n{LSCPU}")
        assert topo("--from", str(paste))["cpus"] == "0-3"

    def test_standard_input(self, gpuaff: Runner, saved: Path) -> None:
        for text, cpus in ((LSCPU, "0-3"), (saved.read_text(), "0-255")):
            done = gpuaff("topo", "--from", "-", "--json", given=text)
            assert (done.returncode, done.stderr) == (0, "")
            assert json.loads(done.stdout)["cpus"] == cpus

    def test_a_pipe_is_read_once(self, gpuaff: Runner, tmp_path: Path) -> None:
        fifo = tmp_path / "fifo"
        os.mkfifo(fifo)
        with subprocess.Popen(["/bin/sh", "-c", f"printf '%s' \"$0\" > {fifo}", LSCPU]):
            assert gpuaff("topo", "--from", str(fifo)).stdout.startswith(f"{fifo}: 4 CPUs")

    def test_what_powershell_writes(self, gpuaff: Runner) -> None:
        done = gpuaff("topo", "--from", "-", given=LSCPU.encode("utf-16"))
        assert done.stdout.startswith("standard input: 4 CPUs")

    def test_underlined_tables_are_text(self, gpuaff: Runner) -> None:
        done = gpuaff("topo", "--from", "-", given=f"\x1b[4mhost\x1b[0m\n{LSCPU}")
        assert done.returncode == 0


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

    def test_a_folder(self, tmp_path: Path) -> None:
        assert "Is a directory; expected a file" in refused("topo", "--from", str(tmp_path))

    def test_binary(self, tmp_path: Path) -> None:
        file = tmp_path / "b"
        file.write_bytes(b"\x7fELF\x00\x01")
        assert refused("topo", "--from", str(file)) == (
            f"gpuaff: {file}: binary; expected a saved JSON or pasted text\n"
        )

    def test_endless(self) -> None:
        assert "/dev/zero: more than 4 MiB" in refused("topo", "--from", "/dev/zero")

    @pytest.mark.skipif(os.geteuid() == 0, reason="not here: root reads everything")
    def test_unreadable(self, tmp_path: Path) -> None:
        file = tmp_path / "secret"
        file.touch(mode=0)
        assert "Permission denied; expected a file" in refused("topo", "--from", str(file))

    def test_failing_while_read(self) -> None:
        assert "Input/output error; expected a file" in refused("topo", "--from", "/proc/self/mem")

    @pytest.mark.parametrize("text", ["", " \n\n"])
    def test_empty(self, text: str, gpuaff: Runner) -> None:
        done = gpuaff("plan", "--from", "-", given=text)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == (
            "gpuaff: standard input: empty; expected a saved JSON or pasted text\n"
        )

    def test_closed_standard_input(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sys.stdin", None)
        assert refused("topo", "--from", "-") == (
            "gpuaff: standard input: empty; expected a saved JSON or pasted text\n"
        )

    def test_a_text_about_something_else(self, tmp_path: Path) -> None:
        file = tmp_path / "letter"
        file.write_text("Dear all,\nwhere are my GPUs?\n")
        assert refused("topo", "--from", str(file)).startswith(f"gpuaff: {file}: ")

    @pytest.mark.parametrize("text", ["[", "[]", "{}", '["a"]', "{]", '{"schema_version": NaN}'])
    def test_json_of_something_else(self, text: str, tmp_path: Path) -> None:
        file = tmp_path / "x.json"
        file.write_text(text)
        assert refused("topo", "--from", str(file)).startswith(f"gpuaff: {file}: ")

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            (
                '{"schema_version": 1, "cpus": "0", "gpus": [], "x": NaN}',
                "NaN is not a JSON number",
            ),
            (
                '{"schema_version": 1, "cpus": "0", "gpus": [], "cpus": "1"}',
                "the key 'cpus' stands twice in one object",
            ),
        ],
    )
    def test_json_is_read_as_strictly_as_by_load(
        self, text: str, problem: str, tmp_path: Path
    ) -> None:
        file = tmp_path / "x.json"
        file.write_text(text)
        assert problem in refused("topo", "--from", str(file))

    def test_json_without_a_bottom(self, tmp_path: Path) -> None:
        file = tmp_path / "deep.json"
        file.write_text('{"a":' * 200_000)
        assert refused("topo", "--from", str(file)).startswith(f"gpuaff: {file}: n")

    @settings(max_examples=30, deadline=None)
    @given(st.data())
    def test_json_cut_anywhere(self, data: st.DataObject) -> None:
        whole = json.dumps(Topology.named("dgx-a100").to_dict())
        cut = whole[: data.draw(st.integers(1, len(whole) - 1))]
        with _file(cut.encode()) as name:
            assert "was it cut?" in refused("topo", "--from", name)

    @settings(max_examples=100, deadline=None)
    @given(
        st.binary(max_size=200) | st.text(max_size=200).map(lambda t: t.encode("utf-8", "replace"))
    )
    def test_anything_at_all_is_one_line(self, data: bytes) -> None:
        with _file(data) as name:
            code, out, err = run("topo", "--from", name)
        assert code in (0, 1)
        assert (err.count("\n"), out) == (1, "") if code else True


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

    def test_all_cpus_are_allowed_and_all_gpus_visible(self, saved: Path) -> None:
        found = topo("--from", str(saved))
        assert found["allowed"] == "0-255"
        assert found["visible"] == list(range(8))

    def test_notes_say_how_it_was(self, saved: Path) -> None:
        code, _, err = run("topo", "--from", str(saved))
        assert code == 0
        assert (
            f"gpuaff: note: {saved} was saved by a process allowed 0-9 only; "
            "gpuaff plan --allowed 0-9 plans for it [saved-allowed]\n" in err
        )
        assert (
            f"gpuaff: note: {saved} was saved by a process that saw GPU 3,1 only; "
            "--visible-devices '3,1' shows it so [saved-visible]\n" in err
        )

    def test_json_has_the_notes_and_standard_error_is_quiet(self, saved: Path) -> None:
        code, out, err = run("plan", "--from", str(saved), "--json")
        assert (code, err) == (0, "")
        codes = [warning["code"] for warning in json.loads(out)["warnings"]]
        assert {"saved-allowed", "saved-visible"} <= set(codes)

    def test_who_says_so_needs_no_note(self, saved: Path) -> None:
        args = ("--from", str(saved), "--allowed", "0-9", "--visible-devices", "3,1", "--json")
        code, out, err = run("plan", *args)
        plan = json.loads(out)
        assert (code, err) == (0, "")
        assert [share["gpu"] for share in plan["ranks"]] == [3, 1]
        assert not [w for w in plan["warnings"] if w["code"].startswith("saved-")]

    def test_the_environment_does_not_count(
        self, saved: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = topo("--from", str(saved))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
        monkeypatch.setenv("CUDA_DEVICE_ORDER", "bogus")
        assert topo("--from", str(saved)) == before
        assert topo("--from", str(saved), "--visible-devices", "1,0")["visible"] == [1, 0]

    def test_the_mask_does_not_count(self, gpuaff: Runner) -> None:
        mask = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(mask)})
        try:
            done = gpuaff("topo", "--from", "dgx-a100", "--json")
        finally:
            os.sched_setaffinity(0, mask)
        assert json.loads(done.stdout)["allowed"] == "0-255"

    @pytest.mark.parametrize(
        ("text", "visible"), [("", []), ("-1", []), ("7,0", [7, 0]), ("0,99,1", [0]), ("0,0", [])]
    )
    @pytest.mark.case("visible-devices")
    def test_visible_devices_is_read_as_the_driver_reads_it(
        self, text: str, visible: list[int]
    ) -> None:
        assert topo("--from", "dgx-a100", f"--visible-devices={text}")["visible"] == visible


class TestTreeOfFiles:
    """GPUAFF_FSROOT: the files of another machine, without its driver."""

    @pytest.mark.case("F3")
    def test_shows_the_cpus(self, tree: Path, gpuaff: Runner) -> None:
        done = gpuaff("topo", "--json", env={"GPUAFF_FSROOT": str(tree)})
        found = json.loads(done.stdout)
        assert (done.returncode, done.stderr) == (0, "")
        assert (found["cpus"], found["allowed"], found["gpus"]) == ("0-3", "0-3", [])
        assert found["cores"] == ["0,2", "1,3"]

    def test_is_called_by_its_path(self, tree: Path, gpuaff: Runner) -> None:
        done = gpuaff("topo", env={"GPUAFF_FSROOT": str(tree)})
        assert done.stdout.startswith(f"{tree}: 1 socket, 2 cores, 4 CPUs (2 threads per core)")

    def test_options_of_the_environment_do_not_count(self, tree: Path, gpuaff: Runner) -> None:
        env = {"GPUAFF_FSROOT": str(tree), "GPUAFF_MODE": "nonsense"}
        done = gpuaff("plan", "--json", "--nproc", "2", env=env)
        plan = json.loads(done.stdout)
        assert plan["mode"] == "unique_contiguous"
        assert [share["cpus"] for share in plan["ranks"]] == ["0-3", "0-3"]

    def test_from_wins(self, tree: Path, gpuaff: Runner) -> None:
        done = gpuaff("topo", "--from", "dgx-a100", env={"GPUAFF_FSROOT": str(tree)})
        assert done.stdout.startswith("dgx-a100: ")

    def test_an_empty_one_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GPUAFF_FSROOT", str(tmp_path))
        line = refused("topo")
        assert line == (
            f"gpuaff: GPUAFF_FSROOT={tmp_path}: there is no sys/devices/system below it\n"
        )


class TestAllowed:
    def test_limits_the_plan(self) -> None:
        code, out, _ = run(
            "plan", "--from", "dgx-a100", "--visible-devices", "0,1", "--allowed", "48-63", "--json"
        )
        assert code == 0
        used = {share["cpus"] for share in json.loads(out)["ranks"]}
        assert used == {"48-55", "56-63"}

    @pytest.mark.case("A18")
    def test_absent_cpus_are_told(self) -> None:
        code, _, err = run("plan", "--from", "dgx-a100", "--allowed", "0-300")
        assert code == 0
        assert (
            "gpuaff: note: --allowed: dgx-a100 has no CPU 256-300 online [allowed-absent]\n" in err
        )

    def test_only_absent_cpus_are_an_error(self) -> None:
        code, out, err = run("plan", "--from", "dgx-a100", "--allowed", "900")
        assert (code, out) == (2, "")
        assert err == ("gpuaff: --allowed='900': expected some of the CPUs of dgx-a100, 0-255\n")

    @pytest.mark.parametrize("text", ["", "x", "3-1", "0-99999999", "1,,2", "0x3"])
    def test_what_is_no_cpulist(self, text: str) -> None:
        code, out, err = run("plan", f"--allowed={text}")
        assert (code, out) == (2, "")
        assert f"argument --allowed: {text!r}: expected a list of CPUs such as 0-3,8" in err


def test_ctrl_c_is_quiet(tmp_path: Path, gpuaff: Runner) -> None:
    """Interrupted while it waits for a paste, it says nothing more: exit code 130."""
    ours, theirs = pty.openpty()
    command = gpuaff("--version").args[:-1]
    child = subprocess.Popen(
        [*command, "topo", "--from", "-"], stdin=theirs, stderr=subprocess.PIPE, text=True
    )
    assert child.stderr is not None
    with child.stderr:
        assert child.stderr.readline() == "gpuaff: paste the text here, then press Ctrl-D\n"
        while child.poll() is None:  # one that comes just before it begins to read ends nothing
            child.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(2)
        assert child.stderr.read() == ""
    assert child.returncode == 130
    os.close(ours)
    os.close(theirs)
