"""torch's DataLoader: each worker on its part of the rank's cores.

torch is imported when a worker calls this, not here.
"""

from __future__ import annotations

from typing import Any

from gpuaff.cpuset import CpuSet
from gpuaff.errors import GPUAffinityError
from gpuaff.pinning.spread import spread_within
from gpuaff.pinning.state import remembered


class WorkerInit:
    """The type of ``worker_init_fn``: a function that is pickled with the rank's share.

    A worker that is spawned, or comes from a fork server, knows of its parent only what is pickled
    for it.
    """

    def __init__(self, share: CpuSet | None = None) -> None:
        self._share = share

    def __call__(self, worker_id: int) -> None:
        """Pin this worker, as the DataLoader numbers it, to its part: see :func:`gpuaff.spread`.

        Raises:
            GPUAffinityError: this process is no worker of a DataLoader.
        """
        from torch.utils.data import get_worker_info

        info = get_worker_info()
        if info is None:
            raise GPUAffinityError(
                "worker_init_fn was called outside of a DataLoader's worker, where the number of "
                "workers is unknown: pass it to the DataLoader, call it in a function that is "
                "passed, or call gpuaff.spread(worker, workers)"
            )
        spread_within(worker_id, info.num_workers, share=self._share)

    def __reduce__(self) -> tuple[Any, ...]:
        state = remembered()
        share = (state and state.in_force) or self._share
        return WorkerInit, (share and frozenset(share),)


worker_init_fn = WorkerInit()
"""For ``DataLoader(worker_init_fn=…)``: pins each worker to its part of the rank's cores."""
