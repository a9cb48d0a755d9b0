"""What ``lscpu`` says, by its ``key: value`` lines.

The keys are known in the languages that lscpu speaks, see :mod:`.lscpu_words`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from gpuaff.cpuset import CpuSet
from gpuaff.records import dataclass, field
from gpuaff.topology.pasted import lscpu_words
from gpuaff.topology.pasted.reading import Reading

_WRAPPED = re.compile(r"[\d,-]+", re.ASCII)
_MAX_KEY = 60
_POWER = re.compile(r"ppc(?:64)?(?:le)?", re.IGNORECASE)
"""The architecture, whatever the language calls it."""
_NUMBER = re.compile(r"\d{1,6}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Lscpu:
    """What was found.

    Attributes:
        online: the "On-line CPU(s) list".
        nodes: each "NUMA nodeN CPU(s)" list; empty for a node without CPUs.
        numbers: ``cpu_count`` (offline CPUs included), ``node_count``, ``threads`` per core,
            ``cores_per_socket`` and ``sockets``, those that were there.
        cores: how many cores with online CPUs there may be, by sockets and cores per socket,
            which lscpu rounds down; empty where it does not tell, or has such numbers for each
            of several kinds of cores.
        power: whether it is a POWER machine.
        virtual: whether a hypervisor is named.
    """

    online: CpuSet | None = None
    nodes: Mapping[int, CpuSet] = field(default_factory=dict)
    numbers: Mapping[str, int] = field(default_factory=dict)
    cores: range = range(0)
    power: bool = False
    virtual: bool = False


def read(reading: Reading) -> Lscpu:
    """Read the lines of ``lscpu``; of two that say different things the first one counts."""
    lists: dict[str, CpuSet] = {}
    numbers: dict[str, int] = {}
    keys: list[str] = []
    power = virtual = False
    last = None
    for number, key, value in _pairs(reading):
        name = _list_name(key)
        if name is not None:
            _keep_list(reading, lists, name, value)
            last = name if number == reading.cut_line else None
        elif (word := lscpu_words.NUMBERS.get(key.lower())) and _NUMBER.fullmatch(value):
            keys.append(word)
            _keep_number(reading, numbers, word, key, value)
        power |= bool(_POWER.fullmatch(value)) or (
            key == "Model name" and value.lower().startswith("power")
        )
        virtual |= lscpu_words.is_hypervisor(key)
    _drop_cut(reading, lists, last, numbers.get("cpu_count"))
    online = lists.pop("online", None)
    nodes = {int(name): cpus for name, cpus in lists.items()}
    kinds = keys.count("cores_per_socket") > max(1, keys.count("cpu_count"))
    return Lscpu(
        online=online,
        nodes=nodes,
        numbers=numbers,
        cores=range(0) if kinds else _cores(numbers),
        power=power,
        virtual=virtual,
    )


def _cores(numbers: Mapping[str, int]) -> range:
    per_socket, sockets = numbers.get("cores_per_socket", 0), numbers.get("sockets", 0)
    least = per_socket * sockets
    return range(least, least + sockets) if least else range(0)


def _pairs(reading: Reading) -> Iterator[tuple[int, str, str]]:
    """Each line's last number, key and value; a list wrapped at a comma is joined."""
    head: tuple[int, str] | None = None
    value: list[str] = []
    for number, line in enumerate((*reading.lines, "")):
        if head and _WRAPPED.fullmatch(line) and (value[-1].endswith(",") or line[0] == ","):
            head = (number, head[1])
            value.append(line)
            continue
        if head:
            yield *head, "".join(value)
        key, colon, first = line.partition(":")
        head = (number, key.rstrip()) if colon and len(key) <= _MAX_KEY else None
        value = [first.strip()]


def _drop_cut(
    reading: Reading, lists: dict[str, CpuSet], last: str | None, count: int | None
) -> None:
    """Drop the list with which the text breaks off, if the numbers show that more followed."""
    if last is None or last not in lists:
        return
    online = lists.get("online")
    if last == "online":
        whole = count in (None, len(lists[last]))
    else:
        nodes = frozenset().union(*(cpus for name, cpus in lists.items() if name != "online"))
        whole = nodes == online if online else count in (None, len(nodes))
    if not whole:
        del lists[last]
        reading.note(
            "line-unreadable", "lscpu: the text breaks off within the last list, which is not used"
        )


def _list_name(key: str) -> str | None:
    """``online``, a node's number, or None when the line is no list of CPUs."""
    if lscpu_words.is_online_list(key):
        return "online"
    node = lscpu_words.node_number(key)
    return None if node is None else str(node)


def _keep_list(reading: Reading, lists: dict[str, CpuSet], name: str, value: str) -> None:
    cpus = reading.cpulist(value)
    if cpus is None or (name == "online" and not cpus):
        what = "the on-line list" if name == "online" else f"the CPUs of node {name}"
        reading.note("line-unreadable", f"lscpu: {what} cannot be read ({value[:40]!r}): cut?")
    elif lists.setdefault(name, cpus) is not cpus:
        what = "the on-line CPUs" if name == "online" else f"the CPUs of node {name}"
        reading.note(
            "contradiction", f"lscpu tells {what} twice and differently; the first one is used"
        )


def _keep_number(
    reading: Reading, numbers: dict[str, int], word: str, key: str, value: str
) -> None:
    number = int(value)
    if numbers.setdefault(word, number) != number:
        reading.note(
            "contradiction", f"lscpu tells {key!r} twice and differently; the first one is used"
        )
