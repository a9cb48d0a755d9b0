"""GPUs occupied by the user's framework: torch, TensorFlow, pycuda, CuPy.

Each is imported only when it is requested. A framework's own context stays until the process ends,
whatever is released, except for pycuda's.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

from gpuaff.errors import PlaceholderError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Occupant(NamedTuple):
    """How a framework occupies GPUs.

    Attributes:
        make: occupies the GPU of an ordinal, and returns what must be kept for that.
        release: is called with what was returned; None: it needs no release.
    """

    make: Callable[[int], object]
    release: Callable[[Any], object] | None = None


# Scripts written for safe_gpu name all of these but CuPy, and their needs differ: TensorFlow takes
# memory by its own rules, and pycuda's contexts are not primary. For others a function will do.
_PACKAGES = {
    "torch": "torch",
    "tensorflow": "tensorflow",
    "pycuda": "pycuda",
    "cupy": "cupy-cuda12x (for CUDA 12; cupy-cuda13x for CUDA 13)",
}
"""The package to install, by module."""


def load(name: str) -> Occupant:
    """Import a framework.

    Raises:
        PlaceholderError: it is not installed, cannot be imported, or has no CUDA.
    """
    return _OCCUPANTS[name](name)


def _imported(name: str, part: str = "") -> Any:
    problem = f"placeholder={name!r}: the Python module {name}"
    try:
        return import_module(name + part)
    except Exception as error:  # a module may run and raise anything
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            install = f"pip install {_PACKAGES[name]}"
            raise PlaceholderError(f"{problem} is not installed; {install}", name) from None
        why = " ".join(str(error).split()) or type(error).__name__
        mend = f"pip install --force-reinstall {_PACKAGES[name]}"
        problem = f"{problem} cannot be imported ({why}); mend it: {mend}"
        raise PlaceholderError(problem, name) from error


def _torch(name: str) -> Occupant:
    torch = _imported(name)
    if torch.version.cuda is None:
        raise PlaceholderError(
            f"placeholder={name!r}: this torch ({torch.__version__}) was built without CUDA; "
            "install a build with CUDA (https://pytorch.org/get-started), or another placeholder",
            name,
        )
    return Occupant(lambda ordinal: torch.zeros(1, device=f"cuda:{ordinal}"))


def _tensorflow(name: str) -> Occupant:
    tensorflow = _imported(name)

    def make(ordinal: int) -> object:
        with tensorflow.device(f"GPU:{ordinal}"):
            tensor = tensorflow.constant([1.0])
        # Where TensorFlow cannot put it there, it puts it elsewhere, without an error.
        if not str(tensor.device).upper().endswith(f"GPU:{ordinal}"):
            raise RuntimeError(
                f"TensorFlow put it on {tensor.device}: it sees no such GPU "
                "(tf.config.list_physical_devices('GPU')), or was built without CUDA"
            )
        return tensor

    return Occupant(make)


def _pycuda(name: str) -> Occupant:
    """Contexts of pycuda's own, none of them current.

    A context that is still current when the process ends makes pycuda abort it. Primary contexts do
    not work: when pycuda releases one, it stays current in CUDA although it is gone
    (``primary_context::detach_internal`` in its ``cuda.hpp`` pops nothing).
    """
    driver = _imported(name, ".driver")

    def make(ordinal: int) -> object:
        driver.init()
        context = driver.Device(ordinal).make_context()
        try:
            driver.Context.pop()
        except BaseException:
            context.detach()
            raise
        return context

    return Occupant(make, lambda context: context.detach())


def _cupy(name: str) -> Occupant:
    cupy = _imported(name)

    def make(ordinal: int) -> object:
        with cupy.cuda.Device(ordinal):  # the current device is the one from before, afterwards
            return cupy.zeros(1)

    return Occupant(make)


_OCCUPANTS = {"torch": _torch, "tensorflow": _tensorflow, "pycuda": _pycuda, "cupy": _cupy}
