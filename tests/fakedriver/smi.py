"""A fake nvidia-smi: as much of it as safe-gpu 2.0.0 calls, over the fake NVML."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import pynvml

MODES = ("Default", "Exclusive_Thread", "Prohibited", "Exclusive_Process")


def bus_of(gpu: Any) -> str:
    return str(pynvml.nvmlDeviceGetPciInfo(gpu).busId)


def list_bus(index: int, gpu: Any) -> None:
    print(f"{index}, {bus_of(gpu)}")


def list_processes(_: int, gpu: Any) -> None:
    for process in pynvml.nvmlDeviceGetComputeRunningProcesses_v3(gpu):
        print(f"{process.pid}, {bus_of(gpu)}")


def describe(_: int, gpu: Any) -> None:
    def told(call: Callable[[Any], int], words: Sequence[str]) -> str:
        try:
            return words[call(gpu)]
        except pynvml.NVMLError:
            return "N/A"

    switched = ("Disabled", "Enabled")
    print(f"GPU {bus_of(gpu)}")
    for name, value in {
        "Product Name": pynvml.nvmlDeviceGetName(gpu),
        "Display Mode": told(pynvml.nvmlDeviceGetDisplayMode, switched),
        "Display Active": told(pynvml.nvmlDeviceGetDisplayActive, switched),
        "GPU UUID": pynvml.nvmlDeviceGetUUID(gpu),
        "Compute Mode": told(pynvml.nvmlDeviceGetComputeMode, MODES),
    }.items():
        print(f"    {name:<38}: {value}")
    print()


def main(question: str) -> None:
    pynvml.nvmlInit()
    count = pynvml.nvmlDeviceGetCount()
    each = {
        "--format=csv,noheader --query-gpu=index,gpu_bus_id": list_bus,
        "--format=csv,noheader --query-compute-apps=pid,gpu_bus_id": list_processes,
        "-q": describe,
    }[question]
    if question == "-q":
        print("\n==============NVSMI LOG==============\n")
        print(f"{'Driver Version':<42}: {pynvml.nvmlSystemGetDriverVersion()}")
        print(f"{'Attached GPUs':<42}: {count}")
    for index in range(count):
        each(index, pynvml.nvmlDeviceGetHandleByIndex(index))


try:
    main(" ".join(sys.argv[1:]))
except pynvml.NVMLError as error:
    print(
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure "
        "that the latest NVIDIA driver is installed and running.\n"
    )
    sys.exit(9 if isinstance(error, pynvml.NVMLError_DriverNotLoaded) else 255)
