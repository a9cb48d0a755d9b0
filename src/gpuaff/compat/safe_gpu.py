"""BUT Speech@FIT's ``safe_gpu``, for scripts that were written for it.

    from gpuaff.compat import safe_gpu  # was: from safe_gpu import safe_gpu

Nothing else changes: names, arguments, log lines and errors are those of safe_gpu
(``docs/migrate-safe-gpu.md`` lists the exceptions). New scripts call ``gpuaff.claim_gpus``, through
which this works.
"""

from __future__ import annotations

import logging
import math
import operator
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, ClassVar, TypeAlias

from gpuaff import errors
from gpuaff._system import env
from gpuaff._system.nvml import open_session
from gpuaff.claims import claim_gpus as _claim_gpus
from gpuaff.claims.claim import Claim
from gpuaff.claims.devices.probe import Probe
from gpuaff.claims.locking import registry
from gpuaff.claims.locking.safe_gpu import DEFAULT, holding
from gpuaff.claims.placeholder import load

PlaceholderFn: TypeAlias = str | Callable[[int], object]

__all__ = [
    "LOCK_FILENAME", "GPUOwner", "NvidiasmiError", "PyCudaPlaceholder", "PytorchPlaceholder",
    "TensorflowPlaceholder", "claim_gpus", "get_free_gpus", "gpu_owner",
    "is_single_gpu_display_mode", "pytorch_placeholder", "release_gpus", "tensorflow_placeholder",
]  # fmt: skip

LOCK_FILENAME = DEFAULT
"""The file that safe_gpu's users lock in turn. A site may set another one."""

gpu_owner: GPUOwner | None = None
"""What :func:`claim_gpus` has made."""


class NvidiasmiError(errors.GpuaffError, FileNotFoundError):
    """There is no usable driver: scripts catch it to go on without GPUs.

    Where nvidia-smi was not installed, safe_gpu raised FileNotFoundError.
    """


def get_free_gpus() -> list[str]:
    """The indices of the GPUs that are free now, as strings; or NvidiasmiError."""
    with _original_errors(), open_session() as session:
        whole = [device for device in session.devices() if not device.is_mig]
        probe = Probe(session, whole, own_is_free=False)
        probe.look()
        usages = probe.usages(registry.entries(), named=True)
    return [str(usage.device.index) for usage in usages if usage.busy is None]


def is_single_gpu_display_mode() -> bool:
    """Whether the machine has one GPU, which also drives a screen; or NvidiasmiError."""
    with _original_errors(), open_session() as session:
        devices = session.devices()
        is_only = len(devices) == 1 and not devices[0].is_mig
        return is_only and session.look()[0].display is True


class _Placeholder:
    _framework: ClassVar[str]

    def __init__(self, logger: Any = None) -> None:
        self.logger = logger or logging.getLogger()

    def __call__(self, device_no: int) -> Any:
        make, _ = load(self._framework)
        return make(device_no)

    def release(self, placeholder: Any) -> None:  # noqa: ARG002 - safe_gpu's signature
        self.logger.info(f"{self._framework} keeps its context on the GPU until the process ends")


class PytorchPlaceholder(_Placeholder):
    """Occupies GPUs with tensors of PyTorch's, whose import takes seconds."""

    _framework = "torch"


class TensorflowPlaceholder(_Placeholder):
    """Occupies GPUs with tensors of TensorFlow's."""

    _framework = "tensorflow"


class PyCudaPlaceholder(_Placeholder):
    """Occupies GPUs with contexts of PyCUDA's; the last one is current."""

    _framework = "pycuda"

    def __call__(self, device_no: int) -> Any:
        """Occupy a GPU; the result is the context."""
        context = super().__call__(device_no)
        context.push()
        return context

    def release(self, placeholder: Any) -> None:
        """Release the context."""
        placeholder.detach()
        self.logger.info("PyCUDA's context is released")


pytorch_placeholder, tensorflow_placeholder = PytorchPlaceholder(), TensorflowPlaceholder()
"""The names of safe_gpu 1.x."""


class GPUOwner:
    """Claimed GPUs, as safe_gpu has it. The claim outlives the object.

    Attributes:
        devices_taken: their indices, as nvidia-smi counts, in CUDA's order.
        placeholders: what the placeholder has returned for each.
    """

    _claim: Claim | None = None

    def __init__(
        self,
        nb_gpus: int = 1,
        placeholder_fn: PlaceholderFn = "context",
        logger: Any = None,
        debug_sleep: float = 0.0,
    ) -> None:
        self.logger = logger or logging.getLogger()
        self.debug_sleep = debug_sleep
        self.placeholder_fn = placeholder_fn
        self.devices_taken: list[int] = []
        self.placeholders: list[object] = []
        count = operator.index(nb_gpus)
        try:
            with _original_errors(), open_session():  # the claim and the look find it open
                self._take(count, for_display=is_single_gpu_display_mode())
        except BaseException:  # from the sleep, or the logger: nothing would own the claim
            if self._claim is not None:
                self._claim.release()
            raise

    def release_gpus(self) -> None:
        """Release the GPUs; CUDA_VISIBLE_DEVICES stays, so that later children use the same."""
        if self._claim is None or self._claim.is_released:
            return
        for device in self.devices_taken:
            self.logger.info(f"Releasing placeholder on CUDA device: {device}")
        variables = {name: env.get(name) for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")}
        try:
            self._claim.release()
        finally:
            for name, value in variables.items():
                env.put(name, value)

    def _take(self, nb_gpus: int, *, for_display: bool) -> None:
        if for_display:
            self.logger.info("This machine has a single GPU, and a screen is driven by it")
            if nb_gpus > 1:
                raise ValueError(f"requested {nb_gpus} GPUs on a machine with a single one")
        with nullcontext() if for_display else _original_lock(nb_gpus, self.logger):
            if nb_gpus == 0:  # safe_gpu hides all GPUs then
                env.put("CUDA_VISIBLE_DEVICES", "")
            else:
                self._claim = made = self._claimed(nb_gpus)
                self.devices_taken.extend(gpu.index for gpu in made.gpus)
                self.placeholders.extend(made.placeholders)
            self.logger.info(f"Set CUDA_VISIBLE_DEVICES={env.get('CUDA_VISIBLE_DEVICES')}")
            time.sleep(self.debug_sleep)

    def _claimed(self, nb_gpus: int) -> Claim:
        try:
            return _claim_gpus(nb_gpus, placeholder=self.placeholder_fn, own_is_free=False)
        except (errors.AlreadyClaimedError, errors.GpusBusyError, errors.NotEnoughGpusError):
            raise  # before anything is occupied safe_gpu logs no error
        except RuntimeError as error:
            self.logger.error(f"Failed to acquire placeholder: {error}")  # noqa: TRY400 - as safe_gpu logs it
            raise


def claim_gpus(
    nb_gpus: int = 1,
    placeholder_fn: PlaceholderFn = "context",
    logger: Any = None,
    debug_sleep: float = 0.0,
) -> None:
    """Claim free GPUs for this process, and make only them visible to CUDA.

    Call it before CUDA is initialized. It sets ``gpu_owner``.

    Args:
        nb_gpus: how many; with 0 no GPU is visible.
        placeholder_fn: what occupies each GPU, as ``placeholder`` of ``gpuaff.claim_gpus``.
        logger: logs the steps, at level INFO; the module ``logging`` works, too.
        debug_sleep: seconds to sleep while safe_gpu's lock is held.

    Raises:
        NvidiasmiError: there is no usable driver.
        RuntimeError: the GPUs could not be claimed or occupied.
        ValueError: several are requested where there is one GPU, which drives a screen; or an
            argument is invalid.
    """
    global gpu_owner
    gpu_owner = GPUOwner(nb_gpus, placeholder_fn, logger, debug_sleep)


def release_gpus() -> None:
    """Release what :func:`claim_gpus` has claimed, if anything."""
    if gpu_owner is not None:
        gpu_owner.release_gpus()


@contextmanager
def _original_lock(nb_gpus: int, logger: Any) -> Iterator[None]:
    """Hold safe_gpu's lock, with its log lines. As with safe_gpu the wait has no limit."""
    # The claim inside takes the lock too. It is held here as well, so that the log lines are true.
    where = LOCK_FILENAME if LOCK_FILENAME != DEFAULT else None
    logger.info("acquiring lock")
    with ExitStack() as at_end, holding(nb_gpus, limit=math.inf, where=where):
        at_end.callback(logger.info, "lock released")
        logger.info("lock acquired")
        yield


@contextmanager
def _original_errors() -> Iterator[None]:
    """Raise safe_gpu's errors, with its names of arguments."""
    try:
        yield
    except errors.NoDriverError as error:
        raise NvidiasmiError(str(error)) from error
    except errors.GpusBusyError as error:
        error.remedy = ""  # safe_gpu cannot wait
        raise
    except errors.InvalidOptionError as error:
        names = {"n": "nb_gpus", "placeholder": "placeholder_fn"}
        error.option = names.get(error.option, error.option)
        raise
