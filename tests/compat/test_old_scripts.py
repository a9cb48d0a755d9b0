"""Old scripts as real processes, of which only the line changes that imports gpu_affinity."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.fakedriver.driver import FakeDriver
from tests.processes import CPUS, SRC, Program, masks, stopped

SCRIPTS = Path(__file__).parent / "old_scripts"
NEW = {
    "import gpu_affinity\n": "from gpuaff.compat import gpu_affinity\n",
    "from gpu_affinity import ": "from gpuaff.compat.gpu_affinity import ",
}

pytestmark = [
    pytest.mark.fake_driver,
    pytest.mark.needs("two-cpus"),
    pytest.mark.case("gpu-affinity-rule-5"),
]


def ported(name: str) -> str:
    """An old script with its new import."""
    lines = (SCRIPTS / name).read_text("utf-8").splitlines(keepends=True)
    (old,) = [line for line in lines if "gpu_affinity" in line and "import " in line]
    before, after = next(pair for pair in NEW.items() if pair[0] in old)
    return "".join(line.replace(before, after) if line is old else line for line in lines)


def start(stack: ExitStack, driver: FakeDriver, name: str, **env: str) -> Program:
    """Start an old script on the fake machine."""
    path = f"{SRC}:{SCRIPTS / 'stand_in'}"
    return stack.enter_context(
        stopped(ported(name), env={**driver.env(), "PYTHONPATH": path, **env})
    )


def one_mask(pid: int) -> frozenset[int]:
    """The CPUs of a process, all of whose threads have the same."""
    (mask,) = set(masks(pid).values())
    return mask


def test_one_process_for_each_gpu(driver: FakeDriver) -> None:
    with ExitStack() as stack:
        ranks = [start(stack, driver, "ddp.py", LOCAL_RANK=str(rank)) for rank in (0, 1)]
        said = [rank.heard() for rank in ranks]
        shares = [one_mask(rank.pid) for rank in ranks]
    # It prints as a set does.
    assert said == [f"{rank}: core affinity: {set(share)}" for rank, share in enumerate(shares)]
    assert not shares[0] & shares[1]
    assert len(shares[0]) == len(shares[1])


def test_modes_made_from_words_and_a_caught_error(driver: FakeDriver) -> None:
    """The first CPU of the first core, and that of the second; the third rank has no GPU."""
    with ExitStack() as stack:
        numbers = ("0", "1", "2")
        ranks = [start(stack, driver, "options.py", SLURM_LOCALID=number) for number in numbers]
        said = [rank.heard() for rank in ranks]
        first, second, all_cpus = (sorted(one_mask(rank.pid)) for rank in ranks)
    assert said == [f"{first} 1", f"{second} 1", "none 0"]
    assert first == [CPUS[0]]
    assert second > first
    assert all_cpus == CPUS, "all is as it was"


def test_forked_ranks(driver: FakeDriver) -> None:
    with ExitStack() as stack:
        parent = start(stack, driver, "forks.py")
        first, second = (one_mask(int(pid)) for pid in parent.heard().split())
        assert one_mask(parent.pid) == frozenset(CPUS)
        parent.go_on()
        assert parent.wait(30) == 0
    assert first
    assert second
    assert not first & second
