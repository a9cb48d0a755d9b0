"""The claim that this process runs in, by the variable GPUAFF_CLAIM.

Whoever claims GPUs says so to all that it starts. The value is

    v1:<slot>:<pid>:<start>:<uuid>[,<uuid>…]

the claim's slot on the board, the process that has claimed and when that started (clock ticks since
the machine did, field 22 of ``/proc/<pid>/stat``; both together tell it from a later process with
the same id), and the UUIDs of what it holds, in the order of CUDA's devices.
"""

from __future__ import annotations

from gpuaff.digits import natural
from gpuaff.launch.variables import Get
from gpuaff.notices import Notice
from gpuaff.records import dataclass
from gpuaff.system import environ

VARIABLE = "GPUAFF_CLAIM"

_VERSION = "v1"


@dataclass(frozen=True, kw_only=True)
class Claimed:
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


def observe() -> tuple[Claimed | None, Notice | None]:
    """The claim around this process, and what to say about it.

    A value that cannot be read counts as not set.
    """
    return classify(environ.get)


def classify(get: Get) -> tuple[Claimed | None, Notice | None]:
    """:func:`observe`, with an environment from anywhere."""
    text = (get(VARIABLE) or "").strip()
    if not text:
        return None, None
    found = _read(text)
    return found, None if found is not None else _unreadable(text)


def _read(text: str) -> Claimed | None:
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
    return Claimed(slot=slot, pid=pid, started=started, uuids=uuids)


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
        f"{VARIABLE}={shown} is not what a claim sets, so this process counts as in no claim; "
        "gpuaff sets it for what a claim starts: unset it, or leave it as it was",
    )
