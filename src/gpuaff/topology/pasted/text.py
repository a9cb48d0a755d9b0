"""Pasted text, without what mails, comments and terminals put around its lines."""

from __future__ import annotations

import re
from typing import TypeVar

from gpuaff.cpuset import CpuSet, parse_cpulist
from gpuaff.errors import TopologyError
from gpuaff.notices import Notice

MAX_CHARS = 4 << 20
MAX_IDS = 2_000_000
"""How many CPU ids all lists of a text may name together: room for a machine of 65 536 CPUs named
30 times."""

_MAX_MESSAGE = 400

_COLOURS = re.compile(r"\x1b?\[[0-9;]{0,20}m", re.ASCII)
"""nvidia-smi underlines its header; some pastes have lost the escape character."""

_PLAIN = str.maketrans({"\r": "\n", "|": "\t", "\xa0": " ", "\0": None, "\ufeff": None})
_MARKS = " \t#>*/`"
"""What stands around a line that was quoted, indented, put into a comment or a code fence."""

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Paste:
    """One text, and the notes about it.

    Attributes:
        name: what errors call the text.
        lines: those of its lines that are not empty, without escape codes and marks.
        text: the same lines, joined.
        is_cut: whether it ends without a newline, so that its last line may be cut.
        notes: each once, in the order that they were made.
    """

    def __init__(self, text: str, name: str) -> None:
        self.name = name
        if len(text) > MAX_CHARS:
            raise self.error(f"{len(text)} characters are more than {MAX_CHARS}; cut out the part")
        valid = text.encode("utf-8", "replace").decode("utf-8").replace("\r\n", "\n")
        plain = _COLOURS.sub("", valid).translate(_PLAIN)
        self.lines = [*filter(None, (line.strip(_MARKS) for line in plain.split("\n")))]
        self.text = "\n".join(self.lines)
        self.is_cut = not plain.endswith("\n")
        self.notes: dict[Notice, None] = {}
        self._lists: dict[str, CpuSet | None] = {}
        self._ids = 0

    def note(self, code: str, message: str) -> None:
        """Add a note, once."""
        cut = f"{message[:_MAX_MESSAGE]}…" if len(message) > _MAX_MESSAGE else message
        self.notes.setdefault(Notice(code, cut))

    def error(self, problem: str) -> TopologyError:
        """The error that says why this text is refused."""
        return TopologyError(self.name, problem)

    def keep(self, found: dict[_Key, _Value], key: _Key, value: _Value, what: str) -> None:
        """Keep the first value that the text has for a key; another one is a contradiction."""
        if found.setdefault(key, value) != value:
            self.note("contradiction", f"{what} are there twice, and differ; the first counts")

    def cpulist(self, text: str) -> CpuSet | None:
        """The CPUs (or nodes) of a cpulist; None when it is not one.

        Raises:
            TopologyError: the text as a whole names more ids than any machine has.
        """
        if text not in self._lists:
            try:
                self._lists[text] = parse_cpulist(text)
            except ValueError:
                self._lists[text] = None
            self._ids += len(self._lists[text] or ())
            if self._ids > MAX_IDS:
                raise self.error(f"its lists name more than {MAX_IDS} CPU ids: not one machine's")
        return self._lists[text]
