"""Options: argument > ``GPUAFF_<OPTION>`` > default; so a job can be steered from outside."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gpuaff._system import env
from gpuaff.allocator.model import (
    Mode,
    Multithreading,
    Options,
    Partition,
    Scope,
    check_count,
    check_cpus,
    check_reserve,
    check_word,
)
from gpuaff.errors import InvalidOptionError
from gpuaff.options import natural

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


def plan_options(nproc: int, arguments: Mapping[str, object]) -> Options:
    """The options of a plan, each from where it was said.

    Args:
        nproc: how many ranks.
        arguments: :func:`gpuaff.plan`'s options by name; None where a caller said nothing.

    Raises:
        InvalidOptionError: an argument or a variable cannot be meant.
    """
    return Options.of(nproc, **with_environment(arguments))


def is_strict(argument: object) -> bool:
    """Whether best effort is not enough: the argument, else ``GPUAFF_STRICT``.

    Raises:
        InvalidOptionError: it is neither a yes nor a no.
    """
    return yes_or_no("strict", argument)


def yes_or_no(option: str, argument: object) -> bool:
    """An option that is off by default: the argument, else ``GPUAFF_<OPTION>``.

    Raises:
        InvalidOptionError: it is neither a yes nor a no.
    """
    name, value = said(option, argument)
    if argument is None:
        return value is not None and flag(name, str(value))
    if isinstance(argument, bool):
        return argument
    raise InvalidOptionError(option, argument, "True or False")


def said(option: str, argument: object) -> tuple[str, object]:
    """What was said for an option: by the argument, else by ``GPUAFF_<OPTION>``.

    Returns:
        What it is called where it was said, and the value; None when nobody said anything.
    """
    if argument is not None:
        return option, argument
    return f"GPUAFF_{option.upper()}", env.option(option)


def pinning_is_off() -> bool:
    """Whether ``GPUAFF=off`` turns pinning off.

    Raises:
        InvalidOptionError: the variable is neither a yes nor a no.
    """
    text = (env.get("GPUAFF") or "").strip()
    return bool(text) and not flag("GPUAFF", text)


def flag(name: str, text: str) -> bool:
    """Read a yes or no.

    Raises:
        InvalidOptionError: it is neither.
    """
    word = text.lower()
    if word not in _TRUE + _FALSE:
        raise InvalidOptionError(name, text, f"one of {', '.join(_TRUE + _FALSE)}")
    return word in _TRUE


def whole_number(name: str, text: str) -> int:
    """Read a number of ranks or cores.

    Raises:
        InvalidOptionError: it is none.
    """
    number = natural(text)
    return check_count(name, text if number is None else number)


def reserve(name: str, text: str) -> int:
    """Read a number of cores, which may be 0.

    Raises:
        InvalidOptionError: it is none.
    """
    number = natural(text)
    return check_reserve(name, text if number is None else number)


READERS: Mapping[str, Callable[[str, str], object]] = {
    "mode": lambda name, text: check_word(name, text, Mode),
    "scope": lambda name, text: check_word(name, text, Scope),
    "multithreading": lambda name, text: check_word(name, text, Multithreading),
    "balanced": flag,
    "min_physical_cores": whole_number,
    "max_physical_cores": whole_number,
    "partition": lambda name, text: check_word(name, text, Partition),
    "cpus": check_cpus,
    "reserve": reserve,
}
"""The planner's options, and how the text of each is read, from a variable or an argument. A
reader takes what the text is called and the text, and raises InvalidOptionError."""


def with_environment(arguments: Mapping[str, object]) -> dict[str, object]:
    """The options that were said: by an argument or, where that is None, by ``GPUAFF_<OPTION>``.

    Raises:
        InvalidOptionError: the value of a variable that counts cannot be meant.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    texts = {name: env.option(name) for name in READERS if name not in given}
    read = {
        name: READERS[name](f"GPUAFF_{name.upper()}", text)
        for name, text in texts.items()
        if text is not None
    }
    return {**read, **given}
