"""A claim inside a claim: it takes from what encloses it, and never from the machine."""

from __future__ import annotations

from collections.abc import Iterable

from gpuaff.claims import board, entries
from gpuaff.claims.entries import Entry
from gpuaff.claims.obtain import Obtained
from gpuaff.errors import ClaimError
from gpuaff.launch import claimed
from gpuaff.launch.claimed import Claimed


def enclosing() -> Claimed | None:
    """The claim in which this process runs, by the variable that it has set; None without one.

    Raises:
        ClaimError: the variable tells of a claim that is over, or of none.
        LockDirectoryError: the board cannot be used.
    """
    found, notice = claimed.observe()
    if notice is not None:
        raise ClaimError(notice.message)
    if found is None:
        return None
    for entry in board.entries():
        told = entry.slot, entry.waits, entry.pid, entry.start or 0  # without /proc: not known
        if told == (found.slot, False, found.pid, found.started) and _has(entry, found.uuids):
            return found
    raise ClaimError(
        f"{claimed.VARIABLE} says that this process runs inside a claim of process {found.pid}, "
        "and that is over, or not what it says (or was made with another GPUAFF_LOCK_DIR): its "
        f"GPUs may be somebody else's by now; unset {claimed.VARIABLE}, CUDA_VISIBLE_DEVICES and "
        "CUDA_DEVICE_ORDER to claim from the machine"
    )


def _has(entry: Entry, uuids: Iterable[str]) -> bool:
    """Whether these are what an entry of the board holds: a claim inside another says whose too.

    In this order, by which its ranks know which byte stands for which.
    """
    held = [key if key[:1] in "GM" else key.partition("/")[2] for key in entry.gpus]
    return [*uuids] == held


def variable(obtained: Obtained) -> str:
    """What tells those that this process starts of its claim."""
    me = entries.about_me()
    uuids = tuple(device.uuid for device in obtained.devices)
    number = obtained.slot.number
    return str(Claimed(slot=number, pid=me["pid"], started=me["start"] or 0, uuids=uuids))
