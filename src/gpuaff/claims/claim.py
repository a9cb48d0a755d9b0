"""``Claim``: GPUs that belong to this process; and the one claim that a process can have."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from gpuaff._system.interrupts import uninterrupted
from gpuaff.errors import AlreadyClaimedError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing_extensions import Self

    from gpuaff.claims.locking.leases import Lease
    from gpuaff.claims.locking.registry import Slot
    from gpuaff.claims.model import ClaimedGpu
    from gpuaff.cpuset import CpuSet
    from gpuaff.notices import Notice


class Claim:
    """GPUs that were claimed. Only :func:`gpuaff.claim_gpus` makes one.

    The claim lasts until the process ends, however it ends, or until :meth:`release`; whether
    this object is kept does not matter. Forked children share it: the GPUs stay claimed while one
    of them lives. As a context manager, it releases at the end of the block.

    Attributes:
        gpus: the GPUs, in CUDA's order in this process.
        placeholders: what the placeholder returned for each; empty without one.
        warnings: what went wrong without preventing the claim.
        cpus: the CPUs that came with the claim (``pin=True``); None without.
        is_released: whether the claim is over for this process.
    """

    def __init__(
        self,
        gpus: tuple[ClaimedGpu, ...],
        placeholders: tuple[object, ...],
        warnings: tuple[Notice, ...],
        cpus: CpuSet | None,
        held: tuple[Lease, Slot],
        undo: ExitStack,
    ) -> None:
        self.gpus, self.placeholders, self.warnings = gpus, placeholders, warnings
        self.cpus, self.is_released = cpus, False
        (self._lease, self._slot), self._undo, self._pid = held, undo, os.getpid()
        self._releasing = threading.RLock()  # another thread, or a placeholder, may release as well

    @property
    def fds(self) -> tuple[int, ...]:
        """The descriptors that hold the claim; empty once it is over.

        A program that is to keep the claim alive after this process needs them:
        ``subprocess.Popen(…, pass_fds=claim.fds)``. Forked children have them anyway. Do not read,
        write or lock them.
        """
        return () if self.is_released else (*self._lease.fds, self._slot.handle)

    @property
    def is_inherited(self) -> bool:
        """Whether this process was forked from the one that claimed."""
        return os.getpid() != self._pid

    def release(self) -> None:
        """Give the GPUs back, also for children that share the claim; may be called again.

        The placeholders are released; ``CUDA_VISIBLE_DEVICES`` and the process's CPUs are again
        what they were. Once CUDA was started, its list of devices never changes: then this process
        can claim the same GPUs again, and no others.

        In a forked child only the child's part ends: the GPUs stay its parent's.

        Raises:
            Exception: from a placeholder's own release; all is released nevertheless.
        """
        with uninterrupted():
            if self.is_inherited:
                self._lease.release()
                self._slot.release()
                self._forget()
                return
            with self._releasing:
                try:
                    self._undo.close()
                finally:
                    self._forget()

    def _forget(self) -> None:
        self.is_released = True
        if state.claim is self:
            state.claim = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def __repr__(self) -> str:
        kind = "released " if self.is_released else "inherited " if self.is_inherited else ""
        return f"<{kind}Claim of {', '.join(f'GPU {gpu.index}' for gpu in self.gpus)}>"


class _State:
    # A forked child has its parent's. It lasts even if its caller drops it.
    claim: Claim | None = None
    # What CUDA shows for good, since it was started under a claim that is over.
    cuda_bound_gpus: tuple[ClaimedGpu, ...] | None = None
    claim_lock = threading.Lock()  # locked while a claim is being made


state = _State()
# In a forked child none is being made.
os.register_at_fork(after_in_child=lambda: setattr(state, "claim_lock", threading.Lock()))


def current_claim() -> Claim | None:
    """The claim that this process holds; None when it holds none.

    A forked child has its parent's (``Claim.is_inherited``) until it makes one of its own.
    """
    return state.claim


@contextmanager
def only_one_claim() -> Iterator[None]:
    """Make a claim in this block; AlreadyClaimedError if there is one, or one is being made."""
    lock = state.claim_lock
    if not lock.acquire(blocking=False):
        raise AlreadyClaimedError(
            "this process is already claiming GPUs, in another thread or around this call"
        )
    try:
        claim = state.claim
        if claim is not None and not claim.is_inherited:
            raise AlreadyClaimedError(
                "this process already has a claim, of GPU "
                f"{', '.join(f'{gpu.index} ({gpu.uuid})' for gpu in claim.gpus)}, and CUDA fixes "
                "its visible GPUs once: claim all GPUs at once, or release() the claim first",
                tuple(gpu.uuid for gpu in claim.gpus),
            )
        yield
    finally:
        lock.release()
