"""The machine that this process runs on, or a copy of another one's files below GPUAFF_FSROOT."""

from __future__ import annotations

import os
from dataclasses import replace

from gpuaff._system import env, kernel, nvml
from gpuaff._system.kernel import Tree
from gpuaff._system.nvml_records import GpuReading
from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.errors import NoDriverError
from gpuaff.notices import Notice
from gpuaff.topology import sysfs
from gpuaff.topology.model import Gpu, Source, Topology


def observe(*, links: bool, accelerators: bool, allowed: CpuSet | None = None) -> Topology:
    """Observe the machine, as :meth:`gpuaff.Topology.observe` does.

    To list ``accelerators`` takes milliseconds; only ``partition="machine"`` needs them.
    ``allowed`` are the CPUs that the process may use, where the main thread's mask is not it.
    """
    tree = kernel.machine_tree()
    machine = sysfs.read_cpus(tree)
    if not tree.is_live:
        return _from_files(tree, machine)
    if allowed is None:  # other threads than the main one may have been bound on purpose
        allowed = kernel.get_affinity(os.getpid()) if kernel.can_pin() else frozenset()
    here = _observe_here(tree, machine, links, allowed)
    return with_accelerators(here, tree, machine) if accelerators else here


def gpus_of_the_machine(topology: Topology) -> tuple[Gpu, ...]:
    """Every NVIDIA GPU of the machine by sysfs alone, also those that this process may not use."""
    return sysfs.gpus_on_the_bus(kernel.machine_tree(), topology)


def _from_files(tree: Tree, machine: Topology) -> Topology:
    """A tree of files, to which the live mask, environment and driver do not belong."""
    notes = [] if machine.cpus else [_no_sysfs(tree)]
    cpuset = sysfs.cpuset_of(tree)
    if cpuset is not None and machine.cpus - cpuset:
        shown = format_cpulist(cpuset & machine.cpus)
        message = f"these files were gathered inside a cpuset of CPUs {shown}"
        notes.append(Notice("cpuset", f"{message}; --allowed {shown} plans for it"))
    gpus = sysfs.gpus_on_the_bus(tree, machine)
    visible = tuple(gpu.index for gpu in gpus)
    topology = replace(machine, gpus=gpus, visible=visible, notes=tuple(notes))
    return with_accelerators(topology, tree, machine)


def _observe_here(tree: Tree, machine: Topology, links: bool, mask: CpuSet) -> Topology:
    if mask and mask.isdisjoint(machine.cpus):
        # Unreadable, or of another machine (a container's own /sys): the kernel's mask is true.
        machine = Topology(cpus=mask, notes=(_no_sysfs(tree),))
    machine = replace(machine, allowed=mask & machine.cpus)
    topology, lost = _with_gpus(tree, machine, links)
    text, order = env.get("CUDA_VISIBLE_DEVICES"), env.get("CUDA_DEVICE_ORDER")
    return topology.with_visible_devices(text, device_order=order, lost=lost)


def with_accelerators(topology: Topology, tree: Tree, machine: Topology) -> Topology:
    """The same machine with the accelerators on its PCI bus."""
    # Where sysfs has other CPUs, only this process's mask is known, and independent jobs would
    # not agree on borders.
    agreed = topology.cpus == machine.cpus
    return replace(topology, accelerators=sysfs.accelerators(tree, machine) if agreed else ())


def _no_sysfs(tree: Tree) -> Notice:
    where = f"{tree.root.rstrip('/')}/sys/devices/system/cpu"
    problem = "cannot be read, or names none of this process's CPUs"
    return Notice("no-sysfs", f"{where} {problem}: cores and NUMA nodes are unknown")


def _with_gpus(tree: Tree, machine: Topology, links: bool) -> tuple[Topology, frozenset[int]]:
    """The machine with the GPUs that this process may use, and which of them are lost."""
    notes = list(machine.notes)
    try:
        with nvml.open_session() as session:
            readings, matrix = session.read_gpus(links=links)
    except NoDriverError as error:
        notes.append(Notice("no-driver", str(error)))
        # A driver that NVML cannot talk to (case F5) still shows its GPUs in /proc.
        gpus = sysfs.gpus_at(tree, machine, tree.list(sysfs.DRIVER))
        return replace(machine, gpus=gpus, notes=tuple(notes)), frozenset()
    for reading in readings:
        notes.extend(Notice("nvml", f"GPU {reading.index}: {text}") for text in reading.problems)
    # NVML also counts GPUs that a device cgroup denies to this process; CUDA does not.
    places = [place for place, reading in enumerate(readings) if not reading.denied]
    gpus = tuple(_merged(tree, machine, readings[place]) for place in places)
    lost = frozenset(reading.index for reading in readings if reading.lost)
    matrix = matrix and tuple(tuple(matrix[a][b] for b in places) for a in places)
    return replace(machine, gpus=gpus, links=matrix, notes=tuple(notes)), lost


def _merged(tree: Tree, machine: Topology, reading: GpuReading) -> Gpu:
    """The driver's facts about a GPU, completed by those of its PCI device."""
    local, numa_node = sysfs.place(tree, reading.pci_bus_id, machine)
    # The driver also names CPUs that are offline or do not exist (case A22).
    node_cpus = (reading.node_cpus or frozenset()) & machine.cpus or None
    socket_cpus = (reading.socket_cpus or frozenset()) & machine.cpus or None
    source = Source.NVML if node_cpus or not local else Source.SYSFS
    # The driver's node, else sysfs's (case A7); of several those with CPUs (case A24).
    with_cpus = [node.id for node in machine.numa_nodes or () if node.cpus]
    named = [node for node in with_cpus if node in (reading.memory_nodes or ())]
    holding = machine.nodes_of(reading.node_cpus or frozenset())
    return Gpu(
        index=reading.index,
        uuid=reading.uuid,
        pci_bus_id=reading.pci_bus_id,
        name=reading.name,
        node_cpus=node_cpus or local,
        socket_cpus=socket_cpus,
        local_cpus=local,
        numa_node=next((found[0] for found in (named, holding) if len(found) == 1), numa_node),
        memory_node=reading.memory_node,
        source=source if node_cpus or local or socket_cpus else None,
        mig=reading.mig,
    )
