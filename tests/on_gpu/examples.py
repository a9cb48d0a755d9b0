"""The examples on a machine with GPUs; run by hand there, since CI has none.

python tests/on_gpu/examples.py OUTDIR [--seconds 190] [--only compare,sweep,…] [--data MNIST]

Fails on what is not as the examples' READMEs say. OUTDIR gets what compare.py and sweep.py write,
``examples.json`` with the cards, the versions and the rest, and ``errors.txt`` with all that was
said on stderr, each at once, the most wanted first: what is cut off costs only itself. What they
show goes into ``docs/examples.md``. Needs torch and scikit-learn; uses matplotlib, mpiexec with
mpi4py, CuPy and safe_gpu where these are.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from gpuaff import Topology
from gpuaff.cpuset import parse_cpulist

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
PYTHON = sys.executable
BEGIN = time.monotonic()


class Machine:
    """Where all of it runs, until ``seconds`` after its start, and what was found so far.

    Without ``cuda`` it is the fake driver, where torch trains on the CPU; without ``data``, MNIST's
    folder, the sweep takes scikit-learn's few digits.
    """

    def __init__(
        self, out: Path, *, gpus: int, seconds: float, cuda: bool, data: Path | None
    ) -> None:
        self.out, self.gpus, self.cuda, self.data, self._seconds = out, gpus, cuda, data, seconds
        self.report: dict[str, Any] = {}
        self.device = [] if cuda else ["--no-cuda"]
        self._errors = out / "errors.txt"
        self._errors.write_text("")

    def keep(self, **found: Any) -> None:
        """Write it down at once."""
        self.report.update(found)
        (self.out / "examples.json").write_text(json.dumps(self.report, indent=1) + "\n")

    def kept(self, name: str, command: list[str], *, seconds: float) -> str:
        """What a command prints, which is written down under a name."""
        printed = self.output(command, seconds=seconds)
        self.keep(**{name: printed.splitlines()})
        return printed

    def output(self, command: list[str], *, seconds: float) -> str:
        """What a command that must succeed prints, in the time that it may take."""
        print(f"[{time.monotonic() - BEGIN:.0f} s] $", " ".join(command), flush=True)
        left = min(seconds, self._seconds - (time.monotonic() - BEGIN))
        assert left > 0, "no time is left for it"
        with tempfile.TemporaryFile("w+") as said, self._errors.open("a+") as errors:
            print("$", " ".join(command), file=errors, flush=True)
            began = errors.tell()
            process = subprocess.Popen(command, stdout=said, stderr=errors, start_new_session=True)
            try:
                code: int | str = process.wait(left)
            except subprocess.TimeoutExpired:
                code = f"none after {left:.0f} s"
                end(process)
            said.seek(0)
            printed = said.read()
            print(printed, flush=True)
            errors.seek(began)
            complaint = errors.read()[-3000:]
        assert code == 0, f"exit code {code}\n{printed}\n{complaint}"
        return printed


def end(process: subprocess.Popen[bytes]) -> None:
    """End a command and its children; torchrun ends its ranks, in sessions of their own, itself."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
            for _ in range(50):
                time.sleep(0.1)
                process.poll()  # or it stays in its group, dead
                os.killpg(process.pid, 0)


def torchrun(ranks: int, script: str, *options: str) -> list[str]:
    here = ["--standalone", "--local-addr=127.0.0.1"]  # the host's name may lead nowhere
    by = ["-m", "torch.distributed.run", *here, f"--nproc-per-node={ranks}"]
    return [PYTHON, *by, str(EXAMPLES / script), *options]


def check_places(printed: str, ranks: int, *, cuda: bool) -> None:
    """Ranks of ddp_mnist, each on a device, a GPU and CPUs of its own."""
    pattern = rf"^rank (\d+) of {ranks}: (\S+), GPU (\d+), CPUs (\S+),"
    placed = re.findall(pattern, printed, re.MULTILINE)
    devices = [(rank, f"cuda:{rank}" if cuda else "cpu") for rank in range(ranks)]
    assert sorted({(int(rank), device) for rank, device, _, _ in placed}) == devices, placed
    assert len({gpu for _, _, gpu, _ in placed}) == ranks, placed


def check_minimal(on: Machine) -> None:
    command = torchrun(on.gpus, "ddp_minimal/ddp_minimal.py", *on.device)
    printed = on.kept("minimal", command, seconds=60)
    by = "nccl" if on.cuda else "gloo"
    assert f"by {by}; on the first node {on.gpus} ranks, {on.gpus} GPUs visible" in printed
    assert "the same on all ranks" in printed
    alone = [PYTHON, str(EXAMPLES / "ddp_minimal/one_process.py")]
    printed = on.kept("one_process", alone, seconds=30)
    losses = re.search(r"loss (\S+), after one step (\S+)", printed)
    assert losses is not None, printed
    assert float(losses[2]) < float(losses[1]), printed


def check_mnist(on: Machine) -> None:
    """As its first lines have it: on GPUs that ``gpuaff run`` claims."""
    run = [PYTHON, "-m", "gpuaff", "run", "-n", str(on.gpus), "--wait", "60", "--"]
    options = ["--epochs", "3", "--batch-size", "32", *on.device]
    script = torchrun(on.gpus, "ddp_mnist/ddp_mnist.py", *options)
    printed = on.kept("mnist", [*run, *script], seconds=60)
    check_places(printed, on.gpus, cuda=on.cuda)
    cpus = re.findall(r"^rank .* CPUs (\S+),", printed, re.MULTILINE)
    assert len(set(cpus)) == on.gpus, cpus
    accuracies = [int(a) / int(b) for a, b in re.findall(r"Accuracy: (\d+)/(\d+)", printed)]
    assert accuracies[-1] > 0.5, accuracies


def check_acquisitor(on: Machine) -> None:
    """Two at once, with time to collide; then each backend that is here."""
    script = [PYTHON, str(EXAMPLES / "acquisitor/acquisitor.py")]
    once = " ".join([*script, "--delay=1", "--sleep=4"])
    two = f"{once} --id=A & first=$!; {once} --id=B --explicit-owner-object && wait $first"
    printed = [on.output(["bash", "-c", two], seconds=30)]
    on.keep(acquisitor=printed)
    gpus = re.findall(r"^[AB]: has GPU (\d+);", printed[0], re.MULTILINE)
    assert len(gpus) == len(set(gpus)) == 2, "each has another one"
    backends = {"context": "ctypes"}
    if on.cuda:
        backends |= {"pytorch": "torch", "cupy": "cupy"}
    for backend in [name for name, package in backends.items() if find_spec(package)]:
        options = ["--backend", backend, f"--nb-gpus={on.gpus}", "--sleep=1"]
        printed.append(on.output([*script, *options, "--explicit-owner-object"], seconds=40))
        on.keep(acquisitor=printed)
        assert printed[-1].endswith("A: gave it back\n"), printed
    if find_spec("safe_gpu"):
        peer = [*script, "--id=ours", "--delay=3", "--sleep=2", "--peer=safe_gpu"]
        printed.append(on.output(peer, seconds=60))
        on.keep(acquisitor=printed)
        gpus = re.findall(r"^\w+: has GPU (\d+)", printed[-1], re.MULTILINE)
        assert len(gpus) == len(set(gpus)) == 2, "each has another one"


def check_dataloader(on: Machine) -> None:
    """The main process of each rank keeps a core; its workers share the rest."""
    command = torchrun(on.gpus, "dataloader/dataloader.py", "--workers=3")
    printed = on.kept("dataloader", command, seconds=60)
    lines = re.findall(r"^rank (\d+): (main|worker).*: cpus (\S+)$", printed, re.MULTILINE)
    assert len(lines) == 4 * on.gpus, lines
    shares = {rank: parse_cpulist(cpus) for rank, who, cpus in lines if who == "main"}
    workers = [(rank, parse_cpulist(cpus)) for rank, who, cpus in lines if who == "worker"]
    if min(map(len, shares.values())) <= 3:
        return  # so few CPUs cannot be parted
    for rank, part in workers:
        assert part < shares[rank], "less than the rank's CPUs"
    together = sum(len(part) for _, part in workers)
    assert len(frozenset().union(*(part for _, part in workers))) == together, "nobody shares"


def check_mpi(on: Machine) -> None:
    """One rank a GPU, by MPI; and a claim of each rank, in the right order and in the wrong one."""
    if which("mpiexec") is None or find_spec("mpi4py") is None:
        on.keep(mpi="no mpiexec or no mpi4py here")
        return
    mpiexec = ["mpiexec", "-n", str(on.gpus), PYTHON]
    printed = [on.output([*mpiexec, str(EXAMPLES / "mpi/one_gpu_per_rank.py")], seconds=40)]
    on.keep(mpi=printed)
    rows = [line.split() for line in printed[0].splitlines()[1 : on.gpus + 1]]
    ranks = [str(rank) for rank in range(on.gpus)]
    assert [row[3] for row in rows] == ranks, rows
    assert len({row[4] for row in rows}) == on.gpus, rows
    script = str(EXAMPLES / "horovod_style/horovod_style.py")
    printed.append(on.output([*mpiexec, script], seconds=60))
    on.keep(mpi=printed)
    claimed = re.findall(r"^local rank (\d+): GPU (\d+), device 0 of 1$", printed[1], re.MULTILINE)
    assert sorted(rank for rank, _ in claimed) == sorted(gpu for _, gpu in claimed) == ranks
    wrong = subprocess.run(
        [*mpiexec, script, "--cuda-first"], capture_output=True, text=True, timeout=60, check=False
    )
    on.keep(mpi=[*printed, wrong.stdout])
    assert wrong.returncode, wrong
    assert "CudaInitializedError: " in wrong.stdout, wrong


def check_alone(on: Machine) -> None:
    """Without a launcher, and so without an address to meet at."""
    script = str(EXAMPLES / "ddp_mnist/ddp_mnist.py")
    printed = on.kept("alone", [PYTHON, script, "--dry-run", *on.device], seconds=40)
    check_places(printed, 1, cuda=on.cuda)


def check_compare(on: Machine) -> None:
    found = on.out / "compare.json"
    files = ["--json", str(found), "--csv", str(on.out / "compare.csv")]
    # A CPU in the place of GPUs would be long about what is little for them.
    size = [] if on.cuda else ["--", "--samples=4096", "--width=64", "--batch-size=64"]
    command = [PYTHON, str(EXAMPLES / "dp_vs_ddp/compare.py"), *files, *on.device, *size]
    printed = on.kept("compare", command, seconds=100)
    (on.out / "compare.txt").write_text(printed)
    runs = json.loads(found.read_text())
    counts = sorted({1, on.gpus})
    assert [(run["gpus"], run["method"]) for run in runs] == [
        (count, method) for count in counts for method in ("dp", "ddp")
    ]
    for run in runs:
        assert len(run["visible"].split(",")) == run["gpus"], run
        assert run["losses"][-1] < run["losses"][0], run
        assert len(run["memory_mib"]) == (run["gpus"] if on.cuda else 0), run
    if on.gpus > 1 and on.cuda:
        by = {run["method"]: run["memory_mib"] for run in runs if run["gpus"] == on.gpus}
        assert by["dp"][0] > 1.2 * max(by["dp"][1:]), "DataParallel gathers on its first GPU"
        assert max(by["ddp"]) < 1.1 * min(by["ddp"]), "DDP's GPUs have the same"


def check_sweep(on: Machine) -> None:
    table = on.out / "sweep.csv"
    asked = [1, 4, 8] if on.data else [1, 4]
    command = [PYTHON, str(EXAMPLES / "sweep/sweep.py"), "--csv", str(table), "--cores"]
    command += map(str, asked)
    if find_spec("matplotlib"):
        command += ["--plot", str(on.out / "sweep.png")]
    size = ["--data", str(on.data)] if on.data else ["--batch-size", "32"]
    seconds = 400 if on.data else 120
    printed = on.output([*command, "--", "--epochs", "6", *size, *on.device], seconds=seconds)
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    last = [float(row["accuracy"]) for row in rows if row["epoch"] == "6"]
    on.keep(sweep=last)
    runs = {(int(r["gpus"]), int(r["cores_asked"])) for r in rows}
    assert runs == {(count, cores) for count in (1, on.gpus) for cores in asked}, runs
    assert all(int(r["cores"]) <= int(r["cores_asked"]) for r in rows), rows
    assert min(last) > (0.98 if on.data else 0.5), last
    check_places(printed, on.gpus, cuda=on.cuda)


def version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cards() -> list[str]:
    queried = "--query-gpu=name,memory.total,driver_version"
    command = ["nvidia-smi", queried, "--format=csv,noheader"]
    return subprocess.check_output(command, text=True).splitlines()


_WANTED = (
    *(check_compare, check_sweep, check_minimal, check_mnist),
    *(check_alone, check_acquisitor, check_dataloader, check_mpi),
)
PARTS = {part.__name__.removeprefix("check_"): part for part in _WANTED}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--seconds", type=float, default=600, help="when it is to be over")
    parser.add_argument("--data", type=Path, help="MNIST's four files: the sweep takes them")
    parser.add_argument("--cpu", action="store_true", help="a rehearsal over the fake driver")
    args = parser.parse_args()
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    os.environ["PYTHONUNBUFFERED"] = "1"  # or what is cut off has printed nothing
    machine = Topology.observe(links=False)
    assert machine.visible, "no GPU is visible here"
    found = [str(gpu.name) for gpu in machine.gpus] if args.cpu else cards()
    on = Machine(
        out,
        gpus=len(machine.visible),
        seconds=args.seconds,
        cuda=not args.cpu,
        data=args.data and args.data.resolve(),
    )
    failed: list[str] = []
    on.keep(
        date=time.strftime("%Y-%m-%d"),
        cards=found,
        cpus=len(os.sched_getaffinity(0)),
        versions={name: version_of(name) for name in ("torch", "scikit-learn", "matplotlib")},
        failed=failed,
    )
    for name in args.only.split(","):
        begin = time.monotonic()
        try:
            PARTS[name](on)
        except Exception as error:  # noqa: BLE001 - the other parts are to be seen as well
            failed.append(f"{name}: {type(error).__name__}: {error}")
            print(failed[-1], flush=True)
        on.keep(**{f"seconds of {name}": round(time.monotonic() - begin)})
    print(json.dumps(on.report, indent=1))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
