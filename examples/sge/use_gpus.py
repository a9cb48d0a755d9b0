"""Claim as many GPUs as Grid Engine has counted for this job, and say which."""

from __future__ import annotations

import os
import sys
import time

import gpuaff
from gpuaff.cpuset import format_cpulist

claim = gpuaff.claim_gpus("auto", wait=60)
task = os.environ.get("SGE_TASK_ID", "undefined")
who = "job" if task == "undefined" else f"task {task}"
numbers = ",".join(str(gpu.index) for gpu in claim.gpus)
cpus = format_cpulist(os.sched_getaffinity(0))
bound = os.environ.get("SGE_BINDING")
sys.stdout.write(f"{who}: GPU {numbers}; cpus {cpus}{f' (bound to {bound})' if bound else ''}\n")
sys.stdout.flush()
time.sleep(float(sys.argv[1]) if len(sys.argv) > 1 else 0)  # in the place of training
