"""As much of CuPy as a placeholder uses: the current device, and an array on it."""

import types

import stand_in_cuda

current = [0]


class Device:
    def __init__(self, number):
        self.number = number

    def __enter__(self):
        current.append(self.number)

    def __exit__(self, *_):
        current.pop()


def zeros(count):
    stand_in_cuda.retain(current[-1])
    return f"{count} zero on {current[-1]}"


cuda = types.SimpleNamespace(Device=Device)
