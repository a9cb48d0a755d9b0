"""The environment variables: the only module that reads and writes them."""

from __future__ import annotations

import os


def get(name: str) -> str | None:
    """A variable's value; None when it is unset. Set but empty is ``""``."""
    return os.environ.get(name)  # not bound once: tests replace os.environ


def names(prefix: str) -> list[str]:
    """The names of the variables that begin so, in order."""
    return sorted(name for name in os.environ if name.startswith(prefix))


def put(name: str, value: str | None) -> None:
    """Set a variable for this process, its C libraries and its children; None unsets it."""
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def option(name: str) -> str | None:
    """The value of ``GPUAFF_<NAME>`` without blanks; None when it is unset or empty."""
    return (get(f"GPUAFF_{name.upper()}") or "").strip() or None


def fsroot() -> str | None:
    """``GPUAFF_FSROOT``: a folder that holds another machine's ``sys/`` and ``proc/``."""
    return get("GPUAFF_FSROOT") or None


def wants_driver() -> bool:
    """Whether the NVIDIA driver will be asked, as far as the environment shows early."""
    # Not with ``GPUAFF=…`` (it may be switched off), nor where another machine is described
    return get("GPUAFF") is None and fsroot() is None
