"""A script that pins itself at its top, unguarded: spawned children import it again (case C10).

Python's default is a fork server from 3.14 on, so that happens to scripts that never asked for it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from fakedriver.driver import FakeDriver
from processes import CPUS

pytestmark = [pytest.mark.fake_driver, pytest.mark.needs("two-cpus")]

SCRIPT = """
import json, multiprocessing, os, sys
import gpuaff

affinity = gpuaff.set_affinity({numbers})
there = sorted(os.sched_getaffinity(0))

def work(_):
    before = gpuaff.check().expected
    gpuaff.set_affinity(0, 1)  # a call of the child's own work is a call
    own = gpuaff.check().expected
    return there, sorted(affinity), affinity.pinned, affinity.rank, before, sorted(own)

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    if sys.argv[2:]:  # the default since 3.14
        context.set_forkserver_preload(["__main__"])
    with context.Pool(1) as pool:
        print(json.dumps([[there, affinity.pinned, affinity.rank], pool.map(work, [0])[0]]))
"""

METHODS = [["spawn"], ["forkserver"], ["forkserver", "preload"]]


@pytest.mark.parametrize("method", METHODS, ids=" ".join)
@pytest.mark.parametrize("numbers", ["1, 2", ""])
def test_the_child_keeps_what_it_has_inherited(
    driver: FakeDriver, tmp_path: Path, method: list[str], numbers: str
) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(numbers=numbers))
    env = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    done = driver.run([sys.executable, str(path), *method], env=env, timeout=60)
    (share, *parents), (there, told, *childs, before, own) = json.loads(done.stdout)
    assert parents == [True, 1]
    assert set(share) < set(CPUS), "a part of the machine"
    assert there == told == share
    assert childs == [False, 1], "nothing was set in the child"
    assert before is None
    assert set(own) <= set(share)
    assert "too-few-cores" not in done.stderr, "nobody planned again inside the share"


DROP_INS = """
import multiprocessing, os, sys
from gpuaff.compat import gpu_affinity, safe_gpu

safe_gpu.claim_gpus(1, placeholder_fn=lambda number: None)
cpus = gpu_affinity.set_affinity(0, 1)

def work(_):
    return os.environ["CUDA_VISIBLE_DEVICES"], safe_gpu.gpu_owner.devices_taken, cpus

if __name__ == "__main__":
    with multiprocessing.get_context(sys.argv[1]).Pool(1) as pool:
        print(*pool.map(work, [0])[0], sep=";")
        print(*work(0), sep=";")
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_drop_ins_in_a_claim(
    driver: FakeDriver, tmp_path: Path, lock_folder: Path, method: str
) -> None:
    """In ``gpuaff run``, too: the script's own claim is inside that."""
    path = tmp_path / "script.py"
    path.write_text(DROP_INS)
    run = ["-m", "gpuaff", "run", "-n", "2", "--", sys.executable, str(path), method]
    env = {"GPUAFF_LOCK_DIR": str(lock_folder), "GPUAFF_SAFE_GPU": "off"}
    done = driver.run([sys.executable, *run], env=env, timeout=60)
    childs, parents = done.stdout.splitlines()
    assert childs == parents
    assert parents.startswith("0;")
    assert driver.double_holdings() == []


def test_a_module_of_that_name_is_not_asked(driver: FakeDriver) -> None:
    """Only multiprocessing's own mark counts: a guarded script's children are as ever."""
    code = """
import multiprocessing.process as process, gpuaff
process.current_process()._inheriting = True
print(gpuaff.set_affinity(0, 2).pinned)
del process.current_process()._inheriting
print(gpuaff.set_affinity(0, 2).pinned)
"""
    done = driver.run([sys.executable, "-c", code], timeout=60)
    assert done.stdout.split() == ["False", "True"]
