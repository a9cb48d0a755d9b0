"""Hyperthreads that lscpu's numbers hide: CPUs that are offline, cores that lie in two nodes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuaff.allocator.plan import plan
from gpuaff.cpuset import format_cpulist
from gpuaff.topology.model import Topology
from gpuaff.topology.pasted import parse
from tests.pasted_machines import DATA

DGX = (DATA / "threads/dgx-a100-cpu255-offline.txt").read_text("utf-8")
ACROSS = (DATA / "threads/kvm-siblings-across-nodes.txt").read_text("utf-8")


def cores(topology: Topology) -> list[str] | None:
    return None if topology.cores is None else [format_cpulist(core) for core in topology.cores]


def codes(topology: Topology) -> set[str]:
    return {note.code for note in topology.notes}


def message(topology: Topology, code: str) -> str:
    return next(note.message for note in topology.notes if note.code == code)


def ranks(topology: Topology, nproc: int) -> list[str]:
    return [format_cpulist(share.cpus) for share in plan(topology, nproc).shares]


def pairs(first: int, last: int, distance: int) -> list[str]:
    return [f"{cpu},{cpu + distance}" for cpu in range(first, last + 1)]


# --- CPUs that are offline --------------------------------------------------------------------


def without(text: str, *keys: str) -> str:
    """The text without the lines that begin so."""
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith(keys))


DGX_RANKS = [
    "48-55,176-183",
    "56-63,184-191",
    "16-23,144-151",
    "24-31,152-159",
    "112-119,240-247",
    "120-127,248-254",  # CPU 127's sibling is CPU 255
    "80-87,208-215",
    "88-95,216-223",
]
"""Node 3 has the cores 48-63, two GPUs are on it, eight cores each; and so on."""


def test_one_offline_cpu_of_a_dgx_a100() -> None:
    """lscpu divided 255 CPUs by 128 cores: "Thread(s) per core: 1"."""
    topology = parse(DGX)
    assert cores(topology) == [*pairs(0, 126, 128), "127"]
    assert ranks(topology, 8) == DGX_RANKS
    assert message(topology, "contradiction") == (
        "lscpu says 1 thread per core, but 255 CPUs online on 128 cores (sockets x cores per "
        "socket); its threads per core are not used"
    )
    assert "the first core: 0, 128" in message(topology, "cores-inferred")


@pytest.mark.parametrize("missing", ["Socket(s)", "Core(s) per socket"])
def test_one_offline_cpu_where_no_number_of_cores_confirms_the_threads(missing: str) -> None:
    """The nodes still show the siblings: 0-15,128-143."""
    topology = parse(without(DGX, missing))
    assert ranks(topology, 8) == DGX_RANKS
    assert "the first core: 0, 128" in message(topology, "cores-inferred")


def test_offline_cpus_where_neither_numbers_nor_nodes_show_siblings() -> None:
    """CPUs 6 and 15 of 16 are offline: with two threads a core, 0 may belong to 1 or to 8."""
    text = (
        "CPU(s): 16\nOn-line CPU(s) list: 0-5,7-14\nThread(s) per core: 1\n"
        "NUMA node(s): 1\nNUMA node0 CPU(s): 0-5,7-14\n"
    )
    topology = parse(text)
    assert cores(topology) is None
    assert "cores-unknown" in codes(topology)


def test_the_largest_core_counts_for_a_newer_lscpu() -> None:
    topology = parse(DGX.replace("core:              1", "core:              2"))
    assert ranks(topology, 8) == DGX_RANKS
    assert "contradiction" not in codes(topology)


RUNS_AROUND_OFFLINE = """\
Architecture: x86_64
CPU(s): 16
On-line CPU(s) list: 0-6,9-15
Thread(s) per core: 1
Socket(s): 1
NUMA node(s): 1
NUMA node0 CPU(s): 0-6,9-15
"""
POWER_ROUNDED = """\
Architecture: ppc64le
CPU(s): 96
On-line CPU(s) list: 0-69,71-95
Thread(s) per core: 3
Socket(s): 2
NUMA node(s): 2
NUMA node0 CPU(s): 0-47
NUMA node1 CPU(s): 48-69,71-95
"""


@pytest.mark.parametrize("text", [RUNS_AROUND_OFFLINE, POWER_ROUNDED])
def test_without_the_number_of_cores_a_wrong_guess_is_not_made(text: str) -> None:
    """CPUs 7 and 8 of {0,8} … {7,15} are offline; four threads a core, of which one is offline."""
    found = parse(text)
    assert (found.cores, "cores-unknown" in codes(found)) == (None, True)


def test_without_the_number_of_cpus_the_contradiction_stays_and_is_said() -> None:
    """Where the ids end is not told then."""
    topology = parse(without(DGX, "CPU(s):"))
    assert topology.cores is None
    assert {"contradiction", "cores-unknown"} <= codes(topology)


def test_one_thread_per_core_beside_a_table_of_two_threads() -> None:
    """`lscpu | grep -E '^(CPU|Thread|Core|Socket)'`: online CPUs are known only near GPUs."""
    numbers = "CPU(s): 256\nThread(s) per core: 1\nCore(s) per socket: 64\nSocket(s): 2\n"
    table = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\tX\tSYS\t48-63,176-191\nGPU1\tSYS\tX\t48-63,176-191\n"
    topology = parse(numbers + table)
    assert cores(topology) == pairs(48, 63, 128)
    assert "contradiction" not in codes(topology)  # the others may be offline


def lscpu(cpus: int, online: str, threads: int, per_socket: int, sockets: int, *nodes: str) -> str:
    """The lines that count."""
    lines = [
        f"CPU(s): {cpus}",
        f"On-line CPU(s) list: {online}",
        f"Thread(s) per core: {threads}",
        f"Core(s) per socket: {per_socket}",
        f"Socket(s): {sockets}",
        *(f"NUMA node{node} CPU(s): {some}" for node, some in enumerate(nodes)),
    ]
    return "\n".join(lines) + "\n"


POWER = "Architecture: ppc64le\n"
VIRTUAL = "Hypervisor vendor: KVM\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # Several are offline, of one core or of two; a core as a whole.
        (lscpu(8, "0-5", 2, 4, 1), ["0,4", "1,5", "2", "3"]),
        (lscpu(8, "0-5", 1, 4, 1), ["0,4", "1,5", "2", "3"]),
        (lscpu(8, "0-2,4-6", 2, 3, 1), ["0,4", "1,5", "2,6"]),
        (lscpu(8, "1-7", 2, 4, 1), ["1,5", "2,6", "3,7", "4"]),
        # Three cores in two sockets: one core per socket, rounded down.
        (lscpu(8, "0-2,4-6", 2, 1, 2), ["0,4", "1,5", "2,6"]),
        # One sibling pair in five CPUs: an average of 1.25 threads.
        (lscpu(8, "0-4", 1, 4, 1), ["0,4", "1", "2", "3"]),
        (lscpu(8, "0-4", 1, 2, 2), ["0,4", "1", "2", "3"]),
        # Siblings are neighbours where else they lay in two nodes.
        (lscpu(8, "0-6", 1, 2, 2, "0-3", "4-6"), ["0-1", "2-3", "4-5", "6"]),
        (POWER + lscpu(16, "0-14", 7, 2, 1), ["0-7", "8-14"]),
        (POWER + lscpu(16, "0-14", 8, 2, 1), ["0-7", "8-14"]),
        (POWER + lscpu(16, "0-3,8-11", 4, 2, 1), ["0-3", "8-11"]),
        (POWER + lscpu(16, "0-2,8-10", 3, 2, 1), ["0-2", "8-10"]),
        (POWER + lscpu(16, "0-4,8-10", 5, 2, 1), ["0-4", "8-10"]),
        (POWER + lscpu(16, "0-4,8-10", 4, 2, 1), ["0-4", "8-10"]),
    ],
)
def test_siblings_beside_offline_cpus(text: str, expected: Sequence[str]) -> None:
    topology = parse(text)
    assert cores(topology) == expected
    assert "cores-inferred" in codes(topology)


@pytest.mark.parametrize(
    "text",
    [
        lscpu(8, "0-3", 1, 4, 1),  # nosmt
        lscpu(8, "0,2,4,6", 1, 4, 1),
        POWER + lscpu(16, "0,8", 1, 2, 1),
        # Three cores in two sockets, as lscpu rounds it.
        lscpu(3, "0-2", 1, 1, 2),
        # Two kinds of cores, each with numbers of its own.
        lscpu(8, "0-7", 1, 4, 1) + "Thread(s) per core: 1\nCore(s) per socket: 4\nSocket(s): 1\n",
    ],
)
def test_one_thread_per_core_that_the_other_numbers_bear_out(text: str) -> None:
    topology = parse(text)
    assert cores(topology) == [str(cpu) for cpu in sorted(topology.cpus)]
    assert {"contradiction", "cores-inferred", "cores-unknown"}.isdisjoint(codes(topology))


@pytest.mark.parametrize(
    "text",
    [
        # Six cores of two threads and eight of one, by an old lscpu: 20 / 14 = 1.
        lscpu(20, "0-19", 1, 14, 1, "0-19"),
        # A virtual machine of one node, where both ways of numbering are usual.
        VIRTUAL + lscpu(8, "0-6", 1, 4, 1, "0-6"),
        lscpu(8, "0-6", 1, 3, 1),
    ],
)
def test_a_contradiction_that_the_numbering_does_not_resolve_is_said(text: str) -> None:
    topology = parse(text)
    assert topology.cores is None
    assert {"contradiction", "cores-unknown"} <= codes(topology)


def test_a_hybrid_processor_contradicts_nothing() -> None:
    """Two threads on six of 14 cores are no more than 28."""
    topology = parse(lscpu(20, "0-19", 2, 14, 1, "0-19"))
    assert topology.cores is None
    assert "contradiction" not in codes(topology)


def test_one_thread_per_core_that_rounding_leaves_open() -> None:
    """Four or five cores in two sockets, and five of twelve CPUs online."""
    topology = parse(lscpu(12, "0-3,6", 1, 2, 2))
    assert topology.cores is None
    assert "which CPUs share a core is unknown" in message(topology, "cores-unknown")
    assert "contradiction" not in codes(topology)


@given(st.data(), st.integers(1, 2), st.integers(1, 3), st.integers(1, 4), st.booleans())
def test_no_core_is_split_in_silence(
    data: st.DataObject, threads: int, sockets: int, per_socket: int, old: bool
) -> None:
    """Any CPUs offline of any machine whose first threads come first, by an lscpu of any age."""
    count = threads * sockets * per_socket
    online = data.draw(st.sets(st.integers(0, count - 1), min_size=1))
    by_core: dict[int, set[int]] = {}
    for cpu in sorted(online):
        by_core.setdefault(cpu % (sockets * per_socket), set()).add(cpu)
    used = len({core // per_socket for core in by_core})  # sockets
    printed = len(online) // len(by_core) if old else max(map(len, by_core.values()))
    text = lscpu(count, format_cpulist(online), printed, len(by_core) // used, used)
    topology = parse(text)
    if topology.cores is None:
        assert "cores-unknown" in codes(topology)
    else:
        assert all(any(core <= found for found in topology.cores) for core in by_core.values())
        # With several sockets the number of cores is rounded, and more than one may be right.
        same = len(topology.cores) == len(by_core)
        assert same or (used > 1 and "cores-inferred" in codes(topology))


# --- cores in two nodes -----------------------------------------------------------------------

ACROSS_RANKS = ["0-31,64-95", "32-63,96-127"]
"""64 cores {i, i + 64}, near both GPUs as CPU i is near GPU 0 and i + 64 near GPU 1: 32 each."""

EXTENDED = "CPU NODE SOCKET CORE L1d:L1i:L2:L3 ONLINE\n" + "".join(
    f"{cpu:3} {cpu // 64:4} {cpu % 64 // 32:6} {cpu % 64:4} "
    f"{cpu % 64}:{cpu % 64}:{cpu % 64}:{cpu % 64 // 32} yes\n"
    for cpu in range(128)
)
TABLE = ACROSS[: ACROSS.index("#")]


def short(columns: str) -> str:
    """What `lscpu -p=…` prints with four columns, or with core ids that repeat (`-y`)."""
    head, *lines = ACROSS[ACROSS.index("# CPU") :].splitlines()
    names = head[2:].split(",")
    rows = [dict(zip(names, line.split(","), strict=True)) for line in lines]
    for row in rows:
        row["Physical"] = str(int(row["Core"]) % 32)
    asked = columns.split(",")
    head = columns.replace("Physical", "Core")
    return "\n".join([f"# {head}", *(",".join(row[name] for name in asked) for row in rows), ""])


@pytest.mark.parametrize(
    "topology",
    [
        Topology.load(DATA / "threads/kvm.json"),
        parse(ACROSS),
        parse(TABLE + EXTENDED),
        parse(TABLE + short("CPU,Core,Socket,Node")),
        parse(TABLE + short("CPU,Physical,Socket,Node,L1d")),
    ],
    ids=["sysfs", "lscpu -p", "lscpu -e", "four columns", "lscpu -y"],
)
def test_siblings_in_two_nodes_stay_one_core(topology: Topology) -> None:
    assert cores(topology) == pairs(0, 63, 64)
    made = plan(topology, 2)
    assert [format_cpulist(share.cpus) for share in made.shares] == ACROSS_RANKS
    assert [share.cores for share in made.shares] == [32, 32]
    (notice,) = (one for one in made.warnings if one.code == "cores-across-nodes")
    assert notice.message == (
        "64 of the 64 cores near GPUs 0-1 have CPUs in several NUMA nodes (0-1; the first core: "
        "CPUs 0,64); cores stay whole, so shares reach into these nodes. On a virtual machine, "
        "correct its CPU topology"
    )


def test_the_paste_has_what_sysfs_has() -> None:
    pasted, saved = parse(ACROSS), Topology.load(DATA / "threads/kvm.json")
    assert (pasted.cpus, pasted.cores) == (saved.cpus, saved.cores)
    assert (pasted.packages, pasted.l3) == (saved.packages, saved.l3)
    assert "cores-inferred" not in codes(pasted)


def test_a_mask_of_one_node_leaves_no_core_in_two() -> None:
    made = plan(parse(ACROSS).with_allowed(frozenset(range(64))), 1)
    assert "cores-across-nodes" not in {one.code for one in made.warnings}


@pytest.mark.parametrize(
    "rows",
    [
        # No first-level cache, and ids that repeat in each socket.
        "# CPU,Core,Socket,Node\n0,0,0,0\n1,0,0,1\n2,0,1,2\n3,0,1,3\n",
        # Caches of their own.
        "# CPU,Core,Socket,Node,L1d\n0,0,0,0,0\n1,0,0,1,1\n2,1,0,0,2\n3,1,0,1,3\n",
    ],
)
def test_ids_that_repeat_in_each_node_are_cores_of_their_own(rows: str) -> None:
    topology = parse(rows)
    assert cores(topology) == ["0", "1", "2", "3"]
    assert "2 core ids" in message(topology, "cores-inferred")
