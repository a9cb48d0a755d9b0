"""Whether it is too late for a claim: CUDA reads only once which GPUs it may use (case D9)."""

from __future__ import annotations

import sys
from collections.abc import Container

from gpuaff.system.cuda import is_initialized

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
