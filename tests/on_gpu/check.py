"""What only a machine with GPUs can show; run by hand there, since CI has none.

python tests/on_gpu/check.py OUTDIR --nproc 4

Starts the ranks under torchrun, reads every thread's mask from outside, and fails on the first
thing that is not as the README says. What it prints goes into ``docs/real-machine.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.processes import masks

HERE = Path(__file__).resolve().parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def wait_for(paths: list[Path], process: subprocess.Popen[bytes]) -> None:
    """Until all are there; the process must not end before."""
    deadline = time.monotonic() + 180
    while not all(path.exists() for path in paths):
        assert process.poll() is None, "torchrun ended"
        assert time.monotonic() < deadline, f"no {paths}"
        time.sleep(0.1)


def check_ranks(nproc: int) -> None:
    """Threads, DataLoader workers, disjoint shares, their union, and the way back."""
    allowed = frozenset(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [*TORCHRUN, "--nproc-per-node", str(nproc), str(HERE / "rank.py"), name]
        process = subprocess.Popen(command)
        ranks = range(nproc)
        wait_for([folder / f"rank{rank}.json" for rank in ranks], process)
        said = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in ranks]
        shares = []
        for rank, one in enumerate(said):
            seen = masks(one["pid"])
            assert len(set(seen.values())) == 1, f"rank {rank}: {seen}"
            share = next(iter(seen.values()))
            assert share == frozenset(one["cpus"]), "what the call returned"
            assert one["workers"] == [one["cpus"]], "DataLoader workers inherit it"
            assert one["gpu"] == rank
            print(f"rank {rank}: {len(seen)} threads, all on {len(share)} CPUs; {one['codes']}")
            shares.append(share)
        assert sum(map(len, shares)) == len(frozenset().union(*shares)), "disjoint"
        print("the shares are disjoint; their union is", len(frozenset().union(*shares)), "CPUs")
        assert frozenset().union(*shares) == allowed, "their union is the machine"
        (folder / "restore").touch()
        wait_for([folder / f"restored{rank}" for rank in ranks], process)
        for rank, one in enumerate(said):
            assert set(masks(one["pid"]).values()) == {allowed}, f"rank {rank} is restored"
        print("restore() gave every thread its mask back")
        (folder / "end").touch()
        assert process.wait(timeout=60) == 0


def check_strangers(out: Path, count: int) -> None:
    """Jobs that know nothing of each other, one on each GPU, each with a mode of its own."""
    modes = ("unique_contiguous", "all", "unique_interleaved", "core_complex")
    jobs = [
        subprocess.Popen(
            [sys.executable, str(HERE / "stranger.py"), modes[gpu % len(modes)]],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for gpu in range(count)
    ]
    said = []
    for job in jobs:
        assert job.stdout is not None
        said.append(json.loads(job.stdout.readline()))
        print(json.dumps({key: said[-1][key] for key in said[-1] if key != "checked"}))
    print(said[0]["checked"])
    for gpu, (job, one) in enumerate(zip(jobs, said, strict=True)):
        assert one["gpu"] == gpu
        assert set(masks(job.pid).values()) <= {frozenset(one["cpus"])}, "each thread, from outside"
        command = [sys.executable, "-m", "gpuaff", "check", "--json", "--pid", str(job.pid)]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        (out / f"check{gpu}.json").write_text(found.stdout + found.stderr)
        print("gpuaff check:", found.returncode, json.loads(found.stdout)["processes"][0]["gpus"])
    if all(one["partition"] == "machine" for one in said):
        assert sum(len(one["cpus"]) for one in said) == len(
            {c for one in said for c in one["cpus"]}
        )
        print(f"{count} strangers, no CPU in two of them")
    for job in jobs:
        job.communicate("")


def show(out: Path, name: str, command: list[str]) -> None:
    """Run a command, keep what it printed, and print it."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    (out / f"{name}.txt").write_text(done.stdout + done.stderr)
    print(f"$ {' '.join(command)}\n{done.stdout}{done.stderr}", flush=True)
    assert done.returncode == 0


def main() -> None:
    """All of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--nproc", type=int, required=True)
    args = parser.parse_args()
    gpuaff = [sys.executable, "-m", "gpuaff"]
    nproc = str(args.nproc)
    show(args.out, "topo", [*gpuaff, "topo"])
    show(args.out, "save", [*gpuaff, "topo", "--save", str(args.out / "topology.json")])
    show(args.out, "plan", [*gpuaff, "plan", "--nproc", nproc])
    show(args.out, "nvidia-smi", ["nvidia-smi", "topo", "-m"])
    show(args.out, "pin", [*TORCHRUN, "--nproc-per-node", nproc, "examples/pin.py"])
    check_ranks(args.nproc)
    check_strangers(args.out, args.nproc)


if __name__ == "__main__":
    main()
