"""BUT Speech@FIT's ``safe_gpu``, for scripts that were written for it.

    from gpuaff.compat import safe_gpu  # was: from safe_gpu import safe_gpu

is all that changes: names, arguments, log lines and errors are the old ones
(``docs/migrate-safe-gpu.md`` tells where they are not, and why). It works through
``gpuaff.claim_gpus``, as a new script should.
"""

from __future__ import annotations

import logging
import operator
import time
from contextlib import contextmanager

from gpuaff._system import env
from gpuaff.claims.locking.safe_gpu import DEFAULT, holding
from gpuaff.claims.placeholder.frameworks import load
from gpuaff.errors import (
    AlreadyClaimedError,
    GpuaffError,
    GpusBusyError,
    InvalidOptionError,
    NoDriverError,
    NotEnoughGpusError,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, TypeAlias

    from gpuaff._system.nvml import Session
    from gpuaff.claims.claim import Claim

    PlaceholderFn: TypeAlias = str | Callable[[int], object]

__all__ = [
    "LOCK_FILENAME",
    "GPUOwner",
    "NvidiasmiError",
    "PyCudaPlaceholder",
    "PytorchPlaceholder",
    "TensorflowPlaceholder",
    "claim_gpus",
    "get_free_gpus",
    "gpu_owner",
    "is_single_gpu_display_mode",
    "pytorch_placeholder",
    "release_gpus",
    "tensorflow_placeholder",
]

LOCK_FILENAME = DEFAULT
"""The file by which safe_gpu's users take turns. A site that puts another one here is obeyed."""

gpu_owner: GPUOwner | None = None
"""What :func:`claim_gpus` has made."""

_VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")

_THEIR_NAMES = {"n": "nb_gpus", "placeholder": "placeholder_fn"}
"""What safe_gpu calls an argument of ``gpuaff.claim_gpus``, where that differs."""

_NOT_OCCUPYING = (AlreadyClaimedError, GpusBusyError, NotEnoughGpusError)
"""What goes wrong before anything is occupied."""


class NvidiasmiError(GpuaffError, FileNotFoundError):
    """There is no usable driver: scripts catch it to go on without GPUs.

    Where nvidia-smi was not even installed, safe_gpu let FileNotFoundError through; scripts may
    catch that instead. It is no RuntimeError, which means that too few GPUs are free.
    """


def get_free_gpus() -> list[str]:
    """The indices of the GPUs that nobody has now, as strings; soon it may be otherwise.

    Raises:
        NvidiasmiError: there is no usable driver.
    """
    from gpuaff.claims.devices.probe import Probe
    from gpuaff.claims.locking import registry

    with _their_errors(), _driver() as session:
        whole = [device for device in session.devices() if not device.is_mig]
        usages = Probe(session, whole, own_is_free=False).usages(registry.entries())
    return [str(usage.device.index) for usage in usages if usage.busy is None]


def is_single_gpu_display_mode() -> bool:
    """Whether the machine has one GPU, and a screen is driven by it.

    Raises:
        NvidiasmiError: there is no usable driver.
    """
    with _their_errors(), _driver() as session:
        return _has_one_for_display(session)


def pytorch_placeholder(device_no: int) -> object:
    """Occupy a GPU with a tensor of PyTorch's (the name of safe_gpu 1.x)."""
    return load("torch").make(device_no)


def tensorflow_placeholder(device_no: int) -> object:
    """Occupy a GPU with a tensor of TensorFlow's (the name of safe_gpu 1.x)."""
    return load("tensorflow").make(device_no)


class PytorchPlaceholder:
    """Occupies GPUs with tensors of PyTorch's, whose import takes seconds."""

    def __init__(self, logger: Any = None) -> None:
        """Take a logger; None is the root logger."""
        self.logger = _logger(logger)

    def __call__(self, device_no: int) -> object:
        """Occupy a GPU; the result is what occupies it."""
        return pytorch_placeholder(device_no)

    def release(self, placeholder: object) -> None:
        """Only say that PyTorch keeps the GPU."""
        del placeholder
        self.logger.info("PyTorch keeps its context on the GPU until the process ends")


class TensorflowPlaceholder:
    """Occupies GPUs with tensors of TensorFlow's."""

    def __init__(self, logger: Any = None) -> None:
        """Take a logger; None is the root logger."""
        self.logger = _logger(logger)

    def __call__(self, device_no: int) -> object:
        """Occupy a GPU; the result is what occupies it."""
        return tensorflow_placeholder(device_no)

    def release(self, placeholder: object) -> None:
        """Only say that TensorFlow keeps the GPU."""
        del placeholder
        self.logger.info("TensorFlow keeps its context on the GPU until the process ends")


class PyCudaPlaceholder:
    """Occupies GPUs with contexts of PyCUDA's; the last one is current, as scripts expect it."""

    def __init__(self, logger: Any = None) -> None:
        """Take a logger; None is the root logger."""
        self.logger = _logger(logger)

    def __call__(self, device_no: int) -> Any:
        """Occupy a GPU; the result is the context."""
        context: Any = load("pycuda").make(device_no)
        context.push()
        return context

    def release(self, placeholder: Any) -> None:
        """Let the context go."""
        placeholder.detach()
        self.logger.info("PyCUDA's context is released")


class GPUOwner:
    """GPUs that were claimed, as safe_gpu has it. The claim outlives the object.

    Attributes:
        devices_taken: their indices, as nvidia-smi counts, in CUDA's order.
        placeholders: what the placeholder has returned for each.
        placeholder_fn: as it was given.
        logger: as it was given, else the root logger.
        debug_sleep: as it was given.
    """

    def __init__(
        self,
        nb_gpus: int = 1,
        placeholder_fn: PlaceholderFn = "context",
        logger: Any = None,
        debug_sleep: float = 0.0,
    ) -> None:
        """Claim GPUs: see :func:`claim_gpus`."""
        self.logger = _logger(logger)
        self.debug_sleep = debug_sleep
        self.placeholder_fn = placeholder_fn
        self.devices_taken: list[int] = []
        self.placeholders: list[object] = []
        self._claim: Claim | None = None
        count = operator.index(nb_gpus)
        try:
            with _their_errors(), _driver() as session:
                self._take(count, for_display=_has_one_for_display(session))
        except BaseException:  # in the sleep, or of the logger: nobody has this to release it
            self._give_back()
            raise

    def release_gpus(self) -> None:
        """Give the GPUs back; once more is no error.

        CUDA_VISIBLE_DEVICES stays, as with safe_gpu: what this process starts later goes nowhere
        else.
        """
        if self._claim is None or self._claim.is_released:
            return
        for device in self.devices_taken:
            self.logger.info(f"Releasing placeholder on CUDA device: {device}")
        variables = {name: env.get(name) for name in _VARIABLES}
        try:
            self._claim.release()
        finally:
            for name, value in variables.items():
                env.put(name, value)

    def _give_back(self) -> None:
        if self._claim is not None:
            self._claim.release()

    def _take(self, nb_gpus: int, *, for_display: bool) -> None:
        if for_display:
            self.logger.info("This machine has a single GPU, and a screen is driven by it")
            if nb_gpus > 1:
                raise ValueError(f"asked for {nb_gpus} GPUs on a machine with a single one")
            self._claim_gpus(nb_gpus)
            return
        with _their_lock(nb_gpus, self.logger):
            self._claim_gpus(nb_gpus)

    def _claim_gpus(self, nb_gpus: int) -> None:
        from gpuaff.claims.claiming import claim_gpus as claim

        if nb_gpus == 0:  # safe_gpu hides all GPUs then
            env.put("CUDA_VISIBLE_DEVICES", "")
            self._tell_visible()
            return
        function = self.placeholder_fn
        placeholder = _Slowly(self, function) if callable(function) else function
        try:
            made = claim(nb_gpus, placeholder=placeholder, own_is_free=False)
        except RuntimeError as error:
            if not isinstance(error, _NOT_OCCUPYING):
                self.logger.error(f"Failed to acquire placeholder: {error}")  # noqa: TRY400 - as safe_gpu logs it
            raise
        self._claim = made
        self.devices_taken.extend(gpu.index for gpu in made.gpus)
        self.placeholders.extend(made.placeholders)
        if placeholder is function:
            self._tell_visible()

    def _tell_visible(self) -> None:
        self.logger.info(f"Set CUDA_VISIBLE_DEVICES={env.get('CUDA_VISIBLE_DEVICES')}")
        time.sleep(self.debug_sleep)


class _Slowly:
    """The user's placeholder, after what safe_gpu does before it."""

    def __init__(self, owner: GPUOwner, function: Callable[[int], object]) -> None:
        self._owner, self._function = owner, function

    def __call__(self, device_no: int) -> object:
        if device_no == 0:
            self._owner._tell_visible()  # noqa: SLF001 - a part of the same class
        return self._function(device_no)

    def release(self, placeholder: object) -> None:
        """Functions, as those of safe_gpu 1.x, have nothing to release."""
        release = getattr(self._function, "release", None)
        if release is not None:
            release(placeholder)


def claim_gpus(
    nb_gpus: int = 1,
    placeholder_fn: PlaceholderFn = "context",
    logger: Any = None,
    debug_sleep: float = 0.0,
) -> None:
    """Take free GPUs for this process, and make only them visible to CUDA.

    Call it before CUDA is started. What it has made is ``gpu_owner``.

    Args:
        nb_gpus: how many; with 0 no GPU is visible.
        placeholder_fn: what occupies each: a function of the device's number in this process,
            whose ``release``, if it has one, is called with its result on release. By default it is
            a context, which frameworks then use, and which takes a tenth of the time that
            importing one takes; other words of ``gpuaff.claim_gpus`` may be given as well.
        logger: told what happens, at level INFO; the module ``logging`` will do, too.
        debug_sleep: seconds between setting CUDA_VISIBLE_DEVICES and occupying.

    Raises:
        NvidiasmiError: there is no usable driver.
        RuntimeError: too few GPUs are free (:class:`~gpuaff.errors.GpusBusyError`) or exist
            (:class:`~gpuaff.errors.NotEnoughGpusError`), CUDA has been started already, this
            process has a claim (:class:`~gpuaff.errors.AlreadyClaimedError`), or the placeholder
            has failed.
        ValueError: several are asked for where there is one GPU, and it drives a screen; or an
            argument cannot be meant.
    """
    global gpu_owner
    gpu_owner = GPUOwner(nb_gpus, placeholder_fn, logger, debug_sleep)


def release_gpus() -> None:
    """Give back what :func:`claim_gpus` has taken, if it has."""
    if gpu_owner is not None:
        gpu_owner.release_gpus()


def _has_one_for_display(session: Session) -> bool:
    devices = session.devices()
    if len(devices) != 1 or devices[0].is_mig:
        return False
    (reading,) = session.look()
    return reading.display is True


def _driver() -> Any:
    from gpuaff._system.nvml import open_session

    return open_session()


def _logger(given: Any) -> Any:
    """What is told; scripts pass a logger, or the module :mod:`logging`."""
    return logging.getLogger() if given is None else given


@contextmanager
def _their_lock(nb_gpus: int, logger: Any) -> Iterator[None]:
    """Keep safe_gpu's users from choosing meanwhile, and say so in the lines that people know.

    As with safe_gpu there is no limit to the wait for those who are choosing.
    """
    replaced = LOCK_FILENAME if LOCK_FILENAME != DEFAULT else None
    logger.info("acquiring lock")
    is_held = False
    try:
        with holding(nb_gpus, limit=None, where=replaced):
            is_held = True
            logger.info("lock acquired")
            yield
    finally:
        if is_held:
            logger.info("lock released")


@contextmanager
def _their_errors() -> Iterator[None]:
    """safe_gpu calls things by its own names."""
    try:
        yield
    except NoDriverError as error:
        raise NvidiasmiError(str(error)) from error
    except GpusBusyError as error:  # its users cannot wait
        raise GpusBusyError(error.wanted, error.free, error.reasons, error.narrowed) from None
    except InvalidOptionError as error:
        option = _THEIR_NAMES.get(error.option, error.option)
        raise InvalidOptionError(option, error.value, error.expected) from error
