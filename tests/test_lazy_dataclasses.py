"""The records against the real dataclasses: whatever can be told apart is a fault."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import sys
from collections.abc import Callable
from typing import Any

import pytest

from gpuaff import lazy_dataclasses

from processes import printed


def make(dataclass: Callable[..., Any], field: Callable[..., Any], **options: bool) -> Any:
    @dataclass(frozen=True, **options)
    class Record:
        one: int
        two: str = "b"
        three: tuple[int, ...] = field(default=(), compare=False)
        four: list[int] = field(default_factory=list, compare=False)

        @property
        def double(self) -> int:
            return 2 * self.one

    return Record


@pytest.fixture(params=[False, True], ids=["by place", "by name"])
def both(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    options = {"kw_only": request.param}
    ours = make(lazy_dataclasses.dataclass, lazy_dataclasses.field, **options)
    return ours, make(dataclasses.dataclass, dataclasses.field, **options)


def outcome(run: Callable[[], Any]) -> Any:
    """What a call gives, or the kind of its error."""
    try:
        return run()
    except (TypeError, AttributeError) as error:
        return type(error)


def inherit(record: Any) -> Any:
    """A class that says nothing of its own."""
    return type("Heir", (record,), {})


@pytest.mark.parametrize(
    "act",
    [
        lambda R: repr(R(one=1)),
        lambda R: R(one=1) == R(one=1, three=(2,), four=[3]),
        lambda R: R(one=1) == R(one=2),
        lambda R: R(one=1) == 1,
        lambda R: hash(R(one=1)) == hash(R(one=1, four=[1])),
        lambda R: R(1).one,
        lambda R: R(1, "c", (1,)).three,
        lambda R: R(1, "c", (1,), [], 5),
        lambda R: R(1, one=1),
        lambda R: R(),
        lambda R: R(two="c"),
        lambda R: R(one=1, five=5),
        lambda R: R(one=1).four is R(one=1).four,
        lambda R: R(one=3).double,
        lambda R: setattr(R(one=1), "one", 2),
        lambda R: delattr(R(one=1), "one"),
        lambda R: R.__match_args__,
        lambda R: [f.name for f in dataclasses.fields(R)],
        lambda R: [(f.compare, f.kw_only) for f in dataclasses.fields(R)],
        lambda R: dataclasses.asdict(R(one=1)),
        lambda R: dataclasses.replace(R(one=1), two="c").two,
        lambda R: dataclasses.is_dataclass(R),
        lambda R: copy.deepcopy(R(one=1)) == R(one=1),
        lambda R: [getattr(R, name) for name in ("two", "three")],
        lambda R: [hasattr(R, name) for name in ("one", "four")],
        lambda R: [f.name for f in dataclasses.fields(inherit(R))],
        lambda R: dataclasses.replace(inherit(R)(one=1), two="c").two,
        lambda R: hasattr(R, "__replace__") or sys.version_info < (3, 13),
    ],
)
def test_it_is_as_with_dataclasses(both: tuple[Any, Any], act: Callable[[Any], Any]) -> None:
    ours, theirs = (outcome(lambda kind=kind: act(kind)) for kind in both)  # type: ignore[misc]  # mypy: lambda with defaults
    assert ours == theirs


def test_a_dataclass_may_be_derived(both: tuple[Any, Any]) -> None:
    names = []
    for base in both:

        @dataclasses.dataclass(frozen=True, kw_only=True)
        class Derived(base):  # type: ignore[misc, valid-type]  # known at run time only
            five: int = 5

        assert Derived(one=1).five == 5
        names.append([field.name for field in dataclasses.fields(Derived)])
    assert names[0] == names[1]


def test_replace_is_as_with_dataclasses(both: tuple[Any, Any]) -> None:
    ours, theirs = both
    assert repr(lazy_dataclasses.replace(ours(one=1), two="c")) == repr(
        dataclasses.replace(theirs(one=1), two="c")
    )
    with pytest.raises(TypeError):
        lazy_dataclasses.replace(ours(one=1), five=5)


def test_what_is_not_frozen_can_be_changed_and_not_hashed() -> None:
    @lazy_dataclasses.dataclass()
    class Record:
        one: int

    record: Any = Record(1)  # type: ignore[call-arg]  # the decorator is not followed
    record.one = 2
    assert record.one == 2
    with pytest.raises(TypeError):
        hash(record)


def test_records_of_the_package_pickle() -> None:
    from gpuaff import Notice, Topology

    for record in (Notice("code", "message", 1), Topology.named("dgx-a100")):
        assert pickle.loads(pickle.dumps(record)) == record


def test_dataclasses_is_not_imported_to_pin() -> None:
    script = """
        import sys
        before = set(sys.modules)
        import gpuaff
        gpuaff.set_affinity(0, 1)
        slow = {"dataclasses", "inspect", "typing", "pathlib", "psutil", "filelock", "rich"}
        print(sorted(slow & (set(sys.modules) - before)))
    """
    assert printed(script) == "[]"


def test_importing_the_package_imports_nothing_else() -> None:
    script = """
        import sys
        before = set(sys.modules)
        import gpuaff
        print(sorted(set(sys.modules) - before))
    """
    assert printed(script) in ("['__future__', 'gpuaff']", "['gpuaff']")


def test_every_public_name_is_there() -> None:
    import gpuaff

    for name in gpuaff.__all__:
        assert getattr(gpuaff, name) is not None
    assert set(gpuaff.__all__) <= set(dir(gpuaff))
    assert gpuaff.__version__
    with pytest.raises(AttributeError, match="no attribute 'claim'"):
        _ = gpuaff.claim
