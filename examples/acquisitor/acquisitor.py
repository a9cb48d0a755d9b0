"""Take GPUs, hold them for a while, and say so. Start several at once: nobody gets another's.

python acquisitor.py --id A --sleep 10 & python acquisitor.py --id B --sleep 10 & wait
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable

import gpuaff

PLACEHOLDERS = {
    "pytorch": "torch",
    "tf": "tensorflow",
    "pycuda": "pycuda",
    "cupy": "cupy",
    "context": "context",
}
"""What occupies a GPU, by the name of the backend."""


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--id", default="A", help="who speaks")
    parser.add_argument("--nb-gpus", type=int, default=1)
    parser.add_argument("--sleep", type=float, default=5, help="seconds to hold the GPUs")
    parser.add_argument("--backend", choices=[*PLACEHOLDERS], default="context")
    parser.add_argument(
        "--explicit-owner-object", action="store_true", help="keep the claim, and release it"
    )
    parser.add_argument(
        "--delay",
        type=float,
        default=0,
        help="seconds between choosing a GPU and occupying it: the time in which others, who only "
        "look, would choose it too (with the backend context)",
    )
    parser.add_argument(
        "--peer",
        choices=["safe_gpu"],
        help="in that time a user of the package safe_gpu starts, who waits for us",
    )
    parser.add_argument("--as-peer", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if (args.delay or args.peer) and args.backend != "context":
        parser.error("--delay and --peer are for the backend context")
    return args


def say(who: str, what: str) -> None:
    """One write, so that lines of several don't run into each other."""
    sys.stdout.write(f"{who}: {what}\n")
    sys.stdout.flush()


def occupy(ordinal: int) -> None:
    """What every framework does at the latest with its first tensor: a primary context."""
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context = ctypes.c_int(), ctypes.c_void_p()
    for code in (
        cuda.cuInit(0),
        cuda.cuDeviceGet(ctypes.byref(device), ordinal),
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
    ):
        if code:
            raise RuntimeError(f"CUDA error {code}")


def slowly(args: argparse.Namespace, peers: list[subprocess.Popen[bytes]]) -> Callable[[int], None]:
    """A placeholder that takes its time."""

    def late(ordinal: int) -> None:
        say(args.id, f"has chosen, and takes {args.delay:g} s to occupy")
        if args.peer and not peers:
            command = [sys.executable, __file__, "--as-peer", "--id", "safe_gpu"]
            # The GPUs that we see are ours alone; who comes from elsewhere has no such variable.
            ours = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "GPUAFF_CLAIM")
            env = {name: value for name, value in os.environ.items() if name not in ours}
            peers.append(subprocess.Popen(command, env=env))
        time.sleep(args.delay)
        occupy(ordinal)

    return late


def be_safe_gpu(who: str) -> None:
    """The peer: the package itself, from PyPI. It knows nothing of gpuaff."""
    from safe_gpu import safe_gpu

    safe_gpu.LOCK_FILENAME = os.environ.get("GPUAFF_SAFE_GPU", safe_gpu.LOCK_FILENAME)
    say(who, "asks")
    start = time.monotonic()
    safe_gpu.claim_gpus(1, placeholder_fn=occupy)
    waited = time.monotonic() - start
    taken = ",".join(map(str, safe_gpu.gpu_owner.devices_taken))
    say(who, f"has GPU {taken} after {waited:.1f} s")


def hold(args: argparse.Namespace, gpus: tuple[gpuaff.ClaimedGpu, ...]) -> None:
    """Say what was taken, and keep it."""
    numbers = ",".join(str(gpu.index) for gpu in gpus)
    say(args.id, f"has GPU {numbers}; CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']}")
    time.sleep(args.sleep)


def main() -> int:
    """Take, hold, give back."""
    args = arguments()
    if args.as_peer:
        be_safe_gpu(args.id)
        return 0
    peers: list[subprocess.Popen[bytes]] = []
    placeholder = slowly(args, peers) if args.delay or args.peer else PLACEHOLDERS[args.backend]
    try:
        if args.explicit_owner_object:
            owner = gpuaff.claim_gpus(args.nb_gpus, placeholder=placeholder)
            hold(args, owner.gpus)
            owner.release()
            say(args.id, "gave it back")
        else:  # nobody need keep the claim: it lasts until the process ends
            gpuaff.claim_gpus(args.nb_gpus, placeholder=placeholder)
            claim = gpuaff.current_claim()
            assert claim is not None
            hold(args, claim.gpus)
    except gpuaff.ClaimError as error:
        say(args.id, f"{type(error).__name__}: {error}")
        return 1
    finally:
        for peer in peers:
            peer.wait()
    return int(any(peer.returncode for peer in peers))


if __name__ == "__main__":
    sys.exit(main())
