"""Reading data that others wrote: a value, where it stands, and what it must be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from gpuaff.cpuset import CpuSet, parse_cpulist
from gpuaff.errors import TopologyError
from gpuaff.records import dataclass

_T = TypeVar("_T")


@dataclass(frozen=True)
class Field:
    """A value out of parsed JSON.

    Every method that reads it raises :class:`TopologyError` with the value's path when it is
    not what it must be.

    Attributes:
        source: what the whole came from, for messages.
        value: the value; a missing member is None, as null is.
        path: how to get to the value, e.g. ``gpus[2].node_cpus``; empty for the whole.
    """

    source: str
    value: Any
    path: str = ""

    def fail(self, problem: str) -> NoReturn:
        """Raise an error about this value.

        Raises:
            TopologyError: always.
        """
        problem = _cut(problem, 200)
        raise TopologyError(self.source, f"{self.path}: {problem}" if self.path else problem)

    def __getitem__(self, key: str) -> Field:
        """The member of an object; null when it is missing."""
        path = f"{self.path}.{key}" if self.path else key
        return Field(self.source, self._expect(dict, "an object").get(key), path)

    def required(self, key: str) -> Field:
        """The member of an object that must be there, though it may be null."""
        member = self[key]
        if key not in self.value:
            member.fail("is missing")
        return member

    def items(self) -> list[Field]:
        """The items of a list."""
        values = self._expect(list, "a list")
        return [Field(self.source, item, f"{self.path}[{i}]") for i, item in enumerate(values)]

    def optional(self, read: Callable[[Field], _T]) -> _T | None:
        """What ``read`` makes of this value; None when it is null or missing."""
        return None if self.value is None else read(self)

    def integer(self, lowest: int = 0, highest: int = 2**31 - 1) -> int:
        """A whole number within limits; true and 1.0 are none."""
        number: int = self._expect(int, "a whole number")
        if not lowest <= number <= highest:
            self.fail(f"expected a number from {lowest} to {highest}")
        return number

    def boolean(self) -> bool:
        """True or false."""
        if not isinstance(self.value, bool):
            self.fail(f"expected true or false, found {self._kind()}")
        return self.value

    def text(self) -> str:
        """A text that is not empty."""
        text: str = self._expect(str, "a text")
        if not text:
            self.fail("is empty; write null for what is not known")
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            self.fail("is not valid Unicode")
        return text

    def cpus(self) -> CpuSet:
        """A cpulist, e.g. ``0-3,8``; ``""`` is the empty set."""
        text = self._expect(str, "CPUs such as '0-3,8'")
        try:
            return parse_cpulist(text)
        except ValueError as error:
            self.fail(str(error))

    def some_cpus(self) -> CpuSet:
        """A cpulist that names at least one CPU."""
        cpus = self.cpus()
        if not cpus:
            self.fail("names no CPU; write null if they are not known")
        return cpus

    def _expect(self, kind: type, words: str) -> Any:
        if not isinstance(self.value, kind) or (kind is int and isinstance(self.value, bool)):
            self.fail(f"expected {words}, found {self._kind()}")
        return self.value

    def _kind(self) -> str:
        """What the value is, for messages."""
        if self.value is None:
            return "null"
        if isinstance(self.value, dict):
            return "an object"
        if isinstance(self.value, list):
            return "a list"
        if isinstance(self.value, int) and self.value.bit_length() > 64:
            return "a huge number"
        return _cut(repr(self.value), 40)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 3]}..."
