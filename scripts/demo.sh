#!/usr/bin/env bash
# The main job, from nothing: install gpuaff, plan for a DGX A100, and pin two ranks here: next to
# this machine's GPUs, or, where it has none, on a fake driver (needs a C compiler).
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/venv.sh
install -e '.[cli]'

echo '$ gpuaff plan --from dgx-a100 --nproc 8'
gpuaff plan --from dgx-a100 --nproc 8

two_ranks() {
  if python -c 'import torch' 2>/dev/null; then # another environment's torchrun has no gpuaff
    python -m torch.distributed.run --nproc-per-node 2 examples/pin.py
  else # what torchrun gives its ranks
    LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 python examples/pin.py &
    LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 python examples/pin.py
    wait $! # and fails if rank 0 has failed
  fi
}

echo
if [ -e /proc/driver/nvidia/gpus ]; then
  echo "two ranks on this machine's GPUs:"
else
  echo 'two ranks on a fake driver with two GPUs:'
  fake=$(mktemp -d)
  trap 'rm -rf "$fake"' EXIT
  eval "$(python tests/fakedriver/make.py this-machine:2 "$fake")"
fi
two_ranks
