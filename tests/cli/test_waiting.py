"""What ``gpuaff run --wait`` says while it waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from gpuaff.claims.model import Waiting
from gpuaff.cli.run import Reporter, in_words


def standing(position: int = 0, **others: Any) -> Waiting:
    return Waiting(position=position, waited=1.0, wanted=2, free=0, **others)


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[[], list[str]]:
    """The places in the line that were said since it was last asked."""

    def heard() -> list[str]:
        lines = capsys.readouterr().err.splitlines()
        return [line.split(", ")[1] for line in lines]

    return heard


def test_the_first_is_said_at_once(said: Callable[[], list[str]]) -> None:
    with closing(Reporter(60)) as tell:
        tell(standing(3))
        assert said() == ["3 before us"]


def test_not_too_often(said: Callable[[], list[str]]) -> None:
    with closing(Reporter(60)) as tell:
        for position in (3, 2, 1):
            tell(standing(position))
        assert said() == ["3 before us"]
    assert said() == []


def test_the_latest_is_said_later(said: Callable[[], list[str]]) -> None:
    heard: list[str] = []
    with closing(Reporter(0.2)) as tell:
        for position in (3, 2, 1):
            tell(standing(position))
        end = time.monotonic() + 20
        while "1 before us" not in heard and time.monotonic() < end:
            heard += said()
            time.sleep(0.01)
    assert heard[0] == "3 before us"
    assert heard[-1] == "1 before us"


def test_without_threads_all_is_said(
    said: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit of processes (``ulimit -u``) is no reason not to wait."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with closing(Reporter(60)) as tell:
        tell(standing(2))
        tell(standing(1))
        assert said() == ["2 before us", "1 before us"]


def test_after_a_pause_it_is_said_at_once(said: Callable[[], list[str]]) -> None:
    with closing(Reporter(0.01)) as tell:
        tell(standing(1))
        assert said() == ["1 before us"]
        time.sleep(0.2)
        assert said() == [], "nothing has changed"
        tell(standing(0))
        assert said() == ["next in line"]


def test_nothing_is_said_when_it_is_over(said: Callable[[], list[str]]) -> None:
    with closing(Reporter(0.05)) as tell:
        tell(standing(2))
        tell(standing(1))
        said()
    time.sleep(0.2)
    assert said() == []


def test_in_words() -> None:
    reasons = ("GPU 0: leased by train.py (pid 7)", "GPU 1: in use by pid 8")
    assert in_words(standing(2, reasons=reasons)) == (
        "waiting for 2 GPUs, 2 before us, none free; GPU 0: leased by train.py (pid 7); "
        "GPU 1: in use by pid 8"
    )
    alone = Waiting(position=0, waited=0, wanted=1, free=1)
    assert in_words(alone) == "waiting for 1 GPU, next in line, 1 free"
