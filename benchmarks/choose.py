"""How long does it take to choose GPUs?

    python benchmarks/choose.py            machines that ship, and made ones of 16 and 32 GPUs

A time is the CPU time of one choice in a warm process, nothing kept from earlier ones: the median
over all sizes of a claim, and the slowest size; of each size the median of several runs. Beside it,
in the same run, all 12870 sets of 8 of 16 GPUs are tried one by one by the first rule alone, which
is what a plain search of the largest machine that is searched exactly would begin with.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from statistics import median

from gpuaff.claims.devices.selection import choose, closeness
from gpuaff.topology.model import Gpu, Topology

SHIPPED = ("dgx-1", "dgx-2", "dgx-a100", "dgx-h100")
WORDS = ("NV4", "NV2", "NV1", "PIX", "PXB", "PHB", "NODE", "SYS")


def main() -> None:
    """Print the times, in milliseconds, and their ratio to the plain search."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=5, help="runs per size (default: 5)")
    runs = parser.parse_args().runs
    plain = _time(lambda: _plain(_mixed(16)), runs)
    print(f"all sets of 8 of 16, one by one: {plain:.1f} ms")
    print(f"{'machine':34}{'GPUs':>5}{'median ms':>11}{'slowest':>9}{'of plain':>10}")
    for name, machine, busy in _machines():
        free = sorted(machine.gpu_by_index.keys() - set(busy))
        times = [_choice(machine, free, count, runs) for count in range(1, len(free))]
        slowest = max(times)
        print(
            f"{name:34}{len(machine.gpus):5}{median(times):11.2f}{slowest:9.2f}"
            f"{slowest / plain:10.3f}",
            flush=True,
        )


def _choice(machine: Topology, free: Sequence[int], count: int, runs: int) -> float:
    return _time(lambda: choose(count, free, topology=machine), runs)


def _time(call: Callable[[], object], runs: int) -> float:
    times = []
    for _ in range(runs):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return 1000 * median(times)


def _plain(machine: Topology) -> object:
    """The best set of half of the GPUs, when only their worst pairs count."""
    table = closeness(machine, range(len(machine.gpus)))
    half = len(table) // 2
    return min(
        (sorted((table[i][j] for i, j in combinations(some, 2)), reverse=True), some)
        for some in combinations(range(len(table)), half)
    )


def _machines() -> Iterator[tuple[str, Topology, Sequence[int]]]:
    """Names, machines, and which GPUs are busy."""
    for name in SHIPPED:
        yield name, Topology.named(name), ()
        yield f"{name}, 1 and 4 busy", Topology.named(name), (1, 4)
    yield "8 bridged pairs", _linked(16, lambda i, j: _nested(i, j, (2,))), ()
    yield "8 bridged pairs, 1 and 4 busy", _linked(16, lambda i, j: _nested(i, j, (2,))), (1, 4)
    yield "switches of 2, 4 and 8", _linked(16, lambda i, j: _nested(i, j, (2, 4, 8))), ()
    yield "links at random", _mixed(16), ()
    yield "a link or none at random", _linked(16, _random(WORDS[::7])), ()
    yield "a cube of four dimensions", _linked(16, _cube), ()
    yield "all joined but a ring: the worst", _linked(16, _ring), ()
    yield "4 islands of 8, 1 and 4 busy", _linked(32, lambda i, j: _nested(i, j, (8,))), (1, 4)
    yield "8 islands of 4, 1 and 4 busy", _linked(32, lambda i, j: _nested(i, j, (4,))), (1, 4)
    yield "switches of 2, 4 and 8", _linked(32, lambda i, j: _nested(i, j, (2, 4, 8))), ()
    yield "links at random", _mixed(32), ()


def _linked(size: int, word: Callable[[int, int], str]) -> Topology:
    words = {pair: word(*pair) for pair in combinations(range(size), 2)}
    return Topology(
        gpus=tuple(Gpu(index=index) for index in range(size)),
        links=tuple(
            tuple(words.get((min(i, j), max(i, j)), "X") for j in range(size)) for i in range(size)
        ),
    )


def _mixed(size: int) -> Topology:
    return _linked(size, _random(WORDS))


def _random(words: Sequence[str]) -> Callable[[int, int], str]:
    draw = random.Random(1)
    return lambda _i, _j: draw.choice(words)


def _nested(i: int, j: int, groups: Sequence[int]) -> str:
    found = (WORDS[place] for place, size in enumerate(groups) if i // size == j // size)
    return next(found, "SYS")


def _cube(i: int, j: int) -> str:
    return "NV1" if (i ^ j).bit_count() == 1 else "SYS"


def _ring(i: int, j: int) -> str:
    return "SYS" if j - i in (1, 15) else "NV1"


if __name__ == "__main__":
    main()
