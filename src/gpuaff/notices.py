"""Notices: what was not as hoped, and what was done about it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Notice(NamedTuple):
    """One notice.

    Attributes:
        code: for programs: a stable word, e.g. ``near-unknown``, one of ``KINDS``.
        message: for users, in one line: what was found, why, what to try.
        rank: the local rank that it concerns; None when it concerns all.
    """

    code: str
    message: str
    rank: int | None = None

    def to_dict(self) -> dict[str, str]:
        """The notice as JSON has it."""
        return {"code": self.code, "message": self.message}


class Kind(NamedTuple):
    """What holds for every notice of a code."""

    level: str = "warning"  # at which it is logged: or ``info``
    strict: bool = False  # whether ``strict=True`` makes it an error
    once_per_job: bool = False  # all ranks of a job have the same, so only rank 0 logs it


# ``strict`` refuses what leaves a rank elsewhere than planned, or makes it likely that ranks share
# CPUs. Not ``masks-unknown``: launchers that bind mostly bind apart, so that correct jobs would be
# refused. Nor remarks about OpenMP: the process is where it should be when the call returns.
_CODES = {
    Kind(strict=True): """
        bad-rank border-unused cpus-unknown gpus-unknown grant-unpinned mask-cut memory-cut
        memory-none memory-refused near-not-allowed near-unknown no-driver no-gpu no-rank not-linux
        other-machine pin-failed share-inherited threads-refused threads-unseen threads-unsettled
        too-few-cores visible-error visible-none""",
    Kind(strict=True, once_per_job=True): "complex-unknown",
    Kind(once_per_job=True): "cores-across-nodes one-gpu ranks-gpus scope-hint",
    Kind("info"): "mask-narrow nvml off omp-kept omp-quota",
    Kind("info", once_per_job=True): "cores-unknown",
    Kind(): """
        affinity-cut affinity-unknown allowed-absent board-unread border-shared cell-glued
        cell-unreadable claim-unreadable contradiction cores-inferred cpus-partial cpuset
        distances-unknown header-missing ids-dropped imported-again l3-unknown line-unreadable
        links-unknown lscpu-cut lscpu-translated mask-shrunk masks-unknown memory-first
        memory-not-restored near-foreign no-gpus no-sysfs node-dropped nodes-missing numa-ambiguous
        numa-unknown omp-binding omp-late packages-inferred packages-unknown pids-foreign
        pinned-far rank-differs rank-inherited ranks-beside ranks-contradict ranks-stale
        rocm-ignored row-cut rows-missing safe-gpu-unlocked saved-allowed saved-visible
        size-assumed unclaimable uuids-unknown variable-unknown visible-ends visible-lost
        visible-mig visible-order world-unknown""",
}

KINDS = {code: kind for kind, codes in _CODES.items() for code in codes.split()}
"""Every code; each is the anchor of its row in ``docs/warnings.md``."""


def one_reason(notices: Iterable[Notice]) -> list[Notice]:
    """The notices without ``no-gpu`` where another one says why there is no GPU."""
    found = list(notices)
    explained = {"no-driver", "visible-none", "visible-error"} & {notice.code for notice in found}
    return [notice for notice in found if not (explained and notice.code == "no-gpu")]
