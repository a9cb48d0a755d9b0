"""As much of torch as a placeholder uses: a tensor keeps its GPU's context until the end."""

import types

import stand_in_cuda

__version__ = "2.13.0+cu130"
version = types.SimpleNamespace(cuda="13.0")
_started = []


def zeros(count, *, device):
    stand_in_cuda.retain(int(device.removeprefix("cuda:")))
    _started.append(device)
    return f"{count} zero on {device}"


def _is_available():
    stand_in_cuda.init()
    return stand_in_cuda.count() > 0


cuda = types.SimpleNamespace(is_available=_is_available, is_initialized=lambda: bool(_started))
