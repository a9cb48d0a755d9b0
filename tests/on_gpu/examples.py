"""The examples on a machine with GPUs; run by hand there, since CI has none.

PYTHONPATH=src python tests/on_gpu/examples.py OUTDIR [--only minimal,mnist,compare,sweep]

Runs ddp_minimal, three epochs of ddp_mnist, dp_vs_ddp on 1 GPU and on all, and sweep, and fails on
what is not as their READMEs say. OUTDIR gets ``compare.txt`` (the table), ``compare.json`` and
``.csv``, ``sweep.csv`` and ``.png``, and ``examples.json`` with the cards, the versions and the
rest. What they show goes into ``docs/examples.md``. Needs torch and scikit-learn, and matplotlib
for the picture.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
PYTHON = sys.executable


def output(command: list[str], *, errors: Path, timeout: float = 150) -> str:
    """What a command that must succeed prints; what it says on stderr goes into a file."""
    print("$", " ".join(command), flush=True)
    with errors.open("w") as file:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=file, text=True, check=False, timeout=timeout
        )
    assert done.returncode == 0, f"{done.stdout}\n{errors.read_text()[-4000:]}"
    print(done.stdout, flush=True)
    return done.stdout


def torchrun(ranks: int, script: str, *options: str) -> list[str]:
    by = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [PYTHON, *by, str(EXAMPLES / script), *options]


def check_minimal(out: Path, gpus: int, report: dict[str, Any]) -> None:
    printed = output(torchrun(gpus, "ddp_minimal/ddp_minimal.py"), errors=out / "minimal.stderr")
    assert f"by nccl; each node: {gpus} GPUs promised, {gpus} visible" in printed
    assert "the same on all ranks" in printed
    report["minimal"] = printed.splitlines()
    one = [PYTHON, str(EXAMPLES / "ddp_minimal/one_process.py")]
    report["one process"] = output(one, errors=out / "one.stderr").splitlines()


def check_mnist(out: Path, gpus: int, report: dict[str, Any]) -> None:
    """As its first lines have it: on GPUs that ``gpuaff run`` claims."""
    run = [PYTHON, "-m", "gpuaff", "run", "-n", str(gpus), "--"]
    script = torchrun(gpus, "ddp_mnist/ddp_mnist.py", "--epochs", "3", "--batch-size", "32")
    printed = output([*run, *script], errors=out / "mnist.stderr")
    placed = re.findall(r"^rank (\d+) of \d+: (\S+), GPU (\d+), CPUs (\S+),", printed, re.MULTILINE)
    assert sorted((int(r), device) for r, device, _, _ in placed) == [
        (rank, f"cuda:{rank}") for rank in range(gpus)
    ], placed
    assert len({gpu for _, _, gpu, _ in placed}) == gpus, placed
    assert len({cpus for _, _, _, cpus in placed}) == gpus, placed
    accuracies = [int(a) / int(b) for a, b in re.findall(r"Accuracy: (\d+)/(\d+)", printed)]
    assert accuracies[-1] > 0.5, accuracies
    report["mnist"] = printed.splitlines()


def check_compare(out: Path, gpus: int, report: dict[str, Any]) -> None:
    found = out / "compare.json"
    files = ["--json", str(found), "--csv", str(out / "compare.csv")]
    printed = output(
        [PYTHON, str(EXAMPLES / "dp_vs_ddp/compare.py"), *files], errors=out / "compare.stderr"
    )
    (out / "compare.txt").write_text(printed)
    runs = json.loads(found.read_text())
    counts = sorted({1, gpus})
    assert [(run["gpus"], run["method"]) for run in runs] == [
        (count, method) for count in counts for method in ("dp", "ddp")
    ]
    for run in runs:
        assert len(run["visible"].split(",")) == len(run["memory_mib"]) == run["gpus"], run
        assert run["losses"][-1] < run["losses"][0], run
    if gpus > 1:
        by = {run["method"]: run["memory_mib"] for run in runs if run["gpus"] == gpus}
        assert by["dp"][0] > 1.2 * max(by["dp"][1:]), "DataParallel gathers on its first GPU"
        assert max(by["ddp"]) < 1.1 * min(by["ddp"]), "DDP's GPUs have the same"
    report["compare"] = printed.splitlines()


def check_sweep(out: Path, gpus: int, report: dict[str, Any]) -> None:
    table = out / "sweep.csv"
    command = [PYTHON, str(EXAMPLES / "sweep/sweep.py"), "--csv", str(table), "--cpus", "1", "4"]
    if find_spec("matplotlib"):
        command += ["--plot", str(out / "sweep.png")]
    options = ["--", "--epochs", "6", "--batch-size", "32"]
    output([*command, *options], errors=out / "sweep.stderr")
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    runs = {(int(r["gpus"]), int(r["cpus_per_task"])) for r in rows}
    assert runs == {(count, cpus) for count in (1, gpus) for cpus in (1, 4)}, runs
    last = [float(row["accuracy"]) for row in rows if row["epoch"] == "6"]
    assert min(last) > 0.5, last
    report["sweep, last accuracies"] = last


def version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cards() -> list[str]:
    command = [
        "nvidia-smi",
        "--query-gpu=name,memory.total,driver_version",
        "--format=csv,noheader",
    ]
    return subprocess.check_output(command, text=True).splitlines()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="minimal,mnist,compare,sweep")
    args = parser.parse_args()
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    found = cards()
    gpus = len(found)
    report: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "cards": found,
        "CPUs": len(os.sched_getaffinity(0)),
        "versions": {name: version_of(name) for name in ("torch", "scikit-learn", "matplotlib")},
    }
    parts = {
        "minimal": check_minimal,
        "mnist": check_mnist,
        "compare": check_compare,
        "sweep": check_sweep,
    }
    failed = []
    for name in args.only.split(","):
        begin = time.monotonic()
        try:
            parts[name](out, gpus, report)
        except Exception as error:  # noqa: BLE001 - the other parts are to be seen as well
            failed.append(f"{name}: {type(error).__name__}: {error}")
            print(failed[-1], flush=True)
        report[f"({name})"] = f"{time.monotonic() - begin:.0f} s"
    report["failed"] = failed
    (out / "examples.json").write_text(json.dumps(report, indent=1))
    print(json.dumps(report, indent=1))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
