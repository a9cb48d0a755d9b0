"""One rank: a process that does what it is told, line by line, and answers."""

from __future__ import annotations

import importlib
import json
import mmap
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.numa_machine.inside.workers import Workers, idle

_PAGE = mmap.PAGESIZE


class Agent:
    """What a rank can be told to do; each method answers with something that JSON holds."""

    def __init__(self) -> None:
        self._affinity: Any = None
        self._kept: list[mmap.mmap] = []
        self._workers = Workers()

    def threads(self, count: int) -> None:
        """Start threads that only wait."""
        idle(count)

    def pin(self, rank: int | None = None, of: int | None = None, **options: Any) -> dict[str, Any]:
        """Call ``set_affinity``; without numbers the launcher's variables tell them."""
        import gpuaff
        from gpuaff.cpuset import format_cpulist

        found: Any = gpuaff.set_affinity(rank, of, **options)
        self._affinity = found
        share = found.plan.share_of(found.rank)
        return {
            "rank": found.rank,
            "cpus": format_cpulist(found),
            "gpu": found.gpu,
            "nodes": list(share.numa_nodes),
            "source": str(share.source),
            "reserved": format_cpulist(share.reserved),
            "pinned": found.pinned,
            "codes": sorted({warning.code for warning in found.warnings}),
        }

    def pin_often(self, rank: int, of: int, times: int) -> list[dict[str, Any]]:
        """Call it again and again, while somebody else changes the machine."""
        return [self.pin(rank, of) for _ in range(times)]

    def pin_while(
        self, rank: int, of: int, writes: list[tuple[str, str]], **options: Any
    ) -> dict[str, Any]:
        """Call it, and write into files after the machine was read and before the mask is set."""
        pin: Any = importlib.import_module("gpuaff.pinning.pin")
        observe = pin.observe
        left = list(writes)

        def read(**asked: Any) -> Any:
            seen = observe(**asked)
            while left:
                path, text = left.pop(0)
                Path(path).write_text(text)
            return seen

        pin.observe = read
        try:
            return self.pin(rank, of, **options)
        finally:
            pin.observe = observe

    def restore(self) -> str:
        """Undo it; the CPUs afterwards."""
        from gpuaff.cpuset import format_cpulist

        return format_cpulist(self._affinity.restore())

    def start_fork_server(self) -> None:
        """Start multiprocessing's."""
        self._workers.start_fork_server()

    def start_workers(self, **what: Any) -> list[dict[str, Any]]:
        """Start worker processes, each of which calls ``spread``; what they say."""
        return self._workers.start(share=self._affinity, **what)

    def tell_workers(self, what: str) -> list[str]:
        """Let each do something; their CPUs afterwards."""
        return self._workers.tell(what)

    def end_workers(self) -> None:
        """Let them end."""
        self._workers.end()

    def touch(self, mib: int, on: list[int] | None = None) -> tuple[int, int]:
        """Write to each page of new memory ``on`` some CPUs; its address, and its size in bytes."""
        import ctypes

        memory = mmap.mmap(-1, mib << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mask = os.sched_getaffinity(0)
        if on is not None:
            os.sched_setaffinity(0, on)
        for place in range(0, len(memory), _PAGE):
            memory[place] = 1
        os.sched_setaffinity(0, mask)
        self._kept.append(memory)
        return ctypes.addressof(ctypes.c_char.from_buffer(memory)), len(memory)


def main() -> None:
    """Tell the process's id, and answer each line of standard input."""
    print(os.getpid(), flush=True)
    agent = Agent()
    for line in sys.stdin:
        asked = json.loads(line)
        do: Callable[..., Any] = getattr(agent, asked.pop("do"))
        try:
            answer = do(**asked)
        except Exception as error:  # noqa: BLE001 - whatever it is, the test is to see it
            answer = {"raised": type(error).__name__, "text": str(error)}
        print(json.dumps(answer), flush=True)
