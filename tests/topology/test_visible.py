from __future__ import annotations

import ctypes
import json
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpuaff.topology.model import Gpu, Topology
from gpuaff.topology.visible import Visible, resolve
from tests.visible_machines import MIGS, OBSERVED, UUIDS, gpus, observed, with_mig

G0, G1, G2, G3 = UUIDS


def codes(visible: Visible) -> list[str]:
    return [note.code for note in visible.notes]


def said(visible: Visible) -> str:
    """The message of the only note."""
    (note,) = visible.notes
    return note.message


# --- every row that was observed -----------------------------------------------------------


def test_the_table_is_read_whole() -> None:
    counts = [row[0] for row in observed()]
    assert (counts.count(4), counts.count(1)) == (57, 99)


@pytest.mark.case("visible-devices", "D4")
@pytest.mark.parametrize(("count", "text", "order", "seen"), observed())
def test_observed(count: int, text: str | None, order: str | None, seen: str) -> None:
    visible = resolve(gpus(count), text, device_order=order)
    refused = {"error 101": "visible-error", "none": "visible-none"}
    if seen in refused:
        assert (visible.indices, codes(visible)) == ((), [refused[seen]])
    else:
        assert visible.indices == tuple(int(index) for index in seen.split(", "))
        assert codes(visible) in ([], ["visible-ends"])


# --- rule by rule --------------------------------------------------------------------------


def filled(cell: str) -> str:
    """A cell of ``rules.json``: ``<g0>`` and ``<m0>`` are UUIDs."""
    return re.sub(r"<([gm])(\d)>", lambda m: (UUIDS if m[1] == "g" else MIGS)[int(m[2])], cell)


MACHINES = {
    "plain": gpus(),
    "one": gpus(1),
    "mig": with_mig(),
    "nameless": (Gpu(index=0), Gpu(index=1)),
    "some": (Gpu(index=6), Gpu(index=3)),
}
RULES = [
    pytest.param(machine, *map(filled, cells), id=f"{title}: {cells[0]!r}")
    for title, rows in json.loads((OBSERVED.parent / "rules.json").read_text("utf-8")).items()
    for machine, *cells in rows
]


@pytest.mark.case("visible-devices", "D1", "D2", "D4")
@pytest.mark.parametrize(("machine", "text", "shown", "code", "message"), RULES)
def test_rule(machine: str, text: str, shown: str, code: str, message: str) -> None:
    visible = resolve(MACHINES[machine], text)
    pairs = zip(visible.indices, visible.instances, strict=True)
    assert " ".join(f"{index}/{one}" if one else str(index) for index, one in pairs) == shown
    assert codes(visible) == ([code] if code else [])
    if message.startswith("CUDA"):
        assert said(visible) == message
    else:
        assert not code or message in said(visible)


_LIBC = ctypes.CDLL(None)
_LIBC.strtoul.restype = ctypes.c_ulong
_LIBC.strtoul.argtypes = [ctypes.c_char_p, ctypes.POINTER(ctypes.c_char_p), ctypes.c_int]


def _strtoul(text: str) -> tuple[int, bool]:
    """What C's own strtoul makes of a text, and whether there was a number at all."""
    raw = ctypes.create_string_buffer(text.encode("utf-8"))
    end = ctypes.c_char_p()
    start = ctypes.cast(raw, ctypes.c_char_p)
    value = _LIBC.strtoul(start, ctypes.byref(end), 10)
    moved = ctypes.cast(end, ctypes.c_void_p).value != ctypes.addressof(raw)
    return int(value), moved


_BLANK = st.text(" \t\n\v\f\r", max_size=3)
_NEAR_A_BORDER = st.builds(
    lambda power, near: str((1 << power) + near),
    st.sampled_from([0, 31, 32, 33, 63, 64, 65]),
    st.integers(-5, 5),
)


@pytest.mark.skipif(ctypes.sizeof(ctypes.c_ulong) != 8, reason="not here: a long of 64 bits")
@settings(deadline=None)
@given(
    st.one_of(
        st.builds(
            "".join,
            st.tuples(
                _BLANK,
                st.sampled_from(["", "+", "-", "--"]),
                st.one_of(_NEAR_A_BORDER, st.text("0123456789", max_size=40)),
                st.text("0x. -a", max_size=2),
            ),
        ),
        st.text(st.characters(exclude_characters="\0,", exclude_categories=["Cs"]), max_size=8),
    )
)
@example("-" + "9" * 20)
@example(f"-{2**64 - 1}")
@example("9" * 5000)
@example(f"{2328306437 * 2**32}0")  # 21 digits, of which the first 20 would read as 0
@example("0" * 30 + "2")
def test_rule_3_agrees_with_strtoul(text: str) -> None:
    value, is_number = _strtoul(text)
    expected = value % 2**32 if is_number else None
    assert resolve(gpus(), text).indices == ((expected,) if expected in range(4) else ())


def test_rule_7_unset_shows_all() -> None:
    assert resolve(tuple(reversed(gpus())), None)[:2] == ((0, 1, 2, 3), ())


@pytest.mark.case("visible-devices")
@pytest.mark.parametrize("order", ["", "pci_bus_id", "PCI_BUS_ID ", "bogus"])
@pytest.mark.parametrize("text", [None, "", "0", "x", G1])
def test_rule_8_a_bad_order_is_an_error_whatever_the_list(order: str, text: str | None) -> None:
    visible = resolve(gpus(), text, device_order=order)
    assert (visible.indices, codes(visible)) == ((), ["visible-error"])
    assert said(visible) == (
        f"CUDA_DEVICE_ORDER={order!r} is not a word that CUDA knows: CUDA fails with error 101 and "
        "shows no GPU; set it to PCI_BUS_ID or unset it"
    )


# --- cases ---------------------------------------------------------------------------------


@pytest.mark.case("D2")
def test_unset_shows_the_first_instance_and_nothing_else() -> None:
    visible = resolve(with_mig(), None)
    assert (visible.indices, codes(visible)) == ((1,), ["visible-mig"])
    assert said(visible) == (
        "GPUs 0, 2, 3 are not shown by CUDA: a GPU with MIG on and no instance is not a device, "
        "and beside a MIG instance CUDA shows nothing else; name the GPUs to use by UUID in "
        "CUDA_VISIBLE_DEVICES"
    )


@pytest.mark.case("D2")
def test_unset_leaves_out_a_gpu_without_instances() -> None:
    first, second, third = gpus(3)
    visible = resolve((first, second._replace(mig=()), third), None)
    assert visible.indices == (0, 2)
    assert codes(visible) == ["visible-mig"]
    assert resolve((first._replace(mig=()),), None).indices == ()
    assert codes(resolve((first._replace(mig=()),), None)) == ["visible-none"]


@pytest.mark.case("D6")
def test_unlike_gpus_may_be_counted_in_another_order() -> None:
    old, new = gpus(2)
    unlike = (old._replace(name="GTX 745"), new._replace(name="GTX 1080 Ti"))
    for text, order, indices in (
        (None, None, (0, 1)),
        ("0", None, (0,)),
        ("1,0", "FASTEST_FIRST", (1, 0)),
    ):
        visible = resolve(unlike, text, device_order=order)
        assert (visible.indices, codes(visible)) == (indices, ["visible-order"])
        assert said(visible) == (
            "the GPUs are unlike (GTX 1080 Ti, GTX 745) and CUDA_DEVICE_ORDER is not PCI_BUS_ID: "
            "CUDA's numbers may differ from NVML's, by which they are read here; set "
            "CUDA_DEVICE_ORDER=PCI_BUS_ID or name the GPUs by UUID"
        )


def test_names_of_several_lines_are_told_on_one() -> None:
    old, new = gpus(2)
    unlike = (old._replace(name="A\u2028 1\n"), new._replace(name="B"))
    assert "(A 1, B)" in said(resolve(unlike, None))


@pytest.mark.case("D6")
def test_the_order_is_certain_by_pci_address_by_uuid_and_among_like_gpus() -> None:
    old, new = gpus(2)
    unlike = (old._replace(name="GTX 745"), new._replace(name="GTX 1080 Ti"))
    assert resolve(unlike, None, device_order="PCI_BUS_ID").notes == ()
    assert resolve(unlike, f"{G1},{G0}")[:2] == ((1, 0), ())
    assert resolve(gpus(2, name="H100"), "1,0").notes == ()
    assert codes(resolve(unlike, "")) == ["visible-none"]


@pytest.mark.case("D8")
def test_a_device_number_leads_to_the_physical_gpu() -> None:
    machine = Topology(gpus=tuple(Gpu(index=index) for index in range(8)))
    seen = machine.with_visible_devices("5,2,7")
    assert seen.visible[1] == 2
    assert [seen.gpu_by_index[index].index for index in seen.visible] == [5, 2, 7]


def test_a_topology_keeps_other_notes_and_replaces_old_ones() -> None:
    machine = Topology(gpus=gpus()).with_visible_devices("0,x")
    assert [note.code for note in machine.notes] == ["visible-ends"]
    assert machine.with_visible_devices(None).notes == ()


def test_no_gpus_no_devices_no_talk() -> None:
    assert resolve((), "0,1", device_order="bogus")[:2] == ((), ())


def test_numbers_count_the_gpus_that_the_process_may_use() -> None:
    """A device cgroup denies the others: CUDA does not see them, NVML still counts them."""
    assert resolve((Gpu(index=6), Gpu(index=3)), None).indices == (3, 6)


# --- what is said ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("x" * 60, f"'{'x' * 60}'"),
        ("x" * 61, f"'{'x' * 58}..."),
        ("\n" + "x" * 59, f"'\\n{'x' * 56}..."),
        ("\n" + "x" * 58, f"'\\n{'x' * 58}'"),
    ],
    ids=["60", "61", "60 with an escape", "59 with an escape"],
)
def test_long_text_is_cut(text: str, shown: str) -> None:
    assert said(resolve(gpus(), text)).startswith(f"CUDA_VISIBLE_DEVICES={shown} hides all GPUs: ")


# --- any text at all -------------------------------------------------------------------------


PIECES = ("0", "1", " 3", "-1", "99", "x", "", "\ud800", G1, G1[:9], *MIGS, f"MIG-{G1}/2/0", "GPU-")


@pytest.mark.case("D5")
@given(
    st.sampled_from([gpus(), with_mig(), gpus(2), (Gpu(index=0), Gpu(index=5))]),
    st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=6),
)
def test_a_list_shows_devices_once_and_what_its_beginning_shows(
    machine: tuple[Gpu, ...], elements: list[str]
) -> None:
    visible = resolve(machine, ",".join(elements))
    assert set(visible.indices) <= {gpu.index for gpu in machine}
    assert len(set(visible.indices)) == len(visible.indices) == len(visible.instances)
    assert visible == resolve(machine[::-1], ",".join(elements))
    assert all(len(note.message.splitlines()) == 1 for note in visible.notes)
    if elements and codes(visible) != ["visible-error"]:
        shorter = resolve(machine, ",".join(elements[:-1])).indices
        assert visible.indices[: len(shorter)] == shorter


@pytest.mark.parametrize(
    "text",
    [
        "," * 1_000_000,
        "9" * 1_000_000,
        " " * 1_000_000,
        "GPU-" + "a" * 1_000_000,
        "MIG-GPU-" + "a" * 1_000_000 + "/1/0",
        "0,1,2,3," + "x" * 1_000_000,
    ],
    ids=range(6),
)
def test_a_megabyte_is_read_in_one_pass(text: str) -> None:
    visible = resolve(gpus(), text)  # the test's own time limit is the bound
    assert set(visible.indices) <= {0, 1, 2, 3}
