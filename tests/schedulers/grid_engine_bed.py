"""A Grid Engine (Son of Grid Engine 8.1) of one host, this machine, with four counted GPUs.

Its root, cell and spool are below the folder, and it runs as root, so that a Grid Engine that the
machine may have is not touched.
"""

from __future__ import annotations

import socket
from pathlib import Path

from tests.schedulers.bed import Bed, free_ports, text_of

GPUS = 4
_DEBIANS = Path("/var/lib/gridengine")
_PROGRAMS = Path("/usr/lib/gridengine")
_SHARED = Path("/usr/share/gridengine")

NODE_FILE = "node"
"""A file below SGE_ROOT with what each job is to see: lines ``export NAME=value``. Grid Engine
hands no LD_LIBRARY_PATH on."""

# What differs from the default configuration.
_CHANGED = """\
min_uid 0
min_gid 0
execd_spool_dir {folder}/execd
mailer /bin/true
load_report_time 00:00:05
"""


def start(bed: Bed) -> dict[str, str]:
    """Start it; the variables by which its commands find it."""
    folder, host = bed.folder, socket.gethostname()
    master, execd = free_ports(2)
    variables = {"SGE_ROOT": str(folder), "SGE_CELL": "cell"}
    variables |= {"SGE_QMASTER_PORT": master, "SGE_EXECD_PORT": execd}
    _lay(bed, variables, host)
    foreground = {**variables, "SGE_ND": "1"}
    bed.daemon("/usr/sbin/sge_qmaster", env=foreground)
    bed.until("root", "qconf", "-sm", env=variables)
    _configure(bed, variables, host)
    bed.daemon("/usr/sbin/sge_execd", env=foreground)
    bed.until("lx-amd64", "qhost", env=variables)
    return variables


def _lay(bed: Bed, variables: dict[str, str], host: str) -> None:
    """The files that it starts from."""
    folder = bed.folder
    for name in ("bin", "lib", "util", "utilbin"):
        (folder / name).symlink_to(_DEBIANS / name)
    bed.write("cell/common/bootstrap", text_of("grid_engine_bootstrap.txt", folder=folder))
    bed.write("starter", text_of("grid_engine_starter.txt", file=folder / NODE_FILE)).chmod(0o755)
    bed.write("cell/common/act_qmaster", f"{host}\n")
    names = {host, "localhost"}
    for line in Path("/etc/hosts").read_text().splitlines():
        words = line.split("#")[0].split()
        if words and words[0].startswith("127."):
            names.update(words[1:])
    bed.write("cell/common/host_aliases", " ".join([host, *sorted(names - {host})]) + "\n")
    (folder / "spool/job_scripts").mkdir(parents=True)
    (folder / "execd").mkdir()
    changed = _CHANGED.format(folder=folder)
    lines = (_SHARED / "default-configuration").read_text().splitlines()
    kept = [f"{line}\n" for line in lines if line.split() and f"{line.split()[0]} " not in changed]
    configuration = bed.write("configuration", "".join(kept) + changed)
    params = f"{folder}/cell/common;{folder}/spool"
    bed.call(f"{_PROGRAMS}/spoolinit", "classic", "libspoolc", params, "init", env=variables)
    folders = {"complexes": "centry", "usersets": "usersets"}
    given = {kind: f"{_SHARED}/util/resources/{name}" for kind, name in folders.items()}
    for kind, what in {"configuration": str(configuration), **given, "managers": "root"}.items():
        bed.call(f"{_PROGRAMS}/spooldefaults", kind, what, env=variables)


def _configure(bed: Bed, variables: dict[str, str], host: str) -> None:
    """The queue, the host, and the GPUs: a resource that is counted, as sites make it."""

    def change(option: str, text: str) -> None:
        path = bed.write(f"asked/{option[1:]}", text)
        bed.call("qconf", option, str(path), env=variables)

    def told(option: str, *more: str) -> str:
        return bed.call("qconf", option, *more, env=variables)

    change("-Mc", told("-sc") + "gpu gpu INT <= YES YES 0 0\n")
    change("-Ae", text_of("grid_engine_host.txt", host=host, gpus=GPUS))
    change("-Ap", text_of("grid_engine_environment.txt"))
    limits = ("rt", "cpu", "fsize", "data", "stack", "core", "rss", "vmem")
    infinite = [f"{kind}_{limit} INFINITY" for limit in limits for kind in "sh"]
    told_of = {"host": host, "folder": bed.folder, "limits": "\n".join(infinite)}
    change("-Aq", text_of("grid_engine_queue.txt", **told_of))
    told("-as", host)
    soon = {"schedule_interval": "0:0:1", "flush_submit_sec": "1", "flush_finish_sec": "1"}
    lines = [line.split(maxsplit=1) for line in told("-ssconf").splitlines()]
    change("-Msconf", "".join(f"{name} {soon.get(name, value)}\n" for name, value in lines))
