"""Claims on a machine with GPUs; run by hand there, since CI has none.

python tests/on_gpu/claims.py OUTDIR [--times 7] [--peer FOLDER_OF_SAFE_GPU]

Measures what a claim costs beside the bare driver, torch and safe_gpu, lets more claimers race than
there are GPUs, puts real strangers onto GPUs, and fails on the first thing that is not as the
README says. What it prints goes into ``docs/real-machine.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

SRC = Path(__file__).resolve().parents[2] / "src"

FLOOR = """
import ctypes
nvml, cuda = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.CDLL("libcuda.so.1")
def must(code): assert code == 0, code
def context(gpu, alone=False):
    if alone:  # CUDA starts faster when it sees one GPU only, as it does after a claim
        import os
        os.environ["CUDA_VISIBLE_DEVICES"], gpu = str(gpu), 0
    must(nvml.nvmlInit_v2())
    must(cuda.cuInit(0))
    device, made = ctypes.c_int(), ctypes.c_void_p()
    must(cuda.cuDeviceGet(ctypes.byref(device), gpu))
    must(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(made), device))
"""
SAFE = "from safe_gpu import safe_gpu; safe_gpu.claim_gpus(1)"
OURS = "import gpuaff; gpuaff.claim_gpus(1)"
TENSOR = "import torch; torch.zeros(1, device='cuda')"


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def seconds(command: Sequence[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start


def compare(commands: dict[str, list[str]], times: int) -> dict[str, float]:
    """Medians, in turns; the first turn is not counted."""
    taken: dict[str, list[float]] = {name: [] for name in commands}
    for turn in range(times + 1):
        for name, command in commands.items():
            taken[name].append(seconds(command))
            if turn == 0:
                taken[name].clear()
    return {name: statistics.median(values) for name, values in taken.items()}


def start(program: str, *arguments: str) -> subprocess.Popen[str]:
    command = [*python(program), *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ready(program: str) -> subprocess.Popen[str]:
    """Start a program that says that it is ready."""
    process = start(program)
    assert line(process) == "ready"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


HOLD = "\nimport sys, time; print('ready', flush=True); sys.stdin.read()"

RACER = """
import sys, time
begin = float(sys.argv[1])
{imports}
while time.time() < begin: pass
try:
    {claim}
    print("won", time.time() - begin, flush=True)
except RuntimeError:
    print("lost", time.time() - begin, flush=True)
sys.stdin.read()
"""


FLOOR_RACER = f"""
import sys, time
{FLOOR}
begin = float(sys.argv[1])
while time.time() < begin: pass
context(int(sys.argv[2]), alone=True)
print(time.time() - begin, flush=True)
sys.stdin.read()
"""


def contest(program: str, arguments: Sequence[Sequence[str]]) -> list[list[str]]:
    """Start a process with each of these arguments at one moment; the words that each says."""
    begin = str(time.time() + 2.0)
    racers = [start(program, begin, *words) for words in arguments]
    said = [line(racer).split() for racer in racers]
    for racer in racers:
        end(racer)
    time.sleep(1)
    return said


def race(count: int, claim: str, imports: str = "") -> tuple[list[float], list[float]]:
    """Start so many processes at one moment: when each has won, or was told that it has lost.

    Starting Python is not counted: each says when it is done after the common start.
    """
    said = contest(RACER.format(imports=imports, claim=claim), [()] * count)
    times = {word: sorted(float(at) for w, at in said if w == word) for word in ("won", "lost")}
    return times["won"], times["lost"]


def check_costs(times: int, report: dict[str, Any]) -> None:
    programs = {
        "python": "pass",
        "floor, all visible": FLOOR + "context(0)",
        "floor": FLOOR + "context(0, alone=True)",
        "claim": OURS,
        "claim without context": "import gpuaff; gpuaff.claim_gpus(1, placeholder=None)",
        "torch": TENSOR,
        "claim + torch": f"{OURS}; {TENSOR}",
        "safe_gpu": SAFE,
    }
    costs = compare({name: python(program) for name, program in programs.items()}, times)
    report["costs"] = {name: round(value, 3) for name, value in costs.items()}
    report["claim / floor"] = round(costs["claim"] / costs["floor"], 2)
    report["claim + torch / torch"] = round(costs["claim + torch"] / costs["torch"], 2)


def check_look(report: dict[str, Any]) -> None:
    """What looking and leasing cost beside NVML's own calls, in a process that is warm."""
    program = """
import time, statistics, gpuaff
from gpuaff.claims import acquire
from gpuaff._system.nvml import open_session
with open_session() as keep:
    keep.devices(); keep.look(utilization=False)
    def ours():
        gpuaff.claim_gpus(1, placeholder=None).release()
    def nvml():
        with open_session() as s:
            s.devices(); s.links(); s.look(utilization=False)
    took = {}
    for f in (ours, nvml):
        f()
        all = []
        for _ in range(30):
            t = time.perf_counter(); f(); all.append(time.perf_counter() - t)
        took[f.__name__] = statistics.median(all) * 1e3
    print(took["ours"], took["nvml"])
"""
    ours, nvml = map(float, subprocess.check_output(python(program), text=True).split())
    report["claim and release, warm, ms"] = round(ours, 2)
    report["the same looks alone, ms"] = round(nvml, 2)


def check_race(gpus: int, report: dict[str, Any], *, peer: bool) -> None:
    count = gpus + gpus // 2
    contexts = [[str(gpu)] for gpu in range(gpus)]
    floors = [max(float(at) for [at] in contest(FLOOR_RACER, contexts)) for _ in range(3)]
    report["floor: contexts at once"] = round(statistics.median(floors), 3)
    lasts, told = [], []
    for _ in range(3):
        won, lost = race(count, "gpuaff.claim_gpus(1)", "import gpuaff")
        assert (len(won), len(lost)) == (gpus, count - gpus), (won, lost)
        lasts.append(won[-1])
        told.append(lost[-1])
    report["last winner"] = [round(value, 3) for value in lasts]
    report["losers told"] = [round(value, 3) for value in told]
    report["last winner / floor"] = round(statistics.median(lasts) / statistics.median(floors), 2)
    if peer:
        won, lost = race(
            count, "safe_gpu.claim_gpus(1)", "import logging; from safe_gpu import safe_gpu"
        )
        report["safe_gpu: winners"] = [round(value, 1) for value in won]
        report["safe_gpu: losers told"] = [round(value, 1) for value in lost]


def claim_in_child(call: str) -> str:
    """What a claim in another process says: GPUs, or its error."""
    program = f"""
import gpuaff
try:
    print([gpu.index for gpu in {call}.gpus])
except gpuaff.GpuaffError as error:
    print(type(error).__name__, error)
"""
    return subprocess.check_output(python(program), text=True).strip()


LEASE_AS_NOBODY = """
import os, fcntl
os.setgroups([]); os.setgid(65534); os.setuid(65534)
lease = os.open("/sys/bus/pci/devices/{address}", os.O_RDONLY)
fcntl.flock(lease, fcntl.LOCK_EX)
"""


def address_of(gpu: int) -> str:
    command = ["nvidia-smi", "--query-gpu=pci.bus_id", "--format=csv,noheader"]
    address = subprocess.check_output(command, text=True).split()[gpu]
    return address.lower().removeprefix("0000")


def check_strangers(gpus: int, report: dict[str, Any]) -> None:
    """Real processes of others: a bare context, torch, another user's lease."""
    bare = ready(FLOOR + "context(0)" + HOLD)
    torch = ready("import torch; x = torch.zeros(1, device='cuda:1')" + HOLD)
    seen = claim_in_child(f"gpuaff.claim_gpus({gpus})")
    assert seen.startswith("GpusBusyError"), seen
    report["busy"] = seen
    if gpus > 2:
        assert claim_in_child("gpuaff.claim_gpus(1)") == "[2]"
        another = ready(LEASE_AS_NOBODY.format(address=address_of(2)) + HOLD)
        assert claim_in_child("gpuaff.claim_gpus(1)") == "[3]"
        end(another)
    for one in (bare, torch):
        end(one)


def check_waiting(gpus: int, report: dict[str, Any]) -> None:
    """How long after its end, or release, a waiter has the GPU: leased, and with a context."""
    waiter = """
import gpuaff, time, sys
class Told:
    def __call__(self, waiting): print('waits', flush=True)
claim = gpuaff.claim_gpus({gpus}, wait=None, on_wait=Told(), placeholder={kind})
print(time.time(), flush=True)
sys.stdin.read()
"""
    holder = """
import gpuaff, time, sys
claim = gpuaff.claim_gpus({gpus}, placeholder={kind})
print('ready', flush=True)
sys.stdin.readline()
start = time.time()
claim.release()
print(start, time.time(), flush=True)
sys.stdin.read()
"""

    def release(first: subprocess.Popen[str]) -> float:
        assert first.stdin is not None
        print(file=first.stdin, flush=True)
        return float(line(first).split()[1])

    def kill(first: subprocess.Popen[str]) -> float:
        now = time.time()
        os.kill(first.pid, signal.SIGKILL)
        return now

    def lateness(held: str, wanted: str, over: Callable[[subprocess.Popen[str]], float]) -> float:
        first = ready(holder.format(gpus=gpus, kind=held))
        second = start(waiter.format(gpus=gpus, kind=wanted))
        assert line(second) == "waits"
        time.sleep(0.3)
        released = over(first)
        while (said := line(second)) == "waits":
            pass
        end(first)
        end(second)
        time.sleep(0.5)
        return round(float(said) - released, 3)

    for kind in ("None", "'context'"):
        late = [lateness(kind, kind, release) for _ in range(5)]
        report[f"waiter after release(), placeholder={kind}, s"] = late
    late = [lateness("'context'", "None", kill) for _ in range(5)]
    report["waiter after SIGKILL of a context's holder, s"] = late


def check_release(report: dict[str, Any]) -> None:
    program = """
import os, gpuaff
from gpuaff._system.nvml import open_session
def used():
    with open_session() as session:
        return [(r.used >> 20, sorted(r.compute or ())) for r in session.look(utilization=False)]
before = used()
claim = gpuaff.claim_gpus(1)
held = used()
assert os.getpid() in held[claim.gpus[0].index][1], held
claim.release()
after = used()
assert os.getpid() not in sum((pids for _, pids in after), []), after
again = gpuaff.claim_gpus(1)
assert again.gpus[0].uuid == claim.gpus[0].uuid
import torch
x = torch.ones(3, device="cuda")
assert torch.cuda.device_count() == 1 and float(x.sum()) == 3
print(before, held, after, used())
"""
    report["MiB used and pids: before, held, after, torch"] = subprocess.check_output(
        python(program), text=True
    ).strip()


RANK = """
import os, gpuaff
claim = gpuaff.claim_gpus(1)
import torch, torch.distributed as dist
dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
total = torch.ones(1, device="cuda:0"); dist.all_reduce(total)
pinned = gpuaff.set_affinity(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
from gpuaff.cpuset import format_cpulist
print("rank", os.environ["LOCAL_RANK"], "GPU", claim.gpus[0].index, "sum", int(total), "CPUs",
      format_cpulist(pinned), [w.code for w in pinned.warnings], flush=True)
dist.destroy_process_group()
"""


def ran(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)


def check_run(folder: Path, gpus: int, report: dict[str, Any]) -> None:
    """The README's command: a stranger is on GPU 0, two jobs run beside it."""
    script = folder / "train.py"
    script.write_text(RANK)
    gpuaff = [sys.executable, "-m", "gpuaff"]
    stranger = ready(FLOOR + "context(0)" + HOLD)
    count = 2 if gpus > 2 else 1
    job = [
        *gpuaff, "run", "-n", str(count), "--",
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count), str(script),
    ]  # fmt: skip
    done = ran(*job)
    assert done.returncode == 0, done.stdout + done.stderr
    report["run"] = sorted(text for text in done.stdout.splitlines() if text.startswith("rank"))
    holder = subprocess.Popen([*gpuaff, "run", "-n", "1", "--", "sleep", "60"])
    time.sleep(2)
    report["status"] = subprocess.check_output([*gpuaff, "status"], text=True).splitlines()
    busy = ran(*gpuaff, "run", "-n", str(gpus), "--", "true")
    assert busy.returncode == 75, busy
    report["run, busy"] = busy.stderr.strip()
    over = ran(*gpuaff, "run", "-n", "99", "--", "true")
    assert over.returncode == 4, over
    holder.kill()
    holder.wait()
    end(stranger)
    plain, ours = ["true"], [*gpuaff, "run", "--no-pin", "--", "true"]
    nvml = python(
        "from gpuaff._system.nvml import open_session\n"
        "with open_session() as s: s.devices(); s.look(utilization=False)"
    )
    costs = compare(
        {"true": plain, "run": ours, "nvml": nvml, "pinned": [*gpuaff, "run", "--", "true"]}, 7
    )
    report["run: costs"] = {name: round(value, 3) for name, value in costs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--times", type=int, default=7)
    parser.add_argument("--only", default="costs,look,race,strangers,waiting,release,run")
    parser.add_argument("--peer", action="store_true", help="race with safe_gpu, too")
    args = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(SRC), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    args.out.mkdir(parents=True, exist_ok=True)
    gpus = len(subprocess.check_output(["nvidia-smi", "-L"], text=True).splitlines())
    report: dict[str, Any] = {"gpus": gpus}
    parts: dict[str, Callable[[], None]] = {
        "costs": lambda: check_costs(args.times, report),
        "look": lambda: check_look(report),
        "race": lambda: check_race(gpus, report, peer=args.peer),
        "strangers": lambda: check_strangers(gpus, report),
        "waiting": lambda: check_waiting(gpus, report),
        "release": lambda: check_release(report),
        "run": lambda: check_run(args.out, gpus, report),
    }
    failed = []
    for name in args.only.split(","):
        begin = time.monotonic()
        try:
            parts[name]()
        except BaseException as error:  # noqa: BLE001 - the other parts are to be seen as well
            failed.append(f"{name}: {type(error).__name__}: {error}")
        report[f"({name})"] = f"{time.monotonic() - begin:.0f} s"
    report["failed"] = failed
    (args.out / "claims.json").write_text(json.dumps(report, indent=1))
    print(json.dumps(report, indent=1))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
