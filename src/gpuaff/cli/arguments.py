"""Readers of the command line's values, as argparse calls them."""

from __future__ import annotations

import argparse

from gpuaff.errors import InvalidOptionError
from gpuaff.formatting import one_line
from gpuaff.options import natural

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    T = TypeVar("T")


def argument(read: Callable[[str, str], T]) -> Callable[[str], T]:
    """A reader for argparse, whose error says what was given and what is expected."""

    def convert(text: str) -> T:
        try:
            return read("", text)  # argparse itself names the argument
        except InvalidOptionError as error:
            problem = f"{one_line(text, 60)!r}: expected {error.expected}"
            raise argparse.ArgumentTypeError(problem) from None

    return convert


def process_id(name: str, text: str) -> int:
    """The id of a process or thread."""
    number = natural(text)
    if not number:
        raise InvalidOptionError(name, text, "the number of a process")
    return number


def file_name(name: str, text: str) -> str:
    """The name of a file to write."""
    if text in ("", "-"):
        expected = "the name of a file; --json prints to standard output"
        raise InvalidOptionError(name, text, expected)
    return text
