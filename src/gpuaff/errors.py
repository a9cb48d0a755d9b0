"""Every error that gpuaff raises.

Each derives from :class:`GpuaffError` and from the built-in that fits, so that code which does not
know gpuaff can catch it. Errors carry data and pickle, so they cross process borders (a pool,
torchrun's error files) complete.
"""

from __future__ import annotations

from dataclasses import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import ClassVar

_LONGEST = 80
"""The most characters that a message shows of a value."""


class GpuaffError(Exception):
    """The base of all errors of this package."""

    __match_args__: ClassVar[tuple[str, ...]] = ()
    """The names of the fields; dataclasses set it."""

    _message: ClassVar[str] = ""
    """The sentence that the fields make; empty: the first argument is the message."""

    def __str__(self) -> str:
        if self._message:
            return self._message.format_map(vars(self))
        return str(self.args[0]) if self.args else ""

    def __post_init__(self) -> None:
        self.args = self._fields()

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), self._fields() or self.args, vars(self)

    def _fields(self) -> tuple[object, ...]:
        return tuple(getattr(self, name) for name in self.__match_args__)


class GPUAffinityError(GpuaffError, RuntimeError):
    """A process could not be pinned, or not as ``strict`` requires.

    NVIDIA's gpu_affinity raised an error of this name.
    """


@dataclass(eq=False, repr=False)
class NoDriverError(GpuaffError, RuntimeError):
    """NVML cannot be used.

    Attributes:
        reason: what was found, and why, in one line.
        remedy: what to try, in one line; may be empty.
    """

    reason: str
    remedy: str = ""

    def __str__(self) -> str:
        return _joined(self.reason, self.remedy)


@dataclass(eq=False, repr=False)
class InvalidOptionError(GpuaffError, ValueError):
    """An argument, an option or a variable has an invalid value.

    Attributes:
        option: its name, as the user wrote it.
        value: what was given; a value that does not pickle arrives in another process as text.
        expected: which values are valid.
    """

    option: str
    value: object
    expected: str

    def __reduce__(self) -> tuple[object, ...]:
        import pickle

        value = self.value
        try:
            pickle.dumps(value)
        except Exception:  # noqa: BLE001 - a lock, a lambda: its class may raise anything
            value = _Shown(_shown(value))
        return type(self), (self.option, value, self.expected), {**vars(self), "value": value}

    def __str__(self) -> str:
        return f"{self.option}={_shown(self.value)}: expected {self.expected}"


@dataclass(eq=False, repr=False)
class TopologyError(GpuaffError, ValueError):
    """A topology could not be read: the input is something else, or contradicts itself.

    Attributes:
        source: where it came from (a path, ``pasted text``, a machine's name).
        problem: what was found there, and what to try.
    """

    source: str
    problem: str
    _message = "{source}: {problem}"


class ClaimError(GpuaffError, RuntimeError):
    """GPUs could not be claimed. Everything is as it was before."""


@dataclass(eq=False, repr=False)
class NotEnoughGpusError(ClaimError):
    """More GPUs were requested than exist, or than may be used here; waiting does not help.

    Attributes:
        wanted: how many were requested.
        found: how many match the request.
        reason: what was found, and why; where single GPUs are the reason, each on its own line.
    """

    wanted: int
    found: int
    reason: str

    def __str__(self) -> str:
        return f"requested {_gpus(self.wanted)}; {self.reason}"


@dataclass(eq=False, repr=False)
class GpusBusyError(ClaimError):
    """Too few GPUs are free now.

    Attributes:
        wanted: how many were requested.
        free: how many that match are free, and not kept for an earlier waiter.
        reasons: one line for each GPU that is busy or kept for an earlier waiter.
        narrowed: why only some of the machine's GPUs were considered; empty when all were.
        remedy: what to try; empty where it has been tried.
    """

    wanted: int
    free: int
    reasons: tuple[str, ...]
    narrowed: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        count = f"only {self.free}" if self.free else "none"
        found = f"requested {_gpus(self.wanted)}; {count} {'is' if self.free < 2 else 'are'} free"
        lines = _joined(found, self.narrowed), self.remedy, *self.reasons
        return "\n  ".join(filter(None, lines))


@dataclass(eq=False, repr=False)
class ClaimTimeoutError(ClaimError, TimeoutError):
    """The GPUs did not become free in time.

    Attributes:
        waited: how long the claim waited, in seconds.
        busy: which GPUs were busy, and why.
    """

    waited: float
    busy: GpusBusyError

    def __str__(self) -> str:
        return f"waited {self.waited:.1f} s: {self.busy}"


@dataclass(eq=False, repr=False)
class _ProblemError(ClaimError):
    problem: str
    gpus: tuple[str, ...] = ()
    _message = "{problem}"


class CudaInitializedError(_ProblemError):
    """CUDA is initialized in this process already, so its visible GPUs are fixed (case D9).

    Attributes:
        problem: what was found, and what to try, in one line.
        gpus: the UUIDs that an earlier claim of this process fixed, which can be claimed again, all
            of them; empty where CUDA was initialized without a claim.
    """


@dataclass(eq=False, repr=False)
class ClaimLostError(_ProblemError):
    """A foreign process took a GPU between the probe and the claim; the claim was undone.

    CUDA is usually initialized by then, so this process can claim no other GPUs: restart it.

    Attributes:
        problem: what was found, and what to try, in one line.
        gpus: the UUIDs of the claimed GPUs that the foreign process uses.
        pids: the foreign processes, as the driver numbers them; empty where it lists none.
        cuda_started: whether CUDA is initialized in this process; if not, it may claim again.
    """

    pids: tuple[int, ...] = ()
    cuda_started: bool = True


class AlreadyClaimedError(_ProblemError):
    """This process holds a claim already; a process can hold one.

    Attributes:
        problem: what was found, and what to try, in one line.
        gpus: the UUIDs of the GPUs of the first claim; empty while that is being made.
    """


@dataclass(eq=False, repr=False)
class PlaceholderError(ClaimError):
    """A claimed GPU could not be occupied.

    Attributes:
        problem: what was found, and what to try, in one line.
        placeholder: what was to occupy it (``context``, ``torch``); None for a function, and where
            it does not matter.
        gpus: the UUIDs of the GPUs concerned; empty when none is, as when CUDA does not start.
        code: CUDA's error (``CUresult``); None for other errors.
    """

    problem: str
    placeholder: str | None = None
    gpus: tuple[str, ...] = ()
    code: int | None = None
    _message = "{problem}"


class LockDirectoryError(GpuaffError, OSError):
    """A file that coordinates claims cannot be used.

    Attributes:
        path: which one.
        problem: what was found there, and what to try.
        errno: the kernel's error; None when the kernel refused nothing.
    """

    __match_args__ = ("path", "problem", "errno")
    _message = "{path}: {problem}"

    def __init__(self, path: str, problem: str, errno: int | None = None) -> None:
        super().__init__(errno, problem, path)  # as OSError reads them: errno, strerror, filename
        self.path = path
        self.problem = problem


@dataclass(eq=False, repr=False)
class CommandError(GpuaffError):
    """The command cannot be run.

    Attributes:
        command: its name, as it was given.
        found: whether there is such a file.
        problem: what was found, and what to try.
    """

    command: str
    found: bool
    problem: str
    _message = "{command}: {problem}"


class _Shown(str):
    """The text of a value that does not pickle; messages show it as they showed the value."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _shown(value: object) -> str:
    """A value of any type in one line, cut when it is long."""
    from gpuaff.formatting import one_line

    try:
        return one_line(repr(value), _LONGEST, end="...")
    except Exception:  # noqa: BLE001 - its repr fails, or it is an int of more than 4300 digits
        return f"<{type(value).__name__}>"


def _joined(*parts: str) -> str:
    return "; ".join(filter(None, parts))


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"
