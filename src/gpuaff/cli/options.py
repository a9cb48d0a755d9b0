"""How the values of arguments are read."""

from __future__ import annotations

import argparse

from gpuaff.digits import natural
from gpuaff.errors import InvalidOptionError

TYPE_CHECKING = False  # `gpuaff run` stands between a user and their program
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    from gpuaff.cpuset import CpuSet

    T = TypeVar("T")


def cpus(name: str, text: str) -> CpuSet:
    """Read a cpulist that names at least one CPU."""
    from gpuaff.cpuset import parse_cpulist

    try:
        found = parse_cpulist(text)
    except ValueError as error:
        raise InvalidOptionError(name, text, f"a list of CPUs such as 0-3,8 ({error})") from None
    if not found:
        expected = "a list of CPUs such as 0-3,8, with at least one in it"
        raise InvalidOptionError(name, text, expected)
    return found


def process_id(name: str, text: str) -> int:
    """Read the id of a process or thread."""
    number = natural(text)
    if not number:
        raise InvalidOptionError(name, text, "the number of a process")
    return number


def file_name(name: str, text: str) -> str:
    """Read the name of a file to write."""
    if text in ("", "-"):
        expected = "the name of a file; --json prints to standard output"
        raise InvalidOptionError(name, text, expected)
    return text


def argument(read: Callable[[str, str], T]) -> Callable[[str], T]:
    """A reader as argparse wants it: its error names what was given and expected."""

    def convert(text: str) -> T:
        try:
            return read("", text)  # argparse itself names the argument
        except InvalidOptionError as error:
            said = f"{text[:60]!r}: expected {error.expected}"
            raise argparse.ArgumentTypeError(said) from None

    return convert
