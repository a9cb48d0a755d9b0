"""Many claimers for few GPUs at the same moment, of ours and of safe_gpu; some are hurt.

    python many.py --ours 64 --gpus 8 --rounds 200 --seed 1 --wait --hurt 32
    python many.py --ours 5 --theirs 5 --gpus 4 --rounds 20

runs inside the fake driver's environment (``FakeDriver.env()``). Claimers are forked, so that a
round costs no imports. With --wait ours wait, as root every other one as another user; else each
tries once, and every round begins without safe_gpu's lock file. Prints what came of it as JSON and
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
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

NOBODY = 65534
LIMIT = 90.0
"""Seconds that a round may take."""


def take_theirs(rng: random.Random, wait: bool) -> int:
    import stand_in_cuda
    from safe_gpu import safe_gpu

    safe_gpu.LOCK_FILENAME = os.environ["GPUAFF_SAFE_GPU"]
    safe_gpu.claim_gpus(placeholder_fn=stand_in_cuda.retain, debug_sleep=rng.uniform(0, 0.15))
    return int(safe_gpu.gpu_owner.devices_taken[0])


def take_ours(rng: random.Random, wait: bool) -> int:
    import gpuaff

    if wait:
        return gpuaff.claim_gpus(wait=None).gpus[0].index
    placeholder = slowly if rng.random() < 0.5 and "stand_in_cuda" in sys.modules else "context"
    return gpuaff.claim_gpus(placeholder=placeholder).gpus[0].index


def slowly(number: int) -> None:
    """As a placeholder that is a framework, whose import takes a while."""
    import stand_in_cuda

    time.sleep(0.1)
    stand_in_cuda.retain(number)


def take_by_drop_in(rng: random.Random, wait: bool) -> int:
    import stand_in_cuda

    from gpuaff.compat import safe_gpu

    safe_gpu.claim_gpus(placeholder_fn=stand_in_cuda.retain, debug_sleep=rng.uniform(0, 0.15))
    assert safe_gpu.gpu_owner is not None
    return safe_gpu.gpu_owner.devices_taken[0]


KINDS = {"ours": take_ours, "theirs": take_theirs, "drop-in": take_by_drop_in}


@dataclass
class Round:
    """One round: who lives, who is stopped, who has which GPU (``-``: none)."""

    rng: random.Random
    wait: bool
    live: set[int] = field(default_factory=set)
    stopped: dict[int, float] = field(default_factory=dict)
    told: dict[int, str] = field(default_factory=dict)
    killed: int = 0
    paused: int = 0
    failures: list[str] = field(default_factory=list)

    def start(self, kinds: list[str]) -> int:
        """Start the claimers, all at the same moment; where they write what they have."""
        reader, self._report = os.pipe()
        self._gate, start = os.pipe()
        for number, kind in enumerate(self.rng.sample(kinds, len(kinds))):
            seed = self.rng.random()
            pid = os.fork()
            if pid == 0:
                os.close(start)
                self._claim(kind, number, random.Random(seed))
            self.live.add(pid)
        for handle in self._report, self._gate, start:
            os.close(handle)
        return reader

    def _claim(self, kind: str, number: int, rng: random.Random) -> None:
        """A child: wait for the start, claim, report, hold."""
        os.read(self._gate, 1)
        if not self.wait:
            time.sleep(rng.choice((0, 0, 0.1, 0.2)))
        elif os.geteuid() == 0 and number % 2:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        try:
            said = str(KINDS[kind](rng, self.wait))
        except BaseException as error:  # noqa: BLE001 - told to the parent
            is_busy = str(error).startswith(("Required 1 GPUs", "requested 1 GPU; none"))
            said = "-" if is_busy and not self.wait else f"! {type(error).__name__}: {error}"
        os.write(self._report, f"{os.getpid()} {said[:300]}\n".encode())
        while True:
            signal.pause()

    @property
    def holders(self) -> list[str]:
        return [said for pid, said in self.told.items() if pid in self.live and said != "-"]

    def play(self, kinds: list[str], gpus: int, hurt: int) -> None:
        lines = self._lines(self.start(kinds))
        end = time.monotonic() + LIMIT
        while (hurt and self.live) or self.stopped or not self._is_over(gpus):
            if time.monotonic() > end:
                self.failures.append(f"{self.holders} of {gpus} GPUs were taken in {LIMIT} s")
                break
            for pid, said in next(lines):
                self.failures += [said] if said.startswith("!") else []
                self.told[pid] = said
            self.resume()
            if hurt and self.live:
                hurt -= 1
                self.hurt(self.rng.choice(sorted(self.live)))
        if len(set(self.holders)) != len(self.holders):
            self.failures.append(f"one GPU for two: {self.holders}")
        if not (self.killed or self.wait) and len(self.holders) != gpus:
            self.failures.append(f"{len(self.holders)} of {gpus} GPUs were taken")
        self.resume(everyone=True)
        for pid in list(self.live):
            self.kill(pid)

    def _is_over(self, gpus: int) -> bool:
        return len(self.holders) == gpus if self.wait else self.live <= self.told.keys()

    def _lines(self, reader: int) -> Iterator[list[tuple[int, str]]]:
        """What claimers report, some milliseconds at a time."""
        buffer = b""
        while True:
            if select.select([reader], [], [], self.rng.uniform(0, 0.02))[0]:
                buffer += os.read(reader, 1 << 16)
            *lines, buffer = buffer.split(b"\n")
            pairs = (line.decode().partition(" ") for line in lines)
            yield [(int(pid), said) for pid, _, said in pairs]

    def hurt(self, victim: int) -> None:
        """Kill it, or stop it for a moment; some are killed then."""
        if self.rng.random() < 0.5:
            self.kill(victim)
            self.killed += 1
        elif victim not in self.stopped:
            os.kill(victim, signal.SIGSTOP)
            self.stopped[victim] = time.monotonic() + self.rng.uniform(0.01, 0.2)
            self.paused += 1

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        self.live.discard(pid)
        self.stopped.pop(pid, None)

    def resume(self, *, everyone: bool = False) -> None:
        now = time.monotonic()
        for pid in [pid for pid, at in self.stopped.items() if everyone or at <= now]:
            del self.stopped[pid]
            if self.rng.random() < 0.3 and not everyone:
                self.kill(pid)
                self.killed += 1
            else:
                os.kill(pid, signal.SIGCONT)


def main() -> int:
    parser = argparse.ArgumentParser()
    for kind in KINDS:
        parser.add_argument(f"--{kind}", type=int, default=0)
    for name, default in {"gpus": 8, "rounds": 20, "seed": 0, "hurt": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--wait", action="store_true")
    args = parser.parse_args()
    sys.path.append(str(Path(__file__).parents[2]))
    from tests.claims.everything import import_all

    import_all()
    counts = {kind: getattr(args, kind.replace("-", "_")) for kind in KINDS}
    if counts["theirs"] or counts["drop-in"]:
        for name in "gpuaff.compat.safe_gpu", "safe_gpu.safe_gpu", "stand_in_cuda":
            import_module(name)
    kinds = [kind for kind, count in counts.items() for _ in range(count)]
    lock = Path(os.environ["GPUAFF_SAFE_GPU"])
    rng, played, failures = random.Random(args.seed), list[Round](), list[str]()
    start = time.monotonic()
    for number in range(args.rounds):
        if str(lock) != "off":
            os.environ["GPUAFF_SAFE_GPU"] = str(lock.with_name(f"{lock.name}-{number}") / "lock")
        played.append(Round(rng, args.wait))
        played[-1].play(kinds, args.gpus, args.hurt)
        failures += [f"round {number}: {failure}" for failure in played[-1].failures]
        if failures:
            break
    seconds = round(time.monotonic() - start, 1)
    killed, paused = (sum(getattr(one, name) for one in played) for name in ("killed", "paused"))
    found = {"rounds": len(played), "killed": killed, "stopped": paused, "seconds": seconds}
    print(json.dumps({**found, "failures": failures}))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
