"""Primary contexts on the claimed GPUs, and whether CUDA shows those."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

from gpuaff.claims.cuda_trouble import explain
from gpuaff.claims.frameworks import Occupant
from gpuaff.errors import NoDriverError, PlaceholderError
from gpuaff.system.cuda import Contexts, CudaError, start, uuids


def contexts(count: int) -> Occupant:
    """Primary contexts: those that frameworks use, so they cost nothing once one is used.

    Args:
        count: one more than the highest ordinal.
    """
    held = Contexts(count)

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
