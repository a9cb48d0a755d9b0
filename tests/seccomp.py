"""A real seccomp filter, as container engines set one: chosen system calls fail.

Run as a program it filters itself and becomes the command that follows; :func:`refusing` makes
that prefix. It takes no privilege.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Sequence

_SET_SECCOMP, _FILTER, _SET_NO_NEW_PRIVS = 22, 2, 38  # <linux/prctl.h>, <linux/seccomp.h>
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06  # <linux/bpf_common.h>
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def refusing(error: int, *calls: int) -> list[str]:
    """A prefix for a command: these system calls, by number, fail with this errno."""
    return [sys.executable, __file__, str(error), ",".join(map(str, calls))]


def install(error: int, calls: Sequence[int]) -> None:
    """Filter this process, for ever."""
    steps = [(_LOAD, 0, 0, 0)]  # the call's number
    for place, call in enumerate(calls):
        steps.append((_EQUAL, len(calls) - place, 0, call))
    steps += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERRNO | error)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = _Program(len(steps), ctypes.addressof(code))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    arguments = [ctypes.c_ulong(one) for one in (_SET_NO_NEW_PRIVS, 1, 0, 0, 0)]
    for what in (arguments, [ctypes.c_ulong(_SET_SECCOMP), ctypes.c_ulong(_FILTER)]):
        rest = [ctypes.byref(program)] if len(what) == 2 else []
        if prctl(*what, *rest) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    install(int(sys.argv[1]), [int(call) for call in sys.argv[2].split(",")])
    os.execv(sys.argv[3], sys.argv[3:])
