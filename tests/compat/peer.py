"""Asks NVIDIA's gpu_affinity, where it can be imported, and keeps what it answered.

python tests/compat/peer.py         writes tests/data/gpu_affinity/answers.json

It runs in a process of its own, unchanged. It sees the fake driver, a described machine's
``thread_siblings_list`` files, and a mask that is only remembered.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

if __name__ == "__main__":  # Python looks first in the folder of its script
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from gpuaff.cpuset import format_cpulist
from gpuaff.topology.model import Topology
from tests.compat.machines import CASES, OPTIONS, Case
from tests.fakedriver.driver import FakeDriver

Answers = Mapping[str, Mapping[str, list[str]]]
"""By case and options: for each rank its CPUs, or the name of the error."""

TABLE = Path(__file__).resolve().parents[1] / "data/gpu_affinity/answers.json"

_ASK = """
import errno, json, os, pathlib, sys, types
case = json.loads(pathlib.Path(sys.argv[1]).read_text())
mask = set()
def set_mask(pid, cpus):
    asked = set(cpus) & set(case["allowed"])
    if not asked:
        raise OSError(errno.EINVAL, "Invalid argument")
    mask.clear()
    mask.update(asked)
os.cpu_count = lambda: case["cpu_count"]
os.sched_setaffinity, os.sched_getaffinity = set_mask, lambda pid: set(mask)
import gpu_affinity
from gpu_affinity import gpu_affinity as inside
inside.pathlib = types.SimpleNamespace(Path=lambda root: pathlib.Path(case["tree"]))
words = {"mode": gpu_affinity.Mode, "scope": gpu_affinity.Scope,
         "multithreading": gpu_affinity.Multithreading}
def answer(rank, options):
    mask.clear()
    mask.update(case["allowed"])
    try:
        found = gpu_affinity.set_affinity(rank, case["nproc"], **options)
    except Exception as error:
        return type(error).__name__
    return sorted(found)
print(json.dumps([
    [answer(rank, {k: words.get(k, lambda v: v)(v) for k, v in options.items()})
     for rank in range(case["nproc"])]
    for options in case["options"]
]))
"""


def package() -> Path | None:
    """The folder that gpu_affinity is imported from; None when it cannot be."""
    spec = find_spec("gpu_affinity")
    return Path(spec.origin).parent.parent if spec is not None and spec.origin else None


def ask(case: Case, folder: Path) -> dict[str, list[str]]:
    """What gpu_affinity answers to each of the questions.

    Args:
        case: the machine and the job.
        folder: an empty folder for the fake driver and the machine's files.
    """
    told = {
        "tree": _tree(case.machine, folder / "tree"),
        "allowed": sorted(case.machine.allowed),
        "cpu_count": case.cpu_count or len(case.machine.cpus),
        "nproc": case.nproc,
        "options": list(OPTIONS.values()),
    }
    driver = FakeDriver(case.machine, folder / "driver", builds=folder.parent / "builds")
    question = folder / "case.json"
    question.write_text(json.dumps(told))
    env = {"PYTHONPATH": str(package())}
    if case.visible is not None:
        env["CUDA_VISIBLE_DEVICES"] = case.visible
    command = [sys.executable, "-c", _ASK, str(question)]
    found = json.loads(driver.run(command, env=env, timeout=100).stdout)
    return {
        name: [one if isinstance(one, str) else format_cpulist(one) for one in ranks]
        for name, ranks in zip(OPTIONS, found, strict=True)
    }


def _tree(machine: Topology, root: Path) -> str:
    for core in machine.cores or ():
        for cpu in core:
            folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
            folder.mkdir(parents=True)
            (folder / "thread_siblings_list").write_text(f"{format_cpulist(core)}\n")
    return str(root)


def recorded() -> Answers:
    """The table."""
    table: Answers = json.loads(TABLE.read_text("utf-8"))
    return table


def main() -> None:
    """Write the table."""
    table = {}
    with tempfile.TemporaryDirectory() as name:
        for place, (called, case) in enumerate(CASES.items()):
            folder = Path(name) / str(place)
            folder.mkdir()
            table[called] = ask(case, folder)
    TABLE.parent.mkdir(parents=True, exist_ok=True)
    TABLE.write_text(_text(table), "utf-8")


def _text(table: Answers) -> str:
    """One line for each question, so that a change can be read."""
    parts = []
    for called, rows in table.items():
        lines = [f"    {json.dumps(name)}: {json.dumps(ranks)}" for name, ranks in rows.items()]
        parts.append(f"  {json.dumps(called)}: {{\n" + ",\n".join(lines) + "\n  }")
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    main()
