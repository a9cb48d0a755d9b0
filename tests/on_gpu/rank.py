"""One rank of ``check.py``: pins itself with threads running, trains a step, waits, restores."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

import gpuaff


class Masks(Dataset):
    """Each item is the mask of the worker that made it."""

    def __len__(self) -> int:
        """Enough for every worker to make some."""
        return 64

    def __getitem__(self, index: int) -> list[int]:
        """The CPUs of this process."""
        return sorted(os.sched_getaffinity(0))


def main() -> None:
    """Tell what happened in a file of its own; go on when a file says so."""
    folder, rank = Path(sys.argv[1]), int(os.environ["LOCAL_RANK"])
    before = os.sched_getaffinity(0)
    for _ in range(4):
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    affinity = gpuaff.set_affinity()
    device = torch.device("cuda", rank)
    total = float(
        (torch.ones(1024, 1024, device=device) @ torch.ones(1024, 1, device=device)).sum()
    )
    loader = DataLoader(Masks(), batch_size=None, num_workers=2)
    workers = {tuple(mask) for mask in loader}
    said = {
        "pid": os.getpid(),
        "gpu": affinity.gpu,
        "cpus": sorted(affinity),
        "codes": [warning.code for warning in affinity.warnings],
        "sum": total,
        "uuid": str(torch.cuda.get_device_properties(device).uuid),
        "workers": sorted(map(list, workers)),
    }
    partial = folder / f"rank{rank}.part"
    partial.write_text(json.dumps(said))
    partial.rename(folder / f"rank{rank}.json")
    while not (folder / "restore").exists():
        time.sleep(0.05)
    affinity.restore()
    (folder / f"restored{rank}").write_text(str(os.sched_getaffinity(0) == before))
    while not (folder / "end").exists():
        time.sleep(0.05)


if __name__ == "__main__":
    main()
