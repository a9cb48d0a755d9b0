"""Among whom granted GPUs are to be divided: the ranks of this node, unless each has its own."""

from __future__ import annotations

from gpuaff.launch import above, gpus, ranks
from gpuaff.launch.claimed import Claimed
from gpuaff.launch.ranks import Ranks
from gpuaff.launch.variables import Get
from gpuaff.system import environ


def observe(*, visible: int, claim: Claimed | None) -> Ranks | None:
    """The ranks that were granted the same GPUs as this process, and its place among them.

    Args:
        visible: how many GPUs come into question, by what CUDA shows and the scheduler names.
        claim: the claim in which this process runs.

    Returns:
        None where all of them are this process's:

        - it is no rank, or the only one of its node;
        - the launcher has given each rank GPUs of its own (:mod:`gpuaff.launch.gpus`);
        - it sees one: a launcher or a wrapper has shown each rank its own, as is often done. If
          all are on the same one after all, the first has it, and the others are told so;
        - the claim around it was made by the rank itself, and not before the launcher.
    """
    here = ranks.ranks()
    found = classify(environ.get, here, visible=visible) if here.is_told else None
    if found is None or claim is None:
        return found
    own = above.own_variables(environ.get, found)
    return None if own and above.carries(claim.pid, own) else found


def classify(get: Get, here: Ranks, *, visible: int) -> Ranks | None:
    """:func:`observe` without a claim, for a rank and an environment from anywhere."""
    if here.local_size == 1 or visible == 1:
        return None
    return here if gpus.classify(get, here, visible=visible) is None else None
