"""Which CPUs share a core, where lscpu's numbers and the numbering must tell it: any machine.

``tests/data/snippets/cores.txt`` has the single cases.
"""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gpuaff import Topology, plan
from gpuaff.cpuset import CpuSet, format_cpulist
from gpuaff.topology.pasted import parse
from tests.pasted_machines import DATA
from tests.topology.reading import codes, cores, lists, message, pairs

pytestmark = pytest.mark.case("pasted-machines")

DGX = (DATA / "threads/dgx-a100-cpu255-offline.txt").read_text("utf-8")
ACROSS = (DATA / "threads/kvm-siblings-across-nodes.txt").read_text("utf-8")


def nodes(*cpulists: str) -> str:
    """The NUMA nodes as lscpu prints them."""
    return "".join(f"NUMA node{node} CPU(s): {cpus}\n" for node, cpus in enumerate(cpulists))


def table(*cpulists: str) -> str:
    """A table with a GPU beside each list."""
    names = [f"GPU{gpu}" for gpu in range(len(cpulists))]
    rows = [
        "\t".join([name, *("X" if other == name else "SYS" for other in names), cpus])
        for name, cpus in zip(names, cpulists, strict=True)
    ]
    return "\n".join(["\t" + "\t".join([*names, "CPU Affinity"]), *rows, ""])


def is_inferred(topology: Topology) -> bool:
    """Whether the cores were worked out; the notes must say the same."""
    assert ("cores-inferred" in codes(topology)) == (topology.cores is not None)
    assert ("cores-unknown" in codes(topology)) == (topology.cores is None)
    return topology.cores is not None


def ranks(topology: Topology, nproc: int) -> list[str] | None:
    return lists([share.cpus for share in plan(topology, nproc).shares])


# --- two equal runs in every list -------------------------------------------------------------


@st.composite
def machines(draw: st.DrawFn) -> tuple[int, list[range]]:
    """Its number of cores, and the first threads of each node; some nodes may be left out."""
    sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=9))
    starts = [sum(sizes[:node]) for node in range(len(sizes))]
    whole = [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    kept = draw(st.lists(st.sampled_from(whole), min_size=1, unique=True))
    assume(all(len(node) < sum(sizes) for node in kept))  # else 0-7 and 8-15 are one run
    return sum(sizes), sorted(kept, key=lambda node: node[0])


def _both_threads(node: range, distance: int) -> CpuSet:
    return frozenset(node) | {cpu + distance for cpu in node}


@given(machines())
def test_hyperthreads_of_any_machine(machine: tuple[int, list[range]]) -> None:
    count, firsts = machine
    lists = [format_cpulist(_both_threads(node, count)) for node in firsts]
    expected = [f"{cpu},{cpu + count}" for node in firsts for cpu in node]
    assert cores(parse(nodes(*lists))) == cores(parse(table(*lists))) == expected


@given(machines(), st.data())
def test_one_cpu_less_and_the_form_is_lost(
    machine: tuple[int, list[range]], data: st.DataObject
) -> None:
    count, firsts = machine
    sets = [_both_threads(node, count) for node in firsts]
    hit = data.draw(st.integers(0, len(sets) - 1))
    sets[hit] -= {data.draw(st.sampled_from(sorted(sets[hit])))}
    assert not is_inferred(parse(nodes(*map(format_cpulist, sets))))


# --- CPUs that are offline --------------------------------------------------------------------

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
        "lscpu's threads per core (1) are not used, as 255 CPUs are online on 128 cores"
    )
    assert "the first core: 0, 128" in message(topology, "cores-inferred")


def test_the_largest_core_counts_for_a_newer_lscpu() -> None:
    topology = parse(DGX.replace("core:              1", "core:              2"))
    assert ranks(topology, 8) == DGX_RANKS
    assert "contradiction" not in codes(topology)


def lscpu(cpus: int, online: str, threads: int, per_socket: int, sockets: int) -> str:
    return (
        f"CPU(s): {cpus}\nOn-line CPU(s) list: {online}\nThread(s) per core: {threads}\n"
        f"Core(s) per socket: {per_socket}\nSocket(s): {sockets}\n"
    )


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


def short(cores: int) -> str:
    """The rows of `lscpu -p=CPU,Core,Socket,Node`; `-y` repeats the core ids in each socket."""
    rows = [f"{cpu},{cpu % cores},{cpu % 64 // 32},{cpu // 64}\n" for cpu in range(128)]
    return "# CPU,Core,Socket,Node\n" + "".join(rows)


@pytest.mark.parametrize(
    "topology",
    [
        Topology.load(DATA / "threads/kvm.json"),
        parse(ACROSS),
        parse(TABLE + EXTENDED),
        parse(TABLE + short(64)),
        parse(TABLE + short(32)),
    ],
    ids=["sysfs", "lscpu -p", "lscpu -e", "four columns", "lscpu -y"],
)
def test_siblings_in_two_nodes_stay_one_core(topology: Topology) -> None:
    assert cores(topology) == pairs(0, 63, 64)
    made = plan(topology, 2)
    assert lists([share.cpus for share in made.shares]) == ACROSS_RANKS
    assert [share.cores for share in made.shares] == [32, 32]
    (notice,) = (one for one in made.warnings if one.code == "cores-across-nodes")
    assert notice.message == (
        "64 of the 64 cores near GPUs 0-1 have CPUs in several NUMA nodes (0-1; the first core: "
        "CPUs 0,64); cores stay whole, so shares reach into these nodes. On a virtual machine, "
        "correct its CPU topology"
    )
    one_node = plan(topology.with_allowed(frozenset(range(64))), 1)
    assert "cores-across-nodes" not in {one.code for one in one_node.warnings}


# --- kinds of cores ---------------------------------------------------------------------------


@pytest.mark.case("G5")
def test_frequencies_in_rows_show_the_slow_cores() -> None:
    """5000 and 5200 MHz, and 3900: as /sys/devices/cpu_atom has it on the same machine."""
    topology = parse((DATA / "lscpu/20em64t-hybrid.e.txt").read_text("utf-8"))
    assert format_cpulist(topology.efficiency_cpus) == "12-19"


@pytest.mark.case("G5")
def test_kinds_of_cores_without_their_cpus_are_said() -> None:
    text = (DATA / "threads/gb10-two-models.txt").read_text("utf-8")
    topology = parse(text)
    assert cores(topology) == [str(cpu) for cpu in range(20)]
    assert topology.efficiency_cpus == frozenset()
    assert message(topology, "cores-unknown") == (
        "lscpu names several kinds of cores, and not which CPUs they are: add the output of "
        "`lscpu -e`"
    )
    rows = "".join(f"{cpu} {cpu} {2808 if cpu % 10 < 5 else 3900}.0000\n" for cpu in range(20))
    told = parse(text + "CPU CORE MAXMHZ\n" + rows)
    assert format_cpulist(told.efficiency_cpus) == "0-4,10-14"
    assert "cores-unknown" not in codes(told)
