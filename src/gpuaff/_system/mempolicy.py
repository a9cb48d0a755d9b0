"""Where a thread's memory comes from: ``get_mempolicy`` and ``set_mempolicy``.

The C library has no functions for these calls, and libnuma is often not installed (case B8); so
they are made by their numbers. All functions raise OSError: ENOSYS without NUMA support, or where
this machine's numbers are unknown; EPERM or whatever else a seccomp filter returns.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Sized
from contextlib import suppress
from typing import NamedTuple

from gpuaff.cpuset import format_cpulist, from_bits

DEFAULT, PREFERRED, BIND, INTERLEAVE, LOCAL, PREFERRED_MANY = range(6)
"""The kernel's modes. PREFERRED takes one node, PREFERRED_MANY (Linux 5.15) several."""

STATIC = 1 << 15
"""MPOL_F_STATIC_NODES: the nodes stay those that were named when a cpuset changes. Without it the
kernel renumbers them, and near the GPU becomes anywhere."""

_FLAGS = STATIC | 1 << 14 | 1 << 13
_NAMES = ("default", "preferred", "bind", "interleave", "local", "preferred", "weighted-interleave")
_ALLOWED = 1 << 2  # MPOL_F_MEMS_ALLOWED: report the nodes that the cpuset grants, not the policy
_MASK_BYTES = 512  # for 4096 nodes; no kernel can be built for more than 1024

NUMBERS = {"x86_64": (239, 238), "aarch64": (236, 237), "ppc64le": (260, 261)}
"""The numbers of get_mempolicy and set_mempolicy, by the machine's name; 64-bit processes only."""


class Policy(NamedTuple):
    """A memory policy: the kernel's number of its mode, with flags, and the NUMA nodes named."""

    mode: int
    nodes: frozenset[int] = frozenset()

    def __str__(self) -> str:
        """As ``set_affinity(memory=)`` spells it: ``bind:0-1``."""
        kind = self.mode & ~_FLAGS
        name = _NAMES[kind] if kind < len(_NAMES) else f"mode {kind}"
        return f"{name}:{format_cpulist(self.nodes)}" if self.nodes else name


def get_policy() -> Policy:
    """The calling thread's policy."""
    return _get(0)


def allowed_nodes() -> frozenset[int]:
    """The NUMA nodes that the calling thread may have memory from (``Mems_allowed``)."""
    return _get(_ALLOWED).nodes


def set_policy(policy: Policy) -> None:
    """Set the calling thread's policy; threads and processes that it starts later inherit it."""
    # The kernel silently drops nodes that it does not grant; EINVAL: none is left, or it lacks the
    # mode
    bits = sum(1 << node for node in policy.nodes)
    mask = bits.to_bytes(8 * (bits.bit_length() // 64 + 1), "little")  # in whole words
    _call(numbers()[1], policy.mode, mask, _maxnode(mask))


def ensure_policy(policy: Policy) -> None:
    """Set a policy unless it is in force, or the kernel refuses that."""
    with suppress(OSError):
        if get_policy() != policy:
            set_policy(policy)


def numbers() -> tuple[int, int]:
    """The numbers of get_mempolicy and set_mempolicy for this process."""
    machine = os.uname().machine
    if machine not in NUMBERS or sys.maxsize <= 1 << 32:
        raise OSError(errno.ENOSYS, f"its numbers on this machine ({machine}) are unknown")
    return NUMBERS[machine]


def _get(flags: int) -> Policy:
    mode, mask = ctypes.c_int(), ctypes.create_string_buffer(_MASK_BYTES)
    _call(numbers()[0], ctypes.byref(mode), mask, _maxnode(mask), None, flags)
    return Policy(mode.value, from_bits(int.from_bytes(mask, "little")))


def _maxnode(mask: Sized) -> int:
    return 8 * len(mask) + 1  # the kernel takes off one before it counts bits


def _call(number: int, *arguments: object) -> None:
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long
    # Without this, integers would be passed in half a register.
    wide = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]
    if syscall(ctypes.c_long(number), *wide) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
