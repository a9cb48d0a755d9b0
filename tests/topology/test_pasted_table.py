"""``nvidia-smi topo -m``, trap by trap."""

from __future__ import annotations

import pytest

from gpuaff.cpuset import format_cpulist
from gpuaff.topology.model import Gpu, Source, Topology
from gpuaff.topology.pasted import parse

PLAIN = (
    "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
    "GPU0\t X \tSYS\t0-15\t0\t\tN/A\nGPU1\tSYS\t X \t16-31\t1\t\tN/A\n"
)


def near(topology: Topology) -> list[str]:
    return [format_cpulist(gpu.node_cpus or ()) for gpu in topology.gpus]


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


def test_a_text_that_ends_within_its_only_row() -> None:
    header = "\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
    assert near(parse(header + "GPU0\t X \t0-1")) == [""]
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
