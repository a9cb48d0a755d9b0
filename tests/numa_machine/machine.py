"""Starts the emulated machine and gets what was seen inside.

python tests/numa_machine/machine.py [SCENARIO ...]     play these, and print what they found
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

if __name__ == "__main__":
    # Python looks first in the folder of its script; what it is to find is two above.
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from tests.fakedriver.build import build

_HERE = Path(__file__).resolve().parent
_TESTS = _HERE.parent
_PROJECT = _TESTS.parent
_SCRIPT = _HERE / "machine.sh"
_BROUGHT = ("__init__.py", "cpusets.py", "processes.py", "fakedriver", "numa_machine", "programs")
"""What of the tests goes along."""


def folder() -> Path:
    """Where the machine is kept, as the script has it."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(os.environ.get("GPUAFF_NUMA_MACHINE") or f"{cache}/gpuaff/numa-machine")


def available() -> bool:
    """Whether it can be started here."""
    built = (folder() / "system.cpio").exists()
    return built and shutil.which("qemu-system-x86_64") is not None


def play(work: Path, *wanted: str) -> dict[str, Any]:
    """Start the machine, install gpuaff in it, and play scenarios: those that are wanted, or all.

    ``work`` is an empty folder. Returns by scenario what it found, or the traceback of what it
    raised; fails with what the console showed when the machine does not come to its end.
    """
    job, out = work / "job", work / "out"
    (job / "tests").mkdir(parents=True)
    for name in _BROUGHT:
        copy = shutil.copytree if (_TESTS / name).is_dir() else shutil.copy
        copy(_TESTS / name, job / "tests" / name)
    shutil.copy(_HERE / "start", job / "start")
    (job / "start").chmod(0o755)
    (job / "wanted").write_text(" ".join(wanted))
    build(job / "builds")
    _install(job / "packages", work / "wheels")
    done = subprocess.run(["bash", str(_SCRIPT), "run", str(job), str(out)], check=False)
    console = (out / "console").read_text("utf-8", "replace")
    assert "the job ended: 0" in console, f"qemu: {done.returncode}\n{console[-4000:]}"
    lines = (out / "results").read_text("ascii").splitlines()
    return {line["scenario"]: line for line in map(json.loads, lines)}


def _install(target: Path, wheels: Path) -> None:
    """Install this project's wheel and what it needs, for the Python inside."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    make = [*pip, "wheel", "--no-deps", "--wheel-dir", str(wheels), str(_PROJECT)]
    subprocess.run(make, check=True)
    version = (folder() / "python").read_text().strip()
    choice = ["--only-binary=:all:", f"--python-version={version}", f"--target={target}"]
    subprocess.run([*pip, "install", *choice, *map(str, wheels.glob("*.whl"))], check=True)


def main(wanted: list[str]) -> None:
    """Play scenarios and print what they found."""
    with TemporaryDirectory() as work:
        for name, line in play(Path(work), *wanted).items():
            told = line.get("raised") or json.dumps(line["found"], indent=2)
            print(f"{name} ({line['seconds']} s): {told}")


if __name__ == "__main__":
    main(sys.argv[1:])
