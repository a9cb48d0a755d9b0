"""Machines whose CUDA devices are looked for, and what the real driver was seen to make of them."""

from __future__ import annotations

import re
from pathlib import Path

from gpuaff.topology.model import Gpu, MigInstance

OBSERVED = Path(__file__).parent / "data" / "visible" / "observed.md"
UUIDS = (
    "GPU-fa1b2c3d-1111-2222-3333-444455556666",  # a digit first would read as a number
    "GPU-1b2c3d4e-aaaa-bbbb-cccc-ddddeeeeffff",
    "GPU-2c3d4e5f-0123-4567-89ab-cdef01234567",
    "GPU-2c3d4e60-fedc-ba98-7654-3210fedcba98",  # the first five digits are GPU 2's too
)
MIGS = (
    "MIG-aaaaaaaa-0000-5000-8000-000000000001",
    "MIG-bbbbbbbb-0000-5000-8000-000000000002",
    "MIG-bbbbbbbb-0000-5000-8000-000000000003",
)


def gpus(count: int = 4, *, name: str | None = None) -> tuple[Gpu, ...]:
    """GPUs with MIG off."""
    return tuple(Gpu(index=i, uuid=UUIDS[i], name=name) for i in range(count))


def instance(number: int, gpu_instance: int, compute_instance: int = 0) -> MigInstance:
    return MigInstance(
        uuid=MIGS[number], gpu_instance=gpu_instance, compute_instance=compute_instance
    )


def with_mig() -> tuple[Gpu, ...]:
    """GPU 0 whole, GPU 1 cut in two, GPU 2 with MIG on and no instance, GPU 3 in one piece."""
    first, second, third, fourth = gpus()
    return (
        first,
        second._replace(mig=(instance(0, 1), instance(1, 2))),
        third._replace(mig=()),
        fourth._replace(mig=(instance(2, 7, 3),)),
    )


def _expand(cell: str) -> str | None:
    """The text that a cell of the table stands for."""
    if cell == "(unset)":
        return None
    text = cell[1:-1] if cell.startswith("`") else cell
    if text == '""':
        return ""
    text = re.sub(r"\\(?:[tnvfr]|x..|u....)", lambda m: eval(f"'{m[0]}'"), text)
    return re.sub(r"<g(\d)([^>]*)>", lambda m: _piece(UUIDS[int(m[1])], m[2]), text)


def _piece(uuid: str, words: str) -> str:
    if "body" in words:
        uuid = uuid.removeprefix("GPU-")
    if "hex" in words:
        uuid = uuid.removeprefix("GPU-").replace("-", "")
    if "upper" in words:
        uuid = uuid.upper()
    first = re.search(r"first (\d+)", words)
    return uuid[: int(first[1])] if first else uuid


def observed() -> list[tuple[int, str | None, str | None, str]]:
    rows, count = [], 4
    for line in OBSERVED.read_text("utf-8").splitlines():
        if line == "## One H100":
            count = 1
        match = re.fullmatch(r"\| (\(unset\)|`.*`) \| (.*) \| ([0-3, ]+|none|error 101) \|", line)
        if match:
            rows.append((count, _expand(match[1]), _expand(match[2]), match[3]))
    return rows
