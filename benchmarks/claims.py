"""Claims and waiting on the fake driver: is all that is told kept, and what does it cost?

    python benchmarks/claims.py              everything, some minutes
    python benchmarks/claims.py --rounds 10  a short race

Each line has a number, what it may be at the most, and their ratio. The fake driver answers in
microseconds, so this is what gpuaff adds; what the real one takes is for a real machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

TESTS = Path(__file__).parent.parent / "tests"
sys.path[0] = str(TESTS.parent)

from gpuaff.topology.model import Topology  # noqa: E402 - found there only
from tests.claims.crowd import Crowd, open_to_all, serve  # noqa: E402 - likewise
from tests.fakedriver.play import this_machine  # noqa: E402 - likewise

USERS: tuple[int, ...] = (0, 54321, 54322) if os.geteuid() == 0 else (0,)


def main() -> None:
    """Print the numbers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=200, help="rounds of the race (default: 200)")
    parser.add_argument(
        "--turns", type=int, default=20, help="turns of what is timed (default: 20)"
    )
    parser.add_argument("--seconds", type=float, default=10, help="for how long CPU is measured")
    args = parser.parse_args()
    print(f"{'':62}{'measured':>10}{'allowed':>10}{'ratio':>8}")
    _look_and_lease()
    _hand_overs(args.turns)
    _eight_at_once(args.turns)
    _idle(args.seconds)
    _two_hundred()
    _race(args.rounds)


def _tell(what: str, measured: float, allowed: float, unit: str) -> None:
    ratio = f"{measured / allowed:8.2f}" if allowed else ""
    print(f"{what:62}{measured:7.2f} {unit:2}{allowed:7.2f} {unit:2}{ratio}", flush=True)


# ---- look and lease --------------------------------------------------------------------------

_COSTS = """
import json, statistics, time
import gpuaff
from gpuaff._system.nvml import open_session
from gpuaff._system.nvml_prewarm import prewarmed_driver

def ask():
    with prewarmed_driver(wanted=True) as end_prewarm, open_session() as session:
        end_prewarm()
        session.look()
        session.look()

calls = {
    "asking": ask,
    "one": lambda: gpuaff.claim_gpus(gpus=[3], placeholder=None).release(),
    "eight": lambda: gpuaff.claim_gpus(8, placeholder=None).release(),
}
times = {name: [] for name in calls}
for _ in range(150):
    for name, call in calls.items():  # in turns, so that noise hits all alike
        start = time.perf_counter()
        call()
        times[name].append(time.perf_counter() - start)
print(json.dumps({name: 1000 * statistics.median(taken[10:]) for name, taken in times.items()}))
"""


def _look_and_lease() -> None:
    """The same questions to NVML with and without a claim around them, in a warm process."""
    with open_to_all(Topology.named("dgx-a100")) as of:
        found = json.loads(of.driver.run(_COSTS, env=of.variables).stdout)
    asking = found["asking"]
    for what in ("one", "eight"):
        name = f"a claim of {what} and its release, over NVML's {asking:.1f} ms"
        _tell(name, found[what] - asking, 3, "ms")


# ---- from one claim to the next ----------------------------------------------------------------


def _hand_overs(turns: int) -> None:
    for name, way, allowed in (
        ("release()", _released, 250),
        ("SIGKILL of the holder", _killed, 250),
        ("the end of a child that shares the lease", _child_ended, 250),
        ("the end of a process without a lease", _stranger_ended, 250),
        ("SIGKILL of the first in line, and a GPU is free", _first_killed, 250),
        ("SIGSTOP of the first in line, and a GPU is free", _first_stopped, 1000),
    ):
        times = sorted(_times(way, turns))
        _tell(f"served after {name}, median", median(times), allowed, "ms")
        _tell(f"{'':9}the slowest of {len(times)}", times[-1], allowed, "ms")


def _eight_at_once(turns: int) -> None:
    """All GPUs are freed at the same time to eight waiters that want any: the last one's wait."""
    with open_to_all(Topology.named("dgx-a100")) as of:
        times = []
        for turn in range(turns):
            of.start(f"a{turn}", 8, wait=None)
            of.until(f"a{turn}", "has")
            waiters = [f"b{turn}-{place}" for place in range(8)]
            for who in waiters:
                of.waits(who)
            time.sleep(1.3)
            started = time.monotonic()
            of.tell(f"a{turn}", "release")
            times.append(1000 * max(of.until(who, "has")["at"] - started for who in waiters))
            for who in waiters:
                of.kill(who)
    _tell("the last of eight GPUs freed at once is had, median", median(times), 500, "ms")
    _tell(f"{'':9}the slowest of {len(times)}", max(times), 500, "ms")


def _times(way: Callable[[Crowd, int], float], turns: int) -> Iterator[float]:
    with open_to_all(this_machine(1)) as of:
        for turn in range(turns):
            started = way(of, turn)
            yield 1000 * (of.until(f"b{turn}", "has")["at"] - started)
            of.kill(f"b{turn}")


def _ready(of: Crowd, turn: int) -> None:
    """One holds the GPU, and another waits for it."""
    of.start(f"a{turn}", wait=None)  # who was killed before may be dying still
    of.until(f"a{turn}", "has")
    of.waits(f"b{turn}")
    time.sleep(1.3)  # until it looks again only once a second


def _released(of: Crowd, turn: int) -> float:
    _ready(of, turn)
    started = time.monotonic()
    of.tell(f"a{turn}", "release")
    return started


def _killed(of: Crowd, turn: int) -> float:
    _ready(of, turn)
    started = time.monotonic()
    of.kill(f"a{turn}")
    return started


def _child_ended(of: Crowd, turn: int) -> float:
    _ready(of, turn)
    of.tell(f"a{turn}", "fork")
    child = of.until(f"a{turn}", "forked")["child"]
    of.kill(f"a{turn}")
    time.sleep(1.3)
    started = time.monotonic()
    os.kill(child, signal.SIGKILL)
    return started


def _stranger_ended(of: Crowd, turn: int) -> float:
    with subprocess.Popen(["sleep", "60"]) as stranger:
        of.driver.use(0, stranger.pid)
        of.start(f"b{turn}", wait=None)
        of.until(f"b{turn}", "waits")
        time.sleep(1.3)
        started = time.monotonic()
        stranger.kill()
    return started


def _first_killed(of: Crowd, turn: int) -> float:
    """The first waits for what the GPU does not do; the next would take it as it is."""
    of.driver.set_utilization(0, 90)
    of.waits(f"a{turn}", max_utilization=10)
    of.waits(f"b{turn}")
    time.sleep(0.3)
    started = time.monotonic()
    of.kill(f"a{turn}")
    return started


def _first_stopped(of: Crowd, turn: int) -> float:
    """Likewise, but the first is stopped, and killed in the next turn."""
    if turn:
        of.kill(f"a{turn - 1}")
    of.driver.set_utilization(0, 90)
    of.waits(f"a{turn}", max_utilization=10)
    of.waits(f"b{turn}")
    time.sleep(0.3)
    started = time.monotonic()
    of.kill(f"a{turn}", signal.SIGSTOP)
    return started


# ---- while nothing happens -------------------------------------------------------------------


def _idle(seconds: float) -> None:
    with open_to_all(Topology.named("dgx-a100")) as of, subprocess.Popen(["sleep", "999"]) as one:
        of.holds("holder", 4)
        for gpu in range(4, 8):
            of.driver.use(gpu, one.pid)
        whom = {
            "the first in line, all wanted are leased": of.waits("a", gpus=[0, 1, 2, 3])["pid"],
            "the first in line, four GPUs are used by strangers": of.waits("b", gpus=[4, 5, 6, 7])[
                "pid"
            ],
        }
        whom["behind one"] = of.waits("c", gpus=[0])["pid"]
        for place in range(30):
            whom["behind thirty"] = of.waits(f"d{place}", gpus=[0])["pid"]
        time.sleep(3)
        before = {name: _cpu(pid) for name, pid in whom.items()}
        time.sleep(seconds)
        for name, pid in whom.items():
            _tell(f"CPU, {name}", 100 * (_cpu(pid) - before[name]) / seconds, 1, "%")
        one.kill()
    with open_to_all(Topology.named("dgx-a100")) as of:
        of.holds("holder", 8)
        pids = [of.waits(f"w{place}")["pid"] for place in range(200)]
        time.sleep(6)
        start = sum(map(_cpu, pids))
        time.sleep(max(seconds, 30))
        share = 100 * (sum(map(_cpu, pids)) - start) / max(seconds, 30)
        _tell("CPU, 200 waiters together", share, 2, "%")


def _cpu(pid: int) -> float:
    """Seconds that all threads of a process have run, as the scheduler counts them."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


# ---- many ------------------------------------------------------------------------------------


def _two_hundred() -> None:
    rng = random.Random(1)
    wishes = {f"w{place}": 4 if rng.random() < 0.3 else 1 for place in range(200)}
    killed = rng.sample(sorted(wishes), 40)
    with open_to_all(Topology.named("dgx-a100")) as of:
        start = time.monotonic()
        served = serve(of, wishes, killed, USERS)
        seconds = time.monotonic() - start
    print(
        f"200 waiters, 1 or 4 of 8 GPUs, {len(USERS)} users, {len(killed)} killed: {served} served "
        f"in order, {seconds:.1f} s with their starts"
    )


def _race(rounds: int) -> None:
    with open_to_all(Topology.named("dgx-a100")) as of:
        done = of.driver.run(
            [
                *(sys.executable, str(TESTS / "claims/many.py"), "--wait"),
                *("--ours=64", "--hurt=32", f"--rounds={rounds}"),
            ],
            env=of.variables,
            check=False,
            timeout=3600,
        )
        doubles = len(of.driver.double_holdings())
    if not done.stdout:
        raise SystemExit(done.stderr)
    found = json.loads(done.stdout)
    print(
        f"64 claimers for 8 GPUs, {found['rounds']} rounds: {doubles} double holdings, "
        f"{len(found['failures'])} failures {found['failures']}, {found['killed']} killed, "
        f"{found['stopped']} stopped, {found['seconds'] / found['rounds']:.2f} s a round"
    )


if __name__ == "__main__":
    main()
