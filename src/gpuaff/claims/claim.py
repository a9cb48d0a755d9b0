"""``Claim``: GPUs that are this process's own until it ends, or gives them back."""

from __future__ import annotations

import threading

from gpuaff._system import kernel
from gpuaff.claims import state

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

    from gpuaff.claims.attempts import Obtained
    from gpuaff.claims.model import ClaimedGpu
    from gpuaff.claims.placeholder import Occupied
    from gpuaff.claims.state import Undo
    from gpuaff.cpuset import CpuSet
    from gpuaff.notices import Notice
    from gpuaff.pinning.grant import Grant


class Claim:
    """GPUs that were claimed. Only :func:`gpuaff.claim_gpus` makes them.

    The claim lasts until the process ends, however it ends, or until :meth:`release`; whether
    this object is kept does not matter. Forked children share it: the GPUs stay claimed while one
    of them lives. It is a context manager that releases at its end.

    Attributes:
        gpus: the GPUs, in CUDA's order in this process.
        placeholders: what the placeholder has returned for each; empty without one.
        warnings: what was not as hoped.
    """

    def __init__(
        self,
        *,
        gpus: tuple[ClaimedGpu, ...],
        obtained: Obtained,
        occupied: Occupied,
        grant: Grant | None,
        warnings: tuple[Notice, ...],
        undo: Undo,
    ) -> None:
        """Only :func:`gpuaff.claim_gpus` makes them."""
        self.gpus = gpus
        self.warnings = warnings
        self.placeholders = tuple(occupied.held)
        self._obtained, self._grant, self._undo = obtained, grant, undo
        self._pid = undo.pid  # a placeholder may have forked: that child has not claimed
        self._is_abandoned = False
        self._releasing = threading.RLock()  # a signal handler may release as well

    @property
    def fds(self) -> tuple[int, ...]:
        """The descriptors that hold the claim.

        A program that is to keep it alive, though this process may end first, is started with
        ``subprocess.Popen(…, pass_fds=claim.fds)``. Forked children have them anyway. They only
        keep the claim: do not read, write or lock them. Empty once it is over.
        """
        return () if self.is_released else (*self._obtained.lease.fds, self._obtained.slot.handle)

    @property
    def cpus(self) -> CpuSet | None:
        """The CPUs that came with the claim (``pin=True``); None when none did."""
        return None if self._grant is None or not self._grant.pinned else self._grant.cpus

    @property
    def is_inherited(self) -> bool:
        """Whether this process was forked from the one that has claimed."""
        return kernel.process_id() != self._pid

    @property
    def is_released(self) -> bool:
        """Whether it is over, as far as this process is concerned."""
        return self._is_abandoned or self._undo.is_done

    def release(self) -> None:
        """Give the GPUs back, also for children that share the claim; may be called again.

        The placeholders are released; ``CUDA_VISIBLE_DEVICES`` and the process's CPUs are again
        what they were.
        CUDA's list of devices is settled for good once it was started: after that this process
        can claim the same GPUs again, and no others.

        In a forked child only the child's part ends: the GPUs stay its parent's.

        Raises:
            Exception: what a placeholder's own release has raised; all is released nevertheless.
        """
        if self.is_inherited:
            self._abandon()
            return
        with self._releasing:
            try:
                self._undo()
            finally:
                self._undo()  # Ctrl-C may have come in the first

    def _abandon(self) -> None:
        state.forget(self)
        if not self._is_abandoned:
            self._is_abandoned = True
            self._obtained.lease.abandon()
            self._obtained.slot.abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        state = "released " if self.is_released else "inherited " if self.is_inherited else ""
        return f"<{state}Claim of {', '.join(f'GPU {gpu.index}' for gpu in self.gpus)}>"

    def __reduce__(self) -> str | tuple[object, ...]:
        """Another process cannot hold it.

        Raises:
            TypeError: always.
        """
        raise TypeError("a Claim cannot be pickled: it belongs to the process that has claimed")
