"""What people see: trees, tables and pictures, plain and coloured."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuaff import formatting
from gpuaff.allocator.model import Mode, Multithreading, Plan, Scope, Share
from gpuaff.cli import main, output, views
from gpuaff.notices import Notice
from gpuaff.topology.model import NumaNode, Source, Topology
from tests.cli.calls import called

VIEWS = Path(__file__).parents[1] / "data/views"
TREES: dict[str, dict[str, Any]] = json.loads((VIEWS / "trees.json").read_text("utf-8"))
"""Machines, and what is shown of them, line by line."""
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


Block = formatting.Line | formatting.Table


def shown(blocks: list[Block]) -> str:
    return "\n".join(map(formatting.plain, blocks))


def read(name: str) -> str:
    """An expected text."""
    return (VIEWS / f"{name}.txt").read_text("utf-8").rstrip("\n")


def on_width(blocks: Iterable[Block], width: int) -> str:
    """The text on a terminal of a width, without colours."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(width))
        return output.rendered(blocks, io.StringIO())


def share(rank: int, gpu: int | None, cpus: set[int], *, nodes: tuple[int, ...] = ()) -> Share:
    source = Source.ALL if gpu is None else Source.GIVEN
    cores = len({cpu % 8 for cpu in cpus})
    return Share(
        rank=rank, gpu=gpu, cpus=frozenset(cpus), cores=cores, numa_nodes=nodes, source=source
    )


def plan(*shares: Share) -> Plan:
    options: Any = {"mode": Mode.UNIQUE_CONTIGUOUS, "scope": Scope.NODE, "balanced": True}
    return Plan(**options, multithreading=Multithreading.ALL_LOGICAL, shares=shares)


def drawn(topology: Topology, *shares: Share) -> list[str]:
    """The rows of a plan, and its picture."""
    return shown(views.plan_blocks(topology, plan(*shares), "it")).splitlines()[3:]


THREE = (
    share(0, 1, {0, 1, 8, 9}, nodes=(0,)),
    share(1, 0, {4, 5, 12, 13}, nodes=(1,)),
    share(2, None, {1, 2, 9, 10}, nodes=(0, 1)),
)


FOUR = frozenset(range(4))
EVEN, ODD = frozenset(range(0, 128, 2)), frozenset(range(1, 128, 2))


def tree(topology: Topology) -> list[str]:
    return shown(views.topology_blocks(topology, "box")).splitlines()


class TestTree:
    def test_says_who_sits_where(self, box: Topology) -> None:
        assert shown(views.topology_blocks(box, "box")) == read("tree")
        alone = box._replace(gpus=box.gpus[:1], links=(("X",),))
        assert "X" not in "".join(tree(alone)), "one GPU has no links"

    @pytest.mark.case("A9", "A10")
    @pytest.mark.parametrize("name", TREES)
    def test_what_is_known_is_shown(self, name: str) -> None:
        data = {"schema_version": 1, **TREES[name]["machine"]}
        assert tree(Topology.from_dict(data)) == TREES[name]["shown"]

    @pytest.mark.case("A25")
    def test_long_lists_are_broken_only_for_a_terminal(self) -> None:
        nodes = (NumaNode(id=0, cpus=EVEN), NumaNode(id=1, cpus=ODD))
        seen = Topology(cpus=EVEN | ODD, allowed=EVEN | ODD, numa_nodes=nodes)
        whole = ",".join(str(cpu) for cpu in sorted(EVEN))
        blocks = views.topology_blocks(seen, "x")
        assert f"  {whole}\n" in shown(blocks)
        broken = on_width(blocks, 60)
        assert max(map(len, broken.splitlines())) <= 60
        assert whole in re.sub(r",\n\s*", ",", broken), "after commas only"


class TestPicture:
    def test_table_and_strips(self, box: Topology) -> None:
        assert shown(views.plan_blocks(box, plan(*THREE), "box")) == read("plan")

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ("", "unique_contiguous, by node"),
            ("--scope socket", "unique_contiguous, by socket"),
            ("--multithreading single_logical", "unique_contiguous, by node, single_logical"),
            ("--unbalanced", "unique_contiguous, by node, unbalanced"),
            ("--mode core_complex --unbalanced", "core_complex, by node, unbalanced"),
            ("--mode all --unbalanced", "all, by node"),
            ("--partition machine", "unique_contiguous, by node, cut by machine"),
        ],
    )
    def test_names_only_what_is_not_the_default(self, options: str, said: str) -> None:
        out = called("plan", "--from", "dgx-a100", *options.split()).out
        assert out.splitlines()[0] == f"dgx-a100: 8 ranks, {said}"

    def test_shows_what_is_kept_for_helpers(self, box: Topology) -> None:
        """Rank 0 keeps core 1, rank 1 core 6; core 5 is kept for both; core 7 is not allowed."""
        kept = [
            share(0, 1, {0, 8}, nodes=(0,))._replace(reserved=frozenset({1, 9})),
            share(1, 0, {4, 12}, nodes=(1,))._replace(reserved=frozenset({5, 6, 13, 14})),
            share(2, 0, {4, 12}, nodes=(1,))._replace(reserved=frozenset({5, 13})),
            share(3, 1, {2, 10}, nodes=(0,)),
        ]
        blocks = views.plan_blocks(box, plan(*kept), "box")
        assert shown(blocks) == read("reserved")
        picture = blocks[-1]
        assert isinstance(picture, formatting.Table)
        strips = [formatting.line(row[2]) for row in picture.rows]
        signs = [span for strip in strips for span in strip if span.text[0] == "+"]
        assert [span.style for span in signs] == ["rank:0", "dim", "rank:1"]

    def test_a_rank_on_a_core_counts_more_than_what_is_kept(self, box: Topology) -> None:
        """One CPU of the core is used, the other kept: the rank has the core."""
        half = share(0, 1, {0}, nodes=(0,))._replace(reserved=frozenset({8}))
        assert "node 0  GPU 1  0. .." in shown(views.plan_blocks(box, plan(half), "box"))

    def test_draws_cpus_where_cores_are_unknown(self) -> None:
        seen = Topology(cpus=FOUR, allowed=FOUR)
        assert drawn(seen, share(0, None, {0, 1})) == [
            "   0    -     -      2  all     0-1",
            "",
            "one character a CPU (cores are not known): the rank that has it, . free",
            "CPUs  00..  0-3",
        ]
        assert drawn(Topology(), share(0, None, set()))[0] == "   0    -     -      0  all     -"

    def test_draws_packages_and_what_is_in_none(self, box: Topology) -> None:
        part = box._replace(numa_nodes=None, packages=box.packages and box.packages[:1])
        assert drawn(part, *THREE)[-2:] == [
            "socket 0   GPU 1  0* 2.  0-3,8-11",
            "elsewhere         11 .-  4-7,12-15",
        ]

    @pytest.mark.parametrize(
        ("rank", "sign", "legend"),
        [(9, "9", ""), (10, "a", ""), (61, "Z", ""), (62, "#", ", # a rank above 61")],
    )
    def test_each_rank_has_a_letter(self, rank: int, sign: str, legend: str) -> None:
        one = frozenset({0})
        lines = drawn(Topology(cpus=one, allowed=one, cores=(one,)), share(rank, None, {0}))
        legend = f"one character a core: the rank that has it{legend}"
        assert lines[-2:] == [legend, f"CPUs  {sign}  0"]

    def test_long_strips_are_broken_only_for_a_terminal(self) -> None:
        cpus = frozenset(range(100))
        seen = Topology(cpus=cpus, allowed=cpus, cores=tuple(frozenset({c}) for c in range(100)))
        blocks = views.plan_blocks(seen, plan(share(0, None, set(range(100)))), "it")
        assert shown(blocks).splitlines()[-1] == f"CPUs  {'0' * 100}  0-99"
        # 50 columns, of which 6 are the name's and 6 the list's.
        assert on_width(blocks, 50).splitlines()[-3:] == [
            f"CPUs  {'0' * 38}  0-99",
            f"      {'0' * 38}",
            f"      {'0' * 24}",
        ]

    @pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
    def test_every_core_is_drawn_once(self, box: Topology, width: int) -> None:
        made = on_width(views.plan_blocks(box, plan(*THREE), "box"), width)
        drawn = re.sub(r"node \d|GPU \d|[\d-]+,[\d-]*|\d+-\d+|\s", "", made.split("ranks\n")[-1])
        assert sorted(drawn) == sorted("0*2.11.-")


WORDS = st.text("abc 01", max_size=8)
CELLS = st.lists(WORDS, max_size=6).map(
    lambda words: formatting.line(*(formatting.Span(w) for w in words))
)
ROWS = st.lists(st.tuples(CELLS, CELLS, CELLS), min_size=1, max_size=5)


class TestTable:
    @given(ROWS, st.integers(1, 60))
    def test_loses_nothing_and_stays_inside_where_it_can(
        self, rows: list[tuple[formatting.Line, ...]], width: int
    ) -> None:
        cells = [cell for row in rows for cell in row]
        expected = "".join(map(formatting.plain, cells))
        broken = on_width([formatting.Table(rows)], width)
        for made in (formatting.plain(formatting.Table(rows)), broken):
            assert sorted("".join(made.split())) == sorted("".join(expected.split()))
        longest = max((len(span.text) for cell in cells for span in cell), default=0)
        widest = max(map(len, broken.splitlines()), default=0)
        assert widest <= max(width, 3 * max(longest, 8) + 2 * formatting.GAP)

    def test_breaks_between_pieces_only(self) -> None:
        table = formatting.Table([(formatting.listed(["10-11", "20-21", "30"], ","), "end")])
        assert on_width([table], 11) == "10-11,  end\n20-21,\n30\n"
        assert on_width([table], 17) == "10-11,20-21,  end\n30\n"

    def test_an_empty_column_takes_no_room(self) -> None:
        table = formatting.Table([("a", "", "b"), ("cc", (), "d")])
        assert formatting.plain(table) == "a   b\ncc  d"
        assert on_width([table], 40) == "a   b\ncc  d\n"


class TestRich:
    def test_colours_change_no_character(self, box: Topology) -> None:
        blocks = [*views.topology_blocks(box, "box"), *views.plan_blocks(box, plan(*THREE), "box")]
        made = output.rendered(blocks, io.StringIO(), force=True)
        assert "\x1b[" in made
        assert ESCAPES.sub("", made) == shown(blocks) + "\n"

    def test_ranks_have_unlike_colours(self) -> None:
        spans = [formatting.Span("x", f"rank:{rank}") for rank in range(12)]
        made = output.rendered([(span,) for span in spans], io.StringIO(), force=True)
        assert len(set(made.splitlines())) == 12

    def test_brackets_are_no_markup(self) -> None:
        line = formatting.line("[red]a[/] :smile:")
        assert output.rendered([line], io.StringIO()) == "[red]a[/] :smile:\n"


class TestOutput:
    def test_a_terminal_gets_colours_at_its_width(self, on_terminal: Callable[..., str]) -> None:
        seen = on_terminal("plan", "--from", "dgx-a100", "--mode", "all", columns=60)
        assert "\x1b[" in seen
        assert max(len(line) for line in ESCAPES.sub("", seen).splitlines()[2:11]) <= 60

    def test_a_terminal_without_rich_gets_plain_text(
        self, on_terminal: Callable[..., str], tmp_path: Path
    ) -> None:
        for name in ("rich", "rich_argparse"):
            (tmp_path / f"{name}.py").write_text("raise ImportError('not installed')\n")
        path = f"{tmp_path}:{':'.join(filter(None, sys.path))}"
        plain = on_terminal("plan", "--from", "dgx-a100", env={"PYTHONPATH": path})
        assert "\x1b" not in plain
        assert plain == ESCAPES.sub("", on_terminal("plan", "--from", "dgx-a100"))
        assert "commands:" in on_terminal("--help", env={"PYTHONPATH": path})

    def test_help_is_coloured_too(self, on_terminal: Callable[..., str]) -> None:
        assert "\x1b[" in on_terminal("plan", "--help")

    def test_no_color_is_honoured(self, on_terminal: Callable[..., str]) -> None:
        seen = on_terminal("topo", "--from", "dgx-a100", env={"NO_COLOR": "1"})
        assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", seen)

    def test_colours_are_forced_into_a_pipe(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for value, is_coloured in ("1", True), ("", False):
            monkeypatch.setenv("FORCE_COLOR", value)
            assert main(["topo", "--from", "dgx-a100"]) == 0
            assert ("\x1b[" in capsys.readouterr().out) is is_coloured

    def test_names_cannot_command_the_terminal(
        self, box: Topology, capsys: pytest.CaptureFixture[str]
    ) -> None:
        evil = box.gpus[0]._replace(name="a\x1b[31mb\nc\ud800")
        output.show(views.topology_blocks(box._replace(gpus=(evil,), links=None), "box"))
        assert "a\\x1b[31mb\\nc\\ud800, cuda:1" in capsys.readouterr().out

    def test_what_the_encoding_lacks_is_escaped(self, monkeypatch: pytest.MonkeyPatch) -> None:
        raw = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
        output.show([formatting.line("é")])
        sys.stdout.flush()
        assert raw.getvalue() == b"\\xe9\n"

    def test_notes_go_to_standard_error(self, capsys: pytest.CaptureFixture[str]) -> None:
        output.show_notes([Notice("a", "one\ntwo"), Notice("b", "three")])
        out, err = capsys.readouterr()
        assert (out, err) == ("", "gpuaff: note: one\\ntwo [a]\ngpuaff: note: three [b]\n")

    def test_json_is_ascii_in_order_and_valid(self, capsys: pytest.CaptureFixture[str]) -> None:
        output.show_json({"b": "é", "a\udcff": ["\ud83d\ude00", "\udcff"]})
        lines = ['"b": "\\u00e9",', '"a\\ufffd": [', '  "\\ud83d\\ude00",', '  "\\ufffd"', "]"]
        assert capsys.readouterr().out == "\n  ".join(["{", *lines]) + "\n}\n"
