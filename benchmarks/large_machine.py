"""Make the /sys of a large machine, to read it."""

from __future__ import annotations

from pathlib import Path

from gpuaff.cpuset import format_cpulist


def make(
    root: Path, *, cpus: int, packages: int = 2, nodes: int = 16, cores_per_l3: int = 8
) -> None:
    """Write a machine of SMT2 cores (i, i + cpus / 2), evenly cut.

    Args:
        root: an empty folder.
        cpus: how many logical CPUs.
        packages: how many sockets.
        nodes: how many NUMA nodes.
        cores_per_l3: how many cores share an L3.
    """
    cores = cpus // 2
    base = root / "sys/devices/system"
    (base / "cpu").mkdir(parents=True)
    for name in ("online", "possible", "present"):
        (base / "cpu" / name).write_text(f"0-{cpus - 1}\n")
    for cpu in range(cpus):
        _cpu(base / f"cpu/cpu{cpu}", cpu % cores, cores, packages, cores_per_l3)
    for node in range(nodes):
        folder = base / f"node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(_block(node, cores // nodes, cores) + "\n")
        (folder / "distance").write_text(
            " ".join("10" if n == node else "20" for n in range(nodes))
        )
    (base / "node/has_memory").write_text(f"0-{nodes - 1}\n")


def _block(number: int, size: int, cores: int) -> str:
    """The CPUs of the block of ``size`` cores with this number."""
    first = range(number * size, (number + 1) * size)
    return format_cpulist([*first, *(core + cores for core in first)])


def _cpu(folder: Path, core: int, cores: int, packages: int, cores_per_l3: int) -> None:
    topology = folder / "topology"
    topology.mkdir(parents=True)
    package = core // (cores // packages)
    for name in ("core_cpus_list", "thread_siblings_list"):
        (topology / name).write_text(f"{core},{core + cores}\n")
    for name in ("package_cpus_list", "core_siblings_list"):
        (topology / name).write_text(_block(package, cores // packages, cores) + "\n")
    (topology / "physical_package_id").write_text(f"{package}\n")
    (topology / "core_id").write_text(f"{core}\n")
    for index, level in enumerate((1, 1, 2, 3)):
        cache = folder / f"cache/index{index}"
        cache.mkdir(parents=True)
        (cache / "level").write_text(f"{level}\n")
        shared = _block(core // cores_per_l3, cores_per_l3, cores) if level == 3 else ""
        (cache / "shared_cpu_list").write_text(f"{shared or f'{core},{core + cores}'}\n")
