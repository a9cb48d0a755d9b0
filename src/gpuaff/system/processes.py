"""Who has started whom: the only module that imports psutil, and late."""

from __future__ import annotations

from gpuaff.errors import GpuaffError


def caller_and_descendants() -> list[int]:
    """The process that has started this one and all that it has started, but what is this one's.

    Returns:
        Their ids, ascending; some may have ended meanwhile.

    Raises:
        GpuaffError: they cannot be seen.
    """
    import psutil

    try:
        me = psutil.Process()
        parent = me.parent()
        if parent is None:
            raise GpuaffError(
                "the process that called gpuaff cannot be seen (it may be outside of this "
                "container): name one with --pid"
            )
        mine = {me.pid, *(child.pid for child in me.children(recursive=True))}
        children = parent.children(recursive=True)
    except psutil.Error as error:
        raise GpuaffError(
            f"the processes around this one cannot be seen ({error}): name one with --pid"
        ) from None
    return sorted({parent.pid, *(child.pid for child in children)} - mine)
