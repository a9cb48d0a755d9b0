"""Many claimers for few GPUs at the same moment, killed and stopped at random.

    python race.py --claimers 64 --gpus 8 --rounds 200 --seed 1

runs inside the fake driver's environment (``FakeDriver.env()``). Claimers are forked, so that a
round costs no imports; as root every other one is another user. Prints what came of it as JSON and
ends with 1 when a GPU was lost or held by two; the driver itself keeps a log of the latter.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

NOBODY = 65534
LIMIT = 90.0
"""Seconds within which all GPUs of a round must have been taken."""


@dataclass
class Round:
    """One round: who lives, who is stopped, who has which GPU."""

    rng: random.Random
    live: set[int] = field(default_factory=set)
    stopped: dict[int, float] = field(default_factory=dict)
    holders: dict[int, str] = field(default_factory=dict)
    killed: int = 0
    paused: int = 0
    failures: list[str] = field(default_factory=list)

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        self.live.discard(pid)
        self.stopped.pop(pid, None)
        self.holders.pop(pid, None)
        self.killed += 1

    def stop(self, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        self.stopped[pid] = time.monotonic() + self.rng.uniform(0.01, 0.2)
        self.paused += 1

    def resume(self, *, everyone: bool = False) -> None:
        now = time.monotonic()
        for pid in [pid for pid, at in self.stopped.items() if everyone or at <= now]:
            del self.stopped[pid]
            if self.rng.random() < 0.3:
                self.kill(pid)
            else:
                os.kill(pid, signal.SIGCONT)


def claimer(report: int, number: int, gate: int) -> None:
    """A child: wait for the start, claim, tell, hold."""
    os.read(gate, 1)
    if os.geteuid() == 0 and number % 2:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    import gpuaff

    try:
        claim = gpuaff.claim_gpus(1, wait=None)
        said = claim.gpus[0].uuid
    except BaseException as error:  # noqa: BLE001 - told to the parent
        said = f"! {type(error).__name__}: {error}"
    os.write(report, f"{os.getpid()} {said[:300]}\n".encode())
    while True:
        signal.pause()


def play(claimers: int, gpus: int, rng: random.Random) -> Round:
    made = Round(rng)
    reader, report = os.pipe()
    waiting, gate = os.pipe()
    for number in range(claimers):
        pid = os.fork()
        if pid == 0:
            os.close(gate)
            claimer(report, number, waiting)
        made.live.add(pid)
    os.close(report)
    os.close(waiting)
    os.close(gate)  # the start
    hurt = claimers // 2
    buffer = b""
    end = time.monotonic() + LIMIT
    while hurt or made.stopped or len(made.holders) < gpus:
        if time.monotonic() > end:
            made.failures.append(f"only {len(made.holders)} of {gpus} GPUs were taken in {LIMIT} s")
            break
        if select.select([reader], [], [], rng.uniform(0, 0.02))[0]:
            buffer += os.read(reader, 1 << 16)
            *lines, buffer = buffer.split(b"\n")
            for line in lines:
                who, _, said = line.decode().partition(" ")
                if said.startswith("!"):
                    made.failures.append(said)
                elif int(who) in made.live:
                    made.holders[int(who)] = said
        made.resume()
        if hurt and made.live:
            hurt -= 1
            victim = rng.choice(sorted(made.live))
            if rng.random() < 0.5:
                made.kill(victim)
            elif victim not in made.stopped:
                made.stop(victim)
    if len(set(made.holders.values())) != len(made.holders):
        made.failures.append(f"one GPU for two: {made.holders}")
    made.resume(everyone=True)
    for pid in list(made.live):
        made.kill(pid)
    os.close(reader)
    return made


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--claimers", type=int, default=64)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    sys.path.append(str(Path(__file__).parents[2]))
    from tests.claims.everything import import_all

    import_all()
    rng = random.Random(args.seed)
    start, killed, paused = time.monotonic(), 0, 0
    failures: list[str] = []
    for number in range(args.rounds):
        made = play(args.claimers, args.gpus, rng)
        failures += [f"round {number}: {failure}" for failure in made.failures]
        killed, paused = killed + made.killed - len(made.holders), paused + made.paused
        if failures:
            break
    print(
        json.dumps(
            {
                "rounds": number + 1,
                "killed": killed,
                "stopped": paused,
                "seconds": round(time.monotonic() - start, 1),
                "failures": failures,
            }
        )
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
