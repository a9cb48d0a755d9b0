"""Text made worse: characters, words, numbers and lines that somebody might paste or type."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from random import Random

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


def _span(random: Random, text: str, most: int = 40) -> tuple[int, int]:
    start = random.randint(0, len(text))
    return start, min(len(text), start + random.randint(0, most))


def _insert(random: Random, text: str, others: Sequence[str]) -> str:
    at, _ = _span(random, text)
    return text[:at] + random.choice(ODD) + text[at:]


def _delete(random: Random, text: str, others: Sequence[str]) -> str:
    start, end = _span(random, text)
    return text[:start] + text[end:]


def _flip(random: Random, text: str, others: Sequence[str]) -> str:
    at, _ = _span(random, text)
    letter = chr(random.choice((random.randrange(128), random.randrange(0x3000))))
    return text[:at] + letter + text[at + 1 :]


def _double(random: Random, text: str, others: Sequence[str]) -> str:
    start, end = _span(random, text, 200)
    return text[:end] + text[start:end] * random.choice((1, 1, 2, 30)) + text[end:]


def _cut(random: Random, text: str, others: Sequence[str]) -> str:
    return text[: random.randint(0, len(text))]


def _behead(random: Random, text: str, others: Sequence[str]) -> str:
    return text[random.randint(0, len(text)) :]


def _splice(random: Random, text: str, others: Sequence[str]) -> str:
    other = random.choice(others)
    return text[: random.randint(0, len(text))] + other[random.randint(0, len(other)) :]


def _renumber(random: Random, text: str, others: Sequence[str]) -> str:
    return _replace_one(random, text, _DIGITS, random.choice(NUMBERS))


def _add_one(random: Random, text: str, others: Sequence[str]) -> str:
    found = list(_DIGITS.finditer(text))
    if not found:
        return text
    one = random.choice(found)
    number = max(0, int(one[0][:20]) + random.choice((-1, 1, 2, 100)))
    return f"{text[: one.start()]}{number}{text[one.end() :]}"


def _reword(random: Random, text: str, others: Sequence[str]) -> str:
    words = random.choice(others).split() or [""]
    return _replace_one(random, text, _WORDS, random.choice((random.choice(words), "")))


def _replace_one(random: Random, text: str, what: re.Pattern[str], new: str) -> str:
    found = list(what.finditer(text))
    if not found:
        return text
    one = random.choice(found)
    return text[: one.start()] + new + text[one.end() :]


def _blanks(random: Random, text: str, others: Sequence[str]) -> str:
    old, new = random.choice(
        (
            ("\t", " "),
            ("\t", ""),
            (" ", "\t"),
            ("  ", " "),
            ("\n", " "),
            ("\n", "\r\n"),
            (",", ", "),
        )
    )
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
    at, _ = _span(random, text)
    return text[:at] + piece * random.choice((10, 100, 1000)) + text[at:]


_ALL: tuple[Callable[[Random, str, Sequence[str]], str], ...] = (
    _insert, _delete, _flip, _double, _cut, _behead, _splice, _renumber, _renumber, _add_one,
    _reword, _blanks, _lines, _lines, _long,
)  # fmt: skip
