"""CUDA as a framework uses it, over whatever libcuda the process finds. None of our code."""

import ctypes

_library = ctypes.CDLL("libcuda.so.1")


def check(code):
    if code:
        raise RuntimeError(f"CUDA error {code}")


def init():
    check(_library.cuInit(0))


def count():
    number = ctypes.c_int()
    check(_library.cuDeviceGetCount(ctypes.byref(number)))
    return number.value


def retain(ordinal):
    init()
    device, handle = ctypes.c_int(), ctypes.c_void_p()
    check(_library.cuDeviceGet(ctypes.byref(device), ordinal))
    check(_library.cuDevicePrimaryCtxRetain(ctypes.byref(handle), device))


def release(ordinal):
    device = ctypes.c_int()
    check(_library.cuDeviceGet(ctypes.byref(device), ordinal))
    check(_library.cuDevicePrimaryCtxRelease_v2(device))
