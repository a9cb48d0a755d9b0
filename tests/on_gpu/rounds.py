"""Claims that follow each other at once: n + 2 claimers for n GPUs, round after round.

python tests/on_gpu/rounds.py [--rounds 10] [--large MIB]

The winners of a round hold their GPUs until all have answered, and are then killed. The next round
claims without a wait while they are exiting, when the driver lists them still and nobody has
collected them. In each round every GPU must be had. Prints a line of JSON a round; fails if any
round lacks a winner. Without a GPU it runs on the fake driver::

    python tests/fakedriver/make.py this-machine:4 OUTDIR -- python tests/on_gpu/rounds.py
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.on_gpu.claims import SRC, line, start

CLAIMER = """
import mmap, sys
sys.path.insert(0, sys.argv[1])
import gpuaff, gpuaff.claims.acquire
from gpuaff._system.nvml import open_session
with open_session() as session:
    session.look()
large = mmap.mmap(-1, 1 + (int(sys.argv[2]) << 20), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
large.madvise(mmap.MADV_NOHUGEPAGE)  # small pages take longer to give back
for at in range(0, len(large), mmap.PAGESIZE):
    large[at] = 1
print("ready", flush=True)
sys.stdin.readline()
try:
    print("won", gpuaff.claim_gpus(1, wait=0).gpus[0].index, flush=True)
except gpuaff.GpuaffError as error:
    print("lost", error, flush=True)
sys.stdin.readline()
"""

EXITING = 0x4
"""PF_EXITING of include/linux/sched.h."""

Claimer = subprocess.Popen[str]


def claimers(count: int, large: int) -> list[Claimer]:
    """So many, who have imported and loaded what a claim needs."""
    found = [start(CLAIMER, str(SRC), str(large)) for _ in range(count)]
    assert all(line(one) == "ready" for one in found)
    return found


def go_on(process: Claimer) -> None:
    assert process.stdin is not None
    print(file=process.stdin, flush=True)


def exits(process: Claimer) -> bool:
    """Whether a process that was killed has got as far as to exit."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return bool(int(fields[6]) & EXITING)


def one_round(now: list[Claimer]) -> dict[str, Any]:
    """Let them claim at one moment; when all have answered, how it went."""
    start = time.monotonic()
    for claimer in now:
        go_on(claimer)
    said = [line(claimer).split(maxsplit=1) for claimer in now]
    return {
        "winners": sorted(int(rest) for word, rest in said if word == "won"),
        "losers": [rest for word, rest in said if word == "lost"],
        "seconds": round(time.monotonic() - start, 3),
    }


def kill(now: list[Claimer]) -> None:
    """Until all are exiting: not until they have ended."""
    for claimer in now:
        claimer.kill()
    while not all(map(exits, now)):
        pass


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--large", type=int, default=0, help="MiB of memory that a claimer has")
    given = parser.parse_args()
    sys.path.insert(0, str(SRC))
    from gpuaff._system.nvml import open_session

    with open_session() as session:
        gpus = len(session.devices())
    lacking = 0
    before: list[Claimer] = []
    after = claimers(gpus + 2, given.large)
    for number in range(1, given.rounds + 1):
        now, after = after, claimers(gpus + 2, given.large) if number < given.rounds else []
        kill(before)
        told = one_round(now)
        print(json.dumps({"round": number, **told}), flush=True)
        lacking += len(set(told["winners"])) != gpus or len(told["winners"]) != gpus
        for claimer in before:
            claimer.communicate()
        before = now
    kill(before)
    for claimer in before:
        claimer.communicate()
    return 1 if lacking else 0


if __name__ == "__main__":
    sys.exit(main())
