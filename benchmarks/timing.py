"""Time whole processes: they are started in turns, so that noise hits all alike."""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """What a process cost, in milliseconds."""

    wall: float
    cpu: float


def once(command: Sequence[str], env: Mapping[str, str]) -> Cost:
    """Run a command and measure it; it must succeed."""
    before, start = os.times(), time.perf_counter()
    subprocess.run(command, env=dict(env), check=True, stdout=subprocess.DEVNULL)
    wall, after = time.perf_counter() - start, os.times()
    used = after.children_user + after.children_system
    used -= before.children_user + before.children_system
    return Cost(wall=wall * 1e3, cpu=used * 1e3)


def compare(
    commands: Mapping[str, Sequence[str]], *, times: int, env: Mapping[str, str]
) -> dict[str, Cost]:
    """The medians of each command; one unmeasured turn warms the caches and compiles.

    Installed packages are compiled, so the sources that we run from are to be as well.
    """
    env = {name: value for name, value in env.items() if name != "PYTHONDONTWRITEBYTECODE"}
    costs: dict[str, list[Cost]] = {name: [] for name in commands}
    for turn in range(times + 1):
        for name, command in commands.items():
            cost = once(command, env)
            if turn:
                costs[name].append(cost)
    return {
        name: Cost(
            wall=statistics.median(cost.wall for cost in taken),
            cpu=statistics.median(cost.cpu for cost in taken),
        )
        for name, taken in costs.items()
    }


def show(costs: Mapping[str, Cost], base: str) -> None:
    """Print the medians and their ratios to one of them."""
    for name, cost in costs.items():
        ratios = f"{cost.wall / costs[base].wall:.2f} wall, {cost.cpu / costs[base].cpu:.2f} CPU"
        print(f"{name:30} {cost.wall:7.1f} ms wall {cost.cpu:7.1f} ms CPU   {ratios} of {base}")
