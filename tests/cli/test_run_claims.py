"""What ``gpuaff run`` claims: real commands on the fake driver's two GPUs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpuaff.cpuset import format_cpulist
from tests import environments, pci_devices
from tests.fakedriver.driver import FakeDriver
from tests.processes import CPUS, as_text, command_line, environment

pytestmark = pytest.mark.fake_driver

RUN = (sys.executable, "-m", "gpuaff", "run")
HOLD = ("sh", "-c", "echo $CUDA_VISIBLE_DEVICES; read x")
"""A command that tells its GPUs, and has them until its standard input ends."""


class Machine:
    """Two GPUs, and nobody on them."""

    def __init__(self, driver: FakeDriver, folder: Path) -> None:
        self.driver = driver
        self.variables = {
            **driver.env(),
            "GPUAFF_LOCK_DIR": str(folder / "locks"),
            "GPUAFF_SAFE_GPU": "off",
        }

    def run(
        self, *words: str, env: Mapping[str, str] | None = None, prefix: Sequence[str] = ()
    ) -> subprocess.CompletedProcess[str]:
        """Run it to its end."""
        variables = environment({**self.variables, **(env or {})})
        if not prefix:
            return as_text(command_line("run", *words, env=variables))
        return subprocess.run(
            [*prefix, *RUN, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=variables,
            check=False,
        )

    @contextmanager
    def running(
        self, *words: str, env: Mapping[str, str] | None = None, prefix: Sequence[str] = ()
    ) -> Iterator[subprocess.Popen[str]]:
        """Start it, and kill it at the end."""
        with subprocess.Popen(
            [*prefix, *RUN, "--no-pin", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment({**self.variables, **(env or {})}),
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    def all_are_free(self) -> bool:
        """Whether both can be had at once."""
        done = self.run("-n", "2", "--no-pin", "--", "true")
        assert done.returncode in (0, 75), done.stderr
        return done.returncode == 0


@pytest.fixture
def machine(driver: FakeDriver, tmp_path: Path) -> Machine:
    return Machine(driver, tmp_path)


def heard(process: subprocess.Popen[str]) -> str:
    """The next line that a command prints."""
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        assert process.stderr is not None
        raise AssertionError(f"it ended: {process.stderr.read()}")
    return line


def tell(process: subprocess.Popen[str], line: str) -> None:
    """Give a shell its next line."""
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def said(process: subprocess.Popen[str]) -> str:
    """The next line that is said on its standard error."""
    assert process.stderr is not None
    return process.stderr.readline().strip()


def told(done: subprocess.CompletedProcess[str]) -> str:
    """The line in which a failure is told, and the indented ones below it."""
    assert done.stdout == ""
    first, *below = done.stderr.splitlines()
    assert first.startswith("gpuaff: ")
    assert all(line.startswith("  ") for line in below)
    return " | ".join([first, *map(str.strip, below)])


class TestClaims:
    def test_each_gets_its_own(self, machine: Machine) -> None:
        with machine.running("--", *HOLD) as first, machine.running("--", *HOLD) as second:
            assert {heard(first), heard(second)} == {"0", "1"}
            third = machine.run("--", "true")
            assert third.returncode == 75
            assert f"(pid {first.pid})" in told(third)

    @pytest.mark.parametrize("which", [("--gpus", "1"), ("-n", "1")])
    def test_beside_a_lost_gpu_the_command_is_shown_a_uuid(
        self, machine: Machine, which: tuple[str, str]
    ) -> None:
        machine.driver.lose_gpu(0)
        with machine.running(*which, "--", *HOLD) as one:
            assert heard(one) == "GPU-00000000-0000-4000-8000-000000000001"
            assert "GPU 0 is left out: its handle: GPU is lost" in said(one)

    def test_a_lost_gpu_asked_for_by_its_index(self, machine: Machine) -> None:
        machine.driver.lose_gpu(0)
        done = machine.run("--gpus", "0", "--wait", "--", "true")
        assert done.returncode == 4
        assert "GPU 0 is left out: its handle: GPU is lost" in told(done)

    def test_the_claim_is_the_commands_and_ends_with_it(self, machine: Machine) -> None:
        with machine.running("-n", "2", "--", *HOLD) as one:
            assert heard(one) == "0,1"
            assert not machine.all_are_free()
            one.kill()
            one.wait()
            assert machine.all_are_free()

    def test_children_that_stay_keep_it(self, machine: Machine) -> None:
        script = "sleep 60 >/dev/null 2>&1 </dev/null & echo $!"
        with machine.running("-n", "2", "--", "sh", "-c", script) as one:
            child = int(heard(one))
            assert one.wait() == 0
            assert not machine.all_are_free()
            os.kill(child, signal.SIGKILL)
            end = time.monotonic() + 10
            while not machine.all_are_free():  # until the kernel has closed its files
                assert time.monotonic() < end

    def test_no_context_is_made(self, machine: Machine) -> None:
        with machine.running("--", *HOLD) as one:
            heard(one)
            assert machine.driver.state.process_count == 0

    @pytest.mark.parametrize("words", [["--gpus", "1,0"], ["--gpus=1", "--wait", "0"]])
    def test_exactly_these(self, words: list[str], machine: Machine) -> None:
        done = machine.run(*words, "--no-pin", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.strip() == words[0].removeprefix("--gpus=").replace("--gpus", "1,0")

    def test_some_of_these(self, machine: Machine) -> None:
        words = ("--candidates", "1", "--no-pin", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
        assert machine.run(*words).stdout.strip() == "1"

    def test_a_command_that_cannot_start_holds_nothing(
        self, machine: Machine, tmp_path: Path
    ) -> None:
        orphan = tmp_path / "orphan"
        orphan.write_text("#!/no/such/interpreter\n")
        orphan.chmod(0o755)
        done = machine.run("-n", "2", "--no-pin", "--", str(orphan))
        assert done.returncode == 127
        assert "interpreter" in told(done)
        assert machine.all_are_free()


class TestFailures:
    def test_no_driver(self, machine: Machine) -> None:
        machine.driver.refuse(9)
        done = machine.run("--", "true")
        assert done.returncode == 3
        assert "kernel module" in told(done)

    def test_not_enough(self, machine: Machine) -> None:
        for words in (["-n", "3"], ["-n", "3", "--wait"], ["--candidates", "0", "-n", "2"]):
            done = machine.run(*words, "--", "true")
            assert done.returncode == 4, words
            told(done)

    def test_not_enough_is_told_as_it_was_spelled(self, machine: Machine) -> None:
        done = machine.run("--candidates", "0", "-n", "2", "--", "true")
        assert told(done) == "gpuaff: requested 2 GPUs; --candidates names 1"
        machine.driver.state.gpus[0].uuid = b"x"
        done = machine.run("--gpus", "0", "--dry-run", "--", "true")
        assert "GPU 0 is left out: its UUID, 'x', is invalid" in told(done)

    @pytest.mark.parametrize(
        ("words", "option"),
        [
            (["--gpus", "7"], "--gpus="),
            (["--candidates", "GPU-nosuch"], "--candidates="),
            (["--gpus", "0", "--candidates", "1"], "--candidates="),
            (["-n", "auto"], "-n="),
            (["-n", "5000"], "-n="),
        ],
    )
    def test_wrong_use_is_told_as_it_was_spelled(
        self, words: list[str], option: str, machine: Machine
    ) -> None:
        done = machine.run(*words, "--", "true")
        assert done.returncode == 2
        assert told(done).startswith(f"gpuaff: {option}")

    def test_others_compute(self, machine: Machine) -> None:
        with subprocess.Popen(["sleep", "60"]) as stranger:
            machine.driver.use(1, stranger.pid)
            done = machine.run("-n", "2", "--", "true")
            stranger.kill()
        assert done.returncode == 75
        assert told(done).startswith(
            "gpuaff: requested 2 GPUs; only 1 is free"
            " | to queue: --wait 10m (at most ten minutes) or --wait (no limit)"
            f" | GPU 1: in use by sleep 60 (pid {stranger.pid})"
        )

    def test_few_candidates(self, machine: Machine) -> None:
        with subprocess.Popen(["sleep", "60"]) as stranger:
            machine.driver.use(1, stranger.pid)
            done = machine.run("--candidates", "1", "--", "true")
            late = machine.run("--candidates", "1", "--wait", "0.01", "--", "true")
            stranger.kill()
        few = "; --candidates allows 1 GPU of the 2 here"
        assert f"{few} | to queue: --wait 10m" in told(done)
        assert f"{few}\n  GPU 1: " in late.stderr, "what has been tried is not advised"

    def test_a_lock_directory_that_cannot_be(self, machine: Machine, tmp_path: Path) -> None:
        (tmp_path / "locks").write_text("a file\n")
        done = machine.run("--", "true")
        assert done.returncode == 1
        assert str(tmp_path / "locks") in told(done)


class TestWaits:
    def test_until_it_is_free(self, machine: Machine) -> None:
        with machine.running("-n", "2", "--", *HOLD) as first:
            heard(first)
            with machine.running("--wait", "--", "sh", "-c", "echo $$") as second:
                line = said(second)
                assert line.startswith(
                    "gpuaff: waiting for 1 GPU, next in line, none free; GPU 0: "
                )
                assert f"(pid {first.pid})" in line
                first.kill()
                assert heard(second) == str(second.pid)
                assert second.wait() == 0

    def test_not_for_ever(self, machine: Machine) -> None:
        with machine.running("-n", "2", "--", *HOLD) as first:
            heard(first)
            done = machine.run("--wait", "0.3", "--", "true")
        assert done.returncode == 75
        assert any(line.startswith("gpuaff: waited 0.") for line in done.stderr.splitlines())

    def test_ctrl_c_leaves_nothing(self, machine: Machine) -> None:
        with machine.running("-n", "1", "--", *HOLD) as first:
            heard(first)
            with machine.running("-n", "2", "--wait", "--", "true") as second:
                said(second)
                second.send_signal(signal.SIGINT)
                assert second.wait() == 130
                assert second.stderr is not None
                assert second.stderr.read() == ""
            done = machine.run("-n", "1", "--no-pin", "--", "echo", "has it")
            assert done.stdout == "has it\n", "nobody waits before us any more"


class TestInsideOfALauncher:
    def ranks(self) -> list[dict[str, str]]:
        return [dict(rank.environ) for rank in environments.started("torchrun", "torchrun")]

    def test_each_rank_claims_its_own(self, machine: Machine) -> None:
        first, second = self.ranks()
        words = ("--per-rank", "-n", "1", "--", *HOLD)
        with machine.running(*words, env=first) as one, machine.running(*words, env=second) as two:
            assert {heard(one), heard(two)} == {"0", "1"}

    def test_a_rank_that_claims_beside_a_lost_gpu(self, machine: Machine) -> None:
        machine.driver.lose_gpu(0)
        words = ("--per-rank", "-n", "1", "--", *HOLD)
        with machine.running(*words, env=self.ranks()[0]) as one:
            assert heard(one) == "GPU-00000000-0000-4000-8000-000000000001"

    def test_ranks_claim_from_the_claim_around_them(self, machine: Machine) -> None:
        """The outer claim is of GPU 1 alone, so the second rank finds nothing, though 0 is free."""
        rank = " ".join(f"{key}={value}" for key, value in self.ranks()[0].items())
        inner = f"env {rank} {' '.join(RUN)} --no-pin --per-rank --"
        with machine.running("--gpus", "1", "--", "sh") as outer:
            tell(outer, f"{inner} sh -c 'echo $CUDA_VISIBLE_DEVICES; exec sleep 60' &")
            assert heard(outer) == "1"
            tell(outer, f"{inner} true; echo $?; kill $!")
            assert heard(outer) == "75"
            assert said(outer).startswith("gpuaff: requested 1 GPU; none is free; the claim in ")
            assert said(outer).startswith("to queue: ")
            assert said(outer).startswith("GPU 1: claimed inside this claim by")

    def test_a_rank_below_a_claim_is_pinned_and_claims_nothing(self, machine: Machine) -> None:
        rank = " ".join(f"{key}={value}" for key, value in self.ranks()[1].items())
        script = f"env {rank} {' '.join(RUN)} -- sh -c 'echo $CUDA_VISIBLE_DEVICES'"
        done = machine.run("-n", "2", "--no-pin", "--", "sh", "-c", script)
        assert done.stdout.split() == ["0,1"], done.stderr


@pytest.mark.needs("two-cpus", "mount-namespaces")
class TestPins:
    """Each GPU has half of this machine's CPUs as its border."""

    MASK = (sys.executable, "-c", "import os; print(*sorted(os.sched_getaffinity(0)))")

    def test_to_the_borders_of_its_gpus(self, machine: Machine, tmp_path: Path) -> None:
        prefix = pci_devices.gpus(tmp_path / "pci", 2)
        masks = []
        for gpus in ("0", "1", "0,1"):
            done = machine.run("--gpus", gpus, "--", *self.MASK, prefix=prefix)
            assert (done.returncode, done.stderr) == (0, "")
            masks.append(set(map(int, done.stdout.split())))
        assert masks[0] & masks[1] == set()
        assert masks[0] | masks[1] == masks[2] == set(CPUS)

    @pytest.mark.case("B13", "B14")
    def test_two_that_each_think_that_they_are_alone(
        self, machine: Machine, tmp_path: Path
    ) -> None:
        """Two engines, each rank 0 of 1 to itself, on GPUs that are near the same CPUs."""
        prefix = pci_devices.gpus(tmp_path / "pci", 2)
        engine = (
            "import os, sys, gpuaff; gpuaff.set_affinity(0, 1); "
            "print(*sorted(os.sched_getaffinity(0)), flush=True); sys.stdin.read()"
        )
        words = ("-n", "1", "--", sys.executable, "-c", engine)
        with (
            machine.running(*words, prefix=prefix) as one,
            machine.running(*words, prefix=prefix) as two,
        ):
            masks = [set(map(int, heard(process).split())) for process in (one, two)]
        assert masks[0] & masks[1] == set()
        assert masks[0] | masks[1] == set(CPUS)

    @pytest.mark.parametrize("how", [("--no-pin", {}), ("--wait=0", {"GPUAFF": "off"})])
    def test_not(self, how: tuple[str, dict[str, str]], machine: Machine, tmp_path: Path) -> None:
        word, env = how
        prefix = pci_devices.gpus(tmp_path / "pci", 2)
        done = machine.run(word, "--", *self.MASK, env=env, prefix=prefix)
        assert (done.returncode, done.stderr) == (0, "")
        assert set(map(int, done.stdout.split())) == set(CPUS)

    def test_a_border_that_cannot_be_had_is_said(self, machine: Machine) -> None:
        done = machine.run("--", "true")
        assert done.returncode == 0
        assert done.stderr.startswith("gpuaff: a claim keeps to the domains of its GPUs, but ")


class TestDryRun:
    def test_tells_what_a_real_call_would_do(self, machine: Machine, tmp_path: Path) -> None:
        prefix = pci_devices.gpus(tmp_path / "pci", 2) if pci_devices.available() else []
        machine.driver.set_memory_used(0, 5 << 30)
        words = ("--", *TestPins.MASK)
        dry = machine.run("--dry-run", *words, prefix=prefix)
        real = machine.run(*words, prefix=prefix)
        assert (dry.returncode, dry.stderr) == (0, real.stderr)
        claim, pin, run = dry.stdout.splitlines()
        assert claim.startswith("would claim  GPU 1 (GPU-")
        if prefix and len(CPUS) > 1:
            cpus = format_cpulist(map(int, real.stdout.split()))
            assert pin == f"would pin    to CPUs {cpus}"
        assert run == f"would run    {sys.executable} -c '{TestPins.MASK[2]}'"

    def test_takes_nothing_and_starts_nothing(self, machine: Machine, tmp_path: Path) -> None:
        mark = tmp_path / "mark"
        done = machine.run("-n", "2", "--dry-run", "--no-pin", "--", "touch", str(mark))
        assert done.returncode == 0
        assert done.stdout.splitlines()[1] == "would pin    nothing"
        assert not mark.exists()
        assert not (tmp_path / "locks").exists()

    def test_fails_as_a_real_call_would(self, machine: Machine) -> None:
        with machine.running("--gpus", "0", "--", *HOLD) as one:
            heard(one)
            for words in (["-n", "2"], ["-n", "2", "--wait"], ["--gpus", "0"]):
                done = machine.run(*words, "--dry-run", "--", "true")
                assert done.returncode == 75, words
                assert f"(pid {one.pid})" in told(done)
            for words, code in ((["-n", "3"], 4), (["--gpus", "9"], 2)):
                assert machine.run(*words, "--dry-run", "--", "true").returncode == code
            assert machine.run("--dry-run", "--", "nosuch").returncode == 127
            machine.driver.refuse(9)
            assert machine.run("--dry-run", "--", "true").returncode == 3

    def test_somebody_waits_before_us(self, machine: Machine) -> None:
        with machine.running("--gpus", "0", "--", *HOLD) as one:
            heard(one)
            with machine.running("-n", "2", "--wait", "--", "true") as two:
                said(two)
                done = machine.run("--dry-run", "--", "true")
        assert done.returncode == 75
        assert "kept for" in told(done)

    def test_a_rank(self, machine: Machine) -> None:
        rank = dict(environments.started("torchrun", "torchrun")[1].environ)
        done = machine.run("--dry-run", "--", "true", env=rank)
        assert done.returncode == 0
        claim, pin, _ = done.stdout.splitlines()
        assert claim == "would claim  nothing"
        assert pin.startswith("would pin    to CPUs ")
