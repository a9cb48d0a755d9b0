"""A Grid Engine (Son of Grid Engine 8.1) of one host, this machine, with four counted GPUs.

Its root, cell and spool are below the folder, and it runs as root, so that a Grid Engine that the
machine may have is not touched.
"""

from __future__ import annotations

import socket
from pathlib import Path

from tests.schedulers.bed import Bed, free_ports

GPUS = 4

_DEBIANS = Path("/var/lib/gridengine")
_PROGRAMS = Path("/usr/lib/gridengine")
_SHARED = Path("/usr/share/gridengine")

NODE_FILE = "node"
"""A file below SGE_ROOT with what each job is to see: lines ``export NAME=value``. Grid Engine
hands no LD_LIBRARY_PATH on."""

_STARTER = """\
#!/bin/sh
test ! -e {file} || . {file}
exec "$@"
"""

_BOOTSTRAP = """\
admin_user none
default_domain none
ignore_fqdn true
spooling_method classic
spooling_lib libspoolc
spooling_params {folder}/cell/common;{folder}/spool
binary_path /usr/sbin
qmaster_spool_dir {folder}/spool
security_mode none
listener_threads 1
worker_threads 1
scheduler_threads 1
"""

_HOST = """\
hostname {host}
load_scaling NONE
complex_values gpu={gpus},slots=8
user_lists NONE
xuser_lists NONE
projects NONE
xprojects NONE
usage_scaling NONE
report_variables NONE
"""

_ENVIRONMENT = """\
pe_name smp
slots 999
user_lists NONE
xuser_lists NONE
start_proc_args NONE
stop_proc_args NONE
allocation_rule $pe_slots
control_slaves FALSE
job_is_first_task TRUE
urgency_slots min
accounting_summary FALSE
qsort_args NONE
"""

_QUEUE = """\
qname all.q
hostlist {host}
seq_no 0
load_thresholds NONE
suspend_thresholds NONE
nsuspend 1
suspend_interval 00:05:00
priority 0
min_cpu_interval 00:05:00
processors UNDEFINED
qtype BATCH
ckpt_list NONE
pe_list smp
rerun FALSE
slots 8
tmpdir {folder}
shell /bin/sh
prolog NONE
epilog NONE
shell_start_mode posix_compliant
starter_method {folder}/starter
suspend_method NONE
resume_method NONE
terminate_method NONE
notify 00:00:60
owner_list NONE
user_lists NONE
xuser_lists NONE
subordinate_list NONE
complex_values NONE
projects NONE
xprojects NONE
calendar NONE
initial_state default
{limits}
"""

_CHANGED = {
    "min_uid": "0",
    "min_gid": "0",
    "execd_spool_dir": "{folder}/execd",
    "mailer": "/bin/true",
    "load_report_time": "00:00:05",
}
"""What differs from the default configuration."""


def start(bed: Bed) -> dict[str, str]:
    """Start it; the variables by which its commands find it."""
    folder, host = bed.folder, socket.gethostname()
    master, execd = free_ports(2)
    variables = {
        "SGE_ROOT": str(folder),
        "SGE_CELL": "cell",
        "SGE_QMASTER_PORT": master,
        "SGE_EXECD_PORT": execd,
    }
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
    bed.write("cell/common/bootstrap", _BOOTSTRAP.format(folder=folder))
    bed.write("starter", _STARTER.format(file=folder / NODE_FILE)).chmod(0o755)
    bed.write("cell/common/act_qmaster", f"{host}\n")
    names = {host, "localhost"}
    for line in Path("/etc/hosts").read_text().splitlines():
        words = line.split("#")[0].split()
        if words and words[0].startswith("127."):
            names.update(words[1:])
    bed.write("cell/common/host_aliases", " ".join([host, *sorted(names - {host})]) + "\n")
    (folder / "spool/job_scripts").mkdir(parents=True)
    (folder / "execd").mkdir()
    changed = {name: value.format(folder=folder) for name, value in _CHANGED.items()}
    lines = (_SHARED / "default-configuration").read_text().splitlines()
    kept = [line for line in lines if line.split() and line.split()[0] not in changed]
    added = [f"{name} {value}" for name, value in changed.items()]
    configuration = bed.write("configuration", "\n".join([*kept, *added]) + "\n")
    params = f"{folder}/cell/common;{folder}/spool"
    spool, defaults = str(_PROGRAMS / "spoolinit"), str(_PROGRAMS / "spooldefaults")
    bed.call(spool, "classic", "libspoolc", params, "init", env=variables)
    resources = _SHARED / "util/resources"
    bed.call(defaults, "configuration", str(configuration), env=variables)
    bed.call(defaults, "complexes", str(resources / "centry"), env=variables)
    bed.call(defaults, "usersets", str(resources / "usersets"), env=variables)
    bed.call(defaults, "managers", "root", env=variables)


def _configure(bed: Bed, variables: dict[str, str], host: str) -> None:
    """The queue, the host, and the GPUs: a resource that is counted, as sites make it."""

    def change(option: str, text: str) -> None:
        path = bed.write(f"asked/{option[1:]}", text)
        bed.call("qconf", option, str(path), env=variables)

    def told(option: str, *more: str) -> str:
        return bed.call("qconf", option, *more, env=variables)

    change("-Mc", told("-sc") + "gpu gpu INT <= YES YES 0 0\n")
    change("-Ae", _HOST.format(host=host, gpus=GPUS))
    change("-Ap", _ENVIRONMENT)
    limits = ("rt", "cpu", "fsize", "data", "stack", "core", "rss", "vmem")
    infinite = [f"{kind}_{limit} INFINITY" for limit in limits for kind in "sh"]
    change("-Aq", _QUEUE.format(host=host, folder=bed.folder, limits="\n".join(infinite)))
    told("-as", host)
    soon = {"schedule_interval": "0:0:1", "flush_submit_sec": "1", "flush_finish_sec": "1"}
    lines = [line.split(maxsplit=1) for line in told("-ssconf").splitlines()]
    change("-Msconf", "".join(f"{name} {soon.get(name, value)}\n" for name, value in lines))
