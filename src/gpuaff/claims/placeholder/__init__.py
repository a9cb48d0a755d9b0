"""What occupies a claimed GPU, so that others see that it is taken.

Those who know nothing of gpuaff see only contexts: the driver lists the processes that have one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from enum import Enum

from gpuaff._system.cuda import Contexts, CudaError, is_initialized, start, uuids
from gpuaff.claims.placeholder.cuda_errors import explain
from gpuaff.claims.placeholder.frameworks import Occupant, load, one_line
from gpuaff.errors import InvalidOptionError, NoDriverError, PlaceholderError
from gpuaff.options import suggestion

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias

# Primary contexts on the claimed GPUs, and whether CUDA shows those.


def contexts() -> Occupant:
    """Primary contexts: those that frameworks use, so they cost nothing once one is used."""
    held = Contexts()

    def finish() -> None:
        # It fails after a fault of the job's own, which the job has been told of, and at exit.
        with suppress(CudaError):
            held.release()

    return Occupant(make=held.retain, finish=finish)


def start_cuda(kind: str) -> None:
    """Initialise CUDA.

    Args:
        kind: what is to occupy GPUs.

    Raises:
        PlaceholderError: it does not start.
    """
    asked = f"placeholder={kind!r}"
    try:
        start()
    except NoDriverError as error:
        raise PlaceholderError(f"{asked}: {error}", kind) from error
    except CudaError as error:
        why = f"CUDA does not start: {explain(error)}"
        raise PlaceholderError(f"{asked}: {why}", kind, code=error.code) from error


def check_visible(claimed: Mapping[int, str], *, alone: bool, kind: str | None = None) -> None:
    """Whether CUDA shows the claimed GPUs under the numbers that they have.

    Only the hex digits are compared: CUDA does not tell what kind of device they belong to, and
    older drivers tell the GPU in place of its MIG instance.

    Args:
        claimed: their UUIDs, by CUDA's numbers.
        alone: whether it must show no others.
        kind: what is to occupy them; None is a function.

    Raises:
        PlaceholderError: it shows others, or does not tell.
    """
    try:
        seen = uuids()
    except NoDriverError as error:
        raise PlaceholderError(str(error), kind) from error
    except CudaError as error:
        why = f"CUDA does not tell its GPUs: {explain(error)}"
        raise PlaceholderError(why, kind, code=error.code) from error
    shown = {ordinal: _digits(uuid) for ordinal, uuid in enumerate(seen)}
    wanted = {ordinal: _digits(uuid) for ordinal, uuid in claimed.items()}
    if shown == wanted or (not alone and wanted.items() <= shown.items()):
        return
    raise PlaceholderError(
        f"claimed was {_numbered(claimed)}, but CUDA shows this process "
        f"{_numbered(dict(enumerate(seen))) or 'no GPU'}: CUDA was initialised before the claim, "
        "CUDA_VISIBLE_DEVICES was changed meanwhile, or a device is denied; claim at the "
        "beginning of the program",
        kind,
        tuple(claimed.values()),
    )


def numbers_of(claimed: Sequence[str], kind: str) -> tuple[int, ...]:
    """CUDA's own numbers of GPUs in this process, where nobody has told it which to show.

    Args:
        claimed: their UUIDs.
        kind: what is to occupy them.

    Raises:
        PlaceholderError: CUDA does not start, or does not show them.
    """
    start_cuda(kind)
    try:
        seen = [_digits(uuid) for uuid in uuids()]
        return tuple(seen.index(_digits(uuid)) for uuid in claimed)
    except (NoDriverError, CudaError) as error:
        code = error.code if isinstance(error, CudaError) else None
        raise PlaceholderError(f"CUDA does not tell its GPUs: {error}", kind, code=code) from error
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


class Placeholder(str, Enum):
    """What occupies a claimed GPU. Wherever one is taken, its string is taken as well."""

    CONTEXT = "context"
    """The GPU's primary context, which frameworks then use. The default."""
    TORCH = "torch"
    """A tensor of torch's."""
    TENSORFLOW = "tensorflow"
    """A tensor of TensorFlow's."""
    PYCUDA = "pycuda"
    """A context of pycuda's own, not current."""
    CUPY = "cupy"
    """An array of CuPy's."""

    def __str__(self) -> str:
        return str(self.value)


Kind: TypeAlias = Placeholder | Callable[[int], object] | None
"""What occupies GPUs; None: nothing does."""


def kind_of(value: object, *, option: str = "placeholder") -> Kind:
    """Read what was asked for.

    Args:
        value: a member of :class:`Placeholder`, its string, a function, or None.
        option: what the option is called where it was said.

    Raises:
        InvalidOptionError: it is none of these, or a function whose ``release`` is none.
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
        made_context: whether CUDA is initialised in this process since. Then the GPUs that it sees
            are settled for good, also after the release.
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
            # In one call, which puts each result into the list before it enters the next function:
            # no signal handler can come between a placeholder and its being remembered.
            self._held.extend(map(self._occupant.make, ordinals))

    def release(self) -> None:
        """Let all go, the last one first; a second call does nothing.

        Raises:
            BaseException: what a placeholder's own release has raised, after all were tried.
        """
        if self._occupant is None:
            return
        failed: BaseException | None = None
        try:
            while self._held:
                error = self._release_last(self._occupant)
                if failed is None or isinstance(error, KeyboardInterrupt):
                    failed = error
        finally:
            self._occupant.finish()
        if failed is not None:
            raise failed

    def _release_last(self, occupant: Occupant) -> BaseException | None:
        try:
            occupant.release(self._held.pop())
        except BaseException as error:  # noqa: BLE001 - raised when all have been tried
            return error
        return None


def occupy(
    kind: Kind,
    expected_uuids: Sequence[str],
    *,
    ordinals: Sequence[int] | None = None,
    note: Callable[[Callable[[], object]], object] | None = None,
) -> Occupied:
    """Occupy the claimed GPUs, all or none.

    With None nothing is touched, not even CUDA. With one of ours CUDA is initialised first, and
    must show the claimed GPUs; with a function that is looked at afterwards, if it has
    initialised CUDA.

    Args:
        kind: what occupies them.
        expected_uuids: the claimed GPUs.
        ordinals: CUDA's numbers of these; None: 0, 1 … in their order, and CUDA shows no others.
        note: given the way back (:meth:`Occupied.release`) before anything is occupied: Ctrl-C may
            come before the caller has what is returned.

    Raises:
        PlaceholderError: one of ours failed, or CUDA shows other GPUs than the claimed ones.
        BaseException: a function raised it, or Ctrl-C came. Whatever is raised, what was occupied
            has been released; but CUDA, once initialised, stays so.
    """
    if kind is None:
        return Occupied()
    claimed = dict(zip(ordinals or range(len(expected_uuids)), expected_uuids, strict=True))
    occupant = _occupant(kind, claimed, alone=ordinals is None)
    occupied = Occupied(occupant)
    if note is not None:
        note(occupied.release)
    try:
        occupied.take(claimed)
        occupied.made_context = is_initialized() is True
        if occupied.made_context and not isinstance(kind, Placeholder):
            check_visible(claimed, alone=ordinals is None)
        return occupied  # noqa: TRY300 - Ctrl-C may come here, too
    except BaseException:
        with suppress(Exception):  # the first error tells more
            occupied.release()
        raise


def _occupant(
    kind: Placeholder | Callable[[int], object], claimed: Mapping[int, str], *, alone: bool
) -> Occupant:
    if not isinstance(kind, Placeholder):
        release = getattr(kind, "release", None)
        return Occupant(make=kind) if release is None else Occupant(make=kind, release=release)
    ours = kind is Placeholder.CONTEXT
    occupant = contexts() if ours else load(str(kind))
    start_cuda(str(kind))
    check_visible(claimed, alone=alone, kind=str(kind))

    def make(ordinal: int) -> object:
        try:
            return occupant.make(ordinal)
        except Exception as error:  # a framework may raise anything
            said = explain(error) if isinstance(error, CudaError) else one_line(error)
            asked = f"placeholder={str(kind)!r} could not occupy {claimed[ordinal]}"
            raise PlaceholderError(
                f"{asked} (CUDA device {ordinal}): {said}",
                str(kind),
                (claimed[ordinal],),
                error.code if isinstance(error, CudaError) else None,
            ) from error

    return replace(occupant, make=make)
