"""Machines that somebody ran ``gpuaff topo --save`` on."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuaff import Topology, plan
from gpuaff.cpuset import format_cpulist

MACHINES = Path(__file__).parents[1] / "data/machines"


@pytest.mark.case("real-machine")
def test_a_virtual_machine_with_two_h100() -> None:
    """One NUMA node, no SMT, a kernel and a driver that agree."""
    machine = Topology.load(MACHINES / "h100x2-vm.json")
    assert format_cpulist(machine.cpus) == "0-31"
    assert machine.links == (("X", "NV18"), ("NV18", "X")), "NVLink over a host bridge"
    assert [gpu.numa_node for gpu in machine.gpus] == [0, 0]
    # 32 cores near both GPUs: 16 each, in blocks or every second one.
    two = [format_cpulist(share.cpus) for share in plan(machine, 2).shares]
    assert two == ["0-15", "16-31"]
    dealt = plan(machine, 2, mode="unique_interleaved").shares
    assert [sorted(share.cpus) for share in dealt] == [
        list(range(0, 32, 2)),
        list(range(1, 32, 2)),
    ]
    # four ranks: two on each GPU, its sixteen cores cut again
    four = [format_cpulist(share.cpus) for share in plan(machine, 4).shares]
    assert four == ["0-7", "16-23", "8-15", "24-31"]


def test_every_saved_machine_is_tested() -> None:
    assert [path.name for path in MACHINES.iterdir()] == ["h100x2-vm.json"]
