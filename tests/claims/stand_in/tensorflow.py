"""As much of TensorFlow as a placeholder uses; what it cannot put on a GPU it puts elsewhere."""

import contextlib
import os
import types

import stand_in_cuda

_place = ["CPU:0"]


@contextlib.contextmanager
def device(name):
    _place.append(name)
    yield
    _place.pop()


def constant(values):
    kind, number = _place[-1].split(":")
    if os.environ.get("STAND_IN_WITHOUT_CUDA"):
        kind, number = "CPU", "0"
    else:
        stand_in_cuda.retain(int(number))
    where = f"/job:localhost/replica:0/task:0/device:{kind}:{number}"
    return types.SimpleNamespace(values=values, device=where)
