"""Text and JSON made worse: what somebody might paste, type or change."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from copy import deepcopy
from random import Random
from typing import Any

from tests.fuzz.seeds import KEYS, SCALARS, nested

NUMBERS: list[str] = [
    *map(str, (0, 1, 2, 7, 8, 9, 15, 16, 31, 32, 63, 64, 127, 128, 255, 256, 999, 1000, 1023)),
    *map(str, (1024, 4095, 8191, 8192, 9999, 65534, 65535, 65536, 99999, 999999, 99999999)),
    *map(str, (2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**63, 2**64 - 1, 2**64, -1)),
    "-0", "+1", "007", "1e5", "0x10", "1.5", "٣", "²", "１", "①", "१", "Ⅷ",
    "9" * 30, "9" * 400, "1" + "0" * 5000, "0" * 60 + "1",
]  # fmt: skip
"""Borders of machine words and of our own limits, and what only looks like a number."""

ODD: list[str] = [
    *"\0\x01\t\n\v\f\r\x1b\x1c\x7f\x85\xa0\u200b\u200e\u2028\u2013\u2212\ufeff\uff1a\uffff│┃²٣é中😀",
    "\ud800", "\udfff", "\r\n", "\x1b[4m", "\x1b[0;31m", "^[[1m", "[0m", "&nbsp;", "&#0;",
    "&#x1f600;", "<br>", "</pre>", "<div ", "```", "> ", "# ", "// ", "[rank0]: ",
    "2024-01-02T03:04:05.123Z ", "GPU", "GPU0", "GPU-", "MIG-", "N/A", "X", "SYS", "NV12", ",", "-",
    ":", "/", "0-", "-0", ",,", "GPU[0] : ", "GPU 0: NVIDIA A30 (UUID: ", "0-65535", "0-31:2/8",
    "0-65535:1/2", "null", "true", "NaN", "{}", "[]", '""', '"', "\\u0000",
]  # fmt: skip
"""Pieces that have a meaning in one of the formats, or that text should not have."""

_DIGITS = re.compile(r"\d+")
_WORDS = re.compile(r"\S+")


def mutated(random: Random, text: str, others: Sequence[str], most: int = 8) -> str:
    """A text after 1 to ``most`` mutations."""
    for _ in range(random.randint(1, most)):
        text = random.choice(_ALL)(random, text, others)
    return text


def _edit(random: Random, text: str, others: Sequence[str]) -> str:
    """A span doubled, or replaced by nothing, by a letter, or by a piece."""
    start = random.randint(0, len(text))
    end = start + random.choice((0, 0, 1, random.randrange(40), random.randrange(200)))
    own, letter = text[start:end], random.choice((random.randrange(128), random.randrange(0x3000)))
    new = random.choice(("", chr(letter), random.choice(ODD), own * random.choice((2, 3, 31))))
    return text[:start] + new + text[end:]


def _cut(random: Random, text: str, others: Sequence[str]) -> str:
    at = random.randint(0, len(text))
    return random.choice((text[:at], text[at:]))


def _splice(random: Random, text: str, others: Sequence[str]) -> str:
    other = random.choice(others)
    return text[: random.randint(0, len(text))] + other[random.randint(0, len(other)) :]


def _renumber(random: Random, text: str, others: Sequence[str]) -> str:
    new = random.choice(NUMBERS)
    return _replace_one(random, text, _DIGITS, lambda _: new)


def _add(random: Random, text: str, others: Sequence[str]) -> str:
    more = random.choice((-1, 1, 2, 100))
    return _replace_one(random, text, _DIGITS, lambda old: str(max(0, int(old[:20]) + more)))


def _reword(random: Random, text: str, others: Sequence[str]) -> str:
    new = random.choice((random.choice(random.choice(others).split() or [""]), ""))
    return _replace_one(random, text, _WORDS, lambda _: new)


def _replace_one(
    random: Random, text: str, what: re.Pattern[str], new: Callable[[str], str]
) -> str:
    found = list(what.finditer(text))
    if not found:
        return text
    one = random.choice(found)
    return text[: one.start()] + new(one[0]) + text[one.end() :]


def _blanks(random: Random, text: str, others: Sequence[str]) -> str:
    swaps = "\t| ", "\t|", " |\t", "  | ", "\n| ", "\n|\r\n", ",|, "
    old, new = random.choice(swaps).split("|")
    return text.replace(old, new, random.choice((1, -1)))


def _lines(random: Random, text: str, others: Sequence[str]) -> str:
    lines = text.split("\n")
    at, to = random.randrange(len(lines)), random.randrange(len(lines))
    act = random.randrange(5)
    if act == 0:
        del lines[at]
    elif act == 1:
        lines.insert(to, lines[at])
    elif act == 2:
        lines[at], lines[to] = lines[to], lines[at]
    elif act == 3:
        lines = [random.choice(ODD) + line for line in lines]
    else:
        lines[at] = lines[at][: len(lines[at]) // 2] + "\n" + lines[at][len(lines[at]) // 2 :]
    return "\n".join(lines)


def _long(random: Random, text: str, others: Sequence[str]) -> str:
    piece = random.choice((random.choice(ODD), random.choice(NUMBERS[:40]) + ",", "[", '{"a":'))
    at = random.randint(0, len(text))
    return text[:at] + piece * random.choice((10, 100, 1000)) + text[at:]


_ALL: tuple[Callable[[Random, str, Sequence[str]], str], ...] = (
    _edit, _edit, _edit, _edit, _cut, _cut, _splice, _renumber, _renumber, _add, _reword, _blanks,
    _lines, _lines, _long,
)  # fmt: skip


def mangled(random: Random, value: Any, most: int = 4) -> Any:
    """A JSON value with 1 to ``most`` members changed, dropped, doubled or moved, in place."""
    for _ in range(random.randint(1, most)):
        holders = list(_holders(value))
        if holders:
            _change(random, random.choice(holders), holders)
    return value


def _holders(value: Any) -> list[Any]:
    """Every list and object that is not empty, the outermost first."""
    found, queue = [], [value]
    for one in queue:
        if isinstance(one, (dict, list)) and one:
            found.append(one)
            queue += one.values() if isinstance(one, dict) else one
    return found


def _change(random: Random, holder: Any, holders: list[Any]) -> None:
    place = (
        random.choice(list(holder)) if isinstance(holder, dict) else random.randrange(len(holder))
    )
    act = random.randrange(7)
    if act == 0:
        del holder[place]
    elif act == 1:
        other = random.choice(holders)
        donor = random.choice(list(other.values()) if isinstance(other, dict) else other)
        holder[place] = deepcopy(donor)
    elif act == 2:
        holder[place] = nested(random, 3)
    elif act == 3 and isinstance(holder, dict):
        holder[random.choice(KEYS)] = holder[place]
    elif act == 3:
        holder.insert(random.randrange(len(holder) + 1), deepcopy(holder[place]))
    elif isinstance(holder[place], bool) or not isinstance(holder[place], int):
        holder[place] = random.choice(SCALARS)
    else:
        holder[place] += random.choice((-1, 1, 7))
