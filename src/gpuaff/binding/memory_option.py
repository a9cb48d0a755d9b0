"""``set_affinity(memory=…)``: what was asked for."""

from __future__ import annotations

from gpuaff.cpuset import parse_cpulist
from gpuaff.errors import InvalidOptionError
from gpuaff.hints import suggestion
from gpuaff.records import dataclass

WORDS = ("preferred", "bind", "interleave")

MAX_NODE_ID = 1023
"""The highest id of a NUMA node: the kernel can be built for no more."""

_OWN = "gpu"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A memory policy as its user spelled it.

    Attributes:
        text: how it was said, for messages: ``memory='bind:8'``.
        word: ``preferred``, ``bind`` or ``interleave``.
        nodes: the NUMA nodes that were named.
        own: whether the memory of the rank's own GPU was named.
    """

    text: str
    word: str
    nodes: frozenset[int] = frozenset()
    own: bool = False

    @property
    def named(self) -> bool:
        """Whether nodes were named; else those of the share are meant."""
        return self.own or bool(self.nodes)


def read(name: str, value: object) -> Wanted:
    """Read a policy: a word, or a word and nodes (``bind:0-1``, ``interleave:0,gpu``).

    Args:
        name: what the option is called where it was said.
        value: what was said.

    Raises:
        InvalidOptionError: it is not that.
    """
    expected = f"one of {', '.join(WORDS)}, with or without nodes (bind:0-1, interleave:gpu)"
    if not isinstance(value, str):
        raise InvalidOptionError(name, value, expected)
    word, colon, listed = (part.strip() for part in value.partition(":"))
    if word not in WORDS:
        raise InvalidOptionError(name, value, expected + suggestion(word, WORDS))
    text = f"{name}={value!r}"
    if not colon:
        return Wanted(text=text, word=word)
    elements = [element.strip() for element in listed.split(",")]
    own, rest = _OWN in elements, [element for element in elements if element != _OWN]
    try:
        return Wanted(text=text, word=word, nodes=_nodes(rest) if rest else frozenset(), own=own)
    except ValueError as error:
        raise InvalidOptionError(name, value, f"{expected} ({error})") from None


def _nodes(elements: list[str]) -> frozenset[int]:
    if not all(elements):
        raise ValueError("a node is missing")
    nodes = parse_cpulist(",".join(elements))  # the kernel lists nodes as it lists CPUs
    if max(nodes) > MAX_NODE_ID:
        raise ValueError(f"{max(nodes)} is above the highest node id, {MAX_NODE_ID}")
    return nodes
