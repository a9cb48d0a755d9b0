"""Run a script of ``examples/`` as its README says, and read the tables that it prints."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.processes import environment

EXAMPLES = Path(__file__).parent.parent / "examples"


def run_example(
    script: str,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    torchrun: Sequence[str] = (),
    cwd: Path | None = None,
    timeout: float = 100,
    fails: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run it to its end, which must be a good one (unless it ``fails``).

    ``script`` is below ``examples/``; with ``torchrun``, its arguments, that starts it.
    """
    by = ["-m", "torch.distributed.run", *torchrun] if torchrun else []
    done = subprocess.run(
        [sys.executable, *by, str(EXAMPLES / script), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=cwd,
        env=environment(env),
        check=False,
    )
    assert (done.returncode != 0) == fails, f"{done.args}\n{done.stdout}\n{done.stderr}"
    return done


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
