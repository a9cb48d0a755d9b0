"""Options by precedence: argument, ``GPUAFF_<OPTION>``, default."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from gpuaff import options
from gpuaff._system import env
from gpuaff.allocator.model import Mode, Multithreading, Options, Partition, Scope, reserve

NUMBER = partial(options.count, text=True)
RESERVE = partial(reserve, text=True)

READERS: Mapping[str, Callable[[str, str], object]] = {
    "mode": partial(options.word, words=Mode),
    "scope": partial(options.word, words=Scope),
    "multithreading": partial(options.word, words=Multithreading),
    "balanced": partial(options.flag, text=True),
    "min_physical_cores": NUMBER,
    "max_physical_cores": NUMBER,
    "partition": partial(options.word, words=Partition),
    "cpus": options.cpus,
    "reserve": RESERVE,
}
"""The planner's options, and the reader of each one's text, from a variable or the command line."""


def plan_options(nproc: int, arguments: Mapping[str, object]) -> Options:
    """The options of a plan.

    Args:
        nproc: how many ranks.
        arguments: :func:`gpuaff.plan`'s options by name; None where a caller gave none.

    Raises:
        InvalidOptionError: an argument or a variable has an invalid value.
    """
    return Options.of(nproc, **with_environment(arguments))


def with_environment(arguments: Mapping[str, object]) -> dict[str, object]:
    """The options that were given: as an argument, else as ``GPUAFF_<OPTION>``.

    Raises:
        InvalidOptionError: a variable that counts has an invalid value.
    """
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
    """A flag that is off by default: the argument, else ``GPUAFF_<OPTION>``.

    Raises:
        InvalidOptionError: it is neither true nor false.
    """
    name, value = value_of(option, argument)
    return value is not None and options.flag(name, value, text=argument is None)


def pinning_is_off() -> bool:
    """Whether ``GPUAFF=off`` turns pinning off.

    Raises:
        InvalidOptionError: the variable is neither true nor false.
    """
    text = (env.get("GPUAFF") or "").strip()
    return bool(text) and not options.flag("GPUAFF", text, text=True)
