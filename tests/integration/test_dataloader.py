"""DataLoader workers of torch: each puts itself on the share, or on its part of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fakedriver.driver import FakeDriver
from tests.processes import CPUS, masks, stopped, worker_cpus

pytestmark = [
    pytest.mark.fake_driver,
    pytest.mark.needs("torch", "two-cpus"),
    pytest.mark.timeout(120),
]


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

    def reapply(worker):
        affinity.reapply()
        affinity.reapply()

    def found(start):
        loader = DataLoader(
            Items(),
            batch_size=None,
            num_workers=2,
            worker_init_fn=start,
            multiprocessing_context="fork",
            persistent_workers=True,
            collate_fn=None,
        )
        items = [[int(number) for number in item] for item in loader]
        print(json.dumps([len(os.sched_getaffinity(0)), items]))
        sys.stdin.readline()

    found(None)
    found(reapply)

main()
"""


@pytest.mark.case("C1", "C8", "C10")
def test_workers_that_reapply_keep_the_share(driver: FakeDriver) -> None:
    """And those that do not are found out."""
    env = {**driver.env(), "GOMP_CPU_AFFINITY": str(CPUS[0])}
    with stopped(LOADER, env=env) as process:
        main, found = json.loads(process.heard())
        assert main == 1, "the import has narrowed the main thread"
        assert {(cpus, ok) for _, cpus, ok in found} == {(1, False)}
        process.go_on()
        main, found = json.loads(process.heard())
        assert main == 1
        assert {(cpus, ok) for _, cpus, ok in found} == {(len(CPUS), True)}
        workers = {pid for pid, _, _ in found}
        assert len(workers) == 2
        for pid in workers:
            seen = masks(pid)
            assert seen[pid] == frozenset(CPUS), "also after a parallel operation"


# What is spawned imports its script again, so this one is a file.
PARTS = """
import json, os, sys
import gpuaff
from gpuaff.integrations.torch import worker_init_fn

if __name__ == "__main__":
    affinity = gpuaff.set_affinity(0, 1)
import torch
from torch.utils.data import DataLoader, Dataset

def cpus():
    return sorted(os.sched_getaffinity(0))

class Items(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        before = cpus()
        torch.set_num_threads(2)
        torch.ones(2000, 2000).sum()
        checked = gpuaff.check()
        return json.dumps([os.getpid(), before, cpus(), checked.ok])

def own(worker):
    worker_init_fn(worker)
    print("own", worker, file=sys.stderr)

if __name__ == "__main__":
    loader = DataLoader(
        Items(),
        batch_size=None,
        num_workers=2,
        worker_init_fn=own if "own" in sys.argv else worker_init_fn,
        multiprocessing_context=sys.argv[1],
        persistent_workers=True,
    )
    print(json.dumps([cpus(), [json.loads(item) for item in loader]]), flush=True)
    sys.stdin.readline()
    try:
        worker_init_fn(0)
    except Exception as error:
        print(type(error).__name__, error, flush=True)
"""


@pytest.mark.case("C1", "C8", "C10", "B19")
@pytest.mark.parametrize(
    ("method", "whose", "narrowed"),
    [
        ("fork", "ours", True),
        pytest.param("spawn", "own", False, marks=pytest.mark.slow),
        pytest.param("forkserver", "ours", True, marks=pytest.mark.slow),
    ],
)
def test_workers_are_on_their_parts(
    driver: FakeDriver, tmp_path: Path, method: str, whose: str, narrowed: bool
) -> None:
    """Also where the import has narrowed the main thread, and after a parallel operation."""
    file = tmp_path / "parts.py"
    file.write_text(PARTS)
    env = {**driver.env(), **({"GOMP_CPU_AFFINITY": str(CPUS[0])} if narrowed else {})}
    command = [str(file), method, whose]
    become = f"import os, sys; os.execv(sys.executable, [sys.executable, *{command}])"
    with stopped(become, env=env) as process:
        main, found = json.loads(process.heard())
        assert main == ([CPUS[0]] if narrowed else CPUS)
        parts = {pid: frozenset(before) for pid, before, _, _ in found}
        assert len(parts) == 2
        assert frozenset().union(*parts.values()) == worker_cpus()
        for pid, before, after, ok in found:
            assert before == after == sorted(masks(pid)[pid]), "it outlives a parallel operation"
            # The variable tells the runtime where its further threads go; nobody else can.
            if not narrowed:
                assert ok
                assert set(masks(pid).values()) == {parts[pid]}
        process.go_on()
        assert process.heard().startswith(
            "GPUAffinityError worker_init_fn was called outside of"
        ), "in the main process it is an error"
