"""Errors carry what a caller wants to know, say one line, and pickle."""

from __future__ import annotations

import copy
import errno
import pickle
import threading

import pytest

from gpuaff.errors import (
    AlreadyClaimedError,
    ClaimLostError,
    ClaimTimeoutError,
    CommandError,
    CudaInitializedError,
    GpuaffError,
    GpusBusyError,
    InvalidOptionError,
    LockDirectoryError,
    NoDriverError,
    NotEnoughGpusError,
    PlaceholderError,
    TopologyError,
)

GPUS = ("GPU-1", "GPU-2")

ERRORS: list[tuple[GpuaffError, str, dict[str, object]]] = [
    (NoDriverError("none", "install it"), "none; install it", {"remedy": "install it"}),
    (InvalidOptionError("n", 0, "1 or more"), "n=0: expected 1 or more", {"value": 0}),
    (TopologyError("a.json", "is empty"), "a.json: is empty", {"source": "a.json"}),
    (NotEnoughGpusError(2, 1, "1 is here"), "requested 2 GPUs; 1 is here", {"found": 1}),
    (
        GpusBusyError(1, 0, ("GPU 0: leased",)),
        "requested 1 GPU; none is free\n  GPU 0: leased",
        {"reasons": ("GPU 0: leased",)},
    ),
    (
        ClaimTimeoutError(1.5, GpusBusyError(1, 0, ())),
        "waited 1.5 s: requested 1 GPU; none is free",
        {"waited": 1.5},
    ),
    (CudaInitializedError("late"), "late", {"gpus": ()}),
    (
        ClaimLostError("lost", GPUS, (7, 8), cuda_started=False),
        "lost",
        {"problem": "lost", "gpus": GPUS, "pids": (7, 8), "cuda_started": False},
    ),
    (AlreadyClaimedError("twice", GPUS), "twice", {"gpus": GPUS}),
    (
        PlaceholderError("no room", "torch", GPUS, 2),
        "no room",
        {"problem": "no room", "placeholder": "torch", "gpus": GPUS, "code": 2},
    ),
    (
        LockDirectoryError("/tmp/gpuaff", "is full", errno.ENOSPC),
        "/tmp/gpuaff: is full",
        {"errno": 28, "strerror": "is full", "filename": "/tmp/gpuaff"},
    ),
    (CommandError("a", False, "is missing"), "a: is missing", {"found": False}),
]


@pytest.mark.parametrize(("error", "line", "data"), ERRORS)
def test_what_it_carries(error: GpuaffError, line: str, data: dict[str, object]) -> None:
    for one in (error, pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(one) is type(error)
        assert str(one) == line
        assert {name: getattr(one, name) for name in data} == data
        assert vars(one).keys() == vars(error).keys()


def test_a_value_that_does_not_pickle() -> None:
    lock = threading.Lock()
    error = InvalidOptionError("placeholder", lock, "a name")
    again = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(error))))
    assert type(again) is InvalidOptionError
    assert str(again) == str(error) == f"placeholder={lock!r}: expected a name"
    assert (again.option, again.value, again.expected) == ("placeholder", repr(lock), "a name")
    assert error.value is lock
