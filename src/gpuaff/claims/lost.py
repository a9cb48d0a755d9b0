"""After a lost claim, the next one of this user waits a random moment first.

Two jobs that come onto a GPU at the same time and both give up, because one of them asks for no
lease or the other cannot see it, would otherwise meet again at every new start.
"""

from __future__ import annotations

import random
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from gpuaff.claims import lockdir
from gpuaff.system import descriptors, kernel, lock_files

_FRESH = 60.0
"""How long a loss is remembered, in seconds."""

_LONGEST = 2.0
"""The longest that is waited, in seconds."""

_TIME = struct.Struct("<d")


def _name() -> str:
    return f"lost-{kernel.user_id()}"


def remember() -> None:
    """A claim was lost just now; that is the error to tell, whatever else goes wrong."""
    with suppress(OSError), _opened() as handle:
        lock_files.write_at(handle, 0, _TIME.pack(kernel.uptime()))


def stand_back() -> None:
    """Wait a random moment if this user has lost a claim lately.

    Nobody is kept from claiming by this: what somebody else has put in the file's place, or keeps
    from being opened, is as if nothing was lost.
    """
    with suppress(OSError):
        if not lockdir.has(_name()):
            return
        with _opened() as handle:
            data = lock_files.read_at(handle, 0, _TIME.size)
            then = _TIME.unpack(data)[0] if len(data) == _TIME.size else 0.0
            if not (then and 0 <= kernel.uptime() - then < _FRESH):
                return
            lock_files.write_at(handle, 0, _TIME.pack(0.0))
        time.sleep(random.uniform(0, _LONGEST))  # noqa: S311 - not to be guessed by nobody


@contextmanager
def _opened() -> Iterator[int]:
    """This user's file, which is made if there is none.

    Raises:
        OSError: it cannot be had, or it is somebody else's.
    """
    handle = lockdir.open_file(_name(), size=_TIME.size)
    try:
        if descriptors.owner_of(handle) != kernel.user_id():
            raise PermissionError(_name())
        yield handle
    finally:
        descriptors.close(handle)
