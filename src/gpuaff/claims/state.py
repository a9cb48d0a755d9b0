"""What this process remembers of its claim: there is one, or none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gpuaff._system import cuda, kernel
from gpuaff.errors import AlreadyClaimedError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gpuaff.claims.claim import Claim
    from gpuaff.claims.model import ClaimedGpu


class _Memory:
    """The only thing about claims that changes.

    Attributes:
        claim: the claim; None when there is none. A forked child has its parent's.
        latched: the GPUs that CUDA shows for good, since a claim has ended after CUDA had been
            started; None when none was.
        making: has one entry while a claim is being made: by whom. A lock that Ctrl-C catches
            just when it has been taken would stay taken.
    """

    def __init__(self) -> None:
        self.claim: Claim | None = None
        self.latched: tuple[ClaimedGpu, ...] | None = None
        self.making: dict[str, object] = {}


_memory = _Memory()


def _be_another() -> None:
    """In a forked child: nobody is claiming here."""
    _memory.making = {}


kernel.in_forked_child(_be_another)


def current_claim() -> Claim | None:
    """This process's claim; None when it has none.

    A forked child has its parent's (``Claim.is_inherited``), until it makes one of its own.
    """
    return _memory.claim


@contextmanager
def claiming(undo: Undo) -> Iterator[None]:
    """While a claim is made: one at a time.

    Args:
        undo: gets the end of it, as Ctrl-C may come when this is about to end it.

    Raises:
        AlreadyClaimedError: there is one, or one is being made.
    """
    making, me = _memory.making, object()

    def end() -> None:
        if making.get("by") is me:
            making.clear()

    undo.add(end)
    try:
        if making.setdefault("by", me) is not me:  # one step, which no other thread can divide
            raise AlreadyClaimedError(
                "this process is claiming GPUs just now, in another thread or around this call"
            )
        claim = _memory.claim
        if claim is not None and not claim.is_inherited:
            gpus = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in claim.gpus)
            raise AlreadyClaimedError(
                f"this process holds a claim already, of GPU {gpus}: one process has one claim, "
                "as CUDA settles once which GPUs it shows; claim all at once, or release() it",
                tuple(gpu.uuid for gpu in claim.gpus),
            )
        yield
    finally:
        end()


def remember(claim: Claim) -> None:
    """Keep a claim: it lasts even when nobody else keeps it."""
    _memory.claim = claim


def forget(claim: Claim) -> None:
    """A claim is over."""
    if _memory.claim is claim:
        _memory.claim = None


def forget_own() -> None:
    """What this process itself has claimed, if anything, is over."""
    claim = _memory.claim
    if claim is not None and not claim.is_inherited:
        _memory.claim = None


def latched() -> tuple[ClaimedGpu, ...] | None:
    """The GPUs that CUDA shows in this process for good, since a claim that is over."""
    return _memory.latched


def remember_cuda(gpus: tuple[ClaimedGpu, ...]) -> None:
    """Once CUDA was started under a claim, it shows the GPUs of that claim for good."""
    if cuda.is_initialized():
        _memory.latched = gpus


# Ways back: what has been done is noted step by step, and undone in the reverse order.


class Undo:
    """Ways back, until they are taken.

    Ctrl-C may come at any moment, also while they are taken. So each way can be taken twice, and
    is forgotten only when it has come to its end; who must be sure calls the whole twice::

        try:
            undo()
        finally:
            undo()  # nothing, unless Ctrl-C came in the first
    """

    def __init__(self) -> None:
        """None yet; they are this process's, and no forked child's."""
        self._ways: list[Callable[[], object]] = []
        self.pid = kernel.process_id()

    @property
    def is_done(self) -> bool:
        """Whether none is left."""
        return not self._ways

    def add(self, way: Callable[[], object]) -> None:
        """Note a way back; may be taken twice, and before what it undoes has been done."""
        self._ways.append(way)

    def __call__(self) -> None:
        """Take them all, the last one first.

        A forked child that comes here (a callback has forked, and the child has raised) has
        nothing to take back: what it shares is its parent's.

        Raises:
            Exception: what the first has raised that failed, when all have been tried.
        """
        if kernel.process_id() != self.pid:
            return
        failed: Exception | None = None
        while self._ways:
            way = self._ways[-1]
            try:
                way()
            except Exception as error:  # noqa: BLE001 - raised when all have been tried
                failed = failed or error
            if self._ways and self._ways[-1] is way:  # a way may have taken all the others
                del self._ways[-1]
        if failed is not None:
            raise failed
