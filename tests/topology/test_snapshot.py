from __future__ import annotations

import copy
import json
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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

WRITTEN = """\
{
  "schema_version": 1,
  "cpus": "0-7",
  "allowed": "0-3",
  "cores": ["0,4", "1,5", "2,6", "3,7"],
  "efficiency_cpus": "",
  "packages": [{"id": 0, "cpus": "0-7"}],
  "l3": ["0-1,4-5", "2-3,6-7"],
  "numa_nodes": [
    {"id": 0, "cpus": "0-7", "has_memory": true, "distances": [10, 80]},
    {"id": 8, "cpus": "", "has_memory": null, "distances": [80, 10]}
  ],
  "gpus": [
    {
      "index": 0,
      "uuid": "GPU-a0",
      "pci_bus_id": "0000:07:00.0",
      "name": "A",
      "node_cpus": "0-1,4-5",
      "socket_cpus": "0-7",
      "local_cpus": "0-1,4-5",
      "numa_node": 0,
      "memory_node": 8,
      "source": "nvml",
      "mig": [{"uuid": "MIG-b0", "gpu_instance": 1, "compute_instance": 0}]
    },
    {
      "index": 1,
      "uuid": null,
      "pci_bus_id": null,
      "name": null,
      "node_cpus": null,
      "socket_cpus": null,
      "local_cpus": null,
      "numa_node": null,
      "memory_node": null,
      "source": null,
      "mig": null
    }
  ],
  "links": [["X", "NV4"], ["NV4", "X"]],
  "visible": [1, 0],
  "accelerators": [
    {"pci_bus_id": "0000:07:00.0", "vendor": "10de", "local_cpus": "0-1,4-5", "numa_node": 0},
    {"pci_bus_id": "10000:01:00.0", "vendor": "1002", "local_cpus": null, "numa_node": null}
  ],
  "notes": [{"code": "some-code", "message": "what was found"}]
}
"""

SAVED = json.dumps(json.loads(WRITTEN), indent=2) + "\n"
"""The same as a file has it: one member or item a line."""


def small() -> dict[str, Any]:
    """The small machine as parsed JSON, to be spoilt."""
    data: dict[str, Any] = json.loads(WRITTEN)
    return data


# --- there and back ------------------------------------------------------------------------


def test_a_machine_as_it_is_written(tmp_path: Path) -> None:
    file = tmp_path / "small.json"
    SMALL.save(file)
    assert file.read_text("utf-8") == SAVED


def test_a_machine_as_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "small.json"
    file.write_text(WRITTEN, "utf-8")
    loaded = Topology.load(file)
    assert loaded == SMALL
    assert loaded.notes == SMALL.notes


@settings(deadline=None)
@given(topologies())
def test_round_trip(topology: Topology) -> None:
    data = topology.to_dict()
    assert Topology.from_dict(data) == topology
    assert Topology.from_dict(data).notes == topology.notes
    again = json.loads(json.dumps(data, allow_nan=False))
    assert again == data
    assert serialize.loads(json.dumps(data)) == topology


@settings(deadline=None)
@given(topologies(max_cores=8, max_gpus=4))
def test_what_is_written_reads_back(topology: Topology) -> None:
    text = serialize.dumps(topology)
    assert json.loads(text) == topology.to_dict()
    assert serialize.loads(text.encode()) == topology


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
    topology = serialize.loads('{"schema_version": 1, "cpus": "0-3", "gpus": [{"index": 4}]}')
    expected = frozenset(range(4))
    assert topology == Topology(cpus=expected, allowed=expected, gpus=(Gpu(index=4),), visible=(4,))


def test_a_process_that_may_use_no_cpu_is_not_one_that_may_use_all() -> None:
    cpus = frozenset(range(4))
    locked_out = Topology(cpus=cpus)
    assert locked_out.to_dict()["allowed"] == ""
    assert Topology.from_dict(locked_out.to_dict()) == locked_out


def test_cpus_that_are_not_known() -> None:
    topology = serialize.loads('{"schema_version": 1, "cpus": null, "gpus": []}')
    assert topology == Topology()
    bounded = serialize.loads('{"schema_version": 1, "cpus": null, "allowed": "2-3", "gpus": []}')
    assert bounded.allowed == {2, 3}


def test_members_of_later_releases_are_passed_over() -> None:
    data = small()
    data["dies"] = {"any": ["thing"]}
    data["gpus"][0]["color"] = "green"
    assert Topology.from_dict(data) == SMALL


def test_near_cpus_without_a_source_are_given() -> None:
    data = small()
    data["gpus"][0]["source"] = None
    assert Topology.from_dict(data).gpus[0].source is Source.GIVEN


def test_pci_addresses_in_the_spelling_of_nvidia_smi() -> None:
    data = small()
    data["gpus"][0]["pci_bus_id"] = "0000000F:C1:00.0"
    assert Topology.from_dict(data).gpus[0].pci_bus_id == "000f:c1:00.0"
    data["gpus"][0]["pci_bus_id"] = "00010000:C1:00.0"
    assert Topology.from_dict(data).gpus[0].pci_bus_id == "10000:c1:00.0"


def test_accelerators_are_ordered_by_number() -> None:
    data = small()
    data["accelerators"][1]["pci_bus_id"] = "0000:08:00.0"
    data["accelerators"].append({"pci_bus_id": "00010000:C1:00.0", "vendor": "8086"})
    devices = Topology.from_dict(data).accelerators or ()
    assert [one.pci_bus_id for one in devices] == ["0000:07:00.0", "0000:08:00.0", "10000:c1:00.0"]


def test_no_accelerator_is_not_the_same_as_not_told() -> None:
    for value, expected in (([], ()), (None, None)):
        topology = Topology.from_dict({**small(), "accelerators": value})
        assert topology.accelerators == expected
        assert topology.to_dict()["accelerators"] == value


def test_groups_are_sorted() -> None:
    data = small()
    data["cores"].reverse()
    data["l3"].reverse()
    assert Topology.from_dict(data) == SMALL


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


def test_near_cpus_stay_whole_where_the_machines_are_not_known() -> None:
    near = {"index": 0, "node_cpus": "48-63"}
    topology = Topology.from_dict({"schema_version": 1, "cpus": None, "gpus": [near]})
    assert topology.gpus[0].node_cpus == frozenset(range(48, 64))
    assert topology.notes == ()


def test_a_large_machine_makes_a_small_file() -> None:
    cpus = frozenset(range(256))
    big = Topology(
        cpus=cpus,
        allowed=cpus,
        cores=tuple(frozenset({i, i + 128}) for i in range(128)),
        gpus=tuple(Gpu(index=i, name="NVIDIA A100-SXM4-80GB", node_cpus=cpus) for i in range(8)),
        links=(("NV12",) * 8,) * 8,
    )
    assert len(serialize.dumps(big)) < 10_240


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


def _set(path: str, value: Any) -> Any:
    """A spoiler: set what stands at a path like ``gpus.0.index``."""

    def spoil(data: dict[str, Any]) -> None:
        *way, last = [int(step) if step.isdigit() else step for step in path.split(".")]
        place: Any = data
        for step in way:
            place = place[step]
        place[last] = value

    return spoil


def _drop(path: str) -> Any:
    def spoil(data: dict[str, Any]) -> None:
        *way, last = [int(step) if step.isdigit() else step for step in path.split(".")]
        place: Any = data
        for step in way:
            place = place[step]
        del place[last]

    return spoil


BAD = [
    (_drop("schema_version"), "schema_version: is missing"),
    (_set("schema_version", None), "schema_version: expected a whole number, found null"),
    (_set("schema_version", True), "schema_version: expected a whole number, found True"),
    (_set("schema_version", 1.0), "schema_version: expected a whole number, found 1.0"),
    (_set("schema_version", "1"), "schema_version: expected a whole number, found '1'"),
    (_set("schema_version", 0), "schema_version: expected a number from 1 to 2147483647"),
    (
        _set("schema_version", 2),
        "schema_version: 2 is of a later gpuaff, and this one reads 1: upgrade gpuaff",
    ),
    (_set("schema_version", 10**30), "schema_version: expected a number from 1 to 2147483647"),
    (_drop("cpus"), "cpus: is missing"),
    (_set("cpus", 8), "cpus: expected CPUs such as '0-3,8', found 8"),
    (_set("cpus", 10**5000), "cpus: expected CPUs such as '0-3,8', found a huge number"),
    (_set("cpus", ["0-7"]), "cpus: expected CPUs such as '0-3,8', found a list"),
    (_set("cpus", {}), "cpus: expected CPUs such as '0-3,8', found an object"),
    (_set("cpus", ""), "cpus: names no CPU; write null if they are not known"),
    (_set("cpus", "0-999999"), "cpus: '0-999999' is above the highest CPU id, 65535"),
    (_set("cpus", "7-0"), "cpus: '7-0' runs backwards"),
    (_set("cpus", "0-7,x"), "cpus: 'x' is not a CPU id"),
    (_set("cpus", "0-65535," * 9 + "0"), "cpus: the list names the same CPUs again and again"),
    (_set("cpus", "x" * 5000), "cpus: 'xxx"),
    (_set("allowed", "0-8"), "allowed: names CPUs that are not in cpus: 8"),
    (_set("allowed", 3), "allowed: expected CPUs"),
    (_set("efficiency_cpus", "7-9"), "efficiency_cpus: names CPUs that are not in cpus: 8-9"),
    (_set("cores", "0,4"), "cores: expected a list, found '0,4'"),
    (_set("cores.1", "5,8"), "cores[1]: names CPUs that are not in cpus: 8"),
    (_set("cores.1", "0,5"), "cores[1]: names CPUs that stand before it already: 0"),
    (_set("cores.2", ""), "cores[2]: names no CPU"),
    (_drop("cores.3"), "cores: no core holds these CPUs: 3,7"),
    (_set("cores.0", None), "cores[0]: expected CPUs such as '0-3,8', found null"),
    (_set("l3.1", "1-3"), "l3[1]: names CPUs that stand before it already: 1"),
    (_set("packages", {}), "packages: expected a list, found an object"),
    (_set("packages.0", "0-7"), "packages[0]: expected an object, found '0-7'"),
    (_set("packages.0.cpus", ""), "packages[0].cpus: names no CPU"),
    (_drop("packages.0.id"), "packages[0].id: is missing"),
    (_set("packages.0.id", -1), "packages[0].id: expected a number from 0 to 2147483647"),
    (
        _set("packages", [{"id": 0, "cpus": "0-3"}, {"id": 1, "cpus": "3-7"}]),
        "packages[1].cpus: names CPUs that stand before it already: 3",
    ),
    (
        _set("packages", [{"id": 0, "cpus": "0-3"}, {"id": 0, "cpus": "4-7"}]),
        "packages[1].id: 0 stands after 0: they must ascend, each once",
    ),
    (_set("numa_nodes.1.id", 0), "numa_nodes[1].id: 0 stands after 0"),
    (_set("numa_nodes.1.cpus", "7"), "numa_nodes[1].cpus: names CPUs that stand before it"),
    (_set("numa_nodes.0.cpus", "0-8"), "numa_nodes[0].cpus: names CPUs that are not in cpus: 8"),
    (_drop("numa_nodes.1.cpus"), "numa_nodes[1].cpus: is missing"),
    (_set("numa_nodes.1.cpus", None), "numa_nodes[1].cpus: expected CPUs"),
    (_set("numa_nodes.0.has_memory", 1), "numa_nodes[0].has_memory: expected true or false"),
    (_set("numa_nodes.0.distances", [10]), "numa_nodes[0].distances: expected 2 distances"),
    (_set("numa_nodes.0.distances", [10, 20, 20]), "numa_nodes[0].distances: expected 2"),
    (_set("numa_nodes.0.distances.1", "far"), "numa_nodes[0].distances[1]: expected a whole"),
    (_set("numa_nodes.0.distances.1", -1), "numa_nodes[0].distances[1]: expected a number"),
    (_drop("gpus"), "gpus: is missing"),
    (_set("gpus", None), "gpus: expected a list, found null"),
    (_set("gpus", [{"index": i} for i in range(257)]), "gpus: 257 GPUs in one machine"),
    (_set("gpus.1", None), "gpus[1]: expected an object, found null"),
    (_drop("gpus.1.index"), "gpus[1].index: is missing"),
    (_set("gpus.1.index", 0), "gpus[1].index: 0 stands after 0: they must ascend, each once"),
    (_set("gpus.0.index", False), "gpus[0].index: expected a whole number, found False"),
    (_set("gpus.0.index", 2), "gpus[1].index: 1 stands after 2"),
    (_set("gpus.1.uuid", "GPU-A0"), "gpus[1].uuid: 'GPU-A0' stands twice"),
    (_set("gpus.1.uuid", ""), "gpus[1].uuid: is empty; write null for what is not known"),
    (_set("gpus.1.name", "\ud800"), "gpus[1].name: is not valid Unicode"),
    (_set("gpus.1.name", 5), "gpus[1].name: expected a text, found 5"),
    (_set("gpus.1.pci_bus_id", "00000000:07:00.0"), "gpus[1].pci_bus_id: '0000:07:00.0' stands"),
    (_set("gpus.1.pci_bus_id", "07:00.0"), "gpus[1].pci_bus_id: expected a PCI address such as"),
    (_set("gpus.0.node_cpus", ""), "gpus[0].node_cpus: names no CPU"),
    (_set("gpus.0.node_cpus", "0-3,-1"), "gpus[0].node_cpus: '-1' is not a CPU id"),
    (_set("gpus.0.local_cpus", 0), "gpus[0].local_cpus: expected CPUs"),
    (_set("gpus.0.numa_node", -1), "gpus[0].numa_node: expected a number from 0"),
    (_set("gpus.0.memory_node", "8"), "gpus[0].memory_node: expected a whole number"),
    (
        _set("gpus.0.source", "guess"),
        "gpus[0].source: expected one of nvml, sysfs, given, nearest, all",
    ),
    (_set("gpus.0.source", 3), "gpus[0].source: expected a text, found 3"),
    (_set("gpus.0.mig", "on"), "gpus[0].mig: expected a list, found 'on'"),
    (_drop("gpus.0.mig.0.uuid"), "gpus[0].mig[0].uuid: is missing"),
    (_set("gpus.0.mig.0.gpu_instance", None), "gpus[0].mig[0].gpu_instance: expected a whole"),
    (
        _set("gpus.1.mig", [{"uuid": "MIG-B0", "gpu_instance": 1, "compute_instance": 0}]),
        "gpus[1].mig[0].uuid: 'MIG-B0' stands twice",
    ),
    (_set("links", [["X", "NV4"]]), "links: expected 2 rows, one for each GPU, found 1"),
    (_set("links.1", ["X"]), "links[1]: expected 2 cells, one for each GPU, found 1"),
    (_set("links.1.0", None), "links[1][0]: expected a text, found null"),
    (_set("visible", [0, 2]), "visible[1]: there is no GPU 2"),
    (_set("visible", "0"), "visible: expected a list, found '0'"),
    (_set("visible", [True]), "visible[0]: expected a whole number, found True"),
    (_set("accelerators", {}), "accelerators: expected a list, found an object"),
    (
        _set("accelerators", [{"pci_bus_id": "0000:07:00.0", "vendor": "10de"}] * 257),
        "accelerators: 257 accelerators in one machine, expected at most 256",
    ),
    (_set("accelerators.0", "10de"), "accelerators[0]: expected an object, found '10de'"),
    (_drop("accelerators.0.pci_bus_id"), "accelerators[0].pci_bus_id: is missing"),
    (_set("accelerators.0.pci_bus_id", None), "accelerators[0].pci_bus_id: expected a text"),
    (_set("accelerators.0.pci_bus_id", "7:0"), "accelerators[0].pci_bus_id: expected a PCI"),
    (
        _set("accelerators.0.pci_bus_id", "10000:01:00.0"),
        "accelerators[1].pci_bus_id: '10000:01:00.0' stands twice",
    ),
    (
        _set("accelerators.0.pci_bus_id", "10001:01:00.0"),
        "accelerators[1].pci_bus_id: 10000:01:00.0 stands after 10001:01:00.0: they must ascend",
    ),
    (_drop("accelerators.1.vendor"), "accelerators[1].vendor: is missing"),
    (_set("accelerators.1.vendor", "0x10de"), "accelerators[1].vendor: expected a PCI vendor"),
    (_set("accelerators.1.vendor", 4318), "accelerators[1].vendor: expected a text, found 4318"),
    (_set("accelerators.0.local_cpus", ""), "accelerators[0].local_cpus: names no CPU"),
    (_set("accelerators.0.numa_node", -1), "accelerators[0].numa_node: expected a number from 0"),
    (_set("notes", [{"code": "c"}]), "notes[0].message: is missing"),
    (_set("notes", ["n"]), "notes[0]: expected an object, found 'n'"),
]


@pytest.mark.parametrize(("spoil", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_data_is_refused_with_its_place(spoil: Any, message: str) -> None:
    data = small()
    spoil(data)
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
        (b"", "empty"),
        (b" \n", "empty"),
        (b"GPU0\tGPU1", "not JSON: "),
        (b'{"schema_version": 1,', "not JSON: "),
        (b'{"cpus": NaN}', "not JSON: NaN is not a JSON number"),
        (b'{"cpus": -Infinity}', "not JSON: -Infinity is not a JSON number"),
        (b'{"a": 1, "cpus": "0", "cpus": "1"}', "the key 'cpus' stands twice in one object"),
        (b"[" * 200_000, "not a topology: nested too deeply"),
        (b'{"x": ' * 200_000, "not a topology: nested too deeply"),
        (b'{"schema_version": ' + b"9" * 10_000 + b"}", ""),
        (b"\xff\xfe{\0}\0", "not UTF-8 text (byte 0)"),
        (b"\x7fELF\x02\x01\x01\x00\x00\xf0\xff", "not UTF-8 text (byte 9)"),
        (b"{} {}", "not JSON: "),
        (b" " * (4 << 20) + b"{}", "longer than 4 MiB: not a topology"),
    ],
    ids=range(14),
)
def test_text_that_is_no_topology(text: bytes, message: str) -> None:
    with pytest.raises(TopologyError) as caught:
        serialize.loads(text, "standard input")
    told = str(caught.value)
    assert told.startswith(f"standard input: {message}")
    assert len(told.splitlines()) == 1


def test_a_byte_order_mark_is_welcome() -> None:
    assert serialize.loads(b"\xef\xbb\xbf" + WRITTEN.encode()) == SMALL
    assert serialize.loads("\ufeff" + WRITTEN) == SMALL


_JSON = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-2, 300),
        st.floats(allow_nan=False),
        st.text(max_size=5),
        st.sampled_from(["0-3", "4-7", "8", "", "nvml", "0000:01:00.0"]),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner)),
    max_leaves=5,
)


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every member and item of parsed JSON: what holds it, and under which key."""
    if not isinstance(value, (dict, list)):
        return []
    keys: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value)))
    return [(value, key) for key in keys] + [place for key in keys for place in _places(value[key])]


@settings(deadline=None)
@given(st.data())
def test_spoilt_data_is_read_or_refused(data: st.DataObject) -> None:
    spoilt = copy.deepcopy(small())
    for _ in range(data.draw(st.integers(1, 3))):
        holder, key = data.draw(st.sampled_from(_places(spoilt)))
        holder[key] = data.draw(_JSON)
    try:
        topology = Topology.from_dict(spoilt)
    except TopologyError:
        return
    assert Topology.from_dict(topology.to_dict()) == topology


@settings(deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_refused_politely(raw: bytes) -> None:
    with pytest.raises(TopologyError):
        serialize.loads(raw)


# --- files ---------------------------------------------------------------------------------


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match="not a file: expected a topology that gpuaff saved"):
        Topology.load(tmp_path)
    with pytest.raises(OSError, match="directory"):
        SMALL.save(tmp_path)


def test_a_pipe_that_nobody_writes_to_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TopologyError, match="not a file"):
        Topology.load(tmp_path / "pipe")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Topology.load(tmp_path / "none.json")
    with pytest.raises(FileNotFoundError) as caught:
        SMALL.save(tmp_path / "none" / "none.json")
    assert caught.value.filename == str(tmp_path / "none" / "none.json")
    assert caught.value.filename2 is None


def test_errors_name_the_file(tmp_path: Path) -> None:
    file = tmp_path / "bad.json"
    file.write_text("{}", "utf-8")
    with pytest.raises(TopologyError) as caught:
        Topology.load(str(file))
    assert str(caught.value) == f"{file}: schema_version: is missing"


def test_saving_replaces_the_file_and_leaves_nothing_behind(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    file.write_text("old", "utf-8")
    SMALL.save(str(file))
    assert Topology.load(file) == SMALL
    assert [each.name for each in tmp_path.iterdir()] == ["machine.json"]


def test_saving_through_a_link_changes_the_file_behind_it(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    SMALL.save(tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert Topology.load(tmp_path / "real.json") == SMALL


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "machine.json"
    file.write_text("old", "utf-8")

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        SMALL.save(file)
    assert file.read_text("utf-8") == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["machine.json"]


def test_a_saved_file_has_the_usual_rights(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    SMALL.save(tmp_path / "machine.json")
    rights = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("plain", "machine.json")]
    assert rights[0] == rights[1]


def test_saving_to_a_pipe_writes_into_it(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text("utf-8")))
    reader.start()
    SMALL.save(pipe)
    reader.join()
    assert read == [SAVED]
    assert stat.S_ISFIFO(pipe.stat().st_mode)
