"""The fake driver's state file, as ``state.h`` lays it out: that is where it is described."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum, IntFlag
from pathlib import Path
from typing import Any, TypeAlias

from gpuaff._system import locks

Struct: TypeAlias = ctypes.Structure
"""A struct of the state: GpuState, Fault, Process, Double or State."""


def _read_header() -> tuple[dict[str, int], dict[str, type[Struct]]]:
    """The constants and the structs of state.h, by their names there."""
    text = Path(__file__).with_name("state.h").read_text()
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    found = re.findall(r"(FAKE_[A-Z_]+) = ([0-9 <]+),", text)
    constants = {name: eval(value) for name, value in found}
    kinds: dict[str, Any] = {"char": ctypes.c_char}
    kinds |= {f"{name}_t": getattr(ctypes, f"c_{name}") for name in ("int32", "uint32", "uint64")}
    structs = {}
    for name, body in re.findall(r"struct (\w+) \{(.*?)\n\};", text, re.DOTALL):
        members = []
        for kind, member, length in re.findall(r"(\w+) (\w+)(?:\[(\w+)\])?;", body):
            count = length and (constants[length] if length in constants else int(length))
            members.append((member, kinds[kind] * count if length else kinds[kind]))
        kinds[name] = structs[name] = type(name, (Struct,), {"_fields_": members})
    return constants, structs


_CONSTANTS, _STRUCTS = _read_header()
GPUS, MIG_SLOTS, LINKS, FAULTS, PROCESSES, DOUBLES, FOREIGN = (
    _CONSTANTS[f"FAKE_{name}"]
    for name in ("GPUS", "MIG_SLOTS", "LINKS", "FAULTS", "PROCESSES", "DOUBLES", "FOREIGN")
)
Fault, Process, State = (_STRUCTS[f"fake_{name}"] for name in ("fault", "process", "state"))


class Number(IntEnum):
    """Its text is the number, on Python 3.10 too."""

    def __str__(self) -> str:
        return str(int(self))


class NVML(Number):
    """The return codes of ``nvml.h`` that tests use."""

    SUCCESS = 0
    UNINITIALIZED = 1
    NOT_SUPPORTED = 3
    NO_PERMISSION = 4
    DRIVER_NOT_LOADED = 9
    FUNCTION_NOT_FOUND = 13
    GPU_IS_LOST = 15
    LIB_RM_VERSION_MISMATCH = 18
    UNKNOWN = 999


class CUDA(Number):
    """The return codes of ``cuda.h`` that tests use."""

    OUT_OF_MEMORY = 2
    DEVICE_UNAVAILABLE = 46
    NO_DEVICE = 100
    INVALID_DEVICE = 101
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


def create(path: Path) -> Struct:
    """Make a state file without GPUs, and map it: a change to the result is seen at once."""
    path.write_bytes(bytes(ctypes.sizeof(State)))
    with path.open("r+b") as file:
        state = State.from_buffer(mmap.mmap(file.fileno(), ctypes.sizeof(State)))
    namespace = Path("/proc/self/ns/pid")
    state.pid_namespace = namespace.stat().st_ino if namespace.exists() else 0
    return state


@contextmanager
def locked(path: Path) -> Iterator[int]:
    """Keep the libraries, and others who write, from the state, by this descriptor's lock."""
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


def is_alive(process: Struct, handle: int) -> bool:
    """Whether a process is there, and has its context by another descriptor of the state."""
    if process.start and start_of(process.pid) != process.start:
        return False
    byte = (1 << 40) + process.lock
    return not process.lock or locks.locked_bytes(handle, byte, byte + 1) == [byte]
