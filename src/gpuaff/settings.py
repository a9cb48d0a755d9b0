"""Options by precedence: argument, ``GPUAFF_<OPTION>``, default.

What counts and is invalid raises :class:`~gpuaff.errors.InvalidOptionError`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from gpuaff import options
from gpuaff._system import env
from gpuaff.allocator import model

_NO_TEXTS = ("balanced", "min_physical_cores", "max_physical_cores", "reserve")

READERS: Mapping[str, Callable[[str, str], object]] = {
    name: partial(read, text=True) if name in _NO_TEXTS else read
    for name, read in model.READERS.items()
}
"""The planner's options, and the reader of each one's text, from a variable or the command line."""


def with_environment(arguments: Mapping[str, object]) -> dict[str, object]:
    """The planner's options that were given: as an argument, not None, else as a variable."""
    given = {name: value for name, value in arguments.items() if value is not None}
    for name in READERS.keys() - given.keys():
        text = env.option(name)
        if text is not None:
            given[name] = READERS[name](f"GPUAFF_{name.upper()}", text)
    return given


def value_of(option: str, argument: object) -> tuple[str, object]:
    """An option's name, as the user wrote it, and its value; None where it was not given."""
    if argument is not None:
        return option, argument
    return f"GPUAFF_{option.upper()}", env.option(option)


def flag(option: str, argument: object) -> bool:
    """A flag that is off by default: the argument, else ``GPUAFF_<OPTION>``."""
    name, value = value_of(option, argument)
    return value is not None and options.flag(name, value, text=argument is None)


def pinning_is_off() -> bool:
    """Whether ``GPUAFF=off`` turns pinning off."""
    text = (env.get("GPUAFF") or "").strip()
    return bool(text) and not options.flag("GPUAFF", text, text=True)
