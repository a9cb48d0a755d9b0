"""A change of this process: one at a time, and wholly or not at all."""

from __future__ import annotations

import sys
from collections.abc import Callable

from gpuaff.errors import GPUAffinityError
from gpuaff.pinning import extras
from gpuaff.pinning.state import Before, Process
from gpuaff.pinning.threads import move_all, put_again

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import TypeVar

    _T = TypeVar("_T")


def transaction(process: Process, work: Callable[[], _T], *, memory: bool = False) -> _T:
    """Do this; whatever it raises (also Ctrl-C), the process is then as it was before.

    Args:
        process: what is remembered of this process.
        work: what is done. It notes in ``process.moved`` what each thread had, before it moves it.
        memory: whether it may change the memory policy.

    Raises:
        GPUAffinityError: it was called by a signal handler, or the like, while a change is made.
    """
    if _is_at_work():
        raise GPUAffinityError(
            "set_affinity, reapply or restore was called while another such call was at work in "
            "the same thread (from a signal handler?): call it when that one has returned"
        )
    with process.lock:
        return _all_or_nothing(process, work, memory=memory)


def _is_at_work() -> bool:
    """Whether this thread is in :func:`_all_or_nothing`.

    Its frames tell, since a flag would stay set if Ctrl-C came just as it is to be taken away.
    """
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - nothing public tells
    while frame is not None and frame.f_code is not _all_or_nothing.__code__:
        frame = frame.f_back
    return frame is not None


def _all_or_nothing(process: Process, work: Callable[[], _T], *, memory: bool) -> _T:
    process.moved = {}
    before, put_back = Before.of(process), extras.taken_down(process, memory=memory)
    try:
        extras.adopt(process)
        return work()
    except BaseException:
        _move_back(process, before)
        before.recall(process)
        put_back()
        raise


def _move_back(process: Process, before: Before) -> None:
    likely = [before.mask] if before.share is None else [before.share, before.original]
    for tid, mask in process.moved.items():
        put_again(tid, mask, likely)
    now = {process.original} if process.share is None else {process.share, process.original}
    ours = now - {before.share, before.original}
    if ours:  # those who were born there meanwhile
        spare = {*process.moved, *process.bound}
        move_all(before.mask, ours=ours, spare=spare)
