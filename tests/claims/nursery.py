"""Forks programs that find everything imported: so one costs milliseconds. See claim_lab.py.

    python nursery.py SOCKET

Each message on the socket is a program in JSON, with four descriptors: its standard streams, and
where it tells that it has come to its end. It runs in a fork of its own, which was never near
NVML or CUDA before.
"""

from __future__ import annotations

import ctypes.util  # noqa: F401 - for the programs: see above
import io
import json
import logging  # noqa: F401 - likewise
import os
import signal
import socket
import sys
import traceback
from typing import Any

import psutil  # noqa: F401 - likewise
import pynvml  # noqa: F401 - likewise

import gpuaff._system.nvml
import gpuaff.claims.acquire
import gpuaff.claims.locking.safe_gpu
import gpuaff.pinning.grant
import gpuaff.topology.live  # noqa: F401 - likewise

_HIGH = 300
"""Where the descriptor for the end is put: out of the way."""


def wait_for_program(server: socket.socket) -> tuple[dict[str, Any], int] | None:
    """In a fork: the program that it is to be, and where to tell of its end."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # whoever ends is gone
    while True:
        message, handles, _, _ = socket.recv_fds(server, 1 << 20, 4)
        if not message:
            return None
        pid = os.fork()
        if pid == 0:
            server.close()
            for number, handle in enumerate(handles[:3]):
                os.dup2(handle, number)
            os.dup2(handles[3], _HIGH, inheritable=False)
            for handle in handles:
                os.close(handle)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return json.loads(message), _HIGH
        for handle in handles:
            os.close(handle)
        server.send(str(pid).encode())


def main() -> int:
    found = wait_for_program(socket.socket(fileno=int(sys.argv[1])))
    if found is None:
        return 0
    program, end = found
    for name, value in program["env"].items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)
    me = os.getpid()
    try:
        exec(compile(program["code"], "<program>", "exec"), {"__name__": "__main__"})
        said = b"0"
    except BaseException:  # noqa: BLE001 - told to whoever has sent the program
        traceback.print_exc()
        said = b"1"
    sys.stdout.flush()
    if os.getpid() == me:
        os.write(end, said)
    return int(said)


if __name__ == "__main__":
    sys.exit(main())
