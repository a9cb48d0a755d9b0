"""Calls of the command in the tests' own process: what needs no process of its own."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, NamedTuple

from gpuaff.cli import main
from tests.processes import environment, unmeasured


class Said(NamedTuple):
    """A call's exit code, standard output and standard error."""

    code: int
    out: str
    err: str


def called(*words: str) -> Said:
    """Call the command."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(words)
    return Said(code, out.getvalue(), err.getvalue())


def as_json(*words: str) -> dict[str, Any]:
    """The JSON of a call that succeeds, and says nothing else."""
    said = called(*words, "--json")
    assert (said.code, said.err) == (0, "")
    found: dict[str, Any] = json.loads(said.out)
    return found


def refused(*words: str, code: int = 1) -> str:
    """The one line that says why a call failed."""
    said = called(*words)
    assert (said.code, said.out) == (code, "")
    assert said.err.startswith("gpuaff: ")
    assert said.err.endswith("\n")
    assert said.err.count("\n") == 1
    return said.err


@contextmanager
def on_one_cpu() -> Iterator[str]:
    """Meanwhile this process may use one CPU only, the last one."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        yield str(max(before))
    finally:
        os.sched_setaffinity(0, before)


_AS_NOBODY = """
import io, os, sys
from contextlib import redirect_stdout
from gpuaff.cli import main
with redirect_stdout(io.StringIO()):  # all is imported: that user may not read this checkout
    main(sys.argv[1:])
os.setgroups([]); os.setgid(65534); os.setuid(65534)
sys.exit(main(sys.argv[1:]))
"""


def as_another_user(*words: str, env: Mapping[str, str], code: int = 0) -> Any:
    """The JSON of a call by the user nobody."""
    command = [sys.executable, "-c", _AS_NOBODY, *words, "--json"]
    variables = unmeasured(environment(env))
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
    assert (done.returncode, done.stderr) == (code, "")
    return json.loads(done.stdout)
