"""Claim free GPUs, and put each training process on the CPU cores next to its own.

import gpuaff
gpuaff.claim_gpus(2)
gpuaff.set_affinity(local_rank, nproc)
"""

from __future__ import annotations

__version__ = "0.1.0"

TYPE_CHECKING = False  # importing typing would double what the import costs
if TYPE_CHECKING:
    from gpuaff.allocator.model import Mode, Multithreading, Partition, Plan, Scope, Share
    from gpuaff.allocator.plan import plan
    from gpuaff.claims import claim_gpus
    from gpuaff.claims.claim import Claim, current_claim
    from gpuaff.claims.model import ClaimedGpu, Waiting
    from gpuaff.errors import *
    from gpuaff.launch import Launcher
    from gpuaff.launch.ranks import Ranks, ranks
    from gpuaff.notices import Notice
    from gpuaff.pinning import set_affinity
    from gpuaff.pinning.check import Check, ThreadCheck, check
    from gpuaff.pinning.restore import Affinity
    from gpuaff.pinning.spread import spread
    from gpuaff.topology.model import Topology

__all__ = [
    "Affinity", "AlreadyClaimedError", "Check", "Claim", "ClaimError", "ClaimLostError",
    "ClaimTimeoutError", "ClaimedGpu", "CudaInitializedError", "GPUAffinityError", "GpuaffError",
    "GpusBusyError", "InvalidOptionError", "Launcher", "LockDirectoryError", "Mode",
    "Multithreading", "NoDriverError", "NotEnoughGpusError", "Notice", "Partition",
    "PlaceholderError", "Plan", "Ranks", "Scope", "Share", "ThreadCheck", "Topology",
    "TopologyError", "Waiting", "__version__", "check", "claim_gpus", "current_claim", "plan",
    "ranks", "set_affinity", "spread",
]  # fmt: skip

_NAMES = {  # each is loaded when it is first used, so that ``import gpuaff`` costs nothing
    "allocator.model": "Mode Multithreading Partition Plan Scope Share",
    "allocator.plan": "plan", "claims": "claim_gpus",
    "claims.claim": "Claim current_claim", "claims.model": "ClaimedGpu Waiting",
    "launch.ranks": "Ranks ranks", "launch": "Launcher", "notices": "Notice",
    "pinning": "set_affinity", "pinning.check": "Check ThreadCheck check",
    "pinning.restore": "Affinity", "pinning.spread": "spread", "topology.model": "Topology",
}  # fmt: skip
_HOME = {name: f"gpuaff.{home}" for home, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'gpuaff' has no attribute {name!r}")
    from importlib import import_module

    home = import_module(_HOME.get(name, "gpuaff.errors"))
    return globals().setdefault(name, getattr(home, name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
