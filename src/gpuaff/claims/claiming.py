"""``claim_gpus``: a few imports first, while the driver wakes."""

from __future__ import annotations

TYPE_CHECKING = False  # importing typing takes longer than all of this module
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from gpuaff.claims.claim import Claim
    from gpuaff.claims.model import Waiting
    from gpuaff.claims.placeholder import Placeholder
    from gpuaff.claims.request import VisibleAs


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
    """Take free GPUs for this process alone, and make only them visible to CUDA.

    Call it at the top of the script, before CUDA is started: ``import torch`` may come before,
    ``torch.cuda.is_available()`` may not. The GPUs are this process's until it ends, however it
    ends, or until :meth:`Claim.release`::

        claim = gpuaff.claim_gpus(2, wait=3600)
        claim.gpus[0].index  # as nvidia-smi counts
        torch.zeros(1, device="cuda:0")  # on the same GPU

    Nobody who claims through gpuaff ever gets the same GPU. All others see the placeholder's CUDA
    context, as they see any running job; users of safe_gpu look for that, and do not choose while
    we do. Without a context (``placeholder=None``) the claim is exclusive among gpuaff's users
    only, until CUDA starts.

    A GPU is free when nobody has leased it, no other process computes on it, its memory is not in
    use by somebody who cannot be seen, and its compute mode lets us in; the documentation tells the
    rules. Processes that draw do not count.

    A claim is never best effort: it gives all that was asked for, or raises and leaves everything
    as it was. Inside a claim (a rank that ``gpuaff run`` or a claiming parent has started) GPUs
    come from that claim, and never from the machine.

    Args:
        n: how many; ``"auto"`` is as many as the scheduler has granted. ``gpus=`` tells it too.
        placeholder: what occupies each GPU: a CUDA ``"context"``, which frameworks then use;
            ``"torch"``, ``"tensorflow"``, ``"pycuda"``, ``"cupy"``; a function of the device's
            ordinal in this process, whose attribute ``release``, if it has one, is called with its
            result on release; or None.
        wait: how long to wait for GPUs that are busy, in seconds; None is without limit. Waiters
            are served in order: a GPU that an earlier one may choose is kept for it, also from a
            claim with 0.
        gpus: exactly these, by index (as nvidia-smi counts), UUID (or the beginning of one) or PCI
            address; CUDA counts them in this order.
        candidates: some of these; named likewise.
        min_free_memory: bytes of memory that must be free on each.
        max_utilization: percent that none may have been busier than lately.
        visible: how ``CUDA_VISIBLE_DEVICES`` is written: by ``"index"``, with
            ``CUDA_DEVICE_ORDER=PCI_BUS_ID``, or by ``"uuid"``, as MIG instances always are, and
            all GPUs beside one that does not respond. None leaves it as it is: then use the
            ordinals that :attr:`Claim.gpus` tells.
        pin: also put the process on the CPUs that belong to these GPUs, where other claims do not
            come: what is called later (:func:`set_affinity`) stays inside.
        own_is_free: whether a GPU counts as free on which only this process, its children or its
            parents compute.
        on_wait: called with a :class:`Waiting` when a wait begins, and when it has moved on.

    Returns:
        The claim. It lasts even when it is not kept; :func:`current_claim` returns it as well.

    Raises:
        InvalidOptionError: an argument cannot be meant, or names a GPU that is not there.
        NoDriverError: NVML cannot be used here.
        NotEnoughGpusError: fewer exist, or may be had, than are asked for.
        GpusBusyError: they are not free; the message tells who has them.
        ClaimTimeoutError: they have not become free in time.
        CudaInitializedError: CUDA is initialised in this process already.
        AlreadyClaimedError: this process has a claim.
        ClaimLostError: a stranger has come onto the GPU meanwhile; start the process again.
        PlaceholderError: a GPU could not be occupied. A function's own error is raised unchanged.
        LockDirectoryError: somebody has spoiled the files by which claims are coordinated.
        ClaimError: ``GPUAFF_CLAIM`` tells of a claim that is over.
    """
    from gpuaff._system import descriptors
    from gpuaff._system.nvml_prewarm import waking_driver

    before = descriptors.in_hand()
    undo = None
    by_context = isinstance(placeholder, str) and placeholder == "context"
    try:
        descriptors.make_room()
        with waking_driver(wanted=True, cuda=by_context) as let_rest:
            from gpuaff.claims.acquire import make
            from gpuaff.claims.state import Undo

            undo = Undo()
            claim = make(
                n,
                undo=undo,
                placeholder=placeholder,
                pin=pin,
                own_is_free=own_is_free,
                on_wait=on_wait,
                let_rest=let_rest,
                arguments={
                    "gpus": gpus,
                    "candidates": candidates,
                    "min_free_memory": min_free_memory,
                    "max_utilization": max_utilization,
                    "wait": wait,
                    "visible": visible,
                },
            )
        descriptors.keep(before)
    except BaseException:  # Ctrl-C while the driver is let go: nobody would have what was made
        try:
            if undo is not None:
                try:
                    undo()
                finally:
                    undo()  # Ctrl-C may have come in the first
        finally:
            descriptors.drop(before)
        raise
    return claim


def current_claim() -> Claim | None:
    """The claim that this process holds; None when it holds none.

    A forked child has its parent's (``Claim.is_inherited``) until it makes one of its own.
    """
    from gpuaff.claims.state import current_claim

    return current_claim()
