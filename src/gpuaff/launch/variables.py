"""The launcher's variables, through whatever gives them: the environment, or a test's dict."""

from __future__ import annotations

from collections.abc import Callable

from gpuaff.cpuset import MAX_CPU_ID
from gpuaff.options import natural

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias

Get: TypeAlias = Callable[[str], "str | None"]
"""Gives a variable's value, None when it is unset: ``system.environ.get``, or a dict's ``get``."""


def number(text: str | None) -> int | None:
    """A number of ranks or devices as launchers write it; None when it cannot be one."""
    found = natural(text)
    return None if found is None or found > MAX_CPU_ID else found
