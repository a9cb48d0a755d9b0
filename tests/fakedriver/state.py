"""The fake driver's state file, as ``state.h`` lays it out."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum, IntFlag
from pathlib import Path

MAGIC = 0x4B414647
VERSION = 5
GPUS = 32
CPU_WORDS = 128
NODE_WORDS = 16
MIG_SLOTS = 16
LINKS = 36
FAULTS = 64
PROCESSES = 256
DOUBLES = 64
FOREIGN = 1 << 22
"""What is added to the pids of another PID namespace."""
WORD_BITS = 64


class Number(IntEnum):
    """Its text is the number, on Python 3.10 too."""

    def __str__(self) -> str:
        return str(int(self))


class NVML(Number):
    """The return codes of ``nvml.h`` that tests use."""

    SUCCESS = 0
    UNINITIALIZED = 1
    INVALID_ARGUMENT = 2
    NOT_SUPPORTED = 3
    NO_PERMISSION = 4
    NOT_FOUND = 6
    INSUFFICIENT_SIZE = 7
    DRIVER_NOT_LOADED = 9
    FUNCTION_NOT_FOUND = 13
    GPU_IS_LOST = 15
    LIB_RM_VERSION_MISMATCH = 18
    ARGUMENT_VERSION_MISMATCH = 25
    UNKNOWN = 999


class CUDA(Number):
    """The return codes of ``cuda.h`` that tests use."""

    SUCCESS = 0
    INVALID_VALUE = 1
    OUT_OF_MEMORY = 2
    NOT_INITIALIZED = 3
    STUB_LIBRARY = 34
    DEVICE_UNAVAILABLE = 46
    NO_DEVICE = 100
    INVALID_DEVICE = 101
    INVALID_CONTEXT = 201
    UNKNOWN = 999


class Mode(Number):
    """``nvmlComputeMode_t``."""

    DEFAULT = 0
    EXCLUSIVE_THREAD = 1
    PROHIBITED = 2
    EXCLUSIVE_PROCESS = 3


class Action(IntEnum):
    """What comes of a call that a fault is set for."""

    RETURN = 0
    HANG = 1
    KILL = 2
    STOP = 3


class Kind(IntFlag):
    """In which of NVML's lists a process is."""

    COMPUTE = 1
    GRAPHICS = 2


class Mig(ctypes.Structure):
    """``struct fake_mig``."""

    _fields_ = (
        ("used", ctypes.c_int32),
        ("gpu_instance", ctypes.c_uint32),
        ("compute_instance", ctypes.c_uint32),
        ("uuid", ctypes.c_char * 96),
    )


class Link(ctypes.Structure):
    """``struct fake_link``."""

    _fields_ = (
        ("active", ctypes.c_int32),
        ("kind", ctypes.c_int32),
        ("remote", ctypes.c_char * 32),
    )


class GpuState(ctypes.Structure):
    """``struct fake_gpu``."""

    _fields_ = (
        ("uuid", ctypes.c_char * 96),
        ("name", ctypes.c_char * 96),
        ("bus_id", ctypes.c_char * 32),
        ("node_code", ctypes.c_int32),
        ("socket_code", ctypes.c_int32),
        ("memory_code", ctypes.c_int32),
        ("memory_node", ctypes.c_int32),
        ("mig_mode", ctypes.c_int32),
        ("mig_slots", ctypes.c_uint32),
        ("links", ctypes.c_uint32),
        ("path", ctypes.c_int32 * GPUS),
        ("node_cpus", ctypes.c_uint64 * CPU_WORDS),
        ("socket_cpus", ctypes.c_uint64 * CPU_WORDS),
        ("memory_nodes", ctypes.c_uint64 * NODE_WORDS),
        ("mig", Mig * MIG_SLOTS),
        ("link", Link * LINKS),
        ("compute_mode", ctypes.c_int32),
        ("display_active", ctypes.c_int32),
        ("display_mode", ctypes.c_int32),
        ("utilization", ctypes.c_int32),
        ("denied", ctypes.c_int32),
        ("contexts", ctypes.c_uint32),
        ("memory", ctypes.c_uint64),
        ("reserved", ctypes.c_uint64),
        ("idle", ctypes.c_uint64),
        ("unexplained", ctypes.c_uint64),
        ("slots_used", ctypes.c_uint64 * MIG_SLOTS),
    )


class Fault(ctypes.Structure):
    """``struct fake_fault``."""

    _fields_ = (
        ("function", ctypes.c_char * 64),
        ("gpu", ctypes.c_int32),
        ("code", ctypes.c_int32),
        ("after", ctypes.c_uint32),
        ("calls", ctypes.c_uint32),
        ("action", ctypes.c_uint32),
        ("ms", ctypes.c_uint32),
        ("times", ctypes.c_uint32),
        ("pid", ctypes.c_uint32),
    )


class Process(ctypes.Structure):
    """``struct fake_process``."""

    _fields_ = (
        ("gpu", ctypes.c_uint32),
        ("slot", ctypes.c_int32),
        ("pid", ctypes.c_uint32),
        ("kinds", ctypes.c_uint32),
        ("memory", ctypes.c_uint64),
        ("start", ctypes.c_uint64),
        ("lock", ctypes.c_uint64),
        ("noticed", ctypes.c_uint64),
        ("unlisted", ctypes.c_uint32),
        ("names", ctypes.c_uint64),
    )


class Double(ctypes.Structure):
    """``struct fake_double``."""

    _fields_ = (
        ("gpu", ctypes.c_uint32),
        ("slot", ctypes.c_int32),
        ("holder", ctypes.c_uint32),
        ("newcomer", ctypes.c_uint32),
        ("at", ctypes.c_uint64),
    )


class State(ctypes.Structure):
    """``struct fake_state``."""

    _fields_ = (
        ("magic", ctypes.c_uint32),
        ("version", ctypes.c_uint32),
        ("size", ctypes.c_uint64),
        ("inits", ctypes.c_uint32),
        ("shutdowns", ctypes.c_uint32),
        ("stub", ctypes.c_uint32),
        ("fault_count", ctypes.c_uint32),
        ("gpu_count", ctypes.c_uint32),
        ("driver_version", ctypes.c_char * 80),
        ("faults", Fault * FAULTS),
        ("gpus", GpuState * GPUS),
        ("unprivileged", ctypes.c_uint32),
        ("process_count", ctypes.c_uint32),
        ("processes", Process * PROCESSES),
        ("hidden", ctypes.c_uint32),
        ("untold_memory", ctypes.c_uint32),
        ("linger_ms", ctypes.c_uint32),
        ("order_differs", ctypes.c_int32),
        ("fastest", ctypes.c_uint32 * GPUS),
        ("locks", ctypes.c_uint64),
        ("double_count", ctypes.c_uint64),
        ("doubles", Double * DOUBLES),
        ("pid_namespace", ctypes.c_uint64),
        ("context_memory", ctypes.c_uint64 * GPUS),
        ("apart", ctypes.c_uint32),
    )


def create(path: Path) -> State:
    """Make a state file without GPUs, and map it: a change to the result is seen at once."""
    path.write_bytes(bytes(ctypes.sizeof(State)))
    with path.open("r+b") as file:
        state = State.from_buffer(mmap.mmap(file.fileno(), ctypes.sizeof(State)))
    state.magic, state.version, state.size = MAGIC, VERSION, ctypes.sizeof(State)
    namespace = Path("/proc/self/ns/pid")
    state.pid_namespace = namespace.stat().st_ino if namespace.exists() else 0
    return state


@contextmanager
def locked(path: Path) -> Iterator[int]:
    """Keep the libraries, and others who write, from the state.

    Yields:
        The descriptor that holds the lock.
    """
    handle = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield handle
    finally:
        os.close(handle)


def start_of(pid: int) -> int:
    """When a process started (field 22 of its stat); 0 where there is none, or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return 0
    fields = stat.rpartition(")")[2].split()  # the name before may hold anything
    return 0 if fields[0] in "ZX" else int(fields[19])


def is_alive(process: Process, handle: int) -> bool:
    """Whether a process is there, and still has its context.

    Args:
        process: which one.
        handle: a descriptor of the state file, not the one that holds the context.
    """
    if process.start and start_of(process.pid) != process.start:
        return False
    return not process.lock or _is_locked(handle, _FIRST_BYTE + process.lock)


_FIRST_BYTE = 1 << 40
_OFD_GETLK = 36
_FLOCK = "hhqqi4x"
"""``struct flock`` of 64-bit Linux."""


def _is_locked(handle: int, byte: int) -> bool:
    asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    kind: int = struct.unpack(_FLOCK, fcntl.fcntl(handle, _OFD_GETLK, asked))[0]
    return kind != fcntl.F_UNLCK
