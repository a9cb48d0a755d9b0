"""DataParallel against DistributedDataParallel on the same GPUs: speed, memory, loss.

    python compare.py                    on one GPU, then on all of them
    python compare.py --gpus 2 4 --json found.json --csv found.csv

Claims the GPUs that it measures on, so that nobody else gets them meanwhile. Where there is no
GPU, or with ``--no-cuda``, processes on the CPU take their place. More options go on to train.py:
``python compare.py -- --epochs 5``.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gpuaff

TRAIN = str(Path(__file__).with_name("train.py"))

COLUMNS = {
    "method": "method",
    "visible": "visible GPUs",
    "processes": "processes",
    "cpus": "CPUs each",
    "omp_threads": "OMP threads",
    "samples_per_s": "samples/s",
    "memory_mib": "MiB by GPU",
    "epochs": "epochs",
    "losses": "loss by epoch",
}


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, nargs="+", help="how many (default: 1, and all)")
    parser.add_argument("--json", type=Path, help="a file for all that was found")
    parser.add_argument("--csv", type=Path, help="a file for the table")
    parser.add_argument("--no-cuda", action="store_true", help="train on the CPU, GPUs or not")
    parser.add_argument("train", nargs="*", help="what train.py is given, after --")
    return parser.parse_args()


@contextmanager
def taken(gpus: int) -> Iterator[None]:
    """So many GPUs that nobody else has, as the only ones that a child sees."""
    try:
        # No placeholder: it would be memory of this process on GPUs that are measured.
        # What has just ended may hold its GPU for a moment longer, so wait for it.
        claim = gpuaff.claim_gpus(gpus, wait=60, placeholder=None, pin=True)
    except gpuaff.NoDriverError:
        yield  # no GPU here: on the CPU
        return
    with claim:
        yield


def run(method: str, gpus: int, options: list[str]) -> dict[str, Any]:
    """Train by one method; what train.py has found."""
    command = [sys.executable]
    if method == "ddp":
        here = ["--standalone", "--local-addr=127.0.0.1"]  # whatever the host's name leads to
        command += ["-m", "torch.distributed.run", *here, f"--nproc-per-node={gpus}"]
    command += [TRAIN, method, f"--parts={gpus}", *options]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    # Libraries may talk on the same pipe (NCCL_DEBUG=VERSION does).
    line = next(line for line in reversed(printed.splitlines()) if line.startswith("{"))
    found: dict[str, Any] = json.loads(line)
    return {"gpus": gpus, **found}


def cell(value: object) -> str:
    """A value as the table shows it."""
    if isinstance(value, list):
        return " ".join(f"{v:.3f}" if isinstance(v, float) else str(v) for v in value) or "-"
    return str(value) or "-"


def table_of(runs: list[dict[str, Any]]) -> list[list[str]]:
    """The header, and a row for each run."""
    return [list(COLUMNS.values()), *([cell(one[key]) for key in COLUMNS] for one in runs)]


def keep(runs: list[dict[str, Any]], args: argparse.Namespace) -> None:
    """Write what there is so far."""
    if args.json:
        args.json.write_text(json.dumps(runs, indent=1) + "\n")
    if args.csv:
        with args.csv.open("w", newline="") as file:
            csv.writer(file).writerows(table_of(runs))


def show(runs: list[dict[str, Any]]) -> None:
    """Print the table."""
    table = table_of(runs)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        print("  ".join(map(str.ljust, row, widths)).rstrip())


def main() -> None:
    """Run both for each number of GPUs, and write the files after each."""
    args = arguments()
    options = [*args.train, *(["--no-cuda"] if args.no_cuda else [])]
    counts = args.gpus or sorted({1, max(1, len(gpuaff.Topology.observe(links=False).visible))})
    runs: list[dict[str, Any]] = []
    try:
        for gpus in counts:
            with taken(gpus):
                for method in ("dp", "ddp"):
                    runs.append(run(method, gpus, options))
                    keep(runs, args)
    finally:  # also where others have the next GPUs: what was measured is not lost
        show(runs)


if __name__ == "__main__":
    main()
