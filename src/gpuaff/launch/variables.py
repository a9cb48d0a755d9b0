"""The launcher's variables, through whatever gives them: the environment, or a test's dict."""

from __future__ import annotations

from collections.abc import Callable

from gpuaff.cpuset import MAX_CPU_ID

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias

Get: TypeAlias = Callable[[str], "str | None"]
"""Gives a variable's value, None when it is unset: ``system.environ.get``, or a dict's ``get``."""


def number(text: str | None) -> int | None:
    """A number as launchers write it: decimal digits and nothing else, of a size that is meant."""
    if text is None or not (text.isascii() and text.isdecimal()) or len(text) > 9:
        return None
    return int(text) if int(text) <= MAX_CPU_ID else None
