"""What a claim would get now. No lock is taken, nobody waits, and nothing is changed."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack

from gpuaff.claims.making import Making
from gpuaff.claims.model import Device
from gpuaff.claims.placeholder import kind_of
from gpuaff.claims.request import read
from gpuaff.system.nvml import usage_session


def preview(n: object, *, arguments: Mapping[str, object]) -> tuple[Device, ...]:
    """The devices that ``claim_gpus`` would take at this moment, in CUDA's order.

    Args:
        n: as there.
        arguments: those of its arguments that say what is asked for, by name.

    Raises:
        GpuaffError: what a claim that does not wait would raise.
    """
    making = Making(
        request=read(n, **arguments),
        kind=kind_of(None),
        pin=False,
        own_is_free=True,
        on_wait=None,
    )
    with usage_session() as session, ExitStack() as kept:
        return making.ready(session, kept).attempts.preview()
