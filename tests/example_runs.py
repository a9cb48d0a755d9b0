"""Run a script of ``examples/`` as its README says, and read the tables that it prints."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.processes import as_text, environment, nursery

EXAMPLES = Path(__file__).parent.parent / "examples"

_FORK = """
import runpy, sys, torch
torch.set_num_threads(1)  # as for a process that was pinned before: tests have two cores
sys.argv[:] = sys.argv[1:]
sys.path[0] = sys.argv[0].rpartition("/")[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_example(
    script: str,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    torchrun: Sequence[str] = (),
    cwd: Path | None = None,
    timeout: float = 100,
    fails: bool = False,
    modules: tuple[str, ...] = (),
) -> subprocess.CompletedProcess[str]:
    """Run a script below ``examples/`` to its end, which must be a good one (unless it ``fails``).

    With ``torchrun``, its arguments, that starts it. With ``modules`` it is a fork of a process
    that has imported these, which takes seconds.
    """
    path, variables = str(EXAMPLES / script), environment(env)
    by = ["-m", "torch.distributed.run", *torchrun] if torchrun else []
    if modules:
        forks = nursery(variables.get("LD_LIBRARY_PATH", ""), (), modules)
        words = [path, *arguments]
        done = as_text(forks.run(_FORK, *words, env=variables, folder=cwd, timeout=timeout))
    else:
        done = finished([sys.executable, *by, path, *arguments], variables, cwd, timeout)
    assert (done.returncode != 0) == fails, f"{done.args}\n{done.stdout}\n{done.stderr}"
    return done


def finished(
    command: Sequence[str], env: Mapping[str, str], cwd: Path | None = None, timeout: float = 100
) -> subprocess.CompletedProcess[str]:
    """A command at its end; it has nothing to read."""
    how: Any = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "check": False}
    return subprocess.run(command, env=env, cwd=cwd, timeout=timeout, **how)


def node(ranks: int) -> list[str]:
    """torchrun's arguments for so many ranks on this node, which meet at a port that is free."""
    return ["--standalone", "--nproc-per-node", str(ranks)]


def table(printed: str, first: str) -> list[dict[str, str]]:
    """The rows of the table whose header begins so; cells are two or more spaces apart."""
    lines = iter(printed.splitlines())
    header = next(line for line in lines if line.split()[:1] == [first])
    names = re.split(r" {2,}", header.strip())
    rows = []
    for line in lines:
        cells = re.split(r" {2,}", line.strip())
        if len(cells) != len(names):
            break
        rows.append(dict(zip(names, cells, strict=True)))
    return rows
