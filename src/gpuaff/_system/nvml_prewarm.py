"""Wake the driver while Python is still importing.

NVML's start, the first handle of each GPU and the first question cost 50 to 100 ms together, all
of it waiting in the driver; importing pynvml and the rest of gpuaff takes about as long. Both at
once halve what a user waits for. Nothing is read here and nothing is decided: :mod:`nvml` asks
everything again, through pynvml, and finds the driver awake.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from gpuaff._system.interrupts import interruptible

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ctypes

_WORDS = 1024
"""Room for the CPUs near a GPU, in 64-bit words: 65536 ids."""

_MOST_GPUS = 64
"""How many GPUs are touched at the most. A broken library may tell of billions, and what is not
touched here is only read a little later."""


@contextmanager
def waking_driver(*, wanted: bool, cuda: bool = False) -> Iterator[Callable[[], None]]:
    """Wake the driver in threads of its own; when the block ends, all is as it was.

    It only saves time: where no thread can be started (a limit of processes, a subinterpreter,
    the interpreter's end) the driver is read asleep.

    Args:
        wanted: False when the driver will not be asked; then nothing is done.
        cuda: also load CUDA's library, which takes a while too; it is not initialised.

    Yields:
        A function to call when everything has been asked: the driver may then be shut down while
        the rest is done.
    """
    # Not an Event: Ctrl-C inside its set() may leave it locked, and the next set() would hang.
    awake = threading.Lock()
    awake.acquire()

    def let_rest() -> None:
        with suppress(RuntimeError):  # it may rest already
            awake.release()

    threads = [threading.Thread(target=_hold_awake, args=(awake,), name="gpuaff-nvml")]
    if cuda:
        threads.append(threading.Thread(target=_load_cuda, name="gpuaff-cuda"))
    try:
        for thread in threads if wanted else ():
            thread.daemon = True
            with suppress(RuntimeError):
                thread.start()
        yield let_rest
    finally:
        let_rest()
        for thread in threads:
            # It was not started, or Ctrl-C came while it was. A driver that hangs can be left.
            with suppress(RuntimeError), interruptible():
                thread.join()


def _load_cuda() -> None:
    with suppress(ImportError, OSError):
        from gpuaff._system.cuda import load  # a claim needs it anyway, pinning does not

        load()


def _hold_awake(awake: threading.Lock) -> None:
    """Start NVML, touch every GPU, and shut NVML down when the reading is over: ``awake`` is free.

    Whatever fails here fails again, and is told, when it is asked for in earnest.
    """
    try:
        import ctypes

        library = ctypes.CDLL("libnvidia-ml.so.1")
        shutdown = library.nvmlShutdown
        if library.nvmlInit_v2() != 0:
            return
    except (ImportError, OSError, AttributeError):
        return
    try:
        _touch_all(library)
        awake.acquire()
    except AttributeError:  # an old library lacks a function
        return
    finally:
        shutdown()


def _touch_all(library: ctypes.CDLL) -> None:
    """Opening a GPU takes 7 ms, and the driver opens several at once."""
    import ctypes

    count, get_handle = ctypes.c_uint(), library.nvmlDeviceGetHandleByIndex_v2
    ask = library.nvmlDeviceGetCpuAffinity
    if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return

    def touch(index: int) -> None:
        device, cpus = ctypes.c_void_p(), (ctypes.c_uint64 * _WORDS)()
        if get_handle(index, ctypes.byref(device)) == 0:
            ask(device, _WORDS, cpus)

    started: list[threading.Thread] = []
    with suppress(RuntimeError):  # no more threads can be had
        for index in range(min(count.value, _MOST_GPUS)):
            thread = threading.Thread(target=touch, args=(index,), daemon=True)
            thread.start()
            started.append(thread)
    for thread in started:
        thread.join()
