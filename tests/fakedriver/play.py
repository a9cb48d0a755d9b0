"""Writes a :class:`Topology` into the fake driver's state: what its GPUs would say to NVML."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable

from gpuaff._system.kernel import Tree
from gpuaff.cpuset import parse_cpulist
from gpuaff.topology.model import Gpu, MigInstance, Topology
from tests.fakedriver.state import GPUS, LINKS, MIG_SLOTS, NVML, Struct

# nvmlGpuTopologyLevel_t of nvidia-smi's words. GPUs that NVLink joins are behind a host bridge, as
# four H100 are.
_PATHS = {"X": 0, "PIX": 10, "PXB": 20, "PHB": 30, "NODE": 40, "SYS": 50, "SOC": 50}
_BEHIND_NVLINK = _PATHS["PHB"]

_DIRECT, _SWITCH = 0, 2  # NVML_NVLINK_DEVICE_TYPE_…
_SWITCH_ADDRESS = b"00000000:C0:00.0"
_PORTS = 18  # the most NVLinks of a GPU that is sold today (H100, B200); more need a switch

# What an H100 has, what its driver keeps for itself, and what else is in use while it is idle.
_MEMORY = 80 << 30, 480 << 20, 3 << 20
_CONTEXT = 518 << 20  # what a context takes there
_SLOTS = 7  # the MIG instances that an A100 or H100 has room for


def play(state: Struct, topology: Topology) -> None:
    """Write a machine into the state; what the topology does not tell is Not Supported.

    But each GPU has an address, a UUID and a name, made up where there are none.
    """
    if len(topology.gpus) > GPUS:
        raise ValueError(f"the fake driver has room for {GPUS} GPUs, not {len(topology.gpus)}")
    state.gpu_count = len(topology.gpus)
    state.driver_version = b"580.159.04"
    for place, gpu in enumerate(topology.gpus):
        _play_gpu(state.gpus[place], place, gpu)
        state.context_memory[place] = _CONTEXT
    for place, words in enumerate(topology.links or ()):
        _play_links(state, place, words)


def _play_gpu(to: Struct, place: int, gpu: Gpu) -> None:
    to.uuid = (gpu.uuid or f"GPU-00000000-0000-4000-8000-{place:012x}").encode()
    to.name = (gpu.name or "Fake GPU").encode()
    address = gpu.pci_bus_id or f"0000:{place + 1:02x}:00.0"
    to.bus_id = address.upper().rjust(16, "0").encode()  # as NVML spells it
    to.node_code = put_mask(to.node_cpus, gpu.node_cpus)
    to.socket_code = put_mask(to.socket_cpus, gpu.socket_cpus)
    to.memory_code = put_mask(to.memory_nodes, None if gpu.numa_node is None else [gpu.numa_node])
    to.memory_node = -1 if gpu.memory_node is None else gpu.memory_node
    to.mig_mode = 0 if gpu.mig is None else 1
    to.path[:] = [-1] * GPUS
    _play_mig(to, gpu.mig or ())
    for link in to.link:
        link.active = -1
    to.memory, to.reserved, to.idle = _MEMORY


def _play_mig(to: Struct, instances: tuple[MigInstance, ...]) -> None:
    """Fill the slots, but the first: real ones have holes, too (case D2)."""
    to.mig_slots = min(max(_SLOTS, len(instances) + 1), MIG_SLOTS)
    for slot, instance in zip(to.mig[1:], instances, strict=False):
        slot.used = 1
        slot.gpu_instance = instance.gpu_instance
        slot.compute_instance = instance.compute_instance
        slot.uuid = instance.uuid.encode()


def put_mask(to: ctypes.Array[ctypes.c_uint64], ids: Iterable[int] | None) -> int:
    """Write a mask; returns NVML's code for it: Not Supported where there are no ids at all."""
    bits = sum(1 << number for number in ids or ())
    for place in range(len(to)):
        to[place] = bits >> 64 * place & (1 << 64) - 1
    return NVML.NOT_SUPPORTED if ids is None else NVML.SUCCESS


def _play_links(state: Struct, place: int, words: tuple[str, ...]) -> None:
    """Write one row of nvidia-smi's matrix.

    The words do not tell who is at the other end of a link. As many links as a GPU has ports
    are taken as direct, more as links to switches that every GPU shares.
    """
    gpu = state.gpus[place]
    joined = [int(word[2:]) if re.fullmatch(r"NV\d+", word) else 0 for word in words]
    gpu.path[: len(words)] = [
        _BEHIND_NVLINK if count else _PATHS.get(word, -1)
        for count, word in zip(joined, words, strict=True)
    ]
    gpu.links = min(max(_PORTS, *joined, 0), LINKS)
    if sum(joined) > gpu.links:
        ends = [(_SWITCH, _SWITCH_ADDRESS)] * max(joined)
    else:
        ends = [(_DIRECT, state.gpus[j].bus_id) for j, n in enumerate(joined) for _ in range(n)]
    for link, (kind, remote) in zip(gpu.link, ends, strict=False):
        link.active, link.kind, link.remote = 1, kind, remote


def this_machine(gpus: int) -> Topology:
    """This machine's own CPUs with fake GPUs, all CPUs near each: so that pinning is real."""
    cpus = parse_cpulist(Tree().read("sys/devices/system/cpu/online") or "0")
    near = [
        Gpu(index=index, name="Fake GPU", node_cpus=cpus, socket_cpus=cpus, numa_node=0)
        for index in range(gpus)
    ]
    links = tuple(tuple("X" if i == j else "SYS" for j in range(gpus)) for i in range(gpus))
    return Topology(cpus=cpus, allowed=cpus, gpus=tuple(near), links=links)
