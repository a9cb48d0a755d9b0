"""What each process of a test's job does: it claims, pins, tells what it saw, and stays.

python rank.py FOLDER [claim=N] [pin | pin=RANK,SIZE]

RANK and SIZE are numbers, or variables that hold them. It writes FOLDER/<pid>.json, and ends when
FOLDER/end is there.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def main(place: str, *words: str) -> None:
    folder = Path(place)
    told: dict[str, Any] = {"environ": dict(os.environ), "before": sorted(os.sched_getaffinity(0))}
    try:
        told |= act(dict(word.partition("=")[::2] for word in words))
    except Exception as error:  # noqa: BLE001 - the test judges it
        told["error"] = f"{type(error).__name__}: {error}"
    draft = folder / f"{os.getpid()}.draft"
    draft.write_text(json.dumps(told))
    draft.rename(draft.with_suffix(".json"))
    ends = time.monotonic() + 60
    while not (folder / "end").exists() and time.monotonic() < ends:
        time.sleep(0.05)


def act(words: dict[str, str]) -> dict[str, Any]:
    import gpuaff

    told: dict[str, Any] = {}
    if "claim" in words:
        count = words["claim"]
        claim = gpuaff.claim_gpus(int(count) if count.isdecimal() else count)
        told["claim"] = [gpu.index for gpu in claim.gpus]
    if "pin" in words:
        held = [word for word in words["pin"].split(",") if word]
        numbers = [int(word if word.isdecimal() else os.environ[word]) for word in held]
        affinity = gpuaff.set_affinity(*numbers)
        told |= {
            "gpu": affinity.gpu,
            "rank": affinity.rank,
            "codes": [notice.code for notice in affinity.warnings],
        }
    return told


if __name__ == "__main__":
    main(*sys.argv[1:])
