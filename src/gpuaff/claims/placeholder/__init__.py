"""What occupies a claimed GPU, so that other programs see that it is used.

Programs that know nothing of gpuaff see only contexts: the driver lists the processes that have
one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from enum import Enum

from gpuaff._system import cuda
from gpuaff._system.cuda import Contexts, CudaError
from gpuaff._system.interrupts import interruptible
from gpuaff.claims.placeholder.cuda_errors import explain
from gpuaff.claims.placeholder.frameworks import Occupant, load, one_line
from gpuaff.errors import InvalidOptionError, NoDriverError, PlaceholderError
from gpuaff.options import suggestion

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias


class Placeholder(str, Enum):
    """What occupies a claimed GPU. Wherever one is expected, its string may be given as well."""

    CONTEXT = "context"
    """The GPU's primary context, which frameworks then use. The default."""
    TORCH = "torch"
    """A tensor of torch."""
    TENSORFLOW = "tensorflow"
    """A tensor of TensorFlow."""
    PYCUDA = "pycuda"
    """A context of pycuda's own, not current."""
    CUPY = "cupy"
    """An array of CuPy."""

    def __str__(self) -> str:
        return str(self.value)


Kind: TypeAlias = Placeholder | Callable[[int], object] | None
"""What occupies GPUs; None: nothing does."""


def kind_of(value: object, *, option: str = "placeholder") -> Kind:
    """Check what was requested.

    Args:
        value: a member of :class:`Placeholder`, its string, a function, or None.
        option: the option's name.

    Raises:
        InvalidOptionError: it is none of these, or its ``release`` is not a function.
    """
    words = [str(kind) for kind in Placeholder]
    if value is None:
        return None
    if isinstance(value, str) and value in words:
        return Placeholder(value)
    expected = f"one of {', '.join(words)}, a function of a device number, or None"
    if not callable(value):
        text = str(value) if isinstance(value, str) else ""
        raise InvalidOptionError(option, value, expected + suggestion(text, words))
    release = getattr(value, "release", None)
    if release is not None and not callable(release):
        raise InvalidOptionError(f"{option}.release", release, "a function, or none at all")
    return value


class Occupied:
    """GPUs that are occupied, until :meth:`release`.

    Attributes:
        made_context: whether CUDA is initialised in this process since. Then the GPUs that it shows
            never change, also after the release.
    """

    def __init__(self, occupant: Occupant | None = None) -> None:
        self._held: list[object] = []
        self._occupant = occupant
        self.made_context = False

    @property
    def held(self) -> tuple[object, ...]:
        """What each GPU's placeholder returned, in their order; empty once released."""
        return tuple(self._held)

    def take(self, ordinals: Iterable[int]) -> None:
        """Occupy the GPUs of these ordinals, one after another."""
        if self._occupant is not None:
            with interruptible():
                # One step of the interpreter puts what is returned into the list, so that no
                # signal handler comes between.
                self._held.extend(map(self._occupant.make, ordinals))

    def release(self) -> None:
        """Release all, the last one first; a second call does nothing.

        Raises:
            BaseException: the first error of a placeholder's own release, when all were tried.
        """
        if self._occupant is None:
            return
        errors: list[BaseException] = []
        while self._held:
            try:
                self._occupant.release(self._held.pop())
            except BaseException as error:  # noqa: BLE001, PERF203 - raised after all tries
                errors.append(error)
        self._occupant.finish()
        if errors:  # Ctrl-C goes before an Exception
            raise min(errors, key=lambda error: isinstance(error, Exception))


def occupy(
    kind: Kind, expected_uuids: Sequence[str], *, ordinals: Sequence[int] | None = None
) -> Occupied:
    """Occupy the claimed GPUs, all or none.

    With None nothing is done, and CUDA is not started. With one of ours CUDA is initialised first,
    and must show the claimed GPUs; with a function this is checked afterwards, if it has
    initialised CUDA.

    Args:
        kind: what occupies them.
        expected_uuids: the claimed GPUs.
        ordinals: CUDA's numbers of these; None: 0, 1 … in their order, and CUDA shows no others.

    Raises:
        PlaceholderError: one of ours failed, or CUDA shows other GPUs than the claimed ones.
        BaseException: what a function raised. Whatever is raised, all is released; but CUDA, once
            initialised, stays so.
    """
    if kind is None:
        return Occupied()
    claimed = dict(zip(ordinals or range(len(expected_uuids)), expected_uuids, strict=True))
    is_alone = ordinals is None
    if isinstance(kind, Placeholder):
        occupied = Occupied(_ours(kind, claimed, is_alone))
    else:
        occupied = Occupied(_of_function(kind))
    try:
        occupied.take(claimed)
        occupied.made_context = cuda.is_initialized() is True
        if occupied.made_context and not isinstance(kind, Placeholder):
            _check_visible(claimed, is_alone)
    except BaseException:
        with suppress(Exception):  # the first error says more
            occupied.release()
        raise
    return occupied


def _of_function(function: Callable[[int], object]) -> Occupant:
    release = getattr(function, "release", None)
    return Occupant(make=function) if release is None else Occupant(make=function, release=release)


def _ours(kind: Placeholder, claimed: Mapping[int, str], is_alone: bool) -> Occupant:
    name = str(kind)
    occupant = _contexts() if kind is Placeholder.CONTEXT else load(name)
    _start_cuda(name)
    _check_visible(claimed, is_alone, name)

    def make(ordinal: int) -> object:
        try:
            return occupant.make(ordinal)
        except Exception as error:  # a framework may raise anything
            code = error.code if isinstance(error, CudaError) else None
            why = explain(error) if isinstance(error, CudaError) else one_line(error)
            failed = f"placeholder={name!r} could not occupy {claimed[ordinal]}"
            problem = f"{failed} (CUDA device {ordinal}): {why}"
            raise PlaceholderError(problem, name, (claimed[ordinal],), code) from error

    return replace(occupant, make=make)


def _contexts() -> Occupant:
    """Primary contexts, which frameworks use as well: so they cost nothing once one does."""
    held = Contexts()

    def finish() -> None:
        # It fails after an error of the job's own, which the job has seen, and at exit.
        with suppress(CudaError):
            held.release()

    return Occupant(make=held.retain, finish=finish)


@contextmanager
def _cuda_call(failure: str, kind: str | None) -> Iterator[None]:
    """A call of CUDA's, which takes a while; its errors are raised as a placeholder's."""
    for_kind = f"placeholder={kind!r}: " if kind else ""
    try:
        with interruptible():
            yield
    except NoDriverError as error:
        raise PlaceholderError(f"{for_kind}{error}", kind) from error
    except CudaError as error:
        problem = f"{for_kind}{failure}: {explain(error)}"
        raise PlaceholderError(problem, kind, code=error.code) from error


def _start_cuda(kind: str) -> None:
    with _cuda_call("CUDA does not start", kind):
        cuda.start()


def _visible_uuids(kind: str | None) -> tuple[str, ...]:
    with _cuda_call("CUDA does not list its GPUs", kind):
        return cuda.uuids()


def _check_visible(claimed: Mapping[int, str], is_alone: bool, kind: str | None = None) -> None:
    """Check that CUDA shows the claimed GPUs under their numbers, and no others if ``is_alone``.

    Only the hex digits are compared: CUDA does not report the kind of the device, and older drivers
    report the GPU in place of its MIG instance.
    """
    visible = dict(enumerate(_visible_uuids(kind)))
    shown = {ordinal: _digits(uuid) for ordinal, uuid in visible.items()}
    wanted = {ordinal: _digits(uuid) for ordinal, uuid in claimed.items()}
    if shown != wanted if is_alone else not wanted.items() <= shown.items():
        raise PlaceholderError(
            f"claimed was {_numbered(claimed)}, but CUDA shows this process "
            f"{_numbered(visible) or 'no GPU'}: CUDA was initialised before the claim, "
            "CUDA_VISIBLE_DEVICES was changed meanwhile, or a device is denied; claim at the "
            "beginning of the program",
            kind,
            tuple(claimed.values()),
        )


def numbers_of(claimed: Sequence[str], kind: str) -> tuple[int, ...]:
    """CUDA's own numbers of GPUs in this process, where our variables do not set them.

    Args:
        claimed: their UUIDs.
        kind: what is to occupy them.

    Raises:
        PlaceholderError: CUDA does not start, or does not show them.
    """
    _start_cuda(kind)
    seen = [_digits(uuid) for uuid in _visible_uuids(kind)]
    try:
        return tuple(seen.index(_digits(uuid)) for uuid in claimed)
    except ValueError:
        raise PlaceholderError(
            f"CUDA does not show {', '.join(claimed)} to this process: CUDA_VISIBLE_DEVICES was "
            "changed meanwhile, or a device is denied; claim at the beginning of the program",
            kind,
            tuple(claimed),
        ) from None


def _numbered(uuids: Mapping[int, str]) -> str:
    return ", ".join(f"{uuid} as device {ordinal}" for ordinal, uuid in uuids.items())


def _digits(uuid: str) -> str:
    """The hex digits of ``GPU-<digits>``, ``MIG-<digits>`` and ``MIG-GPU-<digits>/1/0``."""
    return uuid.partition("/")[0].replace("MIG-", "").replace("GPU-", "").lower()
