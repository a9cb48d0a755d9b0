"""GPUs that do not respond: numbers mean nothing beside one, as CUDA may count it or not."""

from __future__ import annotations

from collections.abc import Sequence

from gpuaff.claims.model import LeftOut
from gpuaff.notices import Notice


def remarks(left_out: Sequence[LeftOut]) -> tuple[Notice, ...]:
    """What to say of a claim beside such GPUs; one without a MIG instance is no fault."""
    lost = [one for one in left_out if not one.cut]
    if not lost:
        return ()
    from gpuaff.binding.report import say

    notice = Notice(
        "visible-lost",
        f"{'; '.join(map(str, lost))}. CUDA may count such a GPU or not, so CUDA_VISIBLE_DEVICES "
        "names the claimed GPUs by UUID, and numbers that stood there were read as nvidia-smi's; "
        "look for Xid in dmesg, and reset the GPU or reboot",
    )
    say([notice], rank=None)
    return (notice,)
