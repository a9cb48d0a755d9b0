"""Pasted text, made plain: its lines without what mails, logs, pages and terminals put there."""

from __future__ import annotations

import html
import re

from gpuaff.cpuset import MAX_CPU_ID, CpuSet, parse_cpulist
from gpuaff.errors import TopologyError
from gpuaff.notices import Notice

MAX_CHARS = 4 * 1024 * 1024
MAX_LINES = 200_000
MAX_IDS = 2_000_000
"""How many CPU ids all lists of a text may name together: room for a machine of 65 536 CPUs
named 30 times, while ``0-65535`` over and over cannot exhaust time and memory."""

_MAX_NOTES = 100
_MAX_MESSAGE = 400

_ESCAPES = re.compile(
    r"(?:\x1b|\^\[|\\e|\\x1b|\\033|\\u001b)(?:\[[0-9;?]{0,20}[A-Za-z]|\(B)"
    r"|\[[0-9]{0,3}(?:;[0-9]{1,3}){0,4}m",
    re.ASCII | re.IGNORECASE,
)
"""Terminal colours, also where the paste spells out or has lost the escape character."""

_LONG_REFERENCE = re.compile(r"&#[0-9]{8,};?", re.ASCII)
"""No letter has such a number, and Python refuses to read one of more than 4300 digits."""

_BREAK = re.compile(r"<(?:br|/p|/div|/tr)[ \t]{0,9}/?>\n?", re.ASCII | re.IGNORECASE)
_TAG = re.compile(
    r"</?(?:p|div|pre|code|span|samp|tt|b|u)(?:[ \t][^<>\n]{0,200})?>", re.ASCII | re.IGNORECASE
)
_REPLACED = {
    "": "\0\ufeff\u200b\u200e",
    " ": "\xa0\u1680\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B))),
    "\t": "|│┃",
    "\n": "\r\v\f\x85\u2028\u2029",
    "-": "\u2010\u2011\u2012\u2013\u2014\u2212",
}
_PLAIN = {ord(old): new for new, all_old in _REPLACED.items() for old in all_old}

_MARKS = " \t#>*/;%!+=-`'\"•·"
"""What stands before a line that was quoted, put into a comment, a list or a code fence."""

_LOGGED = re.compile(
    r"(?:\[[a-z]{1,20}\d{0,5}\]:"
    r"|\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,\d]{0,12}(?:Z|[+-]\d\d:?\d\d)?)[ \t]",
    re.ASCII | re.IGNORECASE,
)
"""What a log has before a line: the rank, by torchrun, or the time, by CI services."""

_RANGE = re.compile(r"(\d{1,9})-(\d{1,9})", re.ASCII)


class Paste:
    """One text, and the notes about it.

    Attributes:
        name: what errors call the text.
        lines: its lines without escape codes, quote and comment marks, outer blanks.
        text: the same lines, joined.
        cut_line: the number of the last line where the text ends without a newline, since it may
            have been cut there; else −1.
        notes: each once, in the order that they were made.
    """

    def __init__(self, text: str, name: str) -> None:
        self.name = name
        if len(text) > MAX_CHARS:
            raise self.error(f"{len(text)} characters are more than {MAX_CHARS}; cut out the part")
        plain = _plain(text)
        count = plain.count("\n")
        if count > MAX_LINES:
            raise self.error(f"{count} lines are more than {MAX_LINES}; cut out the part")
        self.lines = tuple(map(_unmarked, plain.split("\n")))
        self.text = "\n".join(self.lines)
        self.cut_line = -1 if plain.endswith("\n") else count
        self.notes: dict[Notice, None] = {}
        self._lists: dict[str, CpuSet | None] = {}
        self._sets: dict[CpuSet, CpuSet] = {}
        self._ids = 0

    def note(self, code: str, message: str) -> None:
        """Add a note, once; a garbled text does not get thousands."""
        if len(message) > _MAX_MESSAGE:
            message = f"{message[:_MAX_MESSAGE]}…"
        if len(self.notes) < _MAX_NOTES:
            self.notes.setdefault(Notice(code, message))

    def error(self, problem: str) -> TopologyError:
        """The error that says why this text is refused."""
        return TopologyError(self.name, problem)

    def is_cut(self, match: re.Match[str]) -> bool:
        """Whether the text breaks off where this match in it ends."""
        return match.end() == len(self.text)

    def cpulist(self, text: str) -> CpuSet | None:
        """The CPUs (or nodes) of a cpulist; None when it is not one.

        Equal lists give the same object, so that huge ones are compared at once.

        Raises:
            TopologyError: the text as a whole names more ids than any machine has.
        """
        if text not in self._lists:
            self._count_ids(text)
            try:
                found = parse_cpulist(text)
                self._lists[text] = self._sets.setdefault(found, found)
            except ValueError:
                self._lists[text] = None
        return self._lists[text]

    def _count_ids(self, text: str) -> None:
        self._ids += text.count(",") + 1
        for first, last in _RANGE.findall(text):
            if int(last) <= MAX_CPU_ID:
                self._ids += max(0, int(last) - int(first))
        if self._ids > MAX_IDS:
            raise self.error(f"its lists name more than {MAX_IDS} CPU ids: not one machine's")


def _plain(text: str) -> str:
    """The text in valid Unicode, without escape codes and tags, with one kind of line end."""
    valid = text.encode("utf-8", "replace").decode("utf-8")
    text = _TAG.sub("", _BREAK.sub("\n", valid.replace("\r\n", "\n")))
    text = html.unescape(_LONG_REFERENCE.sub("\ufffd", text))
    return _ESCAPES.sub("", text).translate(_PLAIN)


def _unmarked(line: str) -> str:
    """A line without what stands before it in a mail, a comment or a log."""
    return _LOGGED.sub("", line.lstrip(_MARKS), count=1).lstrip(_MARKS).rstrip()
