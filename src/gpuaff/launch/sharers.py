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
    found = classify(environ.get, visible=visible)
    if found is None or claim is None or not above.has_variables_of(found, claim.pid):
        return found
    return None


def classify(get: Get, *, visible: int) -> Ranks | None:
    """:func:`observe` without a claim, with an environment from anywhere."""
    found = ranks.launched(get)
    if found is None or found.local_size == 1 or visible == 1:
        return None
    return found if gpus.classify(get, found, visible=visible) is None else None
