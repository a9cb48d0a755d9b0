"""Claiming GPUs. ``claim_gpus`` imports little at first: the driver wakes meanwhile."""

from __future__ import annotations

from contextlib import suppress

from gpuaff._system import descriptors
from gpuaff._system.interrupts import uninterrupted
from gpuaff._system.nvml_prewarm import prewarmed_driver

TYPE_CHECKING = False  # importing typing takes longer than all of this module
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from gpuaff.claims.candidates import VisibleAs
    from gpuaff.claims.claim import Claim
    from gpuaff.claims.model import Waiting
    from gpuaff.claims.placeholder import Placeholder


def claim_gpus(
    n: int | str = 1,
    *,
    placeholder: Placeholder | str | Callable[[int], object] | None = "context",
    wait: float | None = 0,
    gpus: Iterable[int | str] | int | str | None = None,
    candidates: Iterable[int | str] | int | str | None = None,
    min_free_memory: int | None = None,
    max_utilization: int | None = None,
    visible: VisibleAs | str | None = "index",
    pin: bool = False,
    own_is_free: bool = True,
    on_wait: Callable[[Waiting], object] | None = None,
) -> Claim:
    """Claim free GPUs for this process alone, and make only them visible to CUDA.

    Call it at the top of the script, before CUDA is started: ``import torch`` may come before,
    ``torch.cuda.is_available()`` may not. The claim lasts until the process ends, however it ends,
    or until :meth:`Claim.release`::

        claim = gpuaff.claim_gpus(2, wait=3600)
        claim.gpus[0].index  # as nvidia-smi counts
        torch.zeros(1, device="cuda:0")  # on the same GPU

    No other claim through gpuaff gets the same GPU. Other programs see the placeholder's CUDA
    context, as of any running job. Without a context (``placeholder=None``) the claim is exclusive
    among users of gpuaff only, until CUDA starts.

    A claim gets all GPUs that were requested, or raises and leaves everything as it was. Inside a
    claim (in a rank that ``gpuaff run`` or a claiming parent has started) GPUs come from that
    claim, never from the machine.

    Args:
        n: how many; ``"auto"`` is as many as the scheduler has granted. Not needed with ``gpus``.
        placeholder: what occupies each GPU: a CUDA ``"context"``, which frameworks then use;
            ``"torch"``, ``"tensorflow"``, ``"pycuda"``, ``"cupy"``; a function of the device's
            ordinal in this process, whose attribute ``release``, if it has one, is called with its
            result on release; or None.
        wait: how long to wait for GPUs that are busy, in seconds; None is without limit. Waiters
            are served in order: a GPU that an earlier one may choose is kept for it, also from a
            claim that does not wait.
        gpus: exactly these, by index (as nvidia-smi counts), UUID (or the beginning of one) or PCI
            address; CUDA counts them in this order.
        candidates: choose among these; named likewise.
        min_free_memory: bytes of memory that must be free on each.
        max_utilization: the highest recent utilization of each, in percent.
        visible: how ``CUDA_VISIBLE_DEVICES`` is written: by ``"index"`` or by ``"uuid"``, as it
            always is for MIG instances, and beside a GPU that does not respond. None leaves it as
            it is: then use the ordinals of :attr:`Claim.gpus`.
        pin: also put the process on the CPUs that belong to these GPUs, which other claims do not
            use: :func:`set_affinity` then stays inside.
        own_is_free: whether a GPU counts as free on which only this process, its children or its
            parents compute.
        on_wait: called with a :class:`Waiting` when a wait begins, and when its state changes.

    Returns:
        The claim. It lasts even when it is not kept; :func:`current_claim` returns it as well.

    Raises:
        GpusBusyError: they are not free; the message has the holder of each.
        ClaimTimeoutError: they did not become free in time.
        GpuaffError: another reason; the documentation of claims has a table of all errors. What a
            ``placeholder`` function raises comes unchanged.
    """
    arguments = dict(locals())  # all of them, by name
    claim = None
    try:
        with uninterrupted():
            descriptors.make_room()
            by_context = isinstance(placeholder, str) and placeholder == "context"
            with prewarmed_driver(wanted=True, cuda=by_context) as end_prewarm:
                from gpuaff.claims.acquire import acquire

                claim = acquire(arguments, end_prewarm)
        return claim  # noqa: TRY300 - Ctrl-C may come here, too
    except BaseException:  # Ctrl-C at the end of the block: the caller would not have the claim
        if claim is not None:
            with suppress(Exception):
                claim.release()
        raise
