"""What a failed call of CUDA's means for somebody who claims GPUs, and what to try. Pure.

The meanings are those of ``CUresult`` in the CUDA Driver API's reference.
"""

from __future__ import annotations

from gpuaff.system.cuda import NOT_INITIALIZED, CudaError

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
