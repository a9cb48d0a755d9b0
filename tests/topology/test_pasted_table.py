"""``nvidia-smi topo -m``, trap by trap."""

from __future__ import annotations

import pytest

from gpuaff.cpuset import format_cpulist
from gpuaff.topology.model import Gpu, Source, Topology
from gpuaff.topology.pasted import parse

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


def test_wrapped_legend_and_foreign_lines_are_passed_over() -> None:
    legend = (
        "\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe as well as the SMP\n"
        "interconnect between NUMA nodes (e.g.,\nQPI/UPI)\n  NV#  = Connection traversing a "
        "bonded set of\n# NVLinks\n\nNIC Legend:\n\n  NIC0: mlx5_0\n"
    )
    assert parse(PLAIN + legend) == parse(PLAIN)
    assert parse(legend + PLAIN) == parse(PLAIN)


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
        ("\t0\t\tN/A", (None, 0, None)),
        ("N/A\t0\t\t4", (None, 0, 4)),
        ("7\t0\t\tN/A", ("7", 0, None)),
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


def test_a_text_that_ends_within_its_only_row() -> None:
    header = "\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
    assert near(parse(header + "GPU0\t X \t0-1")) == [None]
    assert near(parse(header + "GPU0\t X \t0-15\t0\t\tN/A")) == ["0-15"]


def test_sixteen_gpus_are_in_the_order_of_their_numbers() -> None:
    names = [f"GPU{index}" for index in range(16)]
    rows = [
        "\t".join([name, *("X" if other == name else "NV6" for other in names), str(index)])
        for index, name in enumerate(names)
    ]
    topology = parse("\n".join(["\t".join([*names, "CPU Affinity"]), *reversed(rows), ""]))
    assert near(topology) == [str(index) for index in range(16)]
    assert [row[place] for place, row in enumerate(topology.links or ())] == ["X"] * 16
