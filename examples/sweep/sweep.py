"""Loss and accuracy by epoch for several numbers of GPUs and of cores for each.

    python sweep.py --gpus 1 2 --cores 1 4 --csv sweep.csv --plot sweep.png

Trains ../ddp_mnist once for each pair, on free GPUs that it claims meanwhile. Where there is no
GPU, so many processes train on the CPU. More options go on to ddp_mnist.py:
``python sweep.py --gpus 1 2 -- --batch-size 32`` (``--no-cuda``: on the CPU, GPUs or not).
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gpuaff

TRAIN = str(Path(__file__).parents[1] / "ddp_mnist/ddp_mnist.py")

Row = dict[str, float]
"""One epoch of one run: its row of the CSV."""


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, nargs="+", help="how many (default: 1, and all)")
    text = "physical cores for each GPU, at most (default: 1, and 4)"
    parser.add_argument("--cores", "--cpus", type=int, nargs="+", default=[1, 4], help=text)
    parser.add_argument("--csv", type=Path, default=Path("sweep.csv"), help="default: sweep.csv")
    parser.add_argument("--plot", type=Path, help="a picture, by matplotlib: sweep.png")
    parser.add_argument("train", nargs="*", help="what ddp_mnist.py is given, after --")
    return parser.parse_args()


@contextmanager
def taken(gpus: int) -> Iterator[None]:
    """So many GPUs that nobody else has, as the only ones that a child sees."""
    try:
        # The ranks occupy their GPUs themselves; this process needs no context there.
        # What has just ended may hold its GPU for a moment longer, so wait for it.
        claim = gpuaff.claim_gpus(gpus, wait=60, placeholder=None, pin=True)
    except gpuaff.NoDriverError:
        yield  # no GPU here: on the CPU
        return
    with claim:
        yield


def train(gpus: int, cores: int, options: list[str]) -> list[Row]:
    """Train with so many ranks, and at most so many cores for each; one row an epoch."""
    # Options of gpuaff can be set from outside: ddp_mnist.py need not know of this one.
    environment = {**os.environ, "GPUAFF_MAX_PHYSICAL_CORES": str(cores)}
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "epochs.csv")
        here = ["--standalone", "--local-addr=127.0.0.1"]  # whatever the host's name leads to
        torchrun = ["-m", "torch.distributed.run", *here, f"--nproc-per-node={gpus}"]
        command = [sys.executable, *torchrun, TRAIN, f"--csv={found}", *options]
        subprocess.run(command, env=environment, check=True)
        with found.open(newline="") as file:
            epochs = list(csv.DictReader(file))
    # That is a limit. How many cores a rank had, the script itself tells: its column "cores".
    return [
        {"gpus": gpus, "cores_asked": cores}
        | {name: int(cell) if cell.isdigit() else float(cell) for name, cell in row.items()}
        for row in epochs
    ]


def counted(number: float, what: str) -> str:
    """``1 GPU``, ``2 GPUs``."""
    return f"{number:.0f} {what}{'s' if number > 1 else ''}"


def draw(rows: list[Row], path: Path) -> None:
    """Loss, accuracy and time, a line for each run."""
    import matplotlib as mpl

    mpl.use("Agg")  # no screen is needed
    import matplotlib.pyplot as plt

    shown = {"test_loss": "test loss", "accuracy": "test accuracy", "seconds": "seconds an epoch"}
    figure, axes = plt.subplots(1, len(shown), figsize=(12, 3.6), layout="constrained")
    runs = sorted({(row["gpus"], row["cores_asked"]) for row in rows})
    # A colour for each number of GPUs, a style for each of cores: lines may lie on each other.
    colors, styles = (
        {n: i for i, n in enumerate(sorted(set(of)))} for of in zip(*runs, strict=True)
    )
    for axis, (name, title) in zip(axes, shown.items(), strict=True):
        for gpus, asked in runs:
            mine = [row for row in rows if (row["gpus"], row["cores_asked"]) == (gpus, asked)]
            had = mine[0]["cores"]
            less = "" if had == asked else f" ({asked:.0f} asked for)"
            axis.plot(
                [row["epoch"] for row in mine],
                [row[name] for row in mine],
                color=f"C{colors[gpus] % 10}",
                linestyle=("-", "--", ":", "-.")[styles[asked] % 4],
                marker="os^vD"[styles[asked] % 5],
                fillstyle="none",
                label=f"{counted(gpus, 'GPU')}, {counted(had, 'core')} each{less}",
            )
        axis.set(xlabel="epoch", title=title)
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Train with each pair, write the CSV after each, and draw."""
    args = arguments()
    visible = len(gpuaff.Topology.observe(links=False).visible)
    rows: list[Row] = []
    for gpus in args.gpus or sorted({1, max(1, visible)}):
        with taken(gpus):
            for cores in args.cores:
                rows += train(gpus, cores, args.train)
                with args.csv.open("w", newline="") as file:
                    writer = csv.DictWriter(file, rows[0])
                    writer.writeheader()
                    writer.writerows(rows)
    if args.plot:
        draw(rows, args.plot)


if __name__ == "__main__":
    main()
