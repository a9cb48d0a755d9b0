"""What a failed call of CUDA means for a claim, and what to do.

The meanings are those of ``CUresult`` in the CUDA Driver API's reference.
"""

from __future__ import annotations

import sys
from collections.abc import Container

from gpuaff._system.cuda import NOT_INITIALIZED, CudaError, is_initialized

_VISIBLE = "see CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER, and which devices the container has"

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
    100: f"CUDA finds no GPU that this process may use: {_VISIBLE}",
    101: f"CUDA does not accept the list of visible devices: {_VISIBLE}",
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

_INITIALIZERS = {
    "torch": "torch.cuda.is_available() (unless PYTORCH_NVML_BASED_CUDA_CHECK=1), "
    "torch.cuda.init(), or a tensor on a GPU",
    "tensorflow": "tf.config.list_physical_devices('GPU') or a first operation of TensorFlow",
    "jax": "jax.devices() or a first array of JAX",
    "cupy": "cupy.cuda.is_available() or a first array of CuPy",
    "pycuda": "import pycuda.autoinit",
    "numba": "numba.cuda.is_available()",
}
"""What initialises CUDA, by module; the likeliest first."""


def explain(error: CudaError) -> str:
    """An error in the driver's own words, and for known ones, what to do."""
    meaning = _MEANING.get(error.code)
    return f"{error}; {meaning}" if meaning else str(error)


def cuda_already_initialized() -> str | None:
    """Why it is too late for a claim, as CUDA fixes its visible GPUs once (case D9); else None.

    Nothing is imported, loaded or initialised to find out. In a forked child CUDA does not report
    that the parent had initialised it; its first call there fails (error 3).
    """
    if not (is_initialized() or _is_initialized_by_torch()):
        return None
    return (
        "CUDA is already initialised in this process, and its GPUs cannot be changed any more; "
        f"{likely_initializers(sys.modules)}. Claim before that, at the beginning of the program"
    )


def likely_initializers(modules: Container[str]) -> str:
    """What has probably initialised CUDA, by the modules that are imported. Pure."""
    found = [how for name, how in _INITIALIZERS.items() if name in modules]
    if not found:
        return "an import or call has done it (a check whether CUDA is available is enough)"
    return f"usual causes: {'; '.join(found)}"


def _is_initialized_by_torch() -> bool:
    """By torch, if it is imported: it may use another libcuda."""
    try:
        return sys.modules["torch"].cuda.is_initialized() is True
    except (KeyError, AttributeError):  # not imported, or still being imported
        return False
