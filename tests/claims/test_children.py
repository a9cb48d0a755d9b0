"""A claim and the processes that its owner starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.claim_lab import BEGIN, Lab, until
from tests.fakedriver.driver import FakeDriver

pytestmark = pytest.mark.fake_driver


def is_free(lab: Lab, gpu: int) -> bool:
    """Whether somebody else could claim a GPU now."""
    code = f"""
    try:
        say(gpuaff.claim_gpus(gpus=[{gpu}], placeholder=None) is None)
    except GpusBusyError as error:
        say(repr(error))
    """
    return lab.one(code) == "False"


FORK = """
claim = gpuaff.claim_gpus(gpus=[1], placeholder=None)
child = os.fork()
if child == 0:
    mine = gpuaff.current_claim()
    say(mine, mine.is_inherited, mine.is_released)
    for line in iter(go_on, ''):
        if line == "release\\n":
            mine.release()
            mine.release()
            say(mine, mine.fds, gpuaff.current_claim())
        else:
            break
    os._exit(0)
say(child)
"""


class TestFork:
    def test_a_child_shares_it(self, lab: Lab) -> None:
        """The GPU stays claimed when its owner is killed, until the child has ended as well."""
        program = lab.start(FORK + "time.sleep(60)")
        said = {program.heard(), program.heard()}
        assert "<inherited Claim of GPU 1> True False" in said
        assert not is_free(lab, 1)
        program.kill()
        assert not is_free(lab, 1)
        program.go_on("end")
        until(lambda: is_free(lab, 1))

    def test_a_child_gives_back_its_own_part_only(self, lab: Lab) -> None:
        program = lab.start(FORK + "os.waitpid(child, 0); say('alone'); time.sleep(60)")
        program.heard()
        program.heard()
        program.go_on("release")
        assert program.heard() == "<released Claim of GPU 1> () None"
        assert not is_free(lab, 1)
        program.kill()
        assert is_free(lab, 1)

    def test_its_owner_gives_it_back_for_all(self, lab: Lab) -> None:
        program = lab.start(FORK + "claim.release(); say('released'); os.waitpid(child, 0)")
        said = {program.heard(), program.heard(), program.heard()}
        assert "released" in said
        assert is_free(lab, 1)
        program.go_on("end")
        program.end()

    def test_a_child_of_one_that_has_a_context(self, lab: Lab) -> None:
        """CUDA cannot be used in it: that is said, and nothing is left behind."""
        code = """
        claim = gpuaff.claim_gpus()
        child = os.fork()
        if child == 0:
            told(refused(1))
            os._exit(0)
        os.waitpid(child, 0)
        """
        said = lab.one(code)
        assert said.startswith(
            "PlaceholderError placeholder='context': CUDA does not start: cuInit"
        )
        assert "forked from one that had initialised CUDA" in said
        assert "set_start_method('spawn')" in said
        assert "placeholder=None" in said

    def test_a_daemon_that_claims_for_itself(self, lab: Lab) -> None:
        """It has closed all it had, and its own descriptors have the numbers of those."""
        code = """
        claim = gpuaff.claim_gpus(gpus=[1, 3], placeholder=None)
        child = os.fork()
        if child == 0:
            os.closerange(3, 4096)
            own = gpuaff.claim_gpus(1, placeholder=None)
            numbers = {*claim.fds} & {*own.fds}
            claim.release()
            for fd in own.fds:
                os.fstat(fd)
            say(bool(numbers), own)
            os._exit(0)
        os.waitpid(child, 0)
        """
        assert lab.one(code) == "True <Claim of GPU 1>"


class TestPrograms:
    PROGRAM = """
    import subprocess
    claim = gpuaff.claim_gpus(gpus=[2], placeholder=None)
    quiet = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", quiet], pass_fds=%s)
    time.sleep(60)
    """

    @pytest.mark.parametrize(("handles", "stays"), [("claim.fds", True), ("()", False)])
    def test_a_program_keeps_it_where_it_was_given_the_descriptors(
        self, lab: Lab, handles: str, stays: bool
    ) -> None:
        program = lab.start(self.PROGRAM % handles)
        assert program.heard() == "2"
        program.kill()
        assert is_free(lab, 2) is not stays
        program.end_of_input()
        until(lambda: is_free(lab, 2))

    def test_the_process_becomes_the_command(self, lab: Lab) -> None:
        program = lab.start("""
            claim = gpuaff.claim_gpus(gpus=[2], placeholder=None)
            for handle in claim.fds:
                os.set_inheritable(handle, True)
            os.execvp("sh", ["sh", "-c", "exec 3>/dev/null; echo $CUDA_VISIBLE_DEVICES $$; read x"])
            """)
        assert program.heard() == f"2 {program.pid}"
        assert not is_free(lab, 2)
        assert f"pid {program.pid}" in lab.refused("4")
        program.kill()
        assert is_free(lab, 2)

    @pytest.mark.case("E2")
    @pytest.mark.parametrize("mode", [0, 3])
    def test_a_parent_claims_for_ranks_that_it_starts(self, lab: Lab, mode: int) -> None:
        """It has no context, so they may: also where a GPU lets one process in."""
        for gpu in range(4):
            lab.driver.set_compute_mode(gpu, mode)
        code = """
        claim = gpuaff.claim_gpus(2, placeholder=None)
        children = []
        for rank in range(2):
            child = os.fork()
            if child == 0:
                from contextlib import ExitStack
                from gpuaff._system import cuda
                cuda.start()
                cuda.retain(rank, ExitStack())
                mine = gpuaff.current_claim()
                say(rank, mine.gpus[rank].index, len(cuda.uuids()))
                go_on()
                os._exit(0)
            children.append(child)
        [os.waitpid(child, 0) for child in children]
        """
        program = lab.start(code)
        assert {program.heard(), program.heard()} == {"0 0 2", "1 1 2"}
        assert lab.used() == [0, 1]
        assert lab.driver.double_holdings() == []


SCRIPT = f"""
import multiprocessing
{BEGIN}
def work(number):
    import gpuaff
    mine = gpuaff.current_claim()
    nested = gpuaff.claim_gpus(placeholder=None)
    found = (os.environ["CUDA_VISIBLE_DEVICES"], mine is not None, len(nested.gpus))
    nested.release()
    return found

if __name__ == "__main__":
    claim = gpuaff.claim_gpus(2, placeholder=None)
    with multiprocessing.get_context(sys.argv[1]).Pool(1) as pool:
        say(pool.map(work, [0])[0])
    say(claim.is_released)
"""

UNGUARDED = """
import multiprocessing, sys
import gpuaff
claim = gpuaff.claim_gpus(placeholder=None)

def lasts(begun, end):
    begun.set()
    end.wait()

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    begun, end = context.Event(), context.Event()
    first = context.Process(target=lasts, args=(begun, end))
    first.start()  # it claims the claim's only GPU once more
    begun.wait()
    second = context.Process(target=print)
    second.start()
    second.join()
    end.set()
    first.join()
    print(first.exitcode, second.exitcode)
"""


@pytest.mark.slow
class TestMultiprocessing:
    def run(
        self, driver: FakeDriver, folder: Path, script: str, method: str
    ) -> subprocess.CompletedProcess[str]:
        path = folder / "script.py"
        path.write_text(script)
        env = {"GPUAFF_LOCK_DIR": f"{folder}/locks", "GPUAFF_SAFE_GPU": "off"}
        return driver.run([sys.executable, str(path), method], env=env, timeout=100)

    @pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
    def test_a_pool(self, driver: FakeDriver, tmp_path: Path, method: str) -> None:
        said = self.run(driver, tmp_path, SCRIPT, method).stdout.splitlines()
        assert said == [f"('0', {method == 'fork'}, 1)", "False"]

    @pytest.mark.parametrize("method", ["spawn", "forkserver"])
    def test_a_script_that_is_imported_again(
        self, driver: FakeDriver, tmp_path: Path, method: str
    ) -> None:
        """It claims at its top, unguarded, and so once more in each child."""
        done = self.run(driver, tmp_path, UNGUARDED, method)
        assert done.stdout == "0 1\n"
        assert "GpusBusyError" in done.stderr
        assert 'put claim_gpus under `if __name__ == "__main__":` [imported-again]' in done.stderr
