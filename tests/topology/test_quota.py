"""Quotas of CPU time: trees of both versions, and this kernel's."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuaff._system.kernel import Tree
from gpuaff.topology.sysfs import quotas

V2 = {"proc/self/cgroup": "0::/pod/rank\n", "proc/mounts": "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0"}
V1 = {
    "proc/self/cgroup": "4:memory:/a\n3:cpu,cpuacct:/pod/rank\n2:cpuset:/\n0::/\n",
    "proc/mounts": (
        "cgroup /sys/fs/cgroup/cpuset cgroup rw,cpuset 0 0\n"
        "cgroup /sys/fs/cgroup/cpu cgroup rw,cpu,cpuacct 0 0\n"
        "cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n"
    ),
}
GROUP = "sys/fs/cgroup/pod/rank"
OLD = "sys/fs/cgroup/cpu/pod/rank"


def found(folder: Path, files: dict[str, str]) -> dict[str, float]:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return quotas(Tree(str(folder)))


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("200000 100000\n", 2.0),
        ("50000 100000", 0.5),
        ("max 100000", None),
        ("0 100000", None),
        ("-1 100000", None),
        ("100000 0", None),
        ("100000", None),
        ("", None),
        ("many few", None),
    ],
)
def test_version_2(tmp_path: Path, text: str, limit: float | None) -> None:
    expected = {} if limit is None else {GROUP: limit}
    assert found(tmp_path, {**V2, f"{GROUP}/cpu.max": text}) == expected


def test_every_group_above_counts(tmp_path: Path) -> None:
    files = {
        f"{GROUP}/cpu.max": "max 100000",
        "sys/fs/cgroup/pod/cpu.max": "400000 100000",
        "sys/fs/cgroup/cpu.max": "800000 100000",
        "sys/fs/cgroup/other/cpu.max": "100000 100000",
    }
    expected = {"sys/fs/cgroup/pod": 4.0, "sys/fs/cgroup": 8.0}
    assert found(tmp_path, {**V2, **files}) == expected


@pytest.mark.parametrize(("quota", "limit"), [("150000", 1.5), ("-1", None), ("", None)])
def test_version_1(tmp_path: Path, quota: str, limit: float | None) -> None:
    files = {f"{OLD}/cpu.cfs_quota_us": quota, f"{OLD}/cpu.cfs_period_us": "100000"}
    expected = {} if limit is None else {OLD: limit}
    assert found(tmp_path, {**V1, **files}) == expected


def test_a_container_sees_its_own_group_as_the_top(tmp_path: Path) -> None:
    """The path is the host's, and what is mounted is that very group."""
    assert found(tmp_path, {**V2, "sys/fs/cgroup/cpu.max": "100000 100000"}) == {
        "sys/fs/cgroup": 1.0
    }


def test_a_group_outside_of_the_namespace(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/../../other\n", "sys/fs/cgroup/cpu.max": "100000 100000"}
    assert found(tmp_path, {**V2, **files}) == {"sys/fs/cgroup": 1.0}


@pytest.mark.parametrize("text", ["", "nonsense", "0::", ":::::", "a b c\n\n"])
def test_files_that_cannot_be_read(tmp_path: Path, text: str) -> None:
    assert found(tmp_path, {"proc/self/cgroup": text, "proc/mounts": text}) == {}
