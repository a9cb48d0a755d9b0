"""What ``gpuaff run`` claims: real commands on the fake driver's two GPUs."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from gpuaff.cpuset import format_cpulist
from tests import environments, pci_devices
from tests.cli.machine import HOLD, RUN, Machine, heard, said, told
from tests.fakedriver.driver import FakeDriver
from tests.processes import CPUS

pytestmark = pytest.mark.fake_driver

ECHO = ("--no-pin", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
MASK = (sys.executable, "-c", "import os; print(*sorted(os.sched_getaffinity(0)))")
LOST = "GPU 0 is left out: its handle: GPU is lost"
RANKS = [dict(rank.environ) for rank in environments.started("torchrun", "torchrun")]


@pytest.fixture
def machine(driver: FakeDriver, tmp_path: Path) -> Machine:
    return Machine(driver, tmp_path)


class TestClaims:
    def test_each_gets_its_own(self, machine: Machine) -> None:
        with machine.running("--", *HOLD) as first, machine.running("--", *HOLD) as second:
            assert {heard(first), heard(second)} == {"0", "1"}
            third = machine.run("--", "true")
            assert third.returncode == 75
            assert f"(pid {first.pid})" in told(third)

    def test_beside_a_lost_gpu_the_command_is_shown_a_uuid(self, machine: Machine) -> None:
        machine.driver.lose_gpu(0)
        for which in (("--gpus", "1"), ("-n", "1")):
            done = machine.run(*which, *ECHO)
            assert done.stdout == "GPU-00000000-0000-4000-8000-000000000001\n"
            assert LOST in done.stderr
        done = machine.run("--gpus", "0", "--wait", "--", "true")
        assert done.returncode == 4
        assert LOST in told(done)

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

    @pytest.mark.parametrize(
        ("words", "gpus"),
        [("--gpus 1,0", "1,0"), ("--gpus=1 --wait 0", "1"), ("--candidates 1", "1")],
    )
    def test_these(self, words: str, gpus: str, machine: Machine) -> None:
        done = machine.run(*words.split(), *ECHO)
        assert (done.returncode, done.stdout, done.stderr) == (0, f"{gpus}\n", "")

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


INVALID = ["--gpus=7", "--candidates=GPU-nosuch", "-n=auto", "-n=5000"]


class TestFailures:
    def test_no_driver(self, machine: Machine) -> None:
        machine.driver.refuse(9)
        done = machine.run("--", "true")
        assert done.returncode == 3
        assert "kernel module" in told(done)

    def test_not_enough(self, machine: Machine) -> None:
        for words in ("-n 3", "-n 3 --wait", "--candidates 0 -n 2"):
            done = machine.run(*words.split(), "--", "true")
            assert done.returncode == 4, words
            told(done)
        assert told(done) == "gpuaff: requested 2 GPUs; --candidates names 1"
        machine.driver.state.gpus[0].uuid = b"x"
        done = machine.run("--gpus", "0", "--dry-run", "--", "true")
        assert "GPU 0 is left out: its UUID, 'x', is invalid" in told(done)

    @pytest.mark.parametrize("words", [*INVALID, "--candidates=1 --gpus=0"])
    def test_wrong_use_is_told_as_it_was_spelled(self, words: str, machine: Machine) -> None:
        done = machine.run(*words.replace("n=", "n").split(), "--", "true")
        assert done.returncode == 2
        assert told(done).startswith(f"gpuaff: {words.split('=')[0]}=")

    def test_others_compute(self, machine: Machine) -> None:
        with machine.used(1) as pid:
            done = machine.run("-n", "2", "--", "true")
            few = machine.run("--candidates", "1", "--", "true")
            late = machine.run("--candidates", "1", "--wait", "0.01", "--", "true")
        queue = "to queue: --wait 10m (at most ten minutes) or --wait (no limit)"
        assert done.returncode == 75
        assert told(done).startswith(
            f"gpuaff: requested 2 GPUs; only 1 is free | {queue}"
            f" | GPU 1: in use by sleep 60 (pid {pid})"
        )
        allowed = "; --candidates allows 1 GPU of the 2 here"
        assert f"{allowed} | {queue}" in told(few)
        assert f"{allowed}\n  GPU 1: " in late.stderr, "what has been tried is not advised"
        assert (late.returncode, "gpuaff: waited 0." in late.stderr) == (75, True)

    def test_a_lock_directory_that_cannot_be(self, machine: Machine) -> None:
        machine.locks.write_text("a file\n")
        done = machine.run("--", "true")
        assert done.returncode == 1
        assert str(machine.locks) in told(done)


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
    def test_each_rank_claims_its_own(self, machine: Machine) -> None:
        words = ("--per-rank", "-n", "1", "--", *HOLD)
        first, second = (machine.running(*words, env=rank) for rank in RANKS)
        with first as one, second as two:
            assert {heard(one), heard(two)} == {"0", "1"}
        machine.driver.lose_gpu(0)
        with machine.running(*words, env=RANKS[0]) as one:
            assert heard(one) == "GPU-00000000-0000-4000-8000-000000000001"

    def test_ranks_claim_from_the_claim_around_them(self, machine: Machine) -> None:
        """The outer claim is of GPU 1 alone, so the second rank finds nothing, though 0 is free."""
        rank = " ".join(f"{key}={value}" for key, value in RANKS[0].items())
        inner = f"env {rank} {' '.join(RUN)} --no-pin --per-rank --"
        with machine.running("--gpus", "1", "--", "sh") as outer:
            assert outer.stdin is not None
            hold = "echo $CUDA_VISIBLE_DEVICES; exec sleep 60"
            print(f"{inner} sh -c '{hold}' &", file=outer.stdin, flush=True)
            assert heard(outer) == "1"
            print(f"{inner} true; echo $?; kill $!", file=outer.stdin, flush=True)
            assert heard(outer) == "75"
            assert said(outer).startswith("gpuaff: requested 1 GPU; none is free; the claim in ")
            assert said(outer).startswith("to queue: ")
            assert said(outer).startswith("GPU 1: claimed inside this claim by")

    def test_a_rank_below_a_claim_is_pinned_and_claims_nothing(self, machine: Machine) -> None:
        rank = " ".join(f"{key}={value}" for key, value in RANKS[1].items())
        script = f"env {rank} {' '.join(RUN)} -- sh -c 'echo $CUDA_VISIBLE_DEVICES'"
        done = machine.run("-n", "2", "--no-pin", "--", "sh", "-c", script)
        assert done.stdout.split() == ["0,1"], done.stderr


@pytest.mark.needs("two-cpus", "mount-namespaces")
class TestPins:
    """Each GPU has half of this machine's CPUs as its border."""

    def test_to_the_borders_of_its_gpus(self, machine: Machine, tmp_path: Path) -> None:
        prefix = pci_devices.gpus(tmp_path / "pci", 2)
        masks = []
        for gpus in ("0", "1", "0,1"):
            done = machine.run("--gpus", gpus, "--", *MASK, prefix=prefix)
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

    def test_a_border_that_cannot_be_had_is_said(self, machine: Machine) -> None:
        done = machine.run("--", "true")
        assert done.returncode == 0
        assert done.stderr.startswith("gpuaff: a claim keeps to the domains of its GPUs, but ")


class TestDryRun:
    def test_tells_what_a_real_call_would_do(self, machine: Machine, tmp_path: Path) -> None:
        prefix = pci_devices.gpus(tmp_path / "pci", 2) if pci_devices.available() else []
        machine.driver.set_memory_used(0, 5 << 30)
        words = ("--", *MASK)
        dry = machine.run("--dry-run", *words, prefix=prefix)
        real = machine.run(*words, prefix=prefix)
        assert (dry.returncode, dry.stderr) == (0, real.stderr)
        claim, pin, run = dry.stdout.splitlines()
        assert claim.startswith("would claim  GPU 1 (GPU-")
        if prefix and len(CPUS) > 1:
            cpus = format_cpulist(map(int, real.stdout.split()))
            assert pin == f"would pin    to CPUs {cpus}"
        assert run == f"would run    {sys.executable} -c '{MASK[2]}'"

    def test_takes_nothing_and_starts_nothing(self, machine: Machine, tmp_path: Path) -> None:
        words = ("--dry-run", "--no-pin", "--", "touch", str(tmp_path / "mark"))
        done = machine.run("-n", "2", *words)
        assert done.stdout.splitlines()[1] == "would pin    nothing"
        assert not (tmp_path / "mark").exists()
        assert not machine.locks.exists()

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

    def test_a_rank(self, machine: Machine) -> None:
        rank = dict(environments.started("torchrun", "torchrun")[1].environ)
        done = machine.run("--dry-run", "--", "true", env=rank)
        assert done.returncode == 0
        claim, pin, _ = done.stdout.splitlines()
        assert claim == "would claim  nothing"
        assert pin.startswith("would pin    to CPUs ")
