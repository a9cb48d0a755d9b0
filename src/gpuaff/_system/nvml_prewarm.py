"""Start the driver while Python is still importing.

NVML's start and the first queries take 50 to 100 ms, all of it waiting in the driver; importing
pynvml and the rest of gpuaff takes about as long. Both at once halve the user's wait. Nothing is
read here, and errors are ignored: :mod:`nvml` queries everything again, through pynvml.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from gpuaff._system.interrupts import interruptible

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ctypes

_MASK_WORDS = 1024  # 65536 CPU ids
_MOST_GPUS = 64  # a broken library may report billions


@contextmanager
def prewarmed_driver(*, wanted: bool, cuda: bool = False) -> Iterator[Callable[[], None]]:
    """Wake the driver, if it is wanted, in threads that end with the block.

    With ``cuda`` CUDA's library is loaded too, not initialised. Where no thread can be started (a
    limit of processes, a subinterpreter) nothing is woken. Yields a function to call when the
    driver has answered everything: it may then be shut down while the rest is done.
    """
    # Not an Event: Ctrl-C inside its set() may leave it locked, and the next set() would hang.
    in_use = threading.Lock()
    in_use.acquire()

    def release() -> None:
        with suppress(RuntimeError):  # it may be released already
            in_use.release()

    work = [lambda: _keep_awake(in_use), *([_load_cuda] if cuda else [])]
    threads = [threading.Thread(target=one, name="gpuaff-nvml", daemon=True) for one in work]
    try:
        for thread in threads if wanted else ():
            with suppress(RuntimeError):
                thread.start()
        yield release
    finally:
        release()
        for thread in threads:
            # It was not started, or Ctrl-C came while it was. A driver that hangs can be left.
            with suppress(RuntimeError), interruptible():
                thread.join()


def _load_cuda() -> None:
    with suppress(ImportError, OSError):
        from gpuaff._system.cuda import load  # pinning does without

        load()


def _keep_awake(in_use: threading.Lock) -> None:
    """Start NVML, open every GPU, and shut NVML down once the lock is free."""
    with suppress(ImportError, OSError, AttributeError):  # AttributeError: an old library
        import ctypes

        library = ctypes.CDLL("libnvidia-ml.so.1")
        shutdown = library.nvmlShutdown
        if library.nvmlInit_v2() != 0:
            return
        try:
            _open_all(library)
            in_use.acquire()
        finally:
            shutdown()


def _open_all(library: ctypes.CDLL) -> None:
    """Open the GPUs at once: each takes the driver 7 ms."""
    import ctypes

    count, get_handle = ctypes.c_uint(), library.nvmlDeviceGetHandleByIndex_v2
    query = library.nvmlDeviceGetCpuAffinity
    if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return

    def open_gpu(index: int) -> None:
        device, cpus = ctypes.c_void_p(), (ctypes.c_uint64 * _MASK_WORDS)()
        if get_handle(index, ctypes.byref(device)) == 0:
            query(device, _MASK_WORDS, cpus)

    started: list[threading.Thread] = []
    with suppress(RuntimeError):  # no more threads can be started
        for index in range(min(count.value, _MOST_GPUS)):
            thread = threading.Thread(target=open_gpu, args=(index,), daemon=True)
            thread.start()
            started.append(thread)
    for thread in started:
        thread.join()
