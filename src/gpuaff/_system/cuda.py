"""CUDA's driver library, libcuda: the only module that calls it.

CUDA reads which GPUs a process may see once, when it is initialised; nothing undoes that. So
:func:`is_initialized` asks without initialising, and all the rest is called only by those who mean
to. Source: the CUDA Driver API's reference; what was seen with driver 580.159.04 is said where it
counts.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from operator import methodcaller, setitem

from gpuaff.errors import NoDriverError

_LIBRARY = "libcuda.so.1"

NOT_INITIALIZED = 3
"""CUDA_ERROR_NOT_INITIALIZED. In a process that was forked from one with CUDA initialised every
call returns it, ``cuInit`` too."""

_INT, _HANDLE = ctypes.c_int, ctypes.c_void_p
_UUID = ctypes.c_ubyte * 16

_ARGUMENTS = {
    "cuInit": (ctypes.c_uint,),
    "cuDeviceGetCount": (ctypes.POINTER(_INT),),
    "cuDeviceGet": (ctypes.POINTER(_INT), _INT),
    "cuDeviceGetUuid": (ctypes.POINTER(_UUID), _INT),
    "cuDeviceGetUuid_v2": (ctypes.POINTER(_UUID), _INT),
    "cuDevicePrimaryCtxRetain": (ctypes.POINTER(_HANDLE), _INT),
    "cuDevicePrimaryCtxRelease": (_INT,),
    "cuDevicePrimaryCtxRelease_v2": (_INT,),
    "cuGetErrorName": (_INT, ctypes.POINTER(ctypes.c_char_p)),
    "cuGetErrorString": (_INT, ctypes.POINTER(ctypes.c_char_p)),
}
"""The types of what each function takes; each returns a ``CUresult``, an int."""


class CudaError(Exception):
    """A call of CUDA's failed.

    Attributes:
        code: the ``CUresult``.
        name: its name, as the driver tells it (``CUDA_ERROR_OUT_OF_MEMORY``).
        words: the driver's own words for it.
        call: the function that returned it.
    """

    def __init__(self, code: int, name: str, words: str, call: str) -> None:
        super().__init__(code, name, words, call)
        self.code = code
        self.name = name
        self.words = words
        self.call = call

    def __str__(self) -> str:
        said = ": ".join(part for part in (self.name, self.words) if part)
        return f"{self.call} returned {self.code}{f' ({said})' if said else ''}"


def is_initialized() -> bool | None:
    """Whether CUDA is initialised in this process; None when its library is not even loaded.

    Neither loads the library nor changes anything: ``cuDeviceGetCount`` returns 3 before
    ``cuInit``, and 0 after it; what is no driver (the stub for building) returns neither. In a
    forked child it is False whatever the parent did: there, only ``cuInit`` tells
    (:data:`NOT_INITIALIZED`).
    """
    try:
        library = ctypes.CDLL(_LIBRARY, mode=os.RTLD_NOLOAD)
        return _function(library, "cuDeviceGetCount")(_INT()) == 0
    except (OSError, AttributeError):  # not loaded; or not CUDA's; or a system without that flag
        return None


def load() -> ctypes.CDLL:
    """Load the library, which takes a while. CUDA is not initialised by that.

    Raises:
        OSError: it cannot be loaded.
    """
    return ctypes.CDLL(_LIBRARY)


def start() -> None:
    """Initialise CUDA (``cuInit``). From now on the GPUs that this process sees are settled.

    A start that fails settles nothing: the next one reads CUDA_VISIBLE_DEVICES again (seen for
    the errors 100 and 101).

    Raises:
        NoDriverError: the library cannot be loaded.
        CudaError: it does not start.
    """
    _call("cuInit", 0)


def uuids() -> tuple[str, ...]:
    """The GPUs and MIG instances that this process sees, in CUDA's order: ``GPU-…``, ``MIG-…``.

    Raises:
        NoDriverError: the library cannot be loaded, or is too old.
        CudaError: it does not tell.
    """
    count = _INT()
    _call("cuDeviceGetCount", count)
    return tuple(_uuid(_device(ordinal)) for ordinal in range(count.value))


def _uuid(device: ctypes.c_int) -> str:
    """The older function tells the GPU of a MIG instance, the newer one the instance itself."""
    older, newer = _UUID(), _UUID()
    try:
        _call("cuDeviceGetUuid_v2", newer, device)
    except NoDriverError:  # before CUDA 11.4
        _call("cuDeviceGetUuid", newer, device)
        return f"GPU-{_spelled(newer)}"
    with suppress(NoDriverError, CudaError):
        _call("cuDeviceGetUuid", older, device)
        if bytes(older) != bytes(newer):
            return f"MIG-{_spelled(newer)}"
    return f"GPU-{_spelled(newer)}"


def _spelled(uuid: ctypes.Array[ctypes.c_ubyte]) -> str:
    text = bytes(uuid).hex()
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


class Contexts:
    """The primary contexts that are held here; none of them is made current.

    The driver notes by itself which it has given: it writes a context's handle in the very call
    that makes it. So nothing is forgotten, whenever Ctrl-C comes.
    """

    def __init__(self, count: int) -> None:
        self._handles = (_HANDLE * count)()

    def retain(self, ordinal: int) -> int:
        """Hold the primary context of a GPU, which makes it if nobody else holds it.

        Returns:
            Its handle (``CUcontext``).

        Raises:
            NoDriverError: the library cannot be loaded, or is too old.
            CudaError: it cannot be had.
        """
        at = ctypes.sizeof(_HANDLE) * ordinal
        try:
            slot = _HANDLE.from_buffer(self._handles, at)
            _call("cuDevicePrimaryCtxRetain", slot, _device(ordinal))
        except CudaError:
            self._handles[ordinal] = None
            raise
        return self._handles[ordinal] or 0

    def release(self) -> None:
        """Let all go that are held here, the last one first; who else holds them still does.

        Raises:
            CudaError: the driver said no to one. None is held here any more all the same.
        """
        failed: CudaError | None = None
        for ordinal in reversed(range(len(self._handles))):
            if not self._handles[ordinal]:
                continue
            try:
                self._release(ordinal)
            except CudaError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def _release(self, ordinal: int) -> None:
        """Let one go, and forget it: ``list`` makes both calls, so Ctrl-C cannot come between.

        A context that is forgotten first might stay; one that is released once too often would be
        taken from somebody else, such as torch. It is forgotten also where the driver says no.
        """
        try:
            device = _device(ordinal)
        except CudaError:
            self._handles[ordinal] = None
            raise
        try:
            library, name = _found("cuDevicePrimaryCtxRelease_v2")
        except NoDriverError:  # before CUDA 11.0
            library, name = _found("cuDevicePrimaryCtxRelease")
        forget = partial(setitem, self._handles, ordinal, None)
        let_go = partial(_function(library, name), device)
        _, code = list(map(methodcaller("__call__"), (forget, let_go)))
        _refuse(code, library, name)


def _device(ordinal: int) -> ctypes.c_int:
    device = _INT()
    _call("cuDeviceGet", device, ordinal)
    return device


def _call(name: str, *arguments: object) -> None:
    """Call a function.

    Raises:
        NoDriverError: there is no library, or it has no such function.
        CudaError: it failed.
    """
    library, _ = _found(name)
    _refuse(_function(library, name)(*arguments), library, name)


def _found(name: str) -> tuple[ctypes.CDLL, str]:
    """The library, which has this function.

    Raises:
        NoDriverError: there is no library, or it has no such function.
    """
    try:
        library = load()
    except OSError as error:
        raise NoDriverError(
            f"the NVIDIA driver's library CUDA cannot be loaded ({error})",
            "install the driver; a container needs the capability compute "
            "(NVIDIA_DRIVER_CAPABILITIES=compute,utility)",
        ) from None
    try:
        _function(library, name)
    except AttributeError:
        raise NoDriverError(
            f"the NVIDIA driver's library CUDA ({_LIBRARY}) has no {name}", "update the driver"
        ) from None
    return library, name


def _refuse(code: int, library: ctypes.CDLL, name: str) -> None:
    """Raise what a function has returned.

    Raises:
        CudaError: it failed.
    """
    if code:
        text = [_said(library, how, code) for how in ("cuGetErrorName", "cuGetErrorString")]
        raise CudaError(code, text[0], text[1], name)


def _said(library: ctypes.CDLL, function: str, code: int) -> str:
    text = ctypes.c_char_p()
    with suppress(AttributeError):
        _function(library, function)(code, text)
    return (text.value or b"").decode("utf-8", "replace")


def _function(library: ctypes.CDLL, name: str) -> Callable[..., int]:
    """A function of the library; what it takes by address may be given as it is.

    Raises:
        AttributeError: the library has none of that name.
    """
    function = getattr(library, name)
    function.argtypes = _ARGUMENTS[name]
    function.restype = _INT
    called: Callable[..., int] = function
    return called
