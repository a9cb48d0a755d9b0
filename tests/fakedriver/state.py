"""The fake driver's state file, as ``state.h`` lays it out."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path

MAGIC = 0x4B414647
VERSION = 2
GPUS = 32
CPU_WORDS = 128
NODE_WORDS = 16
MIG_SLOTS = 16
LINKS = 36
FAULTS = 64
PROCESSES = 256
WORD_BITS = 64


class NVML(IntEnum):
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
    UNKNOWN = 999


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
    )


class Fault(ctypes.Structure):
    """``struct fake_fault``."""

    _fields_ = (
        ("function", ctypes.c_char * 64),
        ("gpu", ctypes.c_int32),
        ("code", ctypes.c_int32),
        ("after", ctypes.c_uint32),
        ("calls", ctypes.c_uint32),
    )


class Process(ctypes.Structure):
    """``struct fake_process``."""

    _fields_ = (
        ("gpu", ctypes.c_uint32),
        ("slot", ctypes.c_int32),
        ("pid", ctypes.c_uint32),
        ("memory", ctypes.c_uint64),
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
        ("strict_masks", ctypes.c_uint32),
        ("driver_version", ctypes.c_char * 80),
        ("faults", Fault * FAULTS),
        ("gpus", GpuState * GPUS),
        ("unprivileged", ctypes.c_uint32),
        ("process_count", ctypes.c_uint32),
        ("processes", Process * PROCESSES),
    )


def create(path: Path) -> State:
    """Make a state file without GPUs, and map it: a change to the result is seen at once."""
    path.write_bytes(bytes(ctypes.sizeof(State)))
    with path.open("r+b") as file:
        state = State.from_buffer(mmap.mmap(file.fileno(), ctypes.sizeof(State)))
    state.magic, state.version, state.size = MAGIC, VERSION, ctypes.sizeof(State)
    return state


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep the libraries, and others who write, from the state."""
    handle = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
