"""Every error that gpuaff raises.

Each derives from :class:`GpuaffError` and from the built-in that fits, so that code which does not
know gpuaff can catch it. Errors carry data and pickle, so they cross process borders (a pool,
torchrun's error files) complete. Of their fields ``problem`` says what was found and what to try,
``gpus`` are UUIDs, and ``remedy`` may be empty.
"""

from __future__ import annotations

from typing import ClassVar

from gpuaff.formatting import counted, one_line

_LONGEST = 80  # characters of a value that a message shows


class GpuaffError(Exception):
    """The base of all errors of this package."""

    _message: ClassVar[str] = ""  # the sentence that the fields make

    def __str__(self) -> str:
        return self._message.format_map(vars(self)) or "".join(map(str, self.args[:1]))


class GPUAffinityError(GpuaffError, RuntimeError):
    """A process could not be pinned, or not as ``strict`` requires.

    NVIDIA's gpu_affinity raised an error of this name.
    """


class NoDriverError(GpuaffError, RuntimeError):
    """NVML cannot be used."""

    def __init__(self, reason: str, remedy: str = "") -> None:
        self.reason, self.remedy = self.args = reason, remedy

    def __str__(self) -> str:
        return f"{self.reason}; {self.remedy}" if self.remedy else self.reason


class InvalidOptionError(GpuaffError, ValueError):
    """An argument, an option or a variable has an invalid value.

    A value that does not pickle arrives in another process as text.
    """

    _message = "{option}={_shown}: expected {expected}"

    def __init__(self, option: str, value: object, expected: str) -> None:
        self.option, self.value, self.expected = self.args = option, value, expected
        try:
            self._shown = one_line(repr(value), _LONGEST, end="...")
        except Exception:  # noqa: BLE001 - its repr fails, or it is an int of more than 4300 digits
            self._shown = f"<{type(value).__name__}>"

    def __reduce__(self) -> tuple[object, ...]:
        import pickle

        value = self.value
        try:
            pickle.dumps(value)
        except Exception:  # noqa: BLE001 - a lock, a lambda: its class may raise anything
            value = self._shown
        return type(self), (self.option, value, self.expected), {**vars(self), "value": value}


class TopologyError(GpuaffError, ValueError):
    """A topology could not be read: the input is something else, or contradicts itself.

    ``source`` is where it came from: a path, ``pasted text``, a machine's name.
    """

    _message = "{source}: {problem}"

    def __init__(self, source: str, problem: str) -> None:
        self.source, self.problem = self.args = source, problem


class ClaimError(GpuaffError, RuntimeError):
    """GPUs could not be claimed. Everything is as it was before."""

    def __init__(self, problem: str, gpus: tuple[str, ...] = ()) -> None:
        self.problem, self.gpus = self.args = problem, gpus


class NotEnoughGpusError(ClaimError):
    """More GPUs were requested than exist, or than may be used here; waiting does not help.

    Of the ``wanted`` GPUs so many were ``found`` that match the request. Where single GPUs are the
    ``reason``, each has its own line there.
    """

    def __init__(self, wanted: int, found: int, reason: str) -> None:
        self.wanted, self.found, self.reason = self.args = wanted, found, reason

    def __str__(self) -> str:
        return f"requested {counted(self.wanted, 'GPU')}; {self.reason}"


class GpusBusyError(ClaimError):
    """Of the ``wanted`` GPUs only so many are ``free`` now, and not kept for an earlier waiter.

    ``reasons`` has a line for each other GPU; ``narrowed`` says why only some of the machine's GPUs
    were considered, and is empty when all were.
    """

    def __init__(
        self,
        wanted: int,
        free: int,
        reasons: tuple[str, ...],
        narrowed: str = "",
        remedy: str = "",
    ) -> None:
        self.args = wanted, free, reasons, narrowed, remedy
        self.wanted, self.free, self.reasons = wanted, free, reasons
        self.narrowed, self.remedy = narrowed, remedy

    def __str__(self) -> str:
        free = f"only {self.free}" if self.free else "none"
        found = f"{free} {'is' if self.free < 2 else 'are'} free"
        request = f"requested {counted(self.wanted, 'GPU')}"
        first = "; ".join(filter(None, (request, found, self.narrowed)))
        return "\n  ".join(filter(None, (first, self.remedy, *self.reasons)))


class ClaimTimeoutError(ClaimError, TimeoutError):
    """The GPUs did not become free in time: it ``waited`` so many seconds."""

    _message = "waited {waited:.1f} s: {busy}"

    def __init__(self, waited: float, busy: GpusBusyError) -> None:
        self.waited, self.busy = self.args = waited, busy


class CudaInitializedError(ClaimError):
    """CUDA is initialized in this process already, so its visible GPUs are fixed (case D9).

    Those of an earlier claim, ``gpus``, can be claimed again, all of them.
    """


class ClaimLostError(ClaimError):
    """A foreign process took a GPU between the probe and the claim; the claim was undone.

    CUDA is usually initialized by then, so this process can claim no other GPUs: restart it.

    It uses the ``gpus``; ``pids`` are the foreign processes, as far as the driver lists them. Where
    CUDA was not ``cuda_started`` in this process, it may claim again.
    """

    def __init__(
        self,
        problem: str,
        gpus: tuple[str, ...] = (),
        pids: tuple[int, ...] = (),
        cuda_started: bool = True,
    ) -> None:
        self.args = problem, gpus, pids, cuda_started
        self.problem, self.gpus, self.pids, self.cuda_started = problem, gpus, pids, cuda_started


class AlreadyClaimedError(ClaimError):
    """This process holds a claim already; a process can hold one.

    Its ``gpus`` are empty while it is being made.
    """


class PlaceholderError(ClaimError):
    """A claimed GPU could not be occupied.

    ``placeholder`` was to occupy it (``context``, ``torch``; None for a function, and where it does
    not matter); ``code`` is CUDA's error (``CUresult``), None for other errors.
    """

    def __init__(
        self,
        problem: str,
        placeholder: str | None = None,
        gpus: tuple[str, ...] = (),
        code: int | None = None,
    ) -> None:
        self.args = problem, placeholder, gpus, code
        self.problem, self.placeholder, self.gpus, self.code = problem, placeholder, gpus, code


class LockDirectoryError(GpuaffError, OSError):
    """A file that coordinates claims cannot be used.

    ``errno`` is the kernel's error; None when the kernel refused nothing.
    """

    _message = "{path}: {problem}"

    def __init__(self, path: str, problem: str, errno: int | None = None) -> None:
        super().__init__(errno, problem, path)  # as OSError reads them: errno, strerror, filename
        self.path, self.problem = path, problem

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.path, self.problem, self.errno)


class CommandError(GpuaffError):
    """The command cannot be run; ``found``: whether there is such a file."""

    _message = "{command}: {problem}"

    def __init__(self, command: str, found: bool, problem: str) -> None:
        self.command, self.found, self.problem = self.args = command, found, problem
