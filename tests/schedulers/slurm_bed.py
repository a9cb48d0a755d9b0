"""A Slurm of two nodes on this machine, with four posed GPUs each.

Both nodes have this machine's real CPUs, so that masks are real and no others are named.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Mapping

from tests.schedulers.bed import Bed, free_ports, text_of

NODES, GPUS = ("n1", "n2"), 4
_COUNT_IDLE = ("sinfo", "-h", "-t", "idle", "-o", "%D")

NODE_FILES = "BED_NODES"
"""The variable of a job that names a folder with a file for each node: lines ``export NAME=value``,
by which its tasks see what the node has."""

_SUBMIT = """
job=$(sbatch --parsable "$@") || exit
while squeue -h -j "$job" | grep -q .; do sleep 0.2; done
scontrol show job "$job" | grep -q ExitCode=0:0
"""
SUBMIT = ("sh", "-c", _SUBMIT, "sbatch")
"""``sbatch --wait``, which would look after 2, 10 and 42 seconds only."""

_PROLOG = f"""\
#!/bin/sh
test -z "${NODE_FILES}" || cat "${NODE_FILES}/$SLURMD_NODENAME"
"""


def start(bed: Bed) -> dict[str, str]:
    """Start it; the variables by which its commands find it."""
    folder, cpus = bed.folder, os.cpu_count()
    (folder / "state").mkdir()
    gpus = [folder / f"gpu{number}" for number in range(GPUS)]
    for path in gpus:
        path.symlink_to("/dev/null")  # the file of a device, as it is looked for
    text = text_of(
        "slurm.conf",
        folder=folder,
        host=socket.gethostname(),
        ports=free_ports(3),
        nodes=NODES,
        has=f"CPUs={cpus} Boards=1 SocketsPerBoard=1 CoresPerSocket={cpus} ThreadsPerCore=1 "
        f"RealMemory=4000 Gres=gpu:{GPUS}",
    )
    config = bed.write("slurm.conf", text)
    files = f"{folder}/gpu[0-{GPUS - 1}]"
    bed.write("gres.conf", f"NodeName={','.join(NODES)} Name=gpu File={files}\n")
    # Nobody uses its cgroups; without the file slurmd would look for a cgroup2 to mount.
    bed.write("cgroup.conf", "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
    bed.write("task-prolog", _PROLOG).chmod(0o755)
    _start_munge(bed)
    variables = {"SLURM_CONF": str(config)}
    bed.daemon("/usr/sbin/slurmctld", "-D", "-c", env=variables)
    for node in NODES:
        (folder / f"spool-{node}").mkdir()
        bed.daemon("/usr/sbin/slurmd", "-D", "-N", node, env=variables)
    bed.until(str(len(NODES)), *_COUNT_IDLE, env=variables)
    return variables


def wait_until_idle(variables: Mapping[str, str]) -> None:
    """Wait until no job of an earlier test is on a node, so that the next one goes to the first."""
    ends = time.monotonic() + 30
    env = {**os.environ, **variables}
    while subprocess.check_output(_COUNT_IDLE, env=env, text=True).strip() != str(len(NODES)):
        assert time.monotonic() < ends, "the last job does not end"
        time.sleep(0.1)


def _start_munge(bed: Bed) -> None:
    key = bed.write("munge.key-file", "")
    key.chmod(0o600)
    key.write_bytes(os.urandom(128))
    names = ("key-file", "socket", "pid-file", "log-file", "seed-file")
    options = [f"--{name}={bed.folder}/munge.{name}" for name in names]
    bed.daemon("/usr/sbin/munged", "--foreground", "--force", *options)
    bed.until("munge.socket", "ls", str(bed.folder))
