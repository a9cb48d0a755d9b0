"""``gpuaff run --dry-run``: what would be claimed, where it would be pinned, what would be run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from shlex import join

from gpuaff.claims.model import Device
from gpuaff.cli import output
from gpuaff.cli.run import Job
from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.formatting import Span, line, table


def show(job: Job, path: str, words: Sequence[str]) -> None:
    """Look, and tell.

    Where the command would be pinned is found out by pinning this process, which then ends.

    Args:
        job: what would be done before the command starts.
        path: the command's file.
        words: its name and arguments.

    Raises:
        GpuaffError: what the real call would fail with, as things stand. Nobody waits.
    """
    devices = () if job.claim is None else _previewed(job.claim)
    gpus = ", ".join(f"{device} ({device.uuid})" for device in devices)
    cpus = _pinned(job, devices)
    rows = {
        "claim": gpus or "nothing",
        "pin": "nothing" if cpus is None else f"to CPUs {format_cpulist(cpus)}",
        "run": join([path, *words[1:]]),
    }
    cells = [(line(Span(f"would {what}", "head")), line(told)) for what, told in rows.items()]
    output.show_lines(table(cells))


def _previewed(claim: Mapping[str, object]) -> tuple[Device, ...]:
    from gpuaff.claims.acquire import preview

    asked = {name: value for name, value in claim.items() if name not in ("n", "pin")}
    return preview(claim["n"], arguments=asked)


def _pinned(job: Job, devices: Sequence[Device]) -> CpuSet | None:
    """Where the command would be pinned; None when it would not be."""
    if job.pin:
        from gpuaff.pinning.affinity import set_affinity

        affinity = set_affinity()
        return affinity if affinity.pinned else None
    if job.claim is None or not job.claim["pin"]:
        return None
    from gpuaff.pinning.grant import take_grant

    grant = take_grant([device.index for device in devices])
    return grant.cpus if grant.pinned else None
