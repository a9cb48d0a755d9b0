"""Names that moved to :mod:`gpuaff._system.locks`, until all callers have followed."""

from __future__ import annotations

from gpuaff._system.locks import (
    UnusableError,
    identity,
    identity_of,
    in_the_way,
    is_current,
    locked_name,
    locked_name_of,
    make_folder,
    mark_of,
    open_directory,
    open_folder,
    open_lock_file,
    read_at,
    real_name,
    write_at,
)

__all__ = [
    "UnusableError",
    "identity",
    "identity_of",
    "in_the_way",
    "is_current",
    "locked_name",
    "locked_name_of",
    "make_folder",
    "mark_of",
    "open_directory",
    "open_folder",
    "open_lock_file",
    "read_at",
    "real_name",
    "write_at",
]
