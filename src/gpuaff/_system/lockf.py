"""Names that moved to :mod:`gpuaff._system.locks`."""

from __future__ import annotations

from gpuaff._system.locks import (
    exclusive_holder,
    exclusive_waiters,
    try_shared,
    wait_for_shared,
)
from gpuaff._system.locks import free_shared as unlock

__all__ = ["exclusive_holder", "exclusive_waiters", "try_shared", "unlock", "wait_for_shared"]
