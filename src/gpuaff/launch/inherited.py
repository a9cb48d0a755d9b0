"""Whether this process is a child that multiprocessing has started: it has its parent's variables.

DataLoader workers and those of ``torch.multiprocessing`` are such children.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass

from gpuaff._system import env, kernel
from gpuaff.launch.variables import Get
from gpuaff.notices import Notice
from gpuaff.options import natural


def maker() -> int | None:
    """The process by which multiprocessing has started this one; None where it has not.

    Nor while the child imports the script again: multiprocessing names it later.

    Nothing is imported for it: a child has the module, as it was started by it. Where another
    thread is just importing that, this is no child.
    """
    process = sys.modules.get("multiprocessing.process")
    parent = getattr(process, "parent_process", None)
    found = None if parent is None else parent()
    return None if found is None else int(found.pid)


def is_child() -> bool:
    """Whether multiprocessing has started this process, by whatever method."""
    return maker() is not None or imports_script()


def imports_script() -> bool:
    """Whether this process only imports the script again, before it does what it was made for.

    Spawned children do, and those of a fork server. It is what multiprocessing itself looks at, to
    refuse processes that are started there.
    """
    process = sys.modules.get("multiprocessing.process")
    current = getattr(process, "current_process", None)
    return current is not None and getattr(current(), "_inheriting", None) is True


IMPORTED = Notice(
    "imported-again",
    "multiprocessing imports this script again in a child, and so its claim is made again, inside "
    'the claim that the script has: put claim_gpus under `if __name__ == "__main__":`',
)
"""What to say where a claim fails there."""


def has_set(names: Iterable[str]) -> bool:
    """Whether one of these variables is not as this process's program was started with it.

    Then it was set since, as functions do that ``torch.multiprocessing.spawn`` starts: the numbers
    are the child's own. A forked child has its parent's program, and may have got from that what
    the parent has set since; that it looks the same as its own work costs no more than a remark.
    """
    began = kernel.variables_of(kernel.process_id())
    return bool(began) and any(env.get(name) != began.get(name) for name in names)


def remark(rank: int, size: int) -> Notice:
    """What to say where such a child takes its parent's numbers for its own."""
    return Notice(
        "rank-inherited",
        f"multiprocessing has started this process, and the variables that make it rank {rank} of "
        f"{size} are its parent's: where several such children call set_affinity, they get the "
        "same CPUs; call set_affinity(local_rank, nproc_per_node) with numbers of their own",
        rank=rank,
    )


# The claim that this process runs in, by the variable GPUAFF_CLAIM.
#
# Whoever claims GPUs says so to all that it starts. The value is
#
#     v1:<slot>:<pid>:<start>:<uuid>[,<uuid>…]
#
# the claim's slot on the board, the process that has claimed and when that started (clock ticks
# since
# the machine did, field 22 of ``/proc/<pid>/stat``; both together tell it from a later process with
# the same id), and the UUIDs of what it holds, in the order of CUDA's devices.


CLAIM_VARIABLE = "GPUAFF_CLAIM"

_VERSION = "v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParentClaim:
    """A claim; ``str()`` gives the variable's value.

    Attributes:
        slot: its slot on the board.
        pid: the process that has claimed.
        started: when that process started, in clock ticks since the machine did.
        uuids: the GPUs and MIG instances that it holds (``GPU-…``, ``MIG-…``).
    """

    slot: int
    pid: int
    started: int
    uuids: tuple[str, ...]

    def __str__(self) -> str:
        return ":".join(
            [_VERSION, str(self.slot), str(self.pid), str(self.started), ",".join(self.uuids)]
        )


def observe_parent_claim() -> tuple[ParentClaim | None, Notice | None]:
    """The claim around this process, and what to say about it.

    A value that cannot be read counts as not set.
    """
    return classify_parent_claim(env.get)


def classify_parent_claim(get: Get) -> tuple[ParentClaim | None, Notice | None]:
    """:func:`observe`, with an environment from anywhere."""
    text = (get(CLAIM_VARIABLE) or "").strip()
    if not text:
        return None, None
    found = _read(text)
    return found, None if found is not None else _unreadable(text)


def _read(text: str) -> ParentClaim | None:
    version, _, rest = text.partition(":")
    fields = rest.split(":", 3)
    if version != _VERSION or len(fields) != 4:
        return None
    slot, pid, started = natural(fields[0]), natural(fields[1]), _ticks(fields[2])
    uuids = tuple(fields[3].split(","))
    if slot is None or not pid or started is None or not all(map(is_uuid, uuids)):
        return None
    if len(set(uuids)) < len(uuids):
        return None
    return ParentClaim(slot=slot, pid=pid, started=started, uuids=uuids)


def _ticks(text: str) -> int | None:
    """A number of clock ticks: a machine that runs for months has more than nine digits of them."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 20 else None


def is_uuid(text: str) -> bool:
    """Whether it looks like one of the driver's names; old MIG ones have slashes."""
    rest = text[4:].replace("-", "").replace("/", "")
    return text.startswith(("GPU-", "MIG-")) and rest.isascii() and rest.isalnum()


def _unreadable(text: str) -> Notice:
    shown = repr(text if len(text) <= 80 else f"{text[:77]}...")
    return Notice(
        "claim-unreadable",
        f"{CLAIM_VARIABLE}={shown} is not what a claim sets, so this process counts as in no "
        "claim; "
        "gpuaff sets it for what a claim starts: unset it, or leave it as it was",
    )
