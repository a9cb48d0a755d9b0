"""Who sits where: the parts of a machine in which its GPUs are."""

from __future__ import annotations

from gpuaff.cpuset import CpuSet
from gpuaff.records import dataclass
from gpuaff.topology.model import Gpu, NumaNode, Package, Topology


@dataclass(frozen=True)
class Region:
    """A part of a machine whose cores are drawn together.

    Attributes:
        name: ``node 3``.
        cpus: its CPUs.
        gpus: the GPUs that sit there.
    """

    name: str
    cpus: CpuSet
    gpus: tuple[Gpu, ...] = ()


def node_of(topology: Topology, gpu: Gpu) -> NumaNode | None:
    """The NUMA node with CPUs that a GPU sits at; None when it is not known to be just one."""
    nodes = [node for node in topology.numa_nodes or () if node.cpus]
    told = [node for node in nodes if node.id == gpu.numa_node]
    near = told or [node for node in nodes if node.cpus & (gpu.node_cpus or frozenset())]
    return near[0] if len(near) == 1 else None


def package_of(topology: Topology, gpu: Gpu) -> Package | None:
    """The package that a GPU sits at; None when it is not known to be just one."""
    near = gpu.node_cpus or gpu.socket_cpus or frozenset()
    found = [package for package in topology.packages or () if package.cpus & near]
    return found[0] if len(found) == 1 else None


def package_of_node(topology: Topology, node: NumaNode) -> Package | None:
    """The package that holds the whole of a node; None when there is none."""
    holders = (package for package in topology.packages or () if node.cpus <= package.cpus)
    return next(holders, None) if node.cpus else None


def at_node(topology: Topology, node: NumaNode) -> tuple[Gpu, ...]:
    """The GPUs that sit at a node."""
    return tuple(gpu for gpu in topology.gpus if node_of(topology, gpu) == node)


def at_package(topology: Topology, package: Package) -> tuple[Gpu, ...]:
    """The GPUs that sit at a package, but not at one node."""
    return tuple(
        gpu
        for gpu in topology.gpus
        if node_of(topology, gpu) is None and package_of(topology, gpu) == package
    )


def elsewhere(topology: Topology) -> tuple[Gpu, ...]:
    """The GPUs that sit at no one node or package, as far as is known."""
    return tuple(
        gpu
        for gpu in topology.gpus
        if node_of(topology, gpu) is None and package_of(topology, gpu) is None
    )


def regions(topology: Topology) -> list[Region]:
    """The parts to draw: the NUMA nodes, else the packages; then the CPUs that are in none."""
    parts = _parts(topology)
    everywhere = topology.cpus or topology.allowed
    rest = everywhere.difference(*(part.cpus for part in parts))
    return [*parts, Region("elsewhere" if parts else "CPUs", rest)] if rest else parts


def _parts(topology: Topology) -> list[Region]:
    if topology.numa_nodes:
        return [
            Region(f"node {node.id}", node.cpus, at_node(topology, node))
            for node in topology.numa_nodes
            if node.cpus
        ]
    return [
        Region(f"package {package.id}", package.cpus, at_package(topology, package))
        for package in topology.packages or ()
    ]
