"""What programs that occupy GPUs begin with (claims/test_placeholder.py)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from gpuaff._system import nvml
from gpuaff.claims.placeholder import kind_of, occupy
from gpuaff.errors import PlaceholderError


class Occupied:
    """GPUs that are occupied, until they are released."""

    def __init__(
        self, kind: Any, uuids: Sequence[str], ordinals: Sequence[int] | None = None
    ) -> None:
        claimed = dict(zip(ordinals or range(len(uuids)), uuids, strict=True))
        with ExitStack() as undo:
            self.held = occupy(kind_of(kind), claimed, undo, are_alone=ordinals is None)
            self.undo = undo.pop_all()

    def release(self) -> None:
        self.undo.close()


def on_gpus() -> list[int]:
    """On which GPUs the driver lists this process."""
    with nvml.open_session() as session:
        return [one.device.index for one in session.look() if os.getpid() in (one.compute or {})]


def refused(*arguments: Any, **options: Any) -> PlaceholderError:
    try:
        Occupied(*arguments, **options)
    except PlaceholderError as error:
        return error
    raise AssertionError("it was not refused")
