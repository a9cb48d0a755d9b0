"""Put each training process on its own share of the CPU cores next to its GPU.

    import gpuaff
    gpuaff.set_affinity(local_rank, nproc)

Names are loaded when they are first used, so that ``import gpuaff`` costs nothing.
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
    from gpuaff.errors import (  # fmt: skip
        GpuaffError,
        GPUAffinityError,
        InvalidOptionError,
        NoDriverError,
        TopologyError,
    )
    from gpuaff.notices import Notice
    from gpuaff.topology.model import Topology

__all__ = [
    "Affinity", "Check", "GPUAffinityError", "GpuaffError", "InvalidOptionError", "Mode",
    "Multithreading", "NoDriverError", "Notice", "Partition", "Plan", "Scope", "Share",
    "ThreadCheck", "Topology", "TopologyError", "__version__", "check", "plan", "set_affinity",
]  # fmt: skip

_NAMES = {
    "_version": "__version__",
    "allocator.modes": "Mode Multithreading Partition Scope",
    "allocator.plan": "Plan Share",
    "allocator.planner": "plan",
    "binding.affinity": "Affinity set_affinity",
    "checking.check": "Check ThreadCheck check",
    "errors": "GPUAffinityError GpuaffError InvalidOptionError NoDriverError TopologyError",
    "notices": "Notice",
    "topology.model": "Topology",
}
_HOME = {name: f"gpuaff.{home}" for home, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'gpuaff' has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
