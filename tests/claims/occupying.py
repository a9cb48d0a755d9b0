"""GPUs that are occupied, until they are released: for programs, too, as text."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from gpuaff.claims.placeholder import occupy


class Occupied:
    def __init__(
        self, kind: Any, uuids: Sequence[str], ordinals: Sequence[int] | None = None
    ) -> None:
        claimed = dict(zip(ordinals or range(len(uuids)), uuids, strict=True))
        with ExitStack() as undo:
            self.held = occupy(kind, claimed, undo, are_alone=ordinals is None)
            self.undo = undo.pop_all()

    def release(self) -> None:
        self.undo.close()
