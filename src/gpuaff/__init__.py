"""Claim free GPUs, and put each training process on the CPU cores next to its own.

    import gpuaff
    gpuaff.claim_gpus(2)
    gpuaff.set_affinity(local_rank, nproc)

Names are loaded when first used: ``import gpuaff`` costs nothing.
"""

from __future__ import annotations

TYPE_CHECKING = False  # importing typing would double what the import costs
if TYPE_CHECKING:
    from gpuaff._version import __version__
    from gpuaff.allocator.modes import Mode, Multithreading, Partition, Scope
    from gpuaff.allocator.plan import Plan, Share
    from gpuaff.allocator.planner import plan
    from gpuaff.binding.affinity import Affinity, set_affinity
    from gpuaff.checking.check import Check, ThreadCheck, check
    from gpuaff.claims.claim import Claim
    from gpuaff.claims.claimer import claim_gpus, current_claim
    from gpuaff.claims.model import ClaimedGpu, Waiting
    from gpuaff.errors import (
        AlreadyClaimedError, ClaimError, ClaimLostError, ClaimTimeoutError, CudaInitializedError,
        GpuaffError, GPUAffinityError, GpusBusyError, InvalidOptionError, LockDirectoryError,
        NoDriverError, NotEnoughGpusError, PlaceholderError, TopologyError
    )  # fmt: skip
    from gpuaff.notices import Notice
    from gpuaff.topology.model import Topology

_NAMES = {
    "_version": "__version__",
    "allocator.modes": "Mode Multithreading Partition Scope",
    "allocator.plan": "Plan Share",
    "allocator.planner": "plan",
    "binding.affinity": "Affinity set_affinity",
    "checking.check": "Check ThreadCheck check",
    "claims.claim": "Claim",
    "claims.claimer": "claim_gpus current_claim",
    "claims.model": "ClaimedGpu Waiting",
    "errors": "AlreadyClaimedError ClaimError ClaimLostError ClaimTimeoutError GPUAffinityError "
    "CudaInitializedError GpuaffError GpusBusyError InvalidOptionError LockDirectoryError "
    "NoDriverError NotEnoughGpusError PlaceholderError TopologyError",
    "notices": "Notice",
    "topology.model": "Topology",
}
_HOME = {name: f"gpuaff.{home}" for home, names in _NAMES.items() for name in names.split()}
__all__ = list(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'gpuaff' has no attribute {name!r}")
    from importlib import import_module

    return globals().setdefault(name, getattr(import_module(_HOME[name]), name))


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
