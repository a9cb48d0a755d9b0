"""Names that moved to :mod:`gpuaff._system.nvml_records` and :mod:`gpuaff._system.nvml`."""

from __future__ import annotations

from gpuaff._system.nvml import Session as UsageSession
from gpuaff._system.nvml_records import ComputeMode, Device, DeviceReading, LeftOut

__all__ = ["ComputeMode", "Device", "DeviceReading", "LeftOut", "UsageSession"]
