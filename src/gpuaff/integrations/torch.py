"""torch's DataLoader: each worker on its part of the rank's cores.

torch is not imported here, but by whoever has made a DataLoader.
"""

from __future__ import annotations

from gpuaff.cpuset import CpuSet
from gpuaff.errors import GPUAffinityError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class WorkerInit:
    """What ``worker_init_fn`` is: a function that takes the rank's share along.

    A worker that is spawned, or that comes from a fork server, knows nothing of its maker but what
    is pickled for it. So the share that is in force is pickled with this.
    """

    def __init__(self, share: CpuSet | None = None) -> None:
        self._share = share

    def __call__(self, worker_id: int) -> None:
        """Put this worker on its part: see :func:`gpuaff.spread`.

        Args:
            worker_id: the worker's number, as the DataLoader passes it.

        Raises:
            GPUAffinityError: this process is no DataLoader's worker.
        """
        from torch.utils.data import get_worker_info

        from gpuaff.pinning.spread import spread_within

        info = get_worker_info()
        if info is None:
            raise GPUAffinityError(
                "worker_init_fn was called outside of a DataLoader's worker, where nobody tells "
                "how many workers there are: pass it to the DataLoader, call it in a function that "
                "is passed, or call gpuaff.spread(worker, workers)"
            )
        spread_within(worker_id, info.num_workers, share=self._share)

    def __reduce__(self) -> tuple[Any, ...]:
        from gpuaff.pinning.state import expected

        share = expected() or self._share
        return WorkerInit, (share and frozenset(share),)


worker_init_fn = WorkerInit()
"""For ``DataLoader(worker_init_fn=…)``: puts each worker on its part of the rank's cores."""
