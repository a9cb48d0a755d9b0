"""GPUs that are occupied, until they are released: for programs, too, as text."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from gpuaff.claims.placeholder import occupy


class Occupied:
    def __init__(self, kind: Any, uuids: Sequence[str], **options: Any) -> None:
        with ExitStack() as undo:
            self.held, self.made_context = occupy(kind, uuids, undo, **options)
            self.undo = undo.pop_all()

    def release(self) -> None:
        self.undo.close()
