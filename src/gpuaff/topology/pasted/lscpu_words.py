"""The words with which ``lscpu`` begins its lines, in the languages that are pasted most.

In lower case and without the colon.
"""

from __future__ import annotations

import re

_WORDS = {
    "cpu_count": ("cpu(s)",),
    "threads": (
        "thread(s) per core",
        "thread(s) pro kern",
        "thread(s) par cœur",
        "hilo(s) de procesamiento por núcleo",
        "每个核的线程数",
    ),
    "cores_per_socket": (
        "core(s) per socket",
        "kern(e) pro sockel",
        "cœur(s) par socket",
        "núcleo(s) por «socket»",
        "每个座的核数",
    ),
    "sockets": ("socket(s)", "sockel", "«socket(s)»", "座"),
    "node_count": (
        "numa node(s)",
        "numa-knoten",
        "nœud(s) numa",
        "modo(s) numa",
        "nodo(s) numa",
        "numa 节点",
    ),
}

NUMBERS = {word: name for name, words in _WORDS.items() for word in words}
"""What a line counts, by its key."""

_ONLINE = frozenset(
    {"lista de la(s) cpu(s) en línea", "liste de processeur(s) en ligne", "在线 cpu 列表"}
)

_NODE = re.compile(r"(?=.*(?:CPU|roces))(?:.*\W)?NUMA\D*(\d{1,4})(?!.*\d)", re.ASCII)
_HYPERVISOR = re.compile(r"h[iy]perv[iy]s|超管理器", re.IGNORECASE)


def is_online_list(key: str) -> bool:
    """Whether a line lists the online CPUs."""
    lower = key.lower()
    said = ("on-line" in lower or "online" in lower) and "list" in lower
    return said or lower in _ONLINE


def node_number(key: str) -> int | None:
    """The NUMA node whose CPUs a line lists; None when it is no such line."""
    found = _NODE.match(key)
    return int(found[1]) if found else None


def is_hypervisor(key: str) -> bool:
    """Whether a line names a hypervisor."""
    return _HYPERVISOR.search(key) is not None
