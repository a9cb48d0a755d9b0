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


@pytest.mark.case("D2")
@pytest.mark.parametrize(
    ("uuid", "gpu_instance", "compute_instance"),
    [(MIG0, -1, -1), (MIG1, -1, -1), (f"MIG-{UUID0}/1/0", 1, 0), (f"MIG-{UUID0}/5/1", 5, 1)],
)
def test_mig_instances(uuid: str, gpu_instance: int, compute_instance: int) -> None:
    """Those of drivers since 470 do not contain their ids."""
    first, second = parse(
        f"GPU 0: NVIDIA H100 (UUID: {UUID0})\n  MIG 3g.40gb     Device  0: (UUID: {uuid})\n"
        f"GPU 1: NVIDIA H100 (UUID: {UUID1})\n"
    ).gpus
    instance = MigInstance(uuid=uuid, gpu_instance=gpu_instance, compute_instance=compute_instance)
    assert (first.mig, second.mig) == ((instance,), None)


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


@pytest.mark.parametrize(
    ("text", "uuids", "contradicts"),
    [
        (LIST + f"GPU 0: NVIDIA H100 (UUID: {UUID1})\n", [UUID0, UUID1], True),
        (LIST + LIST, [UUID0, UUID1], False),
    ],
    ids=["two lists that differ", "one list twice"],
)
def test_lines_of_one_gpu_or_uuid(text: str, uuids: list[str | None], contradicts: bool) -> None:
    assert [gpu.uuid for gpu in parse(text).gpus] == uuids
    assert ("contradiction" in codes(text)) is contradicts


def test_one_uuid_at_two_gpus_is_an_error() -> None:
    with pytest.raises(TopologyError, match="a UUID is at two GPUs: paste the output of one"):
        parse(LIST.replace(UUID1, UUID0))
