"""Topologies from the text that people paste into bug reports.

Read are ``nvidia-smi topo -m``, ``nvidia-smi -L``, ``lscpu``, ``lscpu -p``, ``lscpu -e`` and
``numactl -H``, in any mix and order, in whatever white space, quoting and escape codes they
arrive; anything else in the text is passed over. Each format has a module that only reads;
:mod:`.machine` and :mod:`.devices` put together what they found.

A paste is often cut, and a command often missing. What the text does not tell stays None, and
a note says which command's output would tell it; what may be wrong is not used.
"""

from __future__ import annotations

from collections.abc import Collection

from gpuaff.cpuset import CpuSet
from gpuaff.topology.model import Topology
from gpuaff.topology.pasted import cpus, devices, lscpu, nvidia_smi
from gpuaff.topology.pasted.cpus import Machine
from gpuaff.topology.pasted.text import Reading

__all__ = ["parse"]


def parse(text: str, *, name: str = "pasted text") -> Topology:
    """Read pasted text.

    Args:
        text: what was pasted.
        name: what errors call it, e.g. the path it was read from.

    Raises:
        TopologyError: nothing in it tells about CPUs or NVIDIA GPUs, or it is far larger than
            what those commands print (4 MiB, 200 000 lines, 10 000 of them a
            table's, 2 million CPU ids or 256 GPUs).
    """
    reading = Reading(text, name)
    table = nvidia_smi.read_table(reading)
    listed = nvidia_smi.read_list(reading)
    found = _machine(reading, devices.cpu_lists(reading, table))
    if not (found.cpus or table.gpus or listed):
        raise reading.error(_nothing(reading))
    gpus = devices.assemble(reading, table, listed, found)
    links = devices.links(reading, table, gpus)
    _note_foreign(reading)
    return Topology(
        cpus=found.cpus,
        allowed=found.cpus,
        cores=found.cores,
        packages=found.packages,
        l3=found.l3,
        numa_nodes=found.nodes,
        gpus=gpus,
        links=links,
        visible=tuple(gpu.index for gpu in gpus),
        notes=reading.notes,
    )


def _machine(reading: Reading, near: Collection[CpuSet]) -> Machine:
    return cpus.assemble(
        reading,
        lscpu.read_summary(reading),
        lscpu.read_rows(reading),
        cpus.read_numactl(reading),
        near=near,
    )


def _nothing(reading: Reading) -> str:
    found = "only AMD's GPUs are told of" if reading.foreign else "no CPU and no NVIDIA GPU in it"
    count = len(reading.lines) - (reading.cut_line < 0)  # nothing follows the last newline
    return (
        f"{found} ({count} {'line' if count == 1 else 'lines'}); paste the output of "
        "`nvidia-smi topo -m` and of `lscpu`, whole"
    )


def _note_foreign(reading: Reading) -> None:
    if reading.foreign:
        reading.note(
            "rocm-ignored",
            "the lines of rocm-smi or amd-smi are not read: only NVIDIA's tools are understood",
        )
