"""Dataclasses at a tenth of the price.

``import dataclasses`` takes 18 ms, since it imports inspect, and each class 0.6 ms, since its
methods are written as source and compiled. That is half of what a call of ``set_affinity`` in a
fresh process spends in Python (``benchmarks/set_affinity.py``), while every rank of a job waits.
Here all classes share their methods. ``dataclasses.fields``, ``replace`` and ``asdict`` work: the
real module makes what they need when they ask for it.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeVar

    _T = TypeVar("_T")

_REQUIRED: Any = object()


class Field:
    """What a class says about one of its fields.

    Attributes:
        default: its value when it is not given; ``_REQUIRED`` when it has to be.
        default_factory: makes that value anew each time.
        compare: whether it counts when two records are compared.
        required: whether it has to be given.
    """

    def __init__(
        self,
        default: Any = _REQUIRED,
        default_factory: Callable[[], Any] | None = None,
        compare: bool = True,
    ) -> None:
        self.default = default
        self.default_factory = default_factory
        self.compare = compare
        self.required = default is _REQUIRED and default_factory is None

    def value(self) -> Any:
        """The value of a field that was not given."""
        return self.default if self.default_factory is None else self.default_factory()

    def as_dataclasses_say_it(self) -> Any:
        """The same for :mod:`dataclasses`."""
        import dataclasses

        if self.default_factory is not None:
            return dataclasses.field(default_factory=self.default_factory, compare=self.compare)
        if self.required:
            return dataclasses.field(compare=self.compare)
        return dataclasses.field(default=self.default, compare=self.compare)


def field(
    *,
    default: Any = _REQUIRED,
    default_factory: Callable[[], Any] | None = None,
    compare: bool = True,
) -> Any:
    """As :func:`dataclasses.field`."""
    return Field(default, default_factory, compare)


class _OfTheRealOne:
    """An attribute by which :mod:`dataclasses` knows its own, made when it is asked for."""

    def __init__(self, name: str, **options: bool) -> None:
        self._name = name
        self._options = options

    def __get__(self, record: object, owner: Any) -> Any:
        import dataclasses

        said = {name: how.as_dataclasses_say_it() for name, how in owner.__record__.items()}
        # A class that inherits its fields has no annotations of its own.
        home = next(one for one in owner.__mro__ if "__record__" in one.__dict__)
        body = {"__annotations__": home.__annotations__, "__module__": home.__module__, **said}
        twin: Any = dataclasses.dataclass(**self._options)(type(owner.__name__, (), body))
        return getattr(twin, self._name)


def dataclass(*, frozen: bool = False, kw_only: bool = False) -> Callable[[type[_T]], type[_T]]:
    """As :func:`dataclasses.dataclass`, for classes that inherit no fields.

    Args:
        frozen: whether fields can't be assigned to; such records can be hashed.
        kw_only: whether fields are given by name only.
    """

    def make(cls: Any) -> Any:
        said = {name: cls.__dict__.get(name, _REQUIRED) for name in cls.__annotations__}
        cls.__record__ = {
            name: how if isinstance(how, Field) else Field(how) for name, how in said.items()
        }
        for name, how in cls.__record__.items():  # on the class it is the default, or nothing
            if isinstance(said[name], Field):
                if how.default is _REQUIRED:
                    delattr(cls, name)
                else:
                    setattr(cls, name, how.default)
        for name in ("__dataclass_fields__", "__dataclass_params__"):
            setattr(cls, name, _OfTheRealOne(name, frozen=frozen, kw_only=kw_only))
        cls.__replace__ = replace  # copy.replace, since Python 3.13
        cls.__match_args__ = () if kw_only else tuple(said)  # type: ignore[misc]  # mypy wants a literal
        cls.__init__ = _init_by_name if kw_only else _init
        cls.__eq__, cls.__repr__ = _eq, _repr
        cls.__hash__ = _hash if frozen else None
        if frozen:
            cls.__setattr__ = cls.__delattr__ = _refuse
        return cls

    return make


def replace(record: _T, /, **changes: Any) -> _T:
    """As :func:`dataclasses.replace`."""
    names = type(record).__record__  # type: ignore[attr-defined]  # each record has it
    return type(record)(**{name: getattr(record, name) for name in names} | changes)


def _init(self: Any, *values: Any, **named: Any) -> None:
    names = tuple(self.__record__)
    by_place = dict(zip(names, values, strict=False))
    twice = by_place.keys() & named.keys()
    if len(values) > len(names) or twice:
        what = f"{', '.join(sorted(twice))} twice" if twice else f"{len(values)} values"
        raise TypeError(f"{type(self).__name__}() was given {what}")
    _init_by_name(self, **by_place, **named)


def _init_by_name(self: Any, **named: Any) -> None:
    said: dict[str, Field] = self.__record__
    missing = [n for n, how in said.items() if how.required and n not in named]
    unknown = named.keys() - said.keys()
    if missing or unknown:
        what = f"needs {', '.join(missing)}" if missing else f"has no {', '.join(sorted(unknown))}"
        raise TypeError(f"{type(self).__name__}() {what}")
    self.__dict__.update({n: named[n] if n in named else how.value() for n, how in said.items()})


def _compared(record: Any) -> tuple[Any, ...]:
    said: dict[str, Field] = record.__record__
    return tuple(getattr(record, name) for name, how in said.items() if how.compare)


def _eq(self: Any, other: object) -> Any:
    if type(other) is not type(self):
        return NotImplemented
    return _compared(self) == _compared(other)


def _hash(self: Any) -> int:
    return hash(_compared(self))


def _repr(self: Any) -> str:
    shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.__record__)
    return f"{type(self).__qualname__}({shown})"


def _refuse(self: Any, name: str, *_: object) -> None:
    from dataclasses import FrozenInstanceError

    raise FrozenInstanceError(f"{type(self).__name__} is frozen: {name} cannot be changed")
