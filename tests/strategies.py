"""Hypothesis strategies for whole machines, for every test module that needs one."""

from __future__ import annotations

from random import Random

from hypothesis import strategies as st

from gpuaff.cpuset import CpuSet
from gpuaff.notices import Notice
from gpuaff.topology.model import Accelerator, Gpu, MigInstance, Source, Topology
from tests.fuzz.machines import machine


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """Valid topologies of any kind, in which anything may be unknown."""
    random = draw(st.randoms(use_true_random=False))
    found = machine(random)
    gpus = tuple(_valid(random, gpu, found.cpus) for gpu in found.gpus)
    return found._replace(
        allowed=found.allowed & found.cpus,
        gpus=gpus,
        visible=tuple(index for index in found.visible if index in found.gpu_by_index),
        accelerators=_accelerators(random, gpus),
        links=tuple(tuple("X" if a is b else "NV12" for b in gpus) for a in gpus) or None,
        notes=tuple([Notice("some-code", "some message")] * random.randrange(3)),
    )


def _valid(random: Random, gpu: Gpu, online: CpuSet) -> Gpu:
    """A GPU near online CPUs only, with all that may be known of it."""
    node, socket, local = (
        (cpus and (cpus & online if online else cpus)) or None
        for cpus in (gpu.node_cpus, gpu.socket_cpus, gpu.local_cpus)
    )
    is_known = node or socket or gpu.numa_node is not None
    source = (gpu.source or Source.SYSFS) if is_known else None
    instances = tuple(
        MigInstance(
            uuid=f"MIG-{gpu.index:08x}-0000-5000-8000-{number:012x}",
            gpu_instance=number + 1,
            compute_instance=0,
        )
        for number in range(random.randrange(3))
    )
    return gpu._replace(
        node_cpus=node,
        socket_cpus=socket,
        local_cpus=local,
        name=random.choice((None, "NVIDIA A100-SXM4-80GB", "Tesla V100 »32 GB«")),
        memory_node=random.choice((None, None, 250)),
        source=source,
        mig=random.choice((None, None, instances)),
    )


def _accelerators(random: Random, gpus: tuple[Gpu, ...]) -> tuple[Accelerator, ...] | None:
    """Devices of any vendor, at the GPUs' places, by address; or unknown."""
    if random.random() < 0.3:
        return None
    return tuple(
        Accelerator(
            pci_bus_id=f"{domain:04x}:{bus:02x}:00.{bus % 4}",
            vendor=random.choice(("10de", "1002", "8086")),
            local_cpus=gpu.local_cpus,
            numa_node=gpu.numa_node,
        )
        for domain in (0, 0xFFFF, 0x10000)
        for bus, gpu in enumerate(gpus)
        if random.random() < 0.4
    )
