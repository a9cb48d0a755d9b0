"""What occupies a claimed GPU, so that programs that know nothing of gpuaff see that it is used.

They see only contexts: the driver lists the processes that have one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from enum import Enum
from functools import partial
from importlib import import_module

from gpuaff._system import cuda
from gpuaff._system.cuda import NOT_INITIALIZED, CudaError
from gpuaff._system.interrupts import interruptible
from gpuaff.errors import InvalidOptionError, NoDriverError, PlaceholderError
from gpuaff.options import word

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeAlias


class Placeholder(str, Enum):
    """What occupies a claimed GPU. Wherever one is expected, its string may be given as well."""

    CONTEXT = "context"
    """The GPU's primary context, which frameworks then use. The default."""
    TORCH = "torch"
    """A tensor of torch."""
    TENSORFLOW = "tensorflow"
    """A tensor of TensorFlow."""
    PYCUDA = "pycuda"
    """A context of pycuda's own, not current."""
    CUPY = "cupy"
    """An array of CuPy."""


Kind: TypeAlias = Placeholder | Callable[[int], object] | None
"""What occupies GPUs; None: nothing does."""


def kind_of(value: object) -> Kind:
    """Check the argument: a member of :class:`Placeholder`, its string, a function, or None."""
    release = getattr(value, "release", None)
    if release is not None and not callable(release):
        raise InvalidOptionError("placeholder.release", release, "a function, or none at all")
    if value is None or callable(value):
        return value
    return word("placeholder", value, Placeholder, more=", a function of a device number, or None")


def occupy(
    kind: Kind, claimed: Mapping[int, str], undo: ExitStack, *, are_alone: bool
) -> tuple[object, ...]:
    """Occupy the claimed GPUs (CUDA's numbers, UUIDs); returns what the placeholder did for each.

    ``undo`` releases them, the last one first, also after an error. With one of ours CUDA is
    initialised first, and must show the claimed GPUs, and no others if they ``are_alone``; with a
    function this is checked afterwards, if it has initialised CUDA. PlaceholderError where one of
    ours failed, or CUDA shows other GPUs; what a function raised is raised as it is.
    """
    if kind is None:
        return ()
    make: Callable[[int], object] = partial(cuda.retain, undo=undo)
    release: Callable[[Any], object] | None = None
    if not isinstance(kind, Placeholder):
        make, release = kind, getattr(kind, "release", None)
    elif kind is not Placeholder.CONTEXT:
        make, release = load(kind.value)
    if isinstance(kind, Placeholder):
        _check_visible(claimed, are_alone, kind.value)
        make = partial(_make_or_explain, make, kind.value, claimed)
    held: list[object] = []
    if release is not None:
        undo.callback(_release, held, release)
    with interruptible():
        # One step of the interpreter puts what is returned into the list, so that no signal
        # handler comes between.
        held.extend(map(make, claimed))
    if not isinstance(kind, Placeholder) and cuda.is_initialized():
        _check_visible(claimed, are_alone)
    return tuple(held)


def _release(held: Sequence[object], release: Callable[[object], object]) -> None:
    with ExitStack() as releases:  # all of them, also after an error
        for one in held:
            releases.callback(release, one)


def _make_or_explain(
    make: Callable[[int], object], name: str, claimed: Mapping[int, str], ordinal: int
) -> object:
    try:
        return make(ordinal)
    except Exception as error:  # a framework may raise anything
        code = error.code if isinstance(error, CudaError) else None
        failed = f"placeholder={name!r} could not occupy {claimed[ordinal]}"
        problem = f"{failed} (CUDA device {ordinal}): {explain(error)}"
        raise PlaceholderError(problem, name, (claimed[ordinal],), code) from error


_OTHER_CAUSES = (
    "CUDA_VISIBLE_DEVICES was changed meanwhile, or a device is denied; claim at the beginning of "
    "the program"
)


def _visible(kind: str | None) -> tuple[str, ...]:
    """Start CUDA, if it is not, and ask what it shows; its errors are raised as a placeholder's."""
    for_kind = f"placeholder={kind!r}: " if kind else ""
    try:
        with interruptible():
            cuda.start()
            return cuda.uuids()
    except NoDriverError as error:
        raise PlaceholderError(f"{for_kind}{error}", kind) from error
    except CudaError as error:
        problem = f"{for_kind}CUDA does not start: {explain(error)}"
        raise PlaceholderError(problem, kind, code=error.code) from error


def _check_visible(claimed: Mapping[int, str], are_alone: bool, kind: str | None = None) -> None:
    """Check that CUDA shows the claimed GPUs under their numbers."""
    shown = dict(enumerate(_visible(kind)))
    wanted = {ordinal: _without_kind(uuid) for ordinal, uuid in claimed.items()}
    if shown != wanted if are_alone else not wanted.items() <= shown.items():
        raise PlaceholderError(
            f"claimed was {_numbered(claimed)}, but CUDA shows this process "
            f"{_numbered(shown) or 'no GPU'}: CUDA was initialised before the claim, "
            f"{_OTHER_CAUSES}",
            kind,
            tuple(claimed.values()),
        )


def _numbered(uuids: Mapping[int, str]) -> str:
    return ", ".join(f"{uuid} as device {ordinal}" for ordinal, uuid in uuids.items())


def numbers_of(claimed: Sequence[str], kind: str) -> tuple[int, ...]:
    """CUDA's own numbers of GPUs in this process, where our variables do not set them."""
    shown, wanted = _visible(kind), [*map(_without_kind, claimed)]
    if not {*wanted} <= {*shown}:
        problem = f"CUDA does not show {', '.join(claimed)} to this process: {_OTHER_CAUSES}"
        raise PlaceholderError(problem, kind, tuple(claimed))
    return tuple(map(shown.index, wanted))


def _without_kind(uuid: str) -> str:
    return uuid.partition("-")[2].lower()


_SEE_DEVICES = "see CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER, and which devices the container has"

# What a failed call of CUDA means for a claim, and what to do, by ``CUresult`` (CUDA Driver API).
_MEANING = {
    2: "its memory is full, by a process that the driver does not list; see nvidia-smi",
    NOT_INITIALIZED: "this process was forked from one that had initialised CUDA, and cannot use "
    "CUDA. Start workers by spawn (multiprocessing.set_start_method('spawn')), or fork before "
    "anything uses CUDA: a parent that only claims uses placeholder=None",
    34: "the libcuda.so.1 that was found is the stub for building, not the driver's: take CUDA's "
    "stubs folder out of LD_LIBRARY_PATH",
    46: "its compute mode allows one process (exclusive), which another one is, or none "
    "(prohibited): nvidia-smi -q -d COMPUTE,PIDS. A parent that claims for its children uses "
    "placeholder=None",
    100: f"CUDA finds no GPU that this process may use: {_SEE_DEVICES}",
    101: f"CUDA does not accept the list of visible devices: {_SEE_DEVICES}",
    304: "the operating system refuses CUDA: see the access rights of /dev/nvidia*, and whether "
    "/dev/nvidia-uvm is there; a container needs the capability compute",
    802: "the GPUs are not ready yet: where NVSwitches connect them, the fabric manager must run "
    "(systemctl status nvidia-fabricmanager)",
    803: "the driver's kernel module and its library libcuda differ: reboot, or reload the nvidia "
    "modules; a container needs the host's driver version",
    804: "the CUDA compatibility package does not work with this GPU: take its folder (compat) "
    "out of LD_LIBRARY_PATH",
    999: "the driver gives no reason; see whether nvidia-smi runs, and look for Xid in dmesg. "
    "After a suspend, reload the module nvidia_uvm",
}


def explain(error: Exception) -> str:
    """An error's message in one line, and for known ones of CUDA, what to do."""
    message = " ".join(str(error).split()) or type(error).__name__
    meaning = _MEANING.get(error.code) if isinstance(error, CudaError) else None
    return f"{message}; {meaning}" if meaning else message


# What initialises CUDA, by module; the likeliest first.
_INITIALIZERS = {
    "torch": "torch.cuda.is_available() (unless PYTORCH_NVML_BASED_CUDA_CHECK=1), "
    "torch.cuda.init(), or a tensor on a GPU",
    "tensorflow": "tf.config.list_physical_devices('GPU') or a first operation of TensorFlow",
    "jax": "jax.devices() or a first array of JAX",
    "cupy": "cupy.cuda.is_available() or a first array of CuPy",
    "pycuda": "import pycuda.autoinit",
    "numba": "numba.cuda.is_available()",
}


# In a forked child CUDA does not report that the parent had initialised it; its first call there
# fails (error 3).
def cuda_already_initialized() -> str | None:
    """Why it is too late for a claim, as CUDA fixes its visible GPUs once (case D9); else None."""
    torch = getattr(sys.modules.get("torch"), "cuda", None)  # it may use another libcuda
    if not (cuda.is_initialized() or getattr(torch, "is_initialized", bool)() is True):
        return None
    causes = "; ".join(how for name, how in _INITIALIZERS.items() if name in sys.modules)
    likely = "an import or call has done it (a check whether CUDA is available is enough)"
    return (
        "CUDA is already initialised in this process, and its GPUs cannot be changed any more; "
        f"{f'usual causes: {causes}' if causes else likely}. Claim before that, at the beginning "
        "of the program"
    )


def load(name: str) -> tuple[Callable[[int], object], Callable[[Any], object] | None]:
    """Import a framework; returns what occupies a GPU of an ordinal, and what frees the result."""
    wanted, package, make, release = _FRAMEWORKS[name]
    problem = f"placeholder={name!r}: the Python module {name}"
    try:
        module = import_module(wanted)
    except Exception as error:  # a module may run and raise anything
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            problem += f" is not installed; pip install {package}"
            raise PlaceholderError(problem, name) from None
        problem += f" cannot be imported ({explain(error)}); mend it: pip install --force-reinstall"
        raise PlaceholderError(f"{problem} {package}", name) from error
    if name == "torch" and module.version.cuda is None:
        raise PlaceholderError(
            f"placeholder={name!r}: this torch ({module.__version__}) was built without CUDA; "
            "install a build with CUDA (https://pytorch.org/get-started), or another placeholder",
            name,
        )
    return partial(make, module), release


def _torch(torch: Any, ordinal: int) -> object:
    return torch.zeros(1, device=f"cuda:{ordinal}")


def _tensorflow(tensorflow: Any, ordinal: int) -> object:
    with tensorflow.device(f"GPU:{ordinal}"):
        tensor = tensorflow.constant([1.0])
    # Where TensorFlow cannot put it there, it puts it elsewhere, without an error.
    if not str(tensor.device).upper().endswith(f"GPU:{ordinal}"):
        raise RuntimeError(
            f"TensorFlow put it on {tensor.device}: it sees no such GPU "
            "(tf.config.list_physical_devices('GPU')), or was built without CUDA"
        )
    return tensor


def _pycuda(driver: Any, ordinal: int) -> object:
    # One that is still current when the process ends makes pycuda abort it. Primary contexts do not
    # work: when pycuda releases one, it stays current in CUDA although it is gone
    # (``primary_context::detach_internal`` in its ``cuda.hpp`` pops nothing).
    driver.init()
    context = driver.Device(ordinal).make_context()
    driver.Context.pop()
    return context


def _cupy(cupy: Any, ordinal: int) -> object:
    with cupy.cuda.Device(ordinal):  # the current device is the one from before, afterwards
        return cupy.zeros(1)


# The module that is imported, the package that has it, what occupies a GPU, and what frees it.
# Scripts written for safe_gpu name all of these but CuPy, and their needs differ: TensorFlow takes
# memory by its own rules, and pycuda's contexts are not primary. For others a function will do. All
# but pycuda's contexts stay until the process ends.
_FRAMEWORKS: dict[str, tuple[str, str, Callable[[Any, int], object], Any]] = {
    "torch": ("torch", "torch", _torch, None),
    "tensorflow": ("tensorflow", "tensorflow", _tensorflow, None),
    "pycuda": ("pycuda.driver", "pycuda", _pycuda, lambda context: context.detach()),
    "cupy": ("cupy", "cupy-cuda12x (for CUDA 12; cupy-cuda13x for CUDA 13)", _cupy, None),
}
