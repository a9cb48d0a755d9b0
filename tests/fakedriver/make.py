"""Make the fake driver for use by hand: a machine with GPUs that only NVML sees.

Use::

    python tests/fakedriver/make.py MACHINE OUTDIR                 print the variables to set
    python tests/fakedriver/make.py MACHINE OUTDIR -- COMMAND ...  run the command under it

MACHINE is a topology that ``gpuaff topo --save`` wrote, the name of a machine that ships with
gpuaff, or ``this-machine:N``: this machine's own CPUs with N fake GPUs, so that processes can
really be pinned.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path


def main(arguments: list[str]) -> int:
    where = arguments.index("--") if "--" in arguments else len(arguments)
    given, command = arguments[:where], arguments[where + 1 :]
    if len(given) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        variables = _variables(*given)
    except (OSError, RuntimeError, ValueError) as error:
        print(f"make.py: {error}", file=sys.stderr)
        return 1
    if command:
        os.execvpe(command[0], command, {**os.environ, **variables})
    for name, value in variables.items():
        print(f"export {name}={shlex.quote(value)}")
    return 0


def _variables(machine: str, folder: str) -> dict[str, str]:
    from gpuaff.topology.model import Topology
    from tests.fakedriver.driver import FakeDriver
    from tests.fakedriver.play import this_machine

    if own := re.fullmatch(r"this-machine:(\d+)", machine):
        topology = this_machine(int(own[1]))
    elif Path(machine).is_file():
        topology = Topology.load(machine)
    else:
        topology = Topology.named(machine)
    return FakeDriver(topology, Path(folder)).env()


if __name__ == "__main__":
    # Python looks first in the folder of its script; what it is to find is two above.
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    sys.exit(main(sys.argv[1:]))
