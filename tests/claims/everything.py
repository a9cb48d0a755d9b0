"""All that a claim may import, imported once: for forked children, which need not pay for it."""

from __future__ import annotations

import importlib
import pkgutil

import gpuaff

_LEFT_OUT = ("gpuaff.__main__", "gpuaff.cli", "gpuaff.compat")


def import_all() -> None:
    """Also for those of other users, who may not be able to read our files, or Python's."""
    for name in ("ctypes.util", "json", "logging", "psutil", "pynvml", "random", "typing"):
        importlib.import_module(name)
    for module in pkgutil.walk_packages(gpuaff.__path__, "gpuaff."):
        if not module.name.startswith(_LEFT_OUT):
            importlib.import_module(module.name)
