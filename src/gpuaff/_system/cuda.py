"""CUDA's driver library, libcuda: the only module that calls it.

CUDA reads which GPUs a process may see once, when it is initialised; nothing undoes that. Functions
raise CudaError where a call fails, and NoDriverError where the library cannot be loaded or is too
old. What was observed with driver 580.159.04 is marked as such.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import ExitStack, suppress
from ctypes import byref

from gpuaff._system.interrupts import uninterrupted
from gpuaff.errors import NoDriverError

_LIBRARY = "libcuda.so.1"

NOT_INITIALIZED = 3
"""CUDA_ERROR_NOT_INITIALIZED. In a process that was forked from one with CUDA initialised every
call returns it, ``cuInit`` too."""


class CudaError(Exception):
    """A call of CUDA's failed: its ``CUresult``, that one's name, and the driver's words for it."""

    def __init__(self, code: int, name: str, words: str, call: str) -> None:
        self.code, self.name, self.words, self.call = self.args = code, name, words, call

    def __str__(self) -> str:
        meaning = ": ".join(part for part in (self.name, self.words) if part)
        return f"{self.call} returned {self.code}{f' ({meaning})' if meaning else ''}"


def is_initialized() -> bool | None:
    """Whether CUDA is initialised in this process; None when its library is not even loaded.

    Neither loads the library nor changes anything: ``cuDeviceGetCount`` returns 3 before
    ``cuInit``, and 0 after it; the stub for building returns neither. In a forked child it is
    False whatever the parent did: there, only ``cuInit`` shows it (:data:`NOT_INITIALIZED`).
    """
    try:
        library = ctypes.CDLL(_LIBRARY, mode=os.RTLD_NOLOAD)
        return bool(library.cuDeviceGetCount(byref(ctypes.c_int())) == 0)
    except (OSError, AttributeError):  # not loaded; not CUDA's; or a system without that flag
        return None


def load() -> ctypes.CDLL:
    """Load the library, which takes a while (OSError: it cannot be). CUDA is not initialised."""
    return ctypes.CDLL(_LIBRARY)


def start() -> None:
    """Initialise CUDA (``cuInit``), which settles the GPUs that this process sees."""
    # One that fails settles nothing (observed for the errors 100 and 101)
    _call("cuInit", 0)


def uuids() -> tuple[str, ...]:
    """The UUIDs of the GPUs and MIG instances that this process sees, in CUDA's order.

    They lack the kind (``GPU-``, ``MIG-``), which CUDA does not report.
    """
    count = ctypes.c_int()
    _call("cuDeviceGetCount", byref(count))
    return tuple(_uuid(_device(ordinal)) for ordinal in range(count.value))


def _uuid(device: ctypes.c_int) -> str:
    found = (ctypes.c_ubyte * 16)()
    _call("cuDeviceGetUuid_v2", byref(found), device)  # the first version gives a MIG's GPU
    text = bytes(found).hex()
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def retain(ordinal: int, undo: ExitStack) -> int:
    """Hold a GPU's primary context, which is made if it is missing, until ``undo`` releases it."""
    # It is not made current, and other holders keep theirs.
    context, device = ctypes.c_void_p(), _device(ordinal)
    with uninterrupted():
        _call("cuDevicePrimaryCtxRetain", byref(context), device)
        undo.callback(_release, device)
    return context.value or 0


def _release(device: ctypes.c_int) -> None:
    with suppress(CudaError):  # after an error of the job's own, which the job has seen
        _call("cuDevicePrimaryCtxRelease_v2", device)


def _device(ordinal: int) -> ctypes.c_int:
    device = ctypes.c_int()
    _call("cuDeviceGet", byref(device), ordinal)
    return device


def _call(name: str, *arguments: object) -> None:
    """Call a function that returns a ``CUresult``."""
    try:
        library = load()
        function = getattr(library, name)
    except OSError as error:
        raise NoDriverError(
            f"the NVIDIA driver's library CUDA cannot be loaded ({error})",
            "install the driver; a container needs the capability compute "
            "(NVIDIA_DRIVER_CAPABILITIES=compute,utility)",
        ) from None
    except AttributeError:
        problem = f"the NVIDIA driver's library CUDA ({_LIBRARY}) has no {name}"
        raise NoDriverError(problem, "update the driver") from None
    code = function(*arguments)
    if code:
        kind, words = (_text(library, f"cuGetError{what}", code) for what in ("Name", "String"))
        raise CudaError(code, kind, words, name)


def _text(library: ctypes.CDLL, function: str, code: int) -> str:
    text = ctypes.c_char_p()
    with suppress(AttributeError):
        getattr(library, function)(code, byref(text))
    return (text.value or b"").decode("utf-8", "replace")
