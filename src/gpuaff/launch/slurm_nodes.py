"""Slurm's lists of nodes: ``gpu[01-04,7],login1`` (``man scontrol``, "hostlist"). Pure."""

from __future__ import annotations

import re

from gpuaff.digits import natural

_MOST = 65_536
"""The longest list that is read, in characters."""

_ELEMENT = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")


def holds(nodes: str, host: str) -> bool | None:
    """Whether a list names a host, with its domain or without; None when it can't be read.

    Args:
        nodes: the list.
        host: a machine's name.
    """
    if len(nodes) > _MOST or not nodes.strip():
        return None
    elements = _ELEMENT.findall(nodes)
    if ",".join(elements) != nodes:
        return None
    short = host.split(".")[0].lower()
    return any(_names(element.strip().lower(), short) for element in elements)


def _names(element: str, host: str) -> bool:
    places = {0}
    for ranges, text in _PART.findall(element):
        if ranges:
            places = {end for start in places for end in _after(ranges, host, start)}
        else:
            # The rest of a full name may be a domain, which the host is given without.
            places = {end for start in places for end in _past(text, host, start)}
    return len(host) in places


def _past(text: str, host: str, start: int) -> set[int]:
    if host.startswith(text, start):
        return {start + len(text)}
    short = text.split(".")[0]
    return {len(host)} if "." in text and host[start:] == short else set()


def _after(ranges: str, host: str, start: int) -> set[int]:
    """Where the host's name goes on after a number of the ranges that stands at ``start``."""
    found = set()
    for one in ranges.split(","):
        low, _, high = one.strip().partition("-")
        first, last = natural(low), natural(high or low)
        if first is None or last is None:
            continue
        for end in range(start + len(low), len(host) + 1):
            value = natural(host[start:end])
            if value is None:
                break
            # Numbers are as long as the first one; longer ones have no zero in front.
            padded = str(value).zfill(len(low)) == host[start:end]
            if padded and first <= value <= last:
                found.add(end)
    return found
