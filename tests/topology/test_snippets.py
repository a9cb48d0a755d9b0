"""Short texts in ``tests/data/snippets``, and what is read of them, worked out by hand.

::

    == Contiguous nodes: i and i + 4 would lie in two [A25]
    # A text, in which → is a tab and @name a text that stands above, and what is read of it.
    | NUMA node0 CPU(s): 0-3
    | @another-node
    cores 0-1 2-3 4-5 6-7
    says cores-inferred: the first core

``0-3+8`` are the cores 0,8 to 3,11; ``says`` and ``silent`` name codes; ``refused`` is the error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.errors import TopologyError
from gpuaff.topology.model import Topology
from gpuaff.topology.pasted import parse
from tests.topology.reading import codes, message, nodes, packages, pairs

FOLDER = Path(__file__).parents[1] / "data/snippets"


def words(values: Iterable[object]) -> str:
    return " ".join("unknown" if value is None else str(value) for value in values)


def groups(found: Iterable[CpuSet] | None) -> str:
    return "unknown" if found is None else words(map(format_cpulist, found))


def numbered(found: dict[int, str] | None) -> str:
    return "unknown" if found is None else words(f"{id_}={cpus}" for id_, cpus in found.items())


def mig(topology: Topology) -> str:
    shown = [
        "unknown"
        if gpu.mig is None
        else words(f"{one.uuid}/{one.gpu_instance}/{one.compute_instance}" for one in gpu.mig)
        for gpu in topology.gpus
    ]
    return ", ".join(shown)


FACTS: dict[str, Callable[[Topology], str]] = {
    "cpus": lambda found: format_cpulist(found.cpus),
    "cores": lambda found: groups(found.cores),
    "packages": lambda found: numbered(packages(found)),
    "l3": lambda found: groups(found.l3),
    "nodes": lambda found: numbered(nodes(found)),
    "near": lambda found: words(
        gpu.node_cpus and format_cpulist(gpu.node_cpus) for gpu in found.gpus
    ),
    "numa": lambda found: words(gpu.numa_node for gpu in found.gpus),
    "memory": lambda found: words(gpu.memory_node for gpu in found.gpus),
    "links": lambda found: "unknown" if not found.links else words(map(",".join, found.links)),
    "listed": lambda found: ", ".join(f"{gpu.name} {gpu.uuid}" for gpu in found.gpus),
    "mig": mig,
}


def snippets() -> Iterator[object]:
    """The text and the facts of each, by its title."""
    for file in sorted(FOLDER.glob("*.txt")):
        fragments: dict[str, str] = {}
        for part in re.split(r"^(?=@|== )", file.read_text("utf-8"), flags=re.MULTILINE)[1:]:
            head, body = part.split("\n", 1)
            found = re.findall(r"((?:^\|.*\n)+)((?:^[^|#\n].*\n)*)", body, re.MULTILINE)
            for number, (lines, facts) in enumerate(found):
                text = "".join(map(unmarked, lines.splitlines()))
                for name, fragment in fragments.items():
                    text = text.replace(f"{name}\n", fragment)
                if head.startswith("@"):
                    fragments[head] = text
                else:
                    yield pytest.param(text, facts.splitlines(), id=f"{head[3:]} {number}")


def unmarked(line: str) -> str:
    return f"{line.removeprefix('|').removeprefix(' ')}\n".replace("→", "\t")


def expanded(value: str) -> str:
    """``0-3+8`` as the cores that it stands for."""
    return re.sub(
        r"(\d+)(?:-(\d+))?\+(\d+)",
        lambda at: words(pairs(int(at[1]), int(at[2] or at[1]), int(at[3]))),
        value,
    )


@pytest.mark.parametrize(("text", "facts"), list(snippets()))
def test_snippet(text: str, facts: list[str]) -> None:
    assert facts
    if facts[0].startswith("refused "):
        with pytest.raises(TopologyError, match=re.escape(facts[0].removeprefix("refused "))):
            parse(text)
        return
    topology = parse(text)
    for fact in facts:
        kind, _, value = fact.partition(" ")
        code, has_words, expected = value.partition(": ")
        if kind == "says" and has_words:
            assert expected in message(topology, code)
        elif kind == "says":
            assert set(value.split()) <= codes(topology)
        elif kind == "silent":
            assert codes(topology).isdisjoint(value.split())
        else:
            assert (kind, FACTS[kind](topology)) == (kind, expanded(value))
