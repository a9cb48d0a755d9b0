"""Plans, domains, warnings and refusals that are written down and worked out by hand.

In ``tests/data/plans/*.txt``::

    machine eight = cores=8x1 gpus=0,0

    == Of each part the last cores are reserved [B10]
    # Anything that explains the numbers.
    on eight visible=1,0
    2 reserve=1 -> 0-2 | 4-6
        reserved 3 | 7
        warns mask-narrow@0 scope-hint
        says scope-hint: the whole message, or a part … of it
    2 min=5 -> refused requested min_physical_cores=5, …

A machine is another one's name, or ``cores=`` (``8x2``: eight cores of the CPUs i and i + 8;
``8p2``: of neighbours; ``0,8/1,9``; ``?`` unknown) with ``nodes=`` (of these cores by position) and
``sockets=`` (of these nodes) and ``gpus=`` (the node of each), or ``online=`` alone; then come
changes to it, as :func:`describe` reads them. Questions are ranks, options and each rank's CPUs;
``*3`` repeats them, and ``...`` leaves the rest unsaid. ``domains ->`` asks for the GPUs' domains.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gpuaff.allocator.domains import gpu_domains
from gpuaff.allocator.plan import plan
from gpuaff.cpuset import CpuSet, format_cpulist, parse_cpulist
from gpuaff.errors import GPUAffinityError
from gpuaff.topology.model import Accelerator, Gpu, NumaNode, Package, Source, Topology
from tests.allocator import described
from tests.allocator.described import bare, box, dgx_a100, on_the_bus, union

FOLDER = Path(__file__).parents[1] / "data/plans"

MACHINES = {
    "dgx-a100": dgx_a100(),
    "dgx-a100-bus": on_the_bus(dgx_a100()),
    "gb10": Topology.load(FOLDER.parent / "described/gb10.json"),
    "nothing": Topology(),
    "xeon6": Topology.load(FOLDER.parent / "described/xeon6.json"),
}
"""Machines that are described elsewhere; ``machines.txt`` adds others."""

OPTIONS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "balanced": ("balanced", {"yes": True, "no": False}.__getitem__),
    "cpus": ("cpus", str),
    "masks": ("rank_allowed", lambda text: text.split("/")),
    "max": ("max_physical_cores", int),
    "min": ("min_physical_cores", int),
    "mode": ("mode", str),
    "partition": ("partition", str),
    "reserve": ("reserve", int),
    "scope": ("scope", str),
    "threads": ("multithreading", lambda text: f"{text}_logical"),
}


@dataclass
class Question:
    """What is asked of one machine, and what must be answered."""

    machine: Topology
    line: str
    checks: list[str] = field(default_factory=list)


@dataclass
class Written:
    """One test of a file."""

    title: str
    cases: tuple[str, ...]
    questions: list[Question] = field(default_factory=list)


def read(file: Path) -> Iterator[Written]:
    """The tests of one file."""
    known = dict(MACHINES)
    test, machine, defaults = Written("", ()), Topology(), ""
    shared = FOLDER / "machines.txt"
    for line in (shared.read_text("utf-8") + file.read_text("utf-8")).splitlines():
        word, _, rest = line.strip().partition(" ")
        if word == "machine":
            name, _, words = rest.partition(" = ")
            known[name] = describe(words, known)
        elif word == "==":
            title, _, cases = rest.rstrip("]").partition(" [")
            test, defaults = Written(title, tuple(cases.split())), ""
            yield test
        elif word == "on":
            machine = describe(rest, known)
        elif word == "with":
            defaults = rest
        elif line.startswith("    "):
            test.questions[-1].checks.append(line.strip())
        elif word and word != "#":
            asked, _, answer = line.partition(" ->")
            test.questions.append(Question(machine, f"{asked} {defaults} ->{answer}"))


def describe(text: str, known: Mapping[str, Topology]) -> Topology:
    """A machine in one line."""
    words = dict(_words(re.sub(r"\w+\(.*?\)", "", text)))
    name = text.split()[0]
    made = known[name] if name in known else _new(words)
    gpus = [_gpu(index, own) for index, own in enumerate(re.findall(r"gpu\((.*?)\)", text))]
    gpus += [
        Gpu(index=index, node_cpus=cpus, source=Source.NVML)
        for index, cpus in enumerate(_lists(words.pop("near", "")))
    ]
    devices = [_device(at, own) for at, own in enumerate(re.findall(r"device\((.*?)\)", text))]
    if devices:
        gpus = [Gpu(index=at, pci_bus_id=one.pci_bus_id) for at, one in enumerate(devices)]
        made = made._replace(accelerators=tuple(devices))
    if gpus:
        made = made._replace(gpus=tuple(gpus), visible=tuple(range(len(gpus))))
    for key, value in words.items():
        made = CHANGES[key](made, value)
    return made


def _new(words: dict[str, str]) -> Topology:
    if "online" in words:
        return bare(words.pop("online"))
    cores = _cores(words.pop("cores"))
    nodes = _lists(words.pop("nodes", f"0-{len(cores) - 1}"))
    return box(
        cores,
        nodes=[sorted(node) for node in nodes],
        sockets=_lists(words.pop("sockets", f"0-{len(nodes) - 1}")),
        gpus=[int(node) for node in words.pop("gpus", "").split(",") if node],
    )


CHANGES: Mapping[str, Callable[[Topology, str], Topology]] = {
    "allowed": lambda made, text: made._replace(allowed=parse_cpulist(text)),
    "bus": lambda made, _: on_the_bus(made),
    "cores": lambda made, text: made._replace(cores=_cores(text) or None),
    "cpus": lambda made, text: made._replace(cpus=parse_cpulist(text)),
    "l3": lambda made, text: made._replace(l3=_l3(made, text)),
    "numa": lambda made, text: made._replace(numa_nodes=tuple(_numa(text))),
    "packages": lambda made, text: made._replace(packages=tuple(_packages(text)) or None),
    "slow": lambda made, text: made._replace(efficiency_cpus=parse_cpulist(text)),
    "visible": lambda made, text: made._replace(
        visible=tuple(map(int, filter(None, text.split(","))))
    ),
}


def _words(text: str) -> list[tuple[str, str]]:
    return re.findall(r"(\w+)=(\S*)", text)


def _lists(text: str) -> list[CpuSet]:
    return [parse_cpulist(part) for part in text.split("/")] if text else []


def _cores(text: str) -> tuple[CpuSet, ...]:
    if size := re.fullmatch(r"(\d+)([xp])(\d+)", text):
        make = described.spread_cores if size[2] == "x" else described.packed_cores
        return make(int(size[1]), int(size[3]))
    return () if text == "?" else tuple(_lists(text))


def _l3(made: Topology, text: str) -> tuple[CpuSet, ...] | None:
    """Domains by their CPUs; ``each:8`` neighbouring cores; ``?`` unknown."""
    if not text.startswith("each:"):
        return None if text == "?" else tuple(_lists(text))
    cores, size = made.cores or (), int(text.removeprefix("each:"))
    return tuple(union(cores[at : at + size]) for at in range(0, len(cores), size))


def _numa(text: str) -> Iterator[NumaNode]:
    """Nodes, such as ``0-3:10,20/6@4-7:20,10``: the id, if it is not the place; CPUs; distances."""
    for place, part in enumerate(text.split("/") if text != "?" else ()):
        number, _, rest = part.rpartition("@")
        cpus, _, distances = rest.partition(":")
        row = tuple(map(int, distances.split(","))) if distances else None
        yield NumaNode(id=int(number or place), cpus=parse_cpulist(cpus), distances=row)


def _packages(text: str) -> Iterator[Package]:
    for place, cpus in enumerate(_lists(text if text != "?" else "")):
        yield Package(id=place, cpus=cpus)


def _gpu(index: int, text: str) -> Gpu:
    words = dict(_words(text))
    node, socket, local = (
        parse_cpulist(words[key]) if key in words else None for key in ("node", "socket", "local")
    )
    return Gpu(
        index=index,
        node_cpus=node,
        socket_cpus=socket,
        local_cpus=local,
        numa_node=_number(words, "numa"),
        memory_node=_number(words, "memory"),
        source=Source(words["source"]) if "source" in words else None,
    )


def _device(place: int, text: str) -> Accelerator:
    words = dict(_words(text))
    return Accelerator(
        pci_bus_id=f"0000:{place + 1:02x}:00.0",
        vendor="10de",
        local_cpus=parse_cpulist(words["local"]) if "local" in words else None,
        numa_node=_number(words, "numa"),
    )


def _number(words: Mapping[str, str], key: str) -> int | None:
    return int(words[key]) if key in words else None


def check(question: Question) -> None:
    """Ask, and compare with all that is written."""
    asked, _, answer = map(str.strip, question.line.partition("->"))
    nproc, *_ = asked.split()
    if nproc == "domains":
        found = [cpus for _, cpus in sorted(gpu_domains(question.machine).items())]
        shown = [format_cpulist(cpus) for cpus in found]
        assert shown == (_answers(answer, shown) if shown else []), question.line
        return
    options = {OPTIONS[key][0]: OPTIONS[key][1](value) for key, value in reversed(_words(asked))}
    if answer.startswith("refused "):
        with pytest.raises(GPUAffinityError, match=_pattern(answer.removeprefix("refused "))):
            plan(question.machine, int(nproc), **options)
        return
    made = plan(question.machine, int(nproc), **options)
    facts = {
        "cpus": [format_cpulist(share.cpus) for share in made.shares],
        "reserved": [format_cpulist(share.reserved) for share in made.shares],
        "cores": [str(share.cores) for share in made.shares],
        "gpus": [str(share.gpu) for share in made.shares],
        "nodes": [format_cpulist(share.numa_nodes) for share in made.shares],
        "sources": [str(share.source) for share in made.shares],
        "partition": [str(made.partition)],
    }
    warnings = [one.code if one.rank is None else f"{one.code}@{one.rank}" for one in made.warnings]
    for written in (f"cpus {answer}", *question.checks):
        kind, _, expected = written.partition(" ")
        if kind == "says":
            code, _, message = expected.partition(": ")
            said = [one.message for one in made.warnings if one.code == code]
            assert [text for text in said if re.search(_pattern(message), text)], (written, said)
        elif kind == "warns":
            assert warnings == expected.split(), question.line
        else:
            assert facts[kind] == _answers(expected, facts[kind]), (question.line, kind)


def _answers(text: str, found: list[str]) -> list[str]:
    """What is written for each rank or GPU; what is left unsaid is as it was found."""
    answers: list[str] = []
    for part in text.split("|"):
        written, _, times = map(str.strip, part.partition("*"))
        if written == "...":
            return answers + found[len(answers) :]
        if re.fullmatch(r"[\d,:/-]+", written):
            written = format_cpulist(parse_cpulist(written))
        answers += [written] * int(times or 1)
    return answers


def _pattern(written: str) -> str:
    return f"^{'.*'.join(map(re.escape, written.split('…')))}$"


@pytest.mark.parametrize(
    "test",
    [
        pytest.param(
            test,
            id=f"{file.stem}: {test.title}",
            marks=[pytest.mark.case(*test.cases)] if test.cases else [],
        )
        for file in sorted(FOLDER.glob("*.txt"))
        for test in read(file)
    ],
)
def test_what_is_written_down_is_planned(test: Written) -> None:
    assert test.questions
    for question in test.questions:
        check(question)
