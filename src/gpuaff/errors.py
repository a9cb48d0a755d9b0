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
        value: what was given; of what does not pickle only its words cross process borders.
        expected: what would have been right, in words.
    """

    def __init__(self, option: str, value: object, expected: str) -> None:
        super().__init__(option, value, expected)
        self.option = option
        self.value = value
        self.expected = expected

    def __reduce__(self) -> tuple[object, ...]:
        import pickle

        value = self.value
        try:
            pickle.dumps(value)
        except Exception:  # noqa: BLE001 - a lock, a lambda: whatever its class raises
            value = _Words(_shown(value))
        return type(self), (self.option, value, self.expected), {**vars(self), "value": value}

    def __str__(self) -> str:
        return f"{self.option}={_shown(self.value)}: expected {self.expected}"


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


class ClaimError(GpuaffError, RuntimeError):
    """GPUs could not be claimed. Everything is then as it was before."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""  # the rest is data


class NotEnoughGpusError(ClaimError):
    """More GPUs were asked for than there are, or than may be had here; waiting would not help.

    Attributes:
        wanted: how many were asked for.
        found: how many there are that fit what was asked.
        reason: what was found, and why, in one line.
    """

    def __init__(self, wanted: int, found: int, reason: str) -> None:
        super().__init__(wanted, found, reason)
        self.wanted = wanted
        self.found = found
        self.reason = reason

    def __str__(self) -> str:
        return f"asked for {_gpus(self.wanted)}, but {self.reason}"


class GpusBusyError(ClaimError):
    """Too few GPUs are free now.

    Attributes:
        wanted: how many were asked for.
        free: how many of those that fit are free, and kept for no earlier waiter.
        reasons: one line for each GPU that is not, or that is kept for an earlier waiter.
        narrowed: why not all GPUs of the machine came into question; empty when they did.
        remedy: what to try; empty where it has been tried.
    """

    def __init__(
        self,
        wanted: int,
        free: int,
        reasons: tuple[str, ...],
        narrowed: str = "",
        remedy: str = "",
    ) -> None:
        super().__init__(wanted, free, reasons, narrowed, remedy)
        self.wanted = wanted
        self.free = free
        self.reasons = reasons
        self.narrowed = narrowed
        self.remedy = remedy

    def __str__(self) -> str:
        had = f"asked for {_gpus(self.wanted)}, but {self.free or 'none'} can be had now"
        return "; ".join(filter(None, (had, *self.reasons, self.narrowed, self.remedy)))


class ClaimTimeoutError(ClaimError, TimeoutError):
    """The GPUs did not become free in time.

    Attributes:
        waited: how long was waited, in seconds.
        busy: who has them.
    """

    def __init__(self, waited: float, busy: GpusBusyError) -> None:
        super().__init__(waited, busy)
        self.waited = waited
        self.busy = busy

    def __str__(self) -> str:
        return f"waited {self.waited:.1f} s: {self.busy}"


class CudaInitializedError(ClaimError):
    """CUDA has been started in this process already: which GPUs it sees is settled (case D9).

    Attributes:
        problem: what was found, and what to try, in one line.
        gpus: the UUIDs of those that an earlier claim of this process has settled, which can be
            claimed again, all of them; empty where CUDA was started without a claim.
    """

    def __init__(self, problem: str, gpus: tuple[str, ...] = ()) -> None:
        super().__init__(problem, gpus)
        self.problem = problem
        self.gpus = gpus


class ClaimLostError(ClaimError):
    """A stranger has come onto a GPU between the look and the claim; the claim was undone.

    CUDA is mostly initialised by then, so this process can claim no other GPUs: start it again.

    Attributes:
        problem: what was found, and what to try, in one line.
        gpus: the UUIDs of the claimed GPUs on which a stranger is.
        pids: the strangers, as the driver calls them; empty where it does not list them.
        cuda_started: whether CUDA is initialised in this process; if not, it may claim again.
    """

    def __init__(
        self,
        problem: str,
        gpus: tuple[str, ...] = (),
        pids: tuple[int, ...] = (),
        cuda_started: bool = True,
    ) -> None:
        super().__init__(problem, gpus, pids, cuda_started)
        self.problem = problem
        self.gpus = gpus
        self.pids = pids
        self.cuda_started = cuda_started


class AlreadyClaimedError(ClaimError):
    """This process holds a claim already, and one process can have only one.

    Attributes:
        problem: what was found, and what to try, in one line.
        gpus: the UUIDs of the GPUs of the first claim; empty while that is being made.
    """

    def __init__(self, problem: str, gpus: tuple[str, ...] = ()) -> None:
        super().__init__(problem, gpus)
        self.problem = problem
        self.gpus = gpus


class PlaceholderError(ClaimError):
    """A claimed GPU could not be occupied.

    Attributes:
        problem: what was found, and what to try, in one line.
        placeholder: what was to occupy it (``context``, ``torch``); None for a function, and where
            it does not matter.
        gpus: the UUIDs of those that this is about; empty where it is about none, as when CUDA
            does not start.
        code: CUDA's error (``CUresult``); None when it was none of CUDA's.
    """

    def __init__(
        self,
        problem: str,
        placeholder: str | None = None,
        gpus: tuple[str, ...] = (),
        code: int | None = None,
    ) -> None:
        super().__init__(problem, placeholder, gpus, code)
        self.problem = problem
        self.placeholder = placeholder
        self.gpus = gpus
        self.code = code


class LockDirectoryError(GpuaffError, OSError):
    """A file that claims are coordinated by cannot be used.

    Attributes:
        path: which one.
        problem: what was found there, and what to try.
        errno: the kernel's error; None when it has refused nothing.
    """

    def __init__(self, path: str, problem: str, errno: int | None = None) -> None:
        super().__init__(errno, problem, path)  # as OSError reads them: errno, strerror, filename
        self.path = path
        self.problem = problem

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.path, self.problem, self.errno), self.__dict__

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}"


class CommandError(GpuaffError):
    """The command that was to be run cannot be.

    Attributes:
        command: its name, as it was given.
        found: whether there is such a file.
        problem: what was found, and what to try.
    """

    def __init__(self, command: str, found: bool, problem: str) -> None:
        super().__init__(command, found, problem)
        self.command = command
        self.found = found
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.command}: {self.problem}"


class _Words(str):
    """What is left of a value that does not pickle: it is shown as the value was."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _shown(value: object) -> str:
    """What was given, on one line, cut when it is long; it may be anything."""
    from gpuaff.notices import printable

    try:
        shown = printable(repr(value))
    except Exception:  # noqa: BLE001 - it has no words: its repr fails, or it has 4300 digits
        shown = f"<{type(value).__name__}>"
    return shown if len(shown) <= 80 else f"{shown[:77]}..."


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"
