"""What holds of every topology that was read from something."""

from __future__ import annotations

from gpuaff.topology.model import Topology


def sound(topology: Topology) -> None:
    """What holds of every topology, and what its JSON form demands."""
    cpus = topology.cpus
    assert topology.allowed == cpus
    for groups in (topology.cores, topology.l3, [p.cpus for p in topology.packages or ()]):
        listed = [cpu for group in groups or () for cpu in group]
        assert len(listed) == len(set(listed))
        assert set(listed) <= cpus
        assert all(groups or ())
    if topology.cores is not None:
        assert frozenset().union(*topology.cores) == cpus
    _sound_nodes(topology)
    _sound_gpus(topology)
    for note in topology.notes:
        assert note.code
        assert "\n" not in note.message
        note.message.encode("utf-8")


def _sound_nodes(topology: Topology) -> None:
    nodes = topology.numa_nodes
    assert nodes is None or nodes
    listed = [cpu for node in nodes or () for cpu in node.cpus]
    assert len(listed) == len(set(listed))
    assert set(listed) <= topology.cpus
    ids = [node.id for node in nodes or ()]
    assert ids == sorted(set(ids))
    for node in nodes or ():
        assert node.distances is None or len(node.distances) == len(ids)


def _sound_gpus(topology: Topology) -> None:
    indices = [gpu.index for gpu in topology.gpus]
    assert indices == sorted(set(indices)) == list(topology.visible)
    for gpu in topology.gpus:
        assert gpu.node_cpus is None or gpu.node_cpus
        assert gpu.node_cpus is None or gpu.node_cpus <= topology.cpus
        assert (gpu.source is None) == (gpu.node_cpus is None and gpu.numa_node is None)
    uuids = [gpu.uuid for gpu in topology.gpus if gpu.uuid]
    assert len(uuids) == len(set(uuids))
    assert topology.links is None or [len(row) for row in topology.links] == [len(indices)] * len(
        indices
    )
