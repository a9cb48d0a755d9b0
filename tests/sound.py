"""What holds of every topology that was read from something."""

from __future__ import annotations

from gpuaff.topology.model import Topology


def sound(topology: Topology) -> None:
    """What holds of every topology, and what its JSON form demands."""
    cpus = topology.cpus
    assert topology.allowed == cpus
    packages = [package.cpus for package in topology.packages or ()]
    nodes = [node.cpus for node in topology.numa_nodes or ()]
    for groups in (topology.cores, topology.l3, packages, nodes):
        listed = [cpu for group in groups or () for cpu in group]
        assert len(listed) == len(set(listed))
        assert set(listed) <= cpus
    assert all((*(topology.cores or ()), *(topology.l3 or ()), *packages))
    if topology.cores is not None:
        assert frozenset().union(*topology.cores) == cpus
    assert topology.numa_nodes is None or topology.numa_nodes
    ids = [node.id for node in topology.numa_nodes or ()]
    assert ids == sorted(set(ids))
    distances = [node.distances for node in topology.numa_nodes or ()]
    assert all(one is None or len(one) == len(ids) for one in distances)
    indices = [gpu.index for gpu in topology.gpus]
    assert indices == sorted(set(indices)) == list(topology.visible)
    for gpu in topology.gpus:
        assert gpu.node_cpus is None or gpu.node_cpus
        assert gpu.node_cpus is None or gpu.node_cpus <= topology.cpus
        assert (gpu.source is None) == (gpu.node_cpus is None and gpu.numa_node is None)
    uuids = [gpu.uuid for gpu in topology.gpus if gpu.uuid]
    assert len(uuids) == len(set(uuids))
    square = [len(indices)] * len(indices)
    assert topology.links is None or [len(row) for row in topology.links] == square
    for note in topology.notes:
        assert note.code
        assert "\n" not in note.message
        note.message.encode("utf-8")
