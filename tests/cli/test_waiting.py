"""What ``gpuaff run --wait`` says while it waits."""

from __future__ import annotations

from gpuaff.claims.model import Waiting
from gpuaff.cli.run import in_words


def test_in_words() -> None:
    reasons = ("GPU 0: leased by train.py (pid 7)", "GPU 1: in use by pid 8")
    waiting = Waiting(position=2, waited=1, wanted=2, free=0, reasons=reasons)
    assert in_words(waiting) == (
        "waiting for 2 GPUs, 2 before us, none free; GPU 0: leased by train.py (pid 7); "
        "GPU 1: in use by pid 8"
    )
    alone = Waiting(position=0, waited=0, wanted=1, free=1)
    assert in_words(alone) == "waiting for 1 GPU, next in line, 1 free"
