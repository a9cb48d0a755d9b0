"""Looks at other processes: what the kernel says of their threads and of their pages."""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from contextlib import suppress
from pathlib import Path

_MOVE_PAGES = 279  # on x86-64

_PAGE = os.sysconf("SC_PAGE_SIZE")


def field(pid: int, tid: int, name: str) -> str:
    """A line of a thread's status, as the kernel writes it."""
    text = Path(f"/proc/{pid}/task/{tid}/status").read_text()
    line = next(line for line in text.splitlines() if line.startswith(f"{name}:"))
    return line.split(":")[1].strip()


def threads(pid: int) -> list[str]:
    """Each thread's ``Cpus_allowed_list``, sorted."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            found.append(field(pid, int(task.name), "Cpus_allowed_list"))
    return sorted(found)


def nodes_of_pages(pid: int, address: int, size: int) -> dict[str, int]:
    """On how many pages each NUMA node holds of some memory; errors count by their number.

    ``move_pages(2)`` without targets moves nothing and tells where each page is.
    """
    count = size // _PAGE
    pages = (ctypes.c_void_p * count)(*range(address, address + size, _PAGE))
    status = (ctypes.c_int * count)()
    libc = ctypes.CDLL(None, use_errno=True)
    number, where, many = ctypes.c_long(_MOVE_PAGES), ctypes.c_int(pid), ctypes.c_ulong(count)
    if libc.syscall(number, where, many, pages, None, status, ctypes.c_int(0)):
        raise OSError(ctypes.get_errno(), "move_pages")
    return {str(node): found for node, found in sorted(Counter(status).items())}


def policy_of_pages(pid: int, address: int) -> str:
    """The memory policy of the mapping that holds an address, as /proc/PID/numa_maps words it."""
    lines = Path(f"/proc/{pid}/numa_maps").read_text().splitlines()
    below = [line.split() for line in lines if int(line.split()[0], 16) <= address]
    return max(below, key=lambda words: int(words[0], 16))[1]
