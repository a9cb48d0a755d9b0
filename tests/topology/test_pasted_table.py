"""``nvidia-smi topo -m``, trap by trap."""

from __future__ import annotations

import pytest

from gpuaff.cpuset import format_cpulist, parse_cpulist
from gpuaff.errors import TopologyError
from gpuaff.topology.model import Gpu, Source, Topology
from gpuaff.topology.pasted import parse
from tests.topology.reading import codes, message

HEADER = "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
TWO_NODES = "NUMA node0 CPU(s): 0-15\nNUMA node1 CPU(s): 16-31\n"


def two(cells0: str, cells1: str, *, header: str = HEADER) -> str:
    return f"{header}GPU0\t X \tSYS\t{cells0}\nGPU1\tSYS\t X \t{cells1}\n"


def near(topology: Topology) -> list[str | None]:
    return [
        None if gpu.node_cpus is None else format_cpulist(gpu.node_cpus) for gpu in topology.gpus
    ]


def nodes(topology: Topology) -> list[int | None]:
    return [gpu.numa_node for gpu in topology.gpus]


def memory(topology: Topology) -> list[int | None]:
    return [gpu.memory_node for gpu in topology.gpus]


PLAIN = two("0-15\t0\t\tN/A", "16-31\t1\t\tN/A")


def test_plain() -> None:
    topology = parse(PLAIN)
    assert topology.gpus == (
        Gpu(index=0, node_cpus=frozenset(range(16)), numa_node=0, source=Source.GIVEN),
        Gpu(index=1, node_cpus=frozenset(range(16, 32)), numa_node=1, source=Source.GIVEN),
    )
    assert topology.links == (("X", "SYS"), ("SYS", "X"))
    assert topology.visible == (0, 1)
    assert topology.cpus == topology.allowed == frozenset(range(32))


@pytest.mark.parametrize(
    "text",
    [
        PLAIN.replace("\t", "        "),
        PLAIN.replace("\t", " "),
        PLAIN.replace("\n", "\r\n"),
        PLAIN.replace("\n", "\r"),
        PLAIN.replace("\n", "\n\n"),
        PLAIN.replace("\t", "\xa0\t"),
        "".join(f"    {line}\n" for line in PLAIN.splitlines()),
        "".join(f"# {line}\n" for line in PLAIN.splitlines()),
        "".join(f" * {line}\n" for line in PLAIN.splitlines()),
        "".join(f"> > {line}\n" for line in PLAIN.splitlines()),
        "".join(f"| {line}\n" for line in PLAIN.splitlines()),
        "```text\n" + PLAIN + "```\n",
        "\ufeff" + PLAIN,
        "".join(f"{letter}\0" for letter in PLAIN),
        PLAIN.rstrip(),
        "user@host:~$ nvidia-smi topo -m\n" + PLAIN + "\nLegend:\n\n  X    = Self\n",
    ],
    ids=range(16),
)
def test_white_space_and_quoting(text: str) -> None:
    assert parse(text) == parse(PLAIN)


@pytest.mark.parametrize("escape", ["\x1b", ""])
def test_escape_codes_around_the_header(escape: str) -> None:
    """nvidia-smi underlines its header; some pastes lose the escape character."""
    first, rest = PLAIN.split("\n", 1)
    assert parse(f"{escape}[4m{first}{escape}[0m\n{rest}") == parse(PLAIN)
    assert parse(PLAIN.replace("\tGPU", f"\t{escape}[1;4mGPU")) == parse(PLAIN)


def test_markdown_table() -> None:
    text = (
        "|      | GPU0 | GPU1 | CPU Affinity | NUMA Affinity | GPU NUMA ID |\n"
        "|------|------|------|--------------|---------------|-------------|\n"
        "| GPU0 | X    | SYS  | 0-15         | 0             | N/A         |\n"
        "| GPU1 | SYS  | X    |              |               | N/A         |\n"
    )
    topology = parse(text)
    assert near(topology) == ["0-15", None]
    assert nodes(topology) == [0, None]


def test_wrapped_legend_and_foreign_lines_are_passed_over() -> None:
    legend = (
        "\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe as well as the SMP\n"
        "interconnect between NUMA nodes (e.g.,\nQPI/UPI)\n  NV#  = Connection traversing a "
        "bonded set of\n# NVLinks\n\nNIC Legend:\n\n  NIC0: mlx5_0\n"
    )
    assert parse(PLAIN + legend) == parse(PLAIN)
    assert parse(legend + PLAIN) == parse(PLAIN)


@pytest.mark.case("A1")
def test_empty_cells_alone_leave_the_cpus_unknown() -> None:
    topology = parse(two("\t\t\tN/A", "\t\t\tN/A"))
    assert topology.cpus == frozenset()
    assert near(topology) == [None, None]
    assert {"affinity-unknown", "cpus-unknown"} <= codes(topology)


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ("0-15\t0\t\tN/A", ("0-15", 0, None)),
        ("0-15\t0\tN/A", ("0-15", 0, None)),
        ("0-15\t\tN/A\t\tN/A", ("0-15", None, None)),
        ("0-15\tN/A\t\tN/A", ("0-15", None, None)),
        ("0-15\t\t\tN/A", ("0-15", None, None)),
        ("0-15\t0\t\t4", ("0-15", 0, 4)),
        ("0-15\t0\t4", ("0-15", 0, 4)),
        ("0-15\t\t0\t\t4", ("0-15", 0, 4)),
        ("0-15\t\t\t4", ("0-15", None, 4)),
        ("\t0\t\tN/A", (None, 0, None)),
        ("N/A\t0\t\t4", (None, 0, 4)),
        ("7\t0\t\tN/A", ("7", 0, None)),
        # A number in the second cell: a shifted node, or a memory node in its place?
        ("0-15\t\t4", ("0-15", None, None)),
    ],
)
def test_cells_shifted_by_tabs(
    cells: str, expected: tuple[str | None, int | None, int | None]
) -> None:
    topology = parse(two(cells, cells))
    assert (near(topology)[1], nodes(topology)[1], memory(topology)[1]) == expected


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ("0-15 0 N/A", ("0-15", 0, None)),
        ("0-15 N/A N/A", ("0-15", None, None)),
        ("0-15 N/A", ("0-15", None, None)),
        ("0-15 0 4", ("0-15", 0, 4)),
        ("N/A N/A N/A", (None, None, None)),
        ("N/A", (None, None, None)),
        ("7 0 N/A", ("7", 0, None)),
        # One cell too few: the number may be the CPU or the node, and is not taken for a CPU.
        ("0 N/A", (None, 0, None)),
    ],
)
def test_cells_parted_by_blanks(
    cells: str, expected: tuple[str | None, int | None, int | None]
) -> None:
    text = two(cells, "16-31 1 N/A").replace("\t", "  ")
    topology = parse(text)
    assert (near(topology)[0], nodes(topology)[0], memory(topology)[0]) == expected


def test_old_table_without_numa_column() -> None:
    header = "\tGPU0\tGPU1\tmlx5_0\tCPU Affinity\n"
    rows = "GPU0\t X \tPIX\tSYS\t0-9,20-29\nGPU1\tPIX\t X \tSYS\t10-19,30-39\n"
    topology = parse(header + rows + "mlx5_0\tSYS\tSYS\t X \t\n")
    assert near(topology) == ["0-9,20-29", "10-19,30-39"]
    assert nodes(topology) == [None, None]
    assert topology.links == (("X", "PIX"), ("PIX", "X"))


@pytest.mark.parametrize(
    "end", ["CPU ", "CPU", "CPU Aff", "CPU Affinity  NUMA", "CPU Affinity NUMA Aff"]
)
def test_a_header_whose_last_word_is_cut(end: str) -> None:
    text = PLAIN.replace(HEADER, f"\tGPU0\tGPU1\t{end}\n")
    assert near(parse(text)) == ["0-15", "16-31"]


@pytest.mark.parametrize("nic", ["NIC0", "mlx5_bond_0", "ibp12s0", "hfi1_0"])
def test_nic_columns_by_any_name(nic: str) -> None:
    header = f"\tGPU0\tGPU1\t{nic}\tCPU Affinity\tNUMA Affinity\n"
    rows = f"GPU0\tX\tNV4\tPXB\t0-7\t0\nGPU1\tNV4\tX\tSYS\t8-15\t1\n{nic}\tPXB\tSYS\tX\t\t\n"
    topology = parse(header + rows)
    assert near(topology) == ["0-7", "8-15"]
    assert topology.links == (("X", "NV4"), ("NV4", "X"))


@pytest.mark.case("A24")
def test_numa_affinity_is_a_list_of_which_the_node_with_cpus_counts() -> None:
    """GB200: CPU nodes 0 and 1, GPU memory nodes 2 and up."""
    lscpu = "NUMA node(s): 34\nNUMA node0 CPU(s): 0-71\nNUMA node1 CPU(s): 72-143\n" + "".join(
        f"NUMA node{node} CPU(s): \n" for node in range(2, 34)
    )
    table = two("0-71\t0,2-17\t\tN/A", "72-143\t1,18-33\t\tN/A")
    topology = parse(table + lscpu)
    assert near(topology) == ["0-71", "72-143"]
    assert nodes(topology) == [0, 1]
    assert "numa-ambiguous" not in codes(topology)


EVEN, ODD = ",".join(map(str, range(0, 96, 2))), ",".join(map(str, range(1, 96, 2)))
CUT = two("0,2,4,6,8,10\t0\t\tN/A", "1,3,5,7,9,11\t1\t\tN/A")
NODE_LISTS = [
    f"NUMA node0 CPU(s): {EVEN}\nNUMA node1 CPU(s): {ODD}\n",
    f"node 0 cpus: {EVEN}\nnode 0 size: 1 MB\nnode 1 cpus: {ODD}\nnode 1 size: 1 MB\n".replace(
        ",", " "
    ),
    "# CPU,Core,Socket,Node\n" + "".join(f"{cpu},{cpu},{cpu % 2},{cpu % 2}\n" for cpu in range(96)),
]


@pytest.mark.case("A25")
@pytest.mark.parametrize("lists", NODE_LISTS, ids=["lscpu", "numactl", "lscpu -p"])
@pytest.mark.parametrize("first", [True, False])
def test_a_cut_list_is_replaced_by_its_node(lists: str, first: bool) -> None:
    topology = parse(lists + CUT if first else CUT + lists)
    assert [gpu.node_cpus for gpu in topology.gpus] == [parse_cpulist(EVEN), parse_cpulist(ODD)]
    assert topology.cpus == frozenset(range(96))
    assert "affinity-cut" not in codes(topology)


@pytest.mark.case("A25")
@pytest.mark.parametrize(
    "cell",
    [
        *("0,2,4,6,8", "0,2,4,6,8,10,12", "0,2,4,6,8,11", "0,1,2,3,4,5"),
        *("0-1,4-5,8-9,12-13,16-17,20-22", "0,64", "0-23,48-71", "0-31:2/8"),
    ],
)
def test_other_lists_do_not_look_cut(cell: str) -> None:
    topology = parse(two(f"{cell}\t0\t\tN/A", "100\t1\t\tN/A"))
    assert topology.gpus[0].node_cpus == parse_cpulist(cell)


NDV2 = "On-line CPU(s) list: 0-39\nNUMA node0 CPU(s): 0-19\nNUMA node1 CPU(s): 20-39\n"
SECOND = "16-31\t1\t\tN/A"


@pytest.mark.case("A1", "A9", "A10", "A20", "A22", "A24", "A25")
@pytest.mark.parametrize(
    ("lscpu", "cells", "expected_near", "expected_nodes", "code"),
    [
        # An empty cell is unknown, and not the empty set; a node is enough.
        ("", "\t\t\tN/A", None, None, "affinity-unknown"),
        ("", "N/A\t\t\tN/A", None, None, "affinity-unknown"),
        (TWO_NODES, "\t0\t\tN/A", None, 0, None),
        (TWO_NODES, "N/A\t0\t\tN/A", None, 0, None),
        # The near CPUs may be a part of the node and of the socket.
        (TWO_NODES, "0-7\t0\t\tN/A", "0-7", 0, None),
        # A node without CPUs is not near, nor are nodes that the table calls GPU memory.
        (TWO_NODES + "NUMA node2 CPU(s):\n", "\t2\t\tN/A", None, None, "node-dropped"),
        ("", "0-15\t0,4\t\t4", "0-15", 0, None),
        # Of several nodes the one that holds the CPUs counts; else which is not guessed.
        (TWO_NODES, "0-7\t0-1\t\tN/A", "0-7", 0, None),
        (TWO_NODES, "0-31\t0-1\t\tN/A", "0-31", None, "numa-ambiguous"),
        ("", "0-15\t0,2-17\t\tN/A", "0-15", None, "numa-ambiguous"),
        ("", "0-15\t0-1\t\tN/A", "0-15", None, "numa-ambiguous"),
        # CPUs that do not exist are left out; masks written as if there were 32 to a node.
        (NDV2, "20-51\t1\t\tN/A", "20-39", 1, "ids-dropped"),
        (NDV2, "40-63\t\t\tN/A", None, None, "affinity-unknown"),
        # The node's list, which lscpu has, counts before the printed cell.
        (TWO_NODES, "16-31\t0\t\tN/A", None, 0, "contradiction"),
        # A list of six may be cut, also of ranges, unless the lists name all online CPUs.
        ("", "0,2,4,6,8,10\t0\t\tN/A", None, 0, "affinity-cut"),
        ("", "0-1,4-5,8-9,12-13,16-17,20-21\t0\t\tN/A", None, 0, "affinity-cut"),
        (TWO_NODES, "4,8,12,16,20,24\t0\t\tN/A", None, 0, "affinity-cut"),
        # What can't be read; the tabs were lost: 0-15, 0 and N/A, or 0-1, 50 and N/A?
        ("", "0-15,31-16\t0\t\tN/A", None, 0, "cell-unreadable"),
        ("", "0-15\t?\t\tN/A", "0-15", None, "cell-unreadable"),
        ("", "0-150N/A", None, None, "cell-glued"),
    ],
)
def test_the_place_of_a_gpu(
    lscpu: str, cells: str, expected_near: str | None, expected_nodes: int | None, code: str | None
) -> None:
    topology = parse(lscpu + two(cells, SECOND))
    assert (near(topology)[0], nodes(topology)[0]) == (expected_near, expected_nodes)
    is_unknown = expected_near is None and expected_nodes is None
    assert (topology.gpus[0].source is None) == is_unknown
    doubts = {note.code for note in topology.notes if "GPU 0 " in f"{note.message} "}
    assert doubts >= ({code} if code else set())
    assert code is not None or not doubts


@pytest.mark.case("A25")
def test_two_sockets_of_six_cores_are_whole() -> None:
    """The lists name all online CPUs, so nothing is missing from them."""
    assert near(parse("On-line CPU(s) list: 0-11\n" + CUT)) == ["0,2,4,6,8,10", "1,3,5,7,9,11"]


def test_of_tables_that_differ_the_one_with_most_rows_is_read() -> None:
    """The other is another machine's, or was cut; its rows are not put into the first one."""
    one = "\tGPU0\tCPU Affinity\nGPU0\t X \t0-7\n"
    for text in (one + PLAIN, PLAIN + "\nsorry, here is all of it:\n" + one):
        topology = parse(text)
        assert topology.gpus == parse(PLAIN).gpus
        assert topology.links == parse(PLAIN).links
        assert "the one with most rows counts" in message(topology, "contradiction")
    assert "contradiction" not in codes(parse(PLAIN + "\n" + PLAIN))


def test_rows_missing_below_the_header_are_named() -> None:
    topology = parse("\tGPU2\tGPU5\tGPU6\tGPU7\tCPU Affinity\nGPU5\tSYS\tX\tSYS\tSYS\t0-7\n")
    assert [gpu.index for gpu in topology.gpus] == [2, 5, 6, 7]
    assert near(topology) == [None, "0-7", None, None]
    assert topology.visible == (2, 5, 6, 7)
    assert "GPU 2,6-7 " in message(topology, "rows-missing")
    assert topology.links is None
    assert "links-unknown" in codes(topology)


@pytest.mark.parametrize(
    ("row", "code"),
    [
        ("GPU1\tSYS\t X \t16-31\t1", "row-cut"),
        ("GPU1\tSYS\t X \t16-3", "row-cut"),
        ("GPU1\tSYS\t X", "row-cut"),
        ("GPU1\t X \t16-31\t1\t\tN/A", "row-cut"),
        ("GPU1\tSY", "rows-missing"),
        ("GPU1", "rows-missing"),
    ],
)
@pytest.mark.parametrize("end", ["", "\n", "\n```\n"])
def test_a_row_that_is_not_whole_is_not_used(row: str, code: str, end: str) -> None:
    """It was cut, or has lost a link."""
    topology = parse(PLAIN.split("GPU1\tSYS")[0] + row + end)
    assert near(topology) == ["0-15", None]
    assert nodes(topology) == [0, None]
    assert topology.links is None
    assert "GPU 1 " in message(topology, code)


def test_a_text_that_ends_within_its_only_row() -> None:
    header = "\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
    assert near(parse(header + "GPU0\t X \t0-1")) == [None]
    assert near(parse(header + "GPU0\t X \t0-15\t0\t\tN/A")) == ["0-15"]


def test_rows_without_a_header_are_not_used() -> None:
    rows = PLAIN.split("\n", 1)[1]
    with pytest.raises(TopologyError, match=r"rows of a table without its header, .*; paste the"):
        parse(rows)
    topology = parse(TWO_NODES + rows)
    assert topology.gpus == ()
    assert {"header-missing", "no-gpus"} <= codes(topology)


@pytest.mark.parametrize(
    "text",
    [
        "\tGPU0\tGPU1\nGPU0\t0\t15\nGPU1\t15\t0\n",
        "\tGPU0\tGPU1\nGPU0\t0\tXGMI\nGPU1\tXGMI\t0\n",
        " \tGPU0\tGPU1\t\n GPU0\tX\tOK\t\n GPU1\tOK\tX\t\n",
        "GPU0 and GPU1 are slow\n",
        "GPU0\n",
        "GPU0 GPU1\n",
        "GPU NUMA ID\n",
    ],
    ids=["rocm weights", "rocm types", "peer access", "prose", "heading", "names", "column"],
)
def test_what_looks_like_the_table_and_is_not(text: str) -> None:
    with pytest.raises(TopologyError):
        parse(text)
    assert parse(text + PLAIN).gpus == parse(PLAIN).gpus
    assert parse(PLAIN + text).gpus == parse(PLAIN).gpus


def test_rocm_lines_are_passed_over_and_noted() -> None:
    rocm = "GPU[0]\t\t: (Topology) Numa Node: 3\nGPU[0]\t\t: (Topology) Numa Affinity: 3\n"
    topology = parse(rocm + TWO_NODES)
    assert topology.gpus == ()
    assert {"rocm-ignored", "no-gpus"} <= codes(topology)
    with pytest.raises(TopologyError, match="output of rocm-smi or amd-smi is ignored"):
        parse(rocm)
    assert parse(rocm + PLAIN) == parse(PLAIN)
    assert "rocm-ignored" not in codes(parse("ROCM used to build PyTorch: N/A\n" + PLAIN))


def test_sixteen_gpus_are_in_the_order_of_their_numbers() -> None:
    names = [f"GPU{index}" for index in range(16)]
    rows = [
        "\t".join([name, *("X" if other == name else "NV6" for other in names), str(index)])
        for index, name in enumerate(names)
    ]
    topology = parse("\n".join(["\t".join([*names, "CPU Affinity"]), *reversed(rows), ""]))
    assert near(topology) == [str(index) for index in range(16)]
    assert [row[place] for place, row in enumerate(topology.links or ())] == ["X"] * 16
