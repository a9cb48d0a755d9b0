"""A name that moved to :mod:`gpuaff._system.nvml_records`."""

from __future__ import annotations

from gpuaff._system.nvml_records import pci_address

__all__ = ["pci_address"]
