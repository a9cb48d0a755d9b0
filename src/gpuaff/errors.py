"""Every error that gpuaff raises.

All derive from :class:`GpuaffError`; each also derives from the built-in that fits, so that
code which knows nothing of gpuaff can still catch it. They pickle, so that they cross
process borders (a pool, torchrun's error files) whole.
"""

from __future__ import annotations


class GpuaffError(Exception):
    """The root of all errors of this package."""


class GPUAffinityError(GpuaffError, RuntimeError):
    """A process could not be pinned, or not as was demanded.

    The name is the one that NVIDIA's gpu_affinity raised.
    """


class NoDriverError(GpuaffError, RuntimeError):
    """NVML cannot be used here.

    Attributes:
        reason: what was found, and why, in one line.
        remedy: what to try, in one line; may be empty.
    """

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(reason, remedy)
        self.reason = reason
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.reason}; {self.remedy}" if self.remedy else self.reason


class InvalidOptionError(GpuaffError, ValueError):
    """An argument, an option or a variable has a value that cannot be meant.

    Attributes:
        option: its name, as its user spells it.
        value: what was given.
        expected: what would have been right, in words.
    """

    def __init__(self, option: str, value: object, expected: str) -> None:
        super().__init__(option, value, expected)
        self.option = option
        self.value = value
        self.expected = expected

    def __str__(self) -> str:
        shown = repr(self.value)
        if len(shown) > 80:
            shown = f"{shown[:77]}..."
        return f"{self.option}={shown}: expected {self.expected}"


class TopologyError(GpuaffError, ValueError):
    """A topology could not be read: what was given is not one, or contradicts itself.

    Attributes:
        source: where it came from (a path, ``pasted text``, a machine's name).
        problem: what was found there, and what to try.
    """

    def __init__(self, source: str, problem: str) -> None:
        super().__init__(source, problem)
        self.source = source
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.source}: {self.problem}"
