"""Calls of NVML's functions, each of which may fail on its own (case F1).

This module does not import pynvml: it is handed the module by :mod:`gpuaff._system.nvml`.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import IntEnum

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_ADDRESS = re.compile(r"([0-9a-f]{1,8}):([0-9a-f]{1,2}):([0-9a-f]{1,2})\.([0-7])", re.ASCII)
_LONGEST = 120
"""The most characters that are shown of what a library says about an error."""


class Code(IntEnum):
    """NVML's return codes that are told apart here (``nvmlReturn_t``)."""

    SUCCESS = 0
    INVALID_ARGUMENT = 2
    NOT_SUPPORTED = 3
    NO_PERMISSION = 4
    NOT_FOUND = 6
    INSUFFICIENT_SIZE = 7
    DRIVER_NOT_LOADED = 9
    LIBRARY_NOT_FOUND = 12
    FUNCTION_NOT_FOUND = 13
    GPU_IS_LOST = 15
    LIB_RM_VERSION_MISMATCH = 18
    UNKNOWN = 999


def call(nvml: Any, function: str, *args: Any) -> tuple[Any, int]:
    """Call one function of NVML.

    Args:
        nvml: the module pynvml.
        function: its name. A release of pynvml that lacks it counts as a library that does.
        args: what it is given.

    Returns:
        What it answered, and 0; or None, and NVML's code of what went wrong.
    """
    called = getattr(nvml, function, None)
    if called is None:
        return None, Code.FUNCTION_NOT_FOUND
    try:
        return called(*args), Code.SUCCESS
    except nvml.NVMLError as error:
        return None, int(error.value)
    except UnicodeError:  # a string of no encoding, which pynvml cannot read
        return None, Code.UNKNOWN


def words(nvml: Any, code: int) -> str:
    """What a code means, in one short line."""
    try:
        said = " ".join(str(nvml.NVMLError(code)).split())
    except UnicodeError:
        said = ""
    return said[:_LONGEST] or f"NVML error {code}"


def text(answer: str | bytes | None) -> str | None:
    """A string that NVML answered; old releases of pynvml give bytes."""
    return answer.decode("utf-8", "replace") if isinstance(answer, bytes) else answer


def pci_address(spelled: str | bytes | None) -> str | None:
    """A PCI address as sysfs spells it: NVML's ``00000000:07:00.0`` is ``0000:07:00.0`` there.

    The domain keeps at least four digits, and more where it needs them (``10001:00:00.0``).

    Returns:
        None when it is no PCI address.
    """
    match = _ADDRESS.fullmatch((text(spelled) or "").strip().lower())
    if match is None:
        return None
    domain, bus, device, function = (int(part, 16) for part in match.groups())
    return f"{domain:04x}:{bus:02x}:{device:02x}.{function}"


@dataclass()
class Questions:
    """Asks NVML about one GPU, and keeps what failed.

    Attributes:
        nvml: the module pynvml.
        handle: the GPU's handle; None when it cannot be had.
        problems: what failed, in words.
        lost: whether the GPU has fallen off the bus, or was never there. It is not asked
            again then: it would say the same, and may take long to say it.
        denied: whether this process may not use it (a device cgroup).
        code: NVML's code of the last answer.
    """

    nvml: Any
    handle: Any = None
    problems: list[str] = field(default_factory=list)
    lost: bool = False
    denied: bool = False
    code: int = Code.SUCCESS

    @classmethod
    def about(cls, nvml: Any, index: int) -> Questions:
        """Get ready to ask about the GPU of this index."""
        gpu = cls(nvml)
        gpu.handle = gpu.ask_of(index, "its handle", "nvmlDeviceGetHandleByIndex")
        gpu.lost = gpu.handle is None
        gpu.denied = gpu.code == Code.NO_PERMISSION
        return gpu

    def ask(self, what: str, function: str, *args: Any, fine: Collection[int] = ()) -> Any:
        """Ask the GPU one question.

        Args:
            what: what is asked for, in words.
            function: the function that tells it; the GPU's handle is its first argument.
            args: its further arguments.
            fine: the codes that are an answer as well, and no problem.

        Returns:
            The answer; None when there is none.
        """
        return self.ask_of(self.handle, what, function, *args, fine=fine)

    def ask_of(
        self, whom: Any, what: str, function: str, *args: Any, fine: Collection[int] = ()
    ) -> Any:
        """Ask a part of the GPU (a MIG instance), whose handle comes before the arguments."""
        if self.lost:
            return None
        answer, self.code = call(self.nvml, function, whom, *args)
        self.lost = self.code == Code.GPU_IS_LOST
        if self.code and self.code not in fine:
            self.keep(f"{what}: {words(self.nvml, self.code)} ({function})")
        return answer

    def keep(self, problem: str) -> None:
        """Keep a problem, once."""
        if problem not in self.problems:
            self.problems.append(problem)


def address_of(gpu: Questions) -> str | None:
    """A GPU's PCI address as sysfs spells it; None when it is not told."""
    pci = gpu.ask("PCI address", "nvmlDeviceGetPciInfo")
    if pci is None:
        return None
    return pci_address(pci.busId) or pci_address(pci.busIdLegacy)
