"""Machines that ship with the package, to plan for one that is not at hand.

Each is a file beside this one, in the format of ``docs/topology-json.md``;
``docs/machines.md`` says where its figures are from.
"""

from __future__ import annotations

from importlib import resources

from gpuaff.errors import TopologyError
from gpuaff.options import suggestion
from gpuaff.topology import serialize
from gpuaff.topology.model import Topology

_SUFFIX = ".json"


def names() -> tuple[str, ...]:
    """The names of the machines, sorted."""
    files = (file.name for file in resources.files(__name__).iterdir())
    return tuple(sorted(name.removesuffix(_SUFFIX) for name in files if name.endswith(_SUFFIX)))


def named(name: str) -> Topology:
    """A machine by its name, in upper or lower case.

    Raises:
        TopologyError: there is none of that name; the message lists those there are.
    """
    known = names()
    wanted = name.strip().lower()
    if wanted not in known:
        raise TopologyError(
            _shown(name),
            f"no such machine; there are {', '.join(known)}{suggestion(wanted, known)}",
        )
    file = resources.files(__name__) / f"{wanted}{_SUFFIX}"
    return serialize.loads(file.read_bytes(), wanted)


def _shown(name: str) -> str:
    """A name as it can stand in a message: on one line, and not a long one."""
    return name if name.isprintable() and 0 < len(name) <= 80 else repr(name[:80])
