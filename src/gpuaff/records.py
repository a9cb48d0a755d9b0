"""Frozen records: to readers, type checkers and the functions of :mod:`dataclasses`, dataclasses.

They come from :mod:`gpuaff.lazy_dataclasses`, which does the expensive part only when somebody
asks for it.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dataclasses import dataclass, field, replace
else:
    from gpuaff.lazy_dataclasses import dataclass, field, replace

__all__ = ["dataclass", "field", "replace"]
