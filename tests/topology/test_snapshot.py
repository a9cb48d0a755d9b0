from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from gpuaff.cpuset import parse_cpulist
from gpuaff.errors import TopologyError
from gpuaff.notices import Notice
from gpuaff.topology import serialize
from gpuaff.topology.model import Accelerator, Gpu, MigInstance, NumaNode, Package, Source, Topology
from tests.strategies import topologies

SMALL = Topology(
    cpus=parse_cpulist("0-7"),
    allowed=parse_cpulist("0-3"),
    cores=tuple(frozenset({i, i + 4}) for i in range(4)),
    packages=(Package(id=0, cpus=parse_cpulist("0-7")),),
    l3=(parse_cpulist("0-1,4-5"), parse_cpulist("2-3,6-7")),
    numa_nodes=(
        NumaNode(id=0, cpus=parse_cpulist("0-7"), has_memory=True, distances=(10, 80)),
        NumaNode(id=8, cpus=frozenset(), distances=(80, 10)),
    ),
    gpus=(
        Gpu(
            index=0,
            uuid="GPU-a0",
            pci_bus_id="0000:07:00.0",
            name="A",
            node_cpus=parse_cpulist("0-1,4-5"),
            socket_cpus=parse_cpulist("0-7"),
            local_cpus=parse_cpulist("0-1,4-5"),
            numa_node=0,
            memory_node=8,
            source=Source.NVML,
            mig=(MigInstance(uuid="MIG-b0", gpu_instance=1, compute_instance=0),),
        ),
        Gpu(index=1),
    ),
    links=(("X", "NV4"), ("NV4", "X")),
    visible=(1, 0),
    accelerators=(
        Accelerator(
            pci_bus_id="0000:07:00.0",
            vendor="10de",
            local_cpus=parse_cpulist("0-1,4-5"),
            numa_node=0,
        ),
        Accelerator(pci_bus_id="10000:01:00.0", vendor="1002"),
    ),
    notes=(Notice("some-code", "what was found"),),
)

DATA = Path(__file__).parents[1] / "data/json"
SAVED = (DATA / "small.json").read_text("utf-8")
"""The same as a file has it: one member or item a line."""

SHORTEST = '{"schema_version": 1, "cpus": %s, "gpus": [%s]}'


def small() -> dict[str, Any]:
    """The small machine as parsed JSON, to be spoilt."""
    data: dict[str, Any] = json.loads(SAVED)
    return data


def at(data: dict[str, Any], path: str) -> tuple[Any, Any]:
    """What holds the member at a path such as ``gpus.0.name``, and its key there."""
    holder: Any = data
    *way, last = [int(step) if step.isdigit() else step for step in path.split(".")]
    for step in way:
        holder = holder[step]
    return holder, last


# --- there and back ------------------------------------------------------------------------


def test_a_machine_as_it_is_written_and_read(tmp_path: Path) -> None:
    file = tmp_path / "small.json"
    SMALL.save(file)
    assert file.read_text("utf-8") == SAVED
    loaded = Topology.load(file)
    assert loaded == SMALL
    assert loaded.notes == SMALL.notes


@settings(deadline=None)
@given(topologies())
def test_round_trip(topology: Topology) -> None:
    data, text = topology.to_dict(), serialize.dumps(topology)
    assert json.loads(text) == data
    for again in (Topology.from_dict(data), serialize.loads(text), serialize.loads(text.encode())):
        assert again == topology
        assert again.notes == topology.notes


def test_every_member_is_always_there() -> None:
    assert list(Topology().to_dict()) == list(small())
    assert Topology().to_dict() == {
        **dict.fromkeys(small()),
        "schema_version": 1,
        "efficiency_cpus": "",
        "gpus": [],
        "visible": [],
        "notes": [],
    }


def test_the_shortest_file() -> None:
    topology = serialize.loads(SHORTEST % ('"0-3"', '{"index": 4}'))
    expected = frozenset(range(4))
    assert topology == Topology(cpus=expected, allowed=expected, gpus=(Gpu(index=4),), visible=(4,))


def test_a_process_that_may_use_no_cpu_is_not_one_that_may_use_all() -> None:
    cpus = frozenset(range(4))
    locked_out = Topology(cpus=cpus)
    assert locked_out.to_dict()["allowed"] == ""
    assert Topology.from_dict(locked_out.to_dict()) == locked_out


def test_cpus_that_are_not_known() -> None:
    assert serialize.loads(SHORTEST % ("null", "")) == Topology()
    bounded = serialize.loads((SHORTEST % ("null", ""))[:-1] + ', "allowed": "2-3"}')
    assert bounded.allowed == {2, 3}
    near = serialize.loads(SHORTEST % ("null", '{"index": 0, "node_cpus": "48-63"}'))
    assert near.gpus[0].node_cpus == frozenset(range(48, 64))
    assert near.notes == ()


def test_members_of_later_releases_are_passed_over() -> None:
    data = small()
    data["dies"] = {"any": ["thing"]}
    data["gpus"][0]["color"] = "green"
    assert Topology.from_dict(data) == SMALL


def test_accelerators_are_ordered_by_number() -> None:
    data = small()
    data["accelerators"][1]["pci_bus_id"] = "0000:08:00.0"
    data["accelerators"].append({"pci_bus_id": "00010000:C1:00.0", "vendor": "8086"})
    devices = Topology.from_dict(data).accelerators or ()
    assert [one.pci_bus_id for one in devices] == ["0000:07:00.0", "0000:08:00.0", "10000:c1:00.0"]


@pytest.mark.parametrize(
    ("path", "value", "expected"), json.loads((DATA / "accepted.json").read_text("utf-8"))
)
def test_what_stands_for_the_same_is_accepted(path: str, value: Any, expected: Any) -> None:
    data = small()
    holder, key = at(data, path)
    holder[key] = value
    holder, key = at(Topology.from_dict(data).to_dict(), path)
    assert holder[key] == expected


@pytest.mark.case("A22")
def test_near_cpus_that_do_not_exist_are_left_out() -> None:
    data = small()
    data["gpus"][0]["node_cpus"] = "4-9"
    data["gpus"][0]["socket_cpus"] = "32-63"
    data["accelerators"][0]["local_cpus"] = "5-9"
    topology = Topology.from_dict(data)
    assert topology.gpus[0].node_cpus == frozenset({4, 5, 6, 7})
    assert topology.gpus[0].socket_cpus is None
    assert topology.accelerators
    assert topology.accelerators[0].local_cpus == frozenset({5, 6, 7})
    assert [note.code for note in topology.notes] == ["some-code", *["near-foreign"] * 3]
    assert topology.notes[1].message == (
        "gpus[0].node_cpus names CPUs that the machine does not have: 8-9; they are left out"
    )


def test_a_saved_note_is_not_told_twice() -> None:
    data = small()
    data["gpus"][0]["node_cpus"] = "4-9"
    once = Topology.from_dict(data)
    assert Topology.from_dict(once.to_dict()).notes == once.notes


def test_the_example_in_the_docs() -> None:
    page = Path(__file__).parents[2] / "docs" / "topology-json.md"
    block = page.read_text("utf-8").split("```json\n")[1].split("```")[0]
    machine = serialize.loads(block)
    assert [gpu.name for gpu in machine.gpus] == ["left", "right"]
    assert machine.cores is not None
    assert len(machine.cores) == 8


@pytest.mark.parametrize("member", list(Topology().to_dict()))
def test_the_docs_tell_every_member(member: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "topology-json.md").read_text("utf-8")
    assert f"| `{member}` |" in page


# --- what is not a topology ----------------------------------------------------------------


SPOILT = [
    *json.loads((DATA / "spoilt.json").read_text("utf-8")),
    ["cpus", 10**5000, "cpus: expected a text, found a whole number"],
    ["cpus", "x" * 5000, "cpus: 'xxx"],
]
"""What is set at a path of the small machine, or that it is missing; and the error."""


@pytest.mark.parametrize(("path", "value", "message"), SPOILT, ids=[row[2] for row in SPOILT])
def test_bad_data_is_refused_with_its_place(path: str, value: Any, message: str) -> None:
    data = small()
    holder, key = at(data, path)
    if value == "(missing)":
        del holder[key]
    else:
        holder[key] = value
    with pytest.raises(TopologyError) as caught:
        serialize.from_dict(data, "machine.json")
    told = str(caught.value)
    assert told.startswith(f"machine.json: {message}")
    assert len(told) < 300
    assert len(told.splitlines()) == 1


@pytest.mark.parametrize("data", [None, [], "text", 1, True])
def test_data_that_is_no_object(data: Any) -> None:
    with pytest.raises(TopologyError, match=r"^the topology: expected an object, found "):
        Topology.from_dict(data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "not JSON: Expecting value: line 1 column 1"),
        (b"GPU0\tGPU1", "not JSON: "),
        (b'{"schema_version": 1,', "not JSON: "),
        (b'{"schema_version": 1, "cpus": NaN, "gpus": []}', "cpus: expected a text, found a num"),
        (b"[" * 200_000, "not JSON: "),
        (b'{"x": ' * 200_000, "not JSON: "),
        (b'{"schema_version": ' + b"9" * 10_000 + b"}", ""),
        (b"\x7fELF\xff", "not JSON: 'utf-8' codec can't decode byte 0xff in position 4"),
        (b"{} {}", "not JSON: "),
        (b" " * (4 << 20) + b"{}", "longer than 4 MiB: not a topology"),
    ],
    ids=range(10),
)
def test_text_that_is_no_topology(text: bytes, message: str) -> None:
    with pytest.raises(TopologyError) as caught:
        serialize.loads(text, "standard input")
    told = str(caught.value)
    assert told.startswith(f"standard input: {message}")
    assert len(told.splitlines()) == 1


def test_a_byte_order_mark_is_welcome() -> None:
    assert serialize.loads(b"\xef\xbb\xbf" + SAVED.encode()) == SMALL
    assert serialize.loads("\ufeff" + SAVED) == SMALL


# --- files ---------------------------------------------------------------------------------


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    for act in (Topology.load, SMALL.save):
        with pytest.raises(OSError, match="directory"):
            act(tmp_path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Topology.load(tmp_path / "none.json")
    with pytest.raises(FileNotFoundError):
        SMALL.save(tmp_path / "none" / "none.json")


def test_errors_name_the_file(tmp_path: Path) -> None:
    file = tmp_path / "bad.json"
    file.write_text("{}", "utf-8")
    with pytest.raises(TopologyError) as caught:
        Topology.load(str(file))
    assert str(caught.value) == f"{file}: schema_version: is missing"


def test_a_topology_cannot_be_changed() -> None:
    machine = Topology.named("dgx-a100")
    with pytest.raises(AttributeError, match="use _replace"):
        machine.visible = ()  # type: ignore[misc]  # that is the test
    assert machine._replace(visible=()).visible == ()
