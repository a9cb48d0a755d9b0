"""Which part of the granted GPUs is a rank's, where all ranks of the node were granted them. Pure.

Schedulers mostly grant GPUs to all processes of a job on a node: ``claim_gpus("auto")`` in each of
them would give everything to the first. They are cut into blocks, in the order in which CUDA counts
them and by rank: of 8 GPUs for 4 ranks rank 1 has the third and the fourth, of 3 for 2 ranks rank 0
has two. With as many GPUs as ranks, each has that one which :func:`gpuaff.set_affinity` and
``torch.cuda.set_device(local_rank)`` would take. One GPU for each is the least: with fewer no rank
gets any.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpuaff.claims.model import Device
from gpuaff.errors import NotEnoughGpusError
from gpuaff.launch.ranks import Ranks


def portion(ranks: Ranks, count: int) -> slice:
    """The places of a rank's GPUs among so many.

    Raises:
        NotEnoughGpusError: there is not one for each rank.
    """
    if count < ranks.local_size:
        raise NotEnoughGpusError(
            ranks.local_size,
            count,
            f"{count} {'was' if count == 1 else 'were'} granted to the {ranks.local_size} ranks of "
            "this node, and each needs its own: start fewer ranks; or claim once for all of them, "
            "before the launcher (gpuaff run -n auto -- torchrun ...), and claim nothing in the "
            "ranks; if each rank was granted GPUs of its own, say how many: claim_gpus(n)",
        )
    each, more = divmod(count, ranks.local_size)
    first = ranks.local_rank * each + min(ranks.local_rank, more)
    return slice(first, first + each + (ranks.local_rank < more))


def cut(ranks: Ranks, devices: Sequence[Device], count: int) -> tuple[tuple[Device, ...], int]:
    """The devices that come into question for a rank, and how many of them are its.

    Args:
        ranks: this rank, among those that share what was granted.
        devices: all that come into question.
        count: how many were granted. Where there are more devices nobody has said which ones, so
            any will do.
    """
    own = portion(ranks, count)
    named = tuple(devices[own]) if len(devices) == count else tuple(devices)
    return named, own.stop - own.start
