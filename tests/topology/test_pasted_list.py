"""``nvidia-smi -L``: names, UUIDs, MIG instances."""

from __future__ import annotations

import pytest

from gpuaff.errors import TopologyError
from gpuaff.topology.model import MigInstance
from gpuaff.topology.pasted import parse

UUID0 = "GPU-00000000-1111-2222-3333-444444444444"
UUID1 = "GPU-00000000-1111-2222-3333-555555555555"
MIG0 = "MIG-aaaaaaaa-1111-2222-3333-444444444444"
MIG1 = "MIG-bbbbbbbb-1111-2222-3333-444444444444"
TABLE = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\tX\tSYS\t0-7\t0\nGPU1\tSYS\tX\t8-15\t1\n"
LIST = f"GPU 0: NVIDIA A100-SXM4-80GB (UUID: {UUID0})\nGPU 1: Tesla V100 (UUID: {UUID1})\n"


def codes(text: str) -> set[str]:
    return {note.code for note in parse(text).notes}


@pytest.mark.parametrize("text", [LIST + TABLE, TABLE + LIST, TABLE + "```\n  " + LIST])
def test_names_and_uuids(text: str) -> None:
    first, second = parse(text).gpus
    assert (first.name, first.uuid, first.mig) == ("NVIDIA A100-SXM4-80GB", UUID0, None)
    assert (second.name, second.uuid, second.mig) == ("Tesla V100", UUID1, None)
    assert first.node_cpus == frozenset(range(8))
    assert "uuids-unknown" not in codes(text)


def test_the_list_alone() -> None:
    topology = parse(LIST)
    assert topology.visible == (0, 1)
    assert topology.cpus == frozenset()
    assert topology.links is None
    assert [gpu.source for gpu in topology.gpus] == [None, None]
    assert {"cpus-unknown", "affinity-unknown", "links-unknown"} <= codes(LIST)


def test_a_gpu_in_the_list_and_not_in_the_table() -> None:
    text = TABLE + LIST + "GPU 2: NVIDIA T4\n"
    topology = parse(text)
    assert [gpu.index for gpu in topology.gpus] == [0, 1, 2]
    assert topology.links is None


@pytest.mark.case("D2")
def test_mig_instances_of_new_drivers_do_not_tell_their_ids() -> None:
    text = (
        f"GPU 0: NVIDIA H100 (UUID: {UUID0})\n"
        f"  MIG 3g.40gb     Device  0: (UUID: {MIG0})\n"
        f"  MIG 1g.10gb     Device  1: (UUID: {MIG1})\n"
        f"GPU 1: NVIDIA H100 (UUID: {UUID1})\n"
    )
    first, second = parse(text).gpus
    assert first.mig == (
        MigInstance(uuid=MIG0, gpu_instance=-1, compute_instance=-1),
        MigInstance(uuid=MIG1, gpu_instance=-1, compute_instance=-1),
    )
    assert second.mig is None


@pytest.mark.case("D2")
def test_mig_instances_of_old_drivers_do() -> None:
    text = (
        f"GPU 0: A100-SXM4-40GB (UUID: {UUID0})\n"
        f"  MIG 3g.20gb Device 0: (UUID: MIG-{UUID0}/1/0)\n"
        f"  MIG 2g.10gb Device 1: (UUID: MIG-{UUID0}/5/1)\n"
    )
    (gpu,) = parse(text).gpus
    assert gpu.mig == (
        MigInstance(uuid=f"MIG-{UUID0}/1/0", gpu_instance=1, compute_instance=0),
        MigInstance(uuid=f"MIG-{UUID0}/5/1", gpu_instance=5, compute_instance=1),
    )


@pytest.mark.parametrize(
    "line",
    [
        "GPU 0: NVIDIA A30 (UUID: GPU-0000",
        "GPU 0: NVIDIA A30 (UUID: GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx)",
        "GPU 0: NVIDIA A30 (UUID: N/A)",
        "GPU 0: NVIDIA A30 (UUID:",
        "GPU 0: NVIDIA A30",
    ],
)
def test_a_uuid_that_is_cut_or_hidden_is_unknown(line: str) -> None:
    (gpu,) = parse(line).gpus
    assert (gpu.name, gpu.uuid) == ("NVIDIA A30", None)
    assert "uuids-unknown" in codes(line)


def test_cut_mig_lines_are_passed_over() -> None:
    text = f"GPU 0: NVIDIA A30 (UUID: {UUID0})\n  MIG 1g.6gb Device 0: (UUID: MIG-aaaa"
    assert parse(text).gpus[0].mig is None
    assert parse(text + ")\n").gpus[0].mig is None


@pytest.mark.parametrize("line", ["GPU 0: 35C", "GPU 0: Radeon", "GPU: 0", "GPU 0 NVIDIA"])
def test_lines_of_other_kinds(line: str) -> None:
    with pytest.raises(TopologyError):
        parse(line)


def test_two_lists_that_differ() -> None:
    text = LIST + f"GPU 0: NVIDIA H100 (UUID: {UUID1})\n"
    assert parse(text).gpus[0].uuid == UUID0
    assert "contradiction" in codes(text)


def test_a_list_with_uuids_completes_one_without() -> None:
    text = "GPU 0: NVIDIA A100-SXM4-80GB\n" + LIST
    assert parse(text).gpus[0].uuid == UUID0
    assert "contradiction" not in codes(text)


def test_no_uuid_at_two_gpus() -> None:
    text = f"GPU 0: NVIDIA A30 (UUID: {UUID0})\nGPU 1: NVIDIA A30 (UUID: {UUID0})\n"
    assert [gpu.uuid for gpu in parse(text).gpus] == [UUID0, None]
    assert "contradiction" in codes(text)
