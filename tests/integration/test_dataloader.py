"""DataLoader workers of torch, which are forked: each puts itself on the share."""

from __future__ import annotations

import json

import pytest

from fakedriver.driver import FakeDriver, MakeDriver
from fakedriver.play import this_machine
from processes import CPUS, masks, stopped

pytestmark = [
    pytest.mark.fake_driver,
    pytest.mark.needs("torch", "two-cpus"),
    pytest.mark.timeout(120),
]


@pytest.fixture
def driver(fake_driver: MakeDriver) -> FakeDriver:
    return fake_driver(this_machine(2))


# Torch narrows the main thread as it is imported, where GOMP_CPU_AFFINITY says so; its workers
# inherit that. Each item is a parallel operation, and then the worker's pid and what it found.
LOADER = """
import json, os, sys
import gpuaff

def main():
    affinity = gpuaff.set_affinity(0, 1)
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Items(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            torch.set_num_threads(2)
            torch.ones(2000, 2000).sum()
            checked = gpuaff.check()
            return [os.getpid(), len(os.sched_getaffinity(0)), checked.ok]

    def start(worker):
        if "reapply" in sys.argv:
            affinity.reapply()
            affinity.reapply()

    loader = DataLoader(
        Items(),
        batch_size=None,
        num_workers=2,
        worker_init_fn=start,
        multiprocessing_context="fork",
        persistent_workers=True,
        collate_fn=None,
    )
    found = [[int(number) for number in item] for item in loader]
    print(json.dumps([len(os.sched_getaffinity(0)), found]))
    sys.stdin.readline()

main()
"""


@pytest.mark.case("C1", "C8", "C10")
def test_workers_that_reapply_keep_the_share(driver: FakeDriver) -> None:
    env = {**driver.env(), "GOMP_CPU_AFFINITY": str(CPUS[0])}
    script = LOADER.replace('"reapply" in sys.argv', "True")
    with stopped(script, env=env) as process:
        main, found = json.loads(process.heard())
        assert main == 1, "the import has narrowed the main thread"
        assert {(cpus, ok) for _, cpus, ok in found} == {(len(CPUS), True)}
        workers = {pid for pid, _, _ in found}
        assert len(workers) == 2
        for pid in workers:
            seen = masks(pid)
            assert seen[pid] == frozenset(CPUS), "also after a parallel operation"


@pytest.mark.case("C1")
def test_workers_that_do_not_are_found_out(driver: FakeDriver) -> None:
    env = {**driver.env(), "GOMP_CPU_AFFINITY": str(CPUS[0])}
    with stopped(LOADER, env=env) as process:
        _, found = json.loads(process.heard())
        assert {(cpus, ok) for _, cpus, ok in found} == {(1, False)}
