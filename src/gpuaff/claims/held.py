"""What this process remembers of its claim: there is one, or none."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from gpuaff.errors import AlreadyClaimedError
from gpuaff.system import cuda, kernel

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpuaff.claims.claim import Claim


class _Memory:
    """The only thing about claims that changes.

    Attributes:
        claim: the claim; None when there is none. A forked child has its parent's.
        latched: the GPUs that CUDA shows for good, by UUID, since a claim was released after CUDA
            had been started; None when none was.
        lock: held while a claim is being made.
    """

    def __init__(self) -> None:
        self.claim: Claim | None = None
        self.latched: tuple[str, ...] | None = None
        self.lock = threading.Lock()


_memory = _Memory()


def _be_another() -> None:
    """In a forked child: nobody is claiming here."""
    _memory.lock = threading.Lock()


kernel.in_forked_child(_be_another)


def current_claim() -> Claim | None:
    """This process's claim; None when it has none.

    A forked child has its parent's (``Claim.is_inherited``), until it makes one of its own.
    """
    return _memory.claim


@contextmanager
def claiming() -> Iterator[None]:
    """While a claim is made: one at a time.

    Raises:
        AlreadyClaimedError: there is one, or another thread is making one.
    """
    lock = _memory.lock
    if not lock.acquire(blocking=False):
        raise AlreadyClaimedError("another thread of this process is claiming GPUs just now")
    try:
        claim = _memory.claim
        if claim is not None and not claim.is_inherited:
            gpus = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in claim.gpus)
            raise AlreadyClaimedError(
                f"this process holds a claim already, of GPU {gpus}: one process has one claim, "
                "as CUDA settles once which GPUs it shows; claim all at once, or release() it"
            )
        yield
    finally:
        lock.release()


def remember(claim: Claim) -> None:
    """Keep a claim: it lasts even when nobody else keeps it."""
    _memory.claim = claim


def forget(claim: Claim) -> None:
    """A claim is over."""
    if _memory.claim is claim:
        _memory.claim = None


def latched() -> tuple[str, ...] | None:
    """The GPUs that CUDA shows in this process for good, since a claim that is over."""
    return _memory.latched


def remember_cuda(gpus: tuple[str, ...]) -> None:
    """Once CUDA was started under a claim, it shows the GPUs of that claim for good."""
    if cuda.is_initialized():
        _memory.latched = gpus
