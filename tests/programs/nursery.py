"""Forks programs that find everything imported, so one costs milliseconds: see processes.py.

    python nursery.py SOCKET [MODULE …]

Each message on the socket is a program in JSON, with four descriptors: its standard streams, and
a pipe for its exit status; the answer is its process id, with a pidfd. Its fork was never near NVML
or CUDA before, and goes on as ``python -c`` would.
"""

from __future__ import annotations

import atexit
import ctypes.util  # noqa: F401 - for the programs: see above
import gc
import io
import json
import linecache
import logging  # noqa: F401 - likewise
import os
import select
import socket
import sys
import threading
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import Any

import psutil  # noqa: F401 - likewise
import pynvml  # noqa: F401 - likewise

import gpuaff._system.nvml
import gpuaff._system.nvml_prewarm
import gpuaff.claims.acquire
import gpuaff.claims.locking.safe_gpu
import gpuaff.cli.check
import gpuaff.pinning.grant
import gpuaff.pinning.pin
import gpuaff.topology.live  # noqa: F401 - likewise


def wait_for_program(server: socket.socket) -> dict[str, Any] | None:
    """In a fork: the program that it is to be. None: there are no more."""
    children: dict[int, tuple[int, int]] = {}  # by what becomes readable when one ends
    while True:
        for ready in select.select([server.fileno(), *children], [], [])[0]:
            if ready in children:
                pid, status = children.pop(ready)
                os.close(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with suppress(BrokenPipeError):  # the test is not interested
                    os.write(status, str(code).encode())
                os.close(status)
                continue
            message, handles, _, _ = socket.recv_fds(server, 1 << 20, 4)
            if not message:
                return None
            pid = os.fork()
            if pid == 0:
                server.close()
                for handle in (*children, *(status for _, status in children.values())):
                    os.close(handle)
                for number, handle in enumerate(handles[:3]):
                    os.dup2(handle, number)
                for handle in handles:
                    os.close(handle)
                return json.loads(message)  # type: ignore[no-any-return]
            for handle in handles[:3]:
                os.close(handle)
            watch = os.pidfd_open(pid)
            children[watch] = pid, handles[3]
            socket.send_fds(server, [str(pid).encode()], [watch])


def main() -> None:
    """Serve; and in a fork, run the program as the main module."""
    for name in sys.argv[2:]:
        import_module(name)
    gc.collect()
    gc.freeze()
    program = wait_for_program(socket.socket(fileno=int(sys.argv[1])))
    if program is None:
        return
    os.environ.clear()
    os.environ.update(program["env"])
    os.chdir(program["folder"])
    if os.sched_getaffinity(0) != set(program["cpus"]):  # a mask may also name offline CPUs
        os.sched_setaffinity(0, program["cpus"])
    sys.argv[:] = ["-c", *program["arguments"]]
    sys.path[:1] = ["", *program["env"].get("PYTHONPATH", "").split(":")]
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=program["by_lines"])
    lines = program["code"].splitlines(keepends=True)
    linecache.cache["<program>"] = len(program["code"]), None, lines, "<program>"
    module = sys.modules["__main__"] = ModuleType("__main__")
    status = 0
    try:
        exec(compile(program["code"], "<program>", "exec"), module.__dict__)
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        status = end.code or 0
    # Without Python's own end, which touches, and so copies, all pages of the nursery: 50 ms.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status & 0xFF)


if __name__ == "__main__":
    main()
