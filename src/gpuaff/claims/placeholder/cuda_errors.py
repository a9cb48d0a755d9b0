"""What a failed call of CUDA's means for somebody who claims GPUs, and what to try. Pure.

The meanings are those of ``CUresult`` in the CUDA Driver API's reference.
"""

from __future__ import annotations

import sys
from collections.abc import Container

from gpuaff._system.cuda import NOT_INITIALIZED, CudaError, is_initialized

_VISIBLE = "see CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER, and which devices the container has"

_MEANS = {
    2: "its memory is full: somebody has it whom the driver does not show; nvidia-smi tells how "
    "much is in use",
    NOT_INITIALIZED: "this process was forked from one that had initialised CUDA, and then CUDA "
    "cannot be used in it. Start workers by spawn (multiprocessing.set_start_method('spawn')), or "
    "fork before anything uses CUDA: a parent that only claims takes placeholder=None",
    34: "the libcuda.so.1 that was found is the stub for building, not the driver's: take CUDA's "
    "stubs folder out of LD_LIBRARY_PATH",
    46: "somebody else is on it, and its compute mode lets one process in (exclusive) or none "
    "(prohibited): nvidia-smi -q -d COMPUTE,PIDS. A parent that claims for its children takes "
    "placeholder=None",
    100: f"CUDA finds no GPU that this process may use: {_VISIBLE}",
    101: f"CUDA does not accept the list of visible devices: {_VISIBLE}",
    304: "the operating system refuses CUDA: see the access rights of /dev/nvidia*, and whether "
    "/dev/nvidia-uvm is there; a container needs the capability compute",
    802: "the machine's GPUs are not ready yet: where they are joined by NVSwitches the fabric "
    "manager must run (systemctl status nvidia-fabricmanager)",
    803: "the driver's kernel module and its library libcuda differ: reboot, or reload the nvidia "
    "modules; a container needs the host's driver version",
    804: "the CUDA compatibility package does not work with this GPU: take its folder (compat) "
    "out of LD_LIBRARY_PATH",
    999: "the driver does not say why; see whether nvidia-smi runs, and look for Xid in dmesg. "
    "After a suspend, reload the module nvidia_uvm",
}


def explain(error: CudaError) -> str:
    """An error in the driver's own words, and for those that are known, what to try."""
    meaning = _MEANS.get(error.code)
    return f"{error}; {meaning}" if meaning else str(error)


# Whether it is too late for a claim: CUDA reads only once which GPUs it may use (case D9).


_DID_IT = {
    "torch": "torch.cuda.is_available() (unless PYTORCH_NVML_BASED_CUDA_CHECK=1), "
    "torch.cuda.init(), or a tensor on a GPU",
    "tensorflow": "tf.config.list_physical_devices('GPU') or a first operation of TensorFlow's",
    "jax": "jax.devices() or a first array of JAX's",
    "cupy": "cupy.cuda.is_available() or a first array of CuPy's",
    "pycuda": "import pycuda.autoinit",
    "numba": "numba.cuda.is_available()",
}
"""What initialises CUDA, by the module that does it; the likeliest first."""


def too_late() -> str | None:
    """Why a claim would come too late in this process; None when it does not.

    Nothing is imported, loaded or initialised to find out. In a forked child CUDA does not tell
    that the parent had initialised it: whoever then uses CUDA is told (error 3).
    """
    if not (is_initialized() or _torch_says_so()):
        return None
    return (
        "CUDA is initialised in this process already, and the GPUs that it uses cannot be changed "
        f"any more; {likely(sys.modules)}. Claim before that: at the beginning of the program"
    )


def likely(modules: Container[str]) -> str:
    """What has probably initialised CUDA. Pure.

    Args:
        modules: the names of the modules that are imported.
    """
    found = [how for name, how in _DID_IT.items() if name in modules]
    if not found:
        return "some import or call has done it (a check whether CUDA is available is enough)"
    return f"what does it: {'; '.join(found)}"


def _torch_says_so() -> bool:
    """What torch says, if it is imported: it need not use the libcuda that is asked."""
    try:
        return sys.modules["torch"].cuda.is_initialized() is True
    except (KeyError, AttributeError):  # not imported, or still being imported
        return False
