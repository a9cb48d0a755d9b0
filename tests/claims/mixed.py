"""Claimers of ours and users of safe_gpu at the same moment, for few GPUs.

    python mixed.py --theirs 5 --ours 5 --gpus 4 --rounds 20 --seed 1

runs inside the fake driver's environment (``FakeDriver.env(smi=True)``), with the real safe-gpu
and, as its placeholder, what frameworks do. Claimers are forked, so that a round costs no imports.
In each round there is no lock file yet. Prints what came of it as JSON and ends with 1 when a GPU
was lost or two have the same; the driver itself keeps a log of the latter.
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
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

LIMIT = 60.0
"""Seconds within which all of a round must have been told whether they have a GPU."""


def take_theirs(rng: random.Random) -> int:
    import stand_in_cuda
    from safe_gpu import safe_gpu

    safe_gpu.LOCK_FILENAME = os.environ["GPUAFF_SAFE_GPU"]
    safe_gpu.claim_gpus(placeholder_fn=stand_in_cuda.retain, debug_sleep=rng.uniform(0, 0.15))
    return int(safe_gpu.gpu_owner.devices_taken[0])


def take_ours(rng: random.Random) -> int:
    import gpuaff

    placeholder = slowly if rng.random() < 0.5 else "context"
    return gpuaff.claim_gpus(placeholder=placeholder).gpus[0].index


def slowly(number: int) -> None:
    """As a placeholder that is a framework, whose import takes a while."""
    import stand_in_cuda

    time.sleep(0.1)
    stand_in_cuda.retain(number)


def take_by_drop_in(rng: random.Random) -> int:
    import stand_in_cuda

    from gpuaff.compat import safe_gpu

    safe_gpu.claim_gpus(placeholder_fn=stand_in_cuda.retain, debug_sleep=rng.uniform(0, 0.15))
    assert safe_gpu.gpu_owner is not None
    return safe_gpu.gpu_owner.devices_taken[0]


KINDS = {"theirs": take_theirs, "ours": take_ours, "drop-in": take_by_drop_in}


def claimer(kind: str, report: int, gate: int, rng: random.Random) -> None:
    """A child: wait for the start, claim, tell, hold."""
    os.read(gate, 1)
    time.sleep(rng.choice((0, 0, 0.1, 0.2)))
    try:
        said = str(KINDS[kind](rng))
    except RuntimeError as error:
        said = "-"
        if not str(error).startswith(("Required 1 GPUs", "requested 1 GPU; none")):
            said = f"! {type(error).__name__}: {error}"
    except BaseException as error:  # noqa: BLE001 - told to the parent
        said = f"! {type(error).__name__}: {error}"
    os.write(report, f"{os.getpid()} {said[:400]}\n".encode())
    while True:
        signal.pause()


def play(kinds: list[str], gpus: int, rng: random.Random, *, kill: bool) -> dict[str, Any]:
    """One round."""
    reader, report = os.pipe()
    waiting, gate = os.pipe()
    live: dict[int, str] = {}
    for kind in rng.sample(kinds, len(kinds)):
        seed = rng.random()
        pid = os.fork()
        if pid == 0:
            os.close(gate)
            claimer(kind, report, waiting, random.Random(seed))
        live[pid] = kind
    for handle in report, waiting, gate:  # the last one is the start
        os.close(handle)
    told: dict[int, str] = {}
    failures = []
    killed = 0
    buffer = b""
    end = time.monotonic() + LIMIT
    while len(told.keys() & live.keys()) < len(live):
        if time.monotonic() > end:
            failures.append(f"{set(live) - set(told)} are not told: {live}")
            break
        if select.select([reader], [], [], rng.uniform(0, 0.05))[0]:
            buffer += os.read(reader, 1 << 16)
            *lines, buffer = buffer.split(b"\n")
            for line in lines:
                name, _, said = line.decode().partition(" ")
                told[int(name)] = said
                if said.startswith("!"):
                    failures.append(said)
        if kill and killed < len(kinds) // 3 and rng.random() < 0.3:
            killed += 1
            victim = rng.choice(sorted(live))
            os.kill(victim, signal.SIGKILL)
            os.waitpid(victim, 0)
            del live[victim]
    holders = {pid: said for pid, said in told.items() if pid in live and said.isdecimal()}
    if len(set(holders.values())) < len(holders):
        failures.append(f"one GPU for two: {holders}")
    if not kill and len(holders) != gpus:
        failures.append(f"{len(holders)} of {gpus} GPUs were taken")
    winners = Counter(live[pid] for pid in holders)
    for pid in live:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    os.close(reader)
    return {"failures": failures, "winners": winners, "killed": killed}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--theirs", type=int, default=5)
    parser.add_argument("--ours", type=int, default=5)
    parser.add_argument("--drop-in", type=int, default=0)
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kill", action="store_true")
    args = parser.parse_args()
    # Once for all, as long as nothing is looked at.
    for name in "gpuaff.claims.acquire", "gpuaff.compat.safe_gpu", "safe_gpu.safe_gpu":
        import_module(name)
    base = Path(os.environ["GPUAFF_SAFE_GPU"])
    rng = random.Random(args.seed)
    kinds = ["theirs"] * args.theirs + ["ours"] * args.ours + ["drop-in"] * args.drop_in
    failures: list[str] = []
    winners: Counter[str] = Counter()
    killed = 0
    start = time.monotonic()
    for number in range(args.rounds):
        os.environ["GPUAFF_SAFE_GPU"] = str(base.with_name(f"{base.name}-{number}") / "lock")
        made = play(kinds, args.gpus, rng, kill=args.kill)
        winners += made["winners"]
        killed += made["killed"]
        failures += [f"round {number}: {failure}" for failure in made["failures"]]
        if failures:
            break
    print(
        json.dumps(
            {
                "failures": failures,
                "winners": winners,
                "killed": killed,
                "seconds": round(time.monotonic() - start, 1),
            }
        )
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
