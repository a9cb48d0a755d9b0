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


def refusing(error: int, *calls: int, first: int | None = None) -> list[str]:
    """A prefix for a command: these system calls, by number, fail with this errno.

    With ``first`` only those with this first argument do.
    """
    listed = ",".join(map(str, calls))
    return [sys.executable, __file__, str(error), listed, "" if first is None else str(first)]


def install(error: int, calls: Sequence[int], first: int | None = None) -> None:
    """Filter this process, for ever."""
    steps = [(_LOAD, 0, 0, 0)]  # the call's number
    steps += [(_EQUAL, len(calls) - place, 0, call) for place, call in enumerate(calls)]
    steps += [(_RETURN, 0, 0, _ALLOW)]
    if first is not None:
        low_half = 16 if sys.byteorder == "little" else 20
        steps += [(_LOAD, 0, 0, low_half), (_EQUAL, 1, 0, first), (_RETURN, 0, 0, _ALLOW)]
    steps += [(_RETURN, 0, 0, _ERRNO | error)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    _call(_SET_NO_NEW_PRIVS, 1)
    _call(_SET_SECCOMP, _FILTER, _Program(len(steps), ctypes.addressof(code)))


def _call(what: int, number: int, program: _Program | None = None) -> None:
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    third = ctypes.byref(program) if program is not None else ctypes.c_ulong(0)
    zeros = [ctypes.c_ulong(0)] * 2
    if prctl(what, ctypes.c_ulong(number), third, *zeros) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    error, listed, argument, *command = sys.argv[1:]
    numbers = [int(call) for call in listed.split(",")]
    install(int(error), numbers, int(argument) if argument else None)
    os.execv(command[0], command)
